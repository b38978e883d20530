/* fileio.c - positional reads and writes of a descriptor, all of it or an error; and files below a folder. */
#define _GNU_SOURCE /* O_TMPFILE, O_PATH, AT_EMPTY_PATH, syscall() */
#define _FILE_OFFSET_BITS 64
#include "fileio.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STEP_MAX_NBYTES = 1 << 30 }; /* some systems refuse what does not fit an int */

agsf_status agsf_read_at(int fd, uint64_t offset, uint8_t *out, size_t nbytes, size_t *got_ret, int *os_error_ret) {
    size_t done = 0;
    agsf_status status = AGSF_OK;

    while (done < nbytes) {
        const size_t step = nbytes - done < STEP_MAX_NBYTES ? nbytes - done : STEP_MAX_NBYTES;
        const ssize_t got = pread(fd, out + done, step, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            status = got == 0 ? AGSF_SHORT : AGSF_IO;
            if (got < 0) *os_error_ret = errno;
            break;
        }
        done += (size_t)got;
    }
    *got_ret = done;
    return status;
}

agsf_status agsf_write_at(int fd, uint64_t offset, const uint8_t *in, size_t nbytes, int *os_error_ret) {
    while (nbytes > 0) {
        const ssize_t put = pwrite(fd, in, nbytes < STEP_MAX_NBYTES ? nbytes : STEP_MAX_NBYTES, (off_t)offset);
        if (put <= 0) {
            if (put < 0 && errno == EINTR) continue;
            *os_error_ret = put < 0 ? errno : ENOSPC;
            return AGSF_IO;
        }
        in += put;
        offset += (uint64_t)put;
        nbytes -= (size_t)put;
    }
    return AGSF_OK;
}

#ifndef O_PATH
#define O_PATH O_RDONLY
#endif
#ifndef NAME_MAX
#define NAME_MAX 255
#endif

enum { FOLDER = O_PATH | O_DIRECTORY | O_CLOEXEC };

#if defined(__linux__)

/* As linux/openat2.h has it, which is newer than the headers that wheels are built with. */
struct how {
    uint64_t flags;
    uint64_t mode;
    uint64_t resolve;
};
enum { SYSTEM_CALL_OPENAT2 = 437, RESOLVE_NO_MAGICLINKS_ = 0x02, RESOLVE_BENEATH_ = 0x08 };

static int openat2_below(int root, const char *path, int flags, unsigned mode) {
    const struct how how = {(uint64_t)flags, flags & O_CREAT ? mode : 0, RESOLVE_BENEATH_ | RESOLVE_NO_MAGICLINKS_};

    return (int)syscall(SYSTEM_CALL_OPENAT2, root, path, &how, sizeof(how));
}

/* An old kernel says ENOSYS, a sandbox that or EPERM; one that ends the process for it leaves only the variable. */
static bool has_openat2(void) {
    static atomic_int known; /* 0: not yet, 1: yes, 2: no */

    if (known == 0) {
        const char *wanted = getenv("AGS_FAST_OPENAT2"); /* NOLINT(concurrency-mt-unsafe): once in a process */
        const int root = wanted != NULL && strcmp(wanted, "0") == 0 ? -1 : open("/", FOLDER);
        const int fd = root < 0 ? -1 : openat2_below(root, ".", FOLDER, 0);

        known = fd < 0 ? 2 : 1;
        if (root >= 0) (void)close(root);
        if (fd >= 0) (void)close(fd);
    }
    return known == 1;
}

#else

static int openat2_below(int root, const char *path, int flags, unsigned mode) {
    (void)root, (void)path, (void)flags, (void)mode;
    errno = ENOSYS;
    return -1;
}

static bool has_openat2(void) { return false; }

#endif

/* Whether that is a symbolic link: what was opened, by O_PATH, or what was not. */
static bool is_link(int fd, int folder, const char *name) {
    struct stat status;

    if ((fd >= 0 ? fstat(fd, &status) : fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW)) != 0) return false;
    return S_ISLNK(status.st_mode);
}

/* Follows no link at all: EXDEV for the first. */
static int open_by_steps(int root, const char *path, int flags, unsigned mode) {
    int at = root;

    for (;;) {
        const char *slash = strchr(path, '/');
        const size_t nbytes = slash == NULL ? strlen(path) : (size_t)(slash - path);
        char name[NAME_MAX + 1];
        const bool up = nbytes == 2 && path[0] == '.' && path[1] == '.';
        int fd = -1, error = up ? EXDEV : ENAMETOOLONG;

        if (nbytes <= NAME_MAX && !up) {
            memcpy(name, path, nbytes);
            name[nbytes] = 0;
            fd = openat(at, name, (slash == NULL ? flags : FOLDER) | O_NOFOLLOW, (mode_t)mode);
            error = errno;
            if ((flags & O_NOFOLLOW) == 0 || slash != NULL) {
                if ((fd >= 0 || error == ELOOP || error == ENOTDIR || error == EMLINK) && is_link(fd, at, name)) {
                    if (fd >= 0) (void)close(fd);
                    fd = -1;
                    error = EXDEV;
                }
            }
        }
        if (at != root) (void)close(at);
        if (fd < 0) errno = error;
        if (fd < 0 || slash == NULL) return fd;
        at = fd;
        path = slash + 1;
    }
}

int agsf_open_below(const char *root, const char *path, int flags, unsigned mode, int *os_error_ret) {
    const int at = open(root, FOLDER);
    int fd = -1;

    flags |= O_CLOEXEC;
    if (at >= 0) fd = has_openat2() ? openat2_below(at, path, flags, mode) : open_by_steps(at, path, flags, mode);
    if (fd < 0)
        *os_error_ret = errno == EAGAIN ? EXDEV : errno; /* EAGAIN: a folder was moved while a ".." was followed */
    if (at >= 0) (void)close(at);
    return fd;
}

