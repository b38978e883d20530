/* fileio.c - positional reads and writes of a descriptor: all of it, or an error. */
#define _GNU_SOURCE /* O_TMPFILE, AT_EMPTY_PATH */
#define _FILE_OFFSET_BITS 64
#include "fileio.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
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

agsf_status agsf_open_file(const char *path, uint8_t *out, size_t nbytes, int *fd_ret, uint64_t *nbytes_ret,
                           int *os_error_ret) {
    struct stat status;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0 || fstat(fd, &status) != 0) {
        *os_error_ret = errno;
        if (fd >= 0) (void)close(fd);
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
    return (uint64_t)status.st_mtim.tv_sec == mtime_ns / second && (uint64_t)status.st_mtim.tv_nsec == mtime_ns % second;
}

bool agsf_read_whole(const char *path, uint8_t *out, size_t nbytes, const uint64_t *mtime_ns) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* not to wait for a pipe's writer */
    size_t got;
    int os_error;
    bool whole = fd >= 0 && is_regular(fd, nbytes);

    whole = whole && agsf_read_at(fd, 0, out, nbytes, &got, &os_error) == AGSF_OK;
    whole = whole && (mtime_ns == NULL || is_as_of(fd, nbytes, *mtime_ns));
    if (fd >= 0) (void)close(fd);
    return whole;
}

#if defined(O_TMPFILE) && defined(AT_EMPTY_PATH)

static bool is_folder(int fd, const char *path) {
    struct stat at_path, open_one;

    if (stat(path, &at_path) != 0 || fstat(fd, &open_one) != 0) return false;
    return at_path.st_dev == open_one.st_dev && at_path.st_ino == open_one.st_ino;
}

/* Some file systems tell of a failed write only when the file is closed. */
static bool close_a_copy(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);

    return copy >= 0 && close(copy) == 0;
}

static bool give_name(int fd, int folder, const char *name) {
    char link[32];

    if (linkat(fd, "", folder, name, AT_EMPTY_PATH) == 0) return true;
    if (errno != ENOENT) return false; /* so says a kernel before 6.10 to who lacks CAP_DAC_READ_SEARCH */
    (void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, link, folder, name, AT_SYMLINK_FOLLOW) == 0;
}

bool agsf_write_whole(int folder, const char *path, const char *name, const uint8_t *in, size_t nbytes, bool sync) {
    const int fd = is_folder(folder, path) ? openat(folder, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666) : -1;
    int os_error;
    bool whole = fd >= 0 && agsf_write_at(fd, 0, in, nbytes, &os_error) == AGSF_OK;

    whole = whole && (!sync || fsync(fd) == 0) && close_a_copy(fd) && give_name(fd, folder, name);
    if (fd >= 0) (void)close(fd);
    return whole;
}

#else

bool agsf_write_whole(int folder, const char *path, const char *name, const uint8_t *in, size_t nbytes, bool sync) {
    (void)folder, (void)path, (void)name, (void)in, (void)nbytes, (void)sync;
    return false;
}

#endif