static int open_to_read(const char *root, const char *path, int *os_error_ret) {
    const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK; /* not to wait for a pipe's writer */
    int fd;

    if (root != NULL) return agsf_open_below(root, path, flags, 0, os_error_ret);
    fd = open(path, flags);
    if (fd < 0) *os_error_ret = errno;
    return fd;
}

agsf_status agsf_open_file(const char *root, const char *path, uint8_t *out, size_t nbytes, int *fd_ret,
                           uint64_t *nbytes_ret, int *os_error_ret) {
    struct stat status;
    const int fd = open_to_read(root, path, os_error_ret);

    if (fd < 0) return AGSF_IO;
    if (fstat(fd, &status) != 0 || (!S_ISREG(status.st_mode) && fcntl(fd, F_SETFL, 0) != 0)) {
        *os_error_ret = errno;
        (void)close(fd);
        return AGSF_IO;
    }
    *fd_ret = fd;
    *nbytes_ret = S_ISREG(status.st_mode) ? (uint64_t)status.st_size : UINT64_MAX;
    if (nbytes == 0 || !S_ISREG(status.st_mode) || (uint64_t)status.st_size < nbytes) return AGSF_OK;
    *fd_ret = -1;
    return agsf_read_and_close(fd, out, nbytes, os_error_ret);
}

agsf_status agsf_read_and_close(int fd, uint8_t *out, size_t nbytes, int *os_error_ret) {
    size_t got;
    const agsf_status status = agsf_read_at(fd, 0, out, nbytes, &got, os_error_ret);

    (void)close(fd);
    return status;
}

static bool is_regular(int fd, size_t nbytes) {
    struct stat status;

    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && (uint64_t)status.st_size == nbytes;
}

/* That has been read to its end, which for a file of /proc is not where its size says. */
static bool is_as_of(int fd, size_t nbytes, uint64_t mtime_ns) {
    const uint64_t second = 1000000000;
    struct stat status;
    uint8_t more;
    size_t got;
    int os_error;

    if (agsf_read_at(fd, nbytes, &more, 1, &got, &os_error) != AGSF_SHORT) return false;
    if (fstat(fd, &status) != 0 || (uint64_t)status.st_size != nbytes || status.st_mtim.tv_sec < 0) return false;
    return (uint64_t)status.st_mtim.tv_sec == mtime_ns / second &&
           (uint64_t)status.st_mtim.tv_nsec == mtime_ns % second;
}

bool agsf_read_whole(const char *root, const char *path, uint8_t *out, size_t nbytes, const uint64_t *mtime_ns) {
    size_t got;
    int os_error;
    const int fd = open_to_read(root, path, &os_error);
    bool whole = fd >= 0 && is_regular(fd, nbytes);

    whole = whole && agsf_read_at(fd, 0, out, nbytes, &got, &os_error) == AGSF_OK;
    whole = whole && (mtime_ns == NULL || is_as_of(fd, nbytes, *mtime_ns));
    if (fd >= 0) (void)close(fd);
    return whole;
}

#if defined(O_TMPFILE) && defined(AT_EMPTY_PATH)

/* Some file systems tell of a failed write only when the file is closed. */
static bool close_a_copy(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);

    return copy >= 0 && close(copy) == 0;
}

static bool give_name(int fd, int folder, const char *name) {
    char link[32];

    if (linkat(fd, "", folder, name, AT_EMPTY_PATH) == 0) return true;
    if (errno != ENOENT) return false; /* from kernels before 6.10 without CAP_DAC_READ_SEARCH */
    (void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, link, folder, name, AT_SYMLINK_FOLLOW) == 0;
}

static bool set_mode_and_time(int fd, int mode, const int64_t *mtime_ns) {
    const int64_t second = 1000000000;
    struct timespec times[2] = {{0, UTIME_NOW}, {0, 0}};

    if (mode >= 0 && fchmod(fd, (mode_t)mode) != 0) return false;
    if (mtime_ns == NULL) return true;
    times[1].tv_sec = (time_t)(*mtime_ns / second - (*mtime_ns % second < 0));
    times[1].tv_nsec = (long)((*mtime_ns % second + second) % second);
    return futimens(fd, times) == 0;
}

bool agsf_write_whole(const char *root, const char *folder, const char *name, const uint8_t *in, size_t nbytes,
                      int mode, const int64_t *mtime_ns, bool sync) {
    int os_error;
    const int at = agsf_open_below(root, folder, FOLDER, 0, &os_error);
    const int fd = at < 0 ? -1 : openat(at, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, mode < 0 ? 0666 : 0600);
    bool whole = fd >= 0 && agsf_write_at(fd, 0, in, nbytes, &os_error) == AGSF_OK;

    whole = whole && set_mode_and_time(fd, mode, mtime_ns) && (!sync || fsync(fd) == 0);
    whole = whole && close_a_copy(fd) && give_name(fd, at, name);
    if (fd >= 0) (void)close(fd);
    if (at >= 0) (void)close(at);
    return whole;
}

#else

bool agsf_write_whole(const char *root, const char *folder, const char *name, const uint8_t *in, size_t nbytes,
                      int mode, const int64_t *mtime_ns, bool sync) {
    (void)root, (void)folder, (void)name, (void)in, (void)nbytes, (void)mode, (void)mtime_ns, (void)sync;
    return false;
}

#endif
