/*
 * test_files.c - descriptors on which the system does what it may.
 *
 * Guards: reads and writes that are interrupted or that do a part only go on where they were; an error in the middle
 * of a run is that error, at the right block, and zeros; a file opened here is closed whatever comes; a file that is
 * made in one call is there completely or not at all, and replaces nothing; advice on huge pages changes nothing.
 */
#include "support.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

/* ---------------------------------------------------------------- between csrc and the system */

/* fileio.c has 64-bit offsets, these names are those of its calls. */
ssize_t __real_pread64(int fd, void *out, size_t nbytes, int64_t offset);
ssize_t __real_pwrite64(int fd, const void *in, size_t nbytes, int64_t offset);
ssize_t __wrap_pread64(int fd, void *out, size_t nbytes, int64_t offset);
ssize_t __wrap_pwrite64(int fd, const void *in, size_t nbytes, int64_t offset);

static enum { AS_IT_IS, HESITANT, BROKEN } system_is;
static _Atomic unsigned long ncalls;
static int64_t broken_from; /* BROKEN: this byte of the file cannot be read or written */
static int broken_errno;    /* 0: a write that takes nothing, and gives no reason */

/* How many of nbytes are for the system to do; 0: none, and errno is set. */
static size_t permitted(size_t nbytes, int64_t offset) {
    const unsigned long call = ++ncalls;

    if (system_is == HESITANT) {
        errno = EINTR;
        return call % 3 == 0 ? 0 : call % 3 == 1 && nbytes > 1 ? 1 + nbytes / (1 + call % 7) / 2 : nbytes;
    }
    if (system_is == BROKEN && offset + (int64_t)nbytes > broken_from) {
        errno = broken_errno;
        return offset < broken_from ? (size_t)(broken_from - offset) : 0;
    }
    return nbytes;
}

ssize_t __wrap_pread64(int fd, void *out, size_t nbytes, int64_t offset) {
    const size_t some = permitted(nbytes, offset);

    return some > 0 ? __real_pread64(fd, out, some, offset) : -1;
}

ssize_t __wrap_pwrite64(int fd, const void *in, size_t nbytes, int64_t offset) {
    const size_t some = permitted(nbytes, offset);

    return some > 0 ? __real_pwrite64(fd, in, some, offset) : broken_errno == 0 && system_is == BROKEN ? 0 : -1;
}

int __real_linkat(int from, const char *path, int to, const char *name, int flags);
int __wrap_linkat(int from, const char *path, int to, const char *name, int flags);
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_close(int fd);
int __wrap_close(int fd);

static bool links_by_path_only, fsync_fails, close_fails; /* the first: before 6.10, or without a privilege */
static unsigned nfsyncs;

int __wrap_linkat(int from, const char *path, int to, const char *name, int flags) {
    if (!links_by_path_only || path[0] != 0) return __real_linkat(from, path, to, name, flags);
    errno = ENOENT;
    return -1;
}

int __wrap_fsync(int fd) {
    nfsyncs++;
    if (!fsync_fails) return __real_fsync(fd);
    errno = EIO;
    return -1;
}

int __wrap_close(int fd) { return __real_close(fd) == 0 && !close_fails ? 0 : -1; }

/* ---------------------------------------------------------------- runs */

enum { HEADER = 8, KEY_SEED = 4 };

static void check_runs(size_t block_nbytes, size_t nbytes, unsigned threads) {
    const size_t sealed_nbytes = (size_t)agsf_sealed_nbytes(nbytes, block_nbytes);
    const size_t sealed_block = block_nbytes + AGSF_OVERHEAD_NBYTES;
    guarded plain = guarded_new(nbytes, AT_END), out = guarded_new(nbytes, AT_START);
    uint8_t *sealed = malloc(sealed_nbytes);
    agsf_key *key = key_of(16, KEY_SEED);
    const int fd = memfd_create("run", MFD_CLOEXEC);
    agsf_run run = {.key = key,
                    .block_nbytes = block_nbytes,
                    .plain = plain.data,
                    .plain_nbytes = nbytes,
                    .fd = fd,
                    .fd_offset = HEADER,
                    .threads = threads};

    CHECK(fd >= 0 && sealed != NULL);
    fill(plain.data, nbytes, nbytes);
    checking("blocks of %zu, %u threads, a system that hesitates", block_nbytes, threads);
    system_is = HESITANT;
    ncalls = 0;
    CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_OK);
    CHECK(ncalls > 2);
    CHECK(pread(fd, sealed, sealed_nbytes, HEADER) == (ssize_t)sealed_nbytes);
    CHECK(is_sealed_run(&run, sealed, plain.data));
    run.plain = out.data;
    run.done = 0;
    CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_OK);
    CHECK(memcmp(out.data, plain.data, nbytes) == 0);

    for (size_t i = 0; i < 12; i++) {
        const size_t at = i * (sealed_nbytes - 1) / 11; /* from the first byte to the last */
        checking("blocks of %zu, %u threads, a system broken from byte %zu", block_nbytes, threads, at);
        system_is = BROKEN;
        broken_from = HEADER + (int64_t)at;
        broken_errno = EIO;
        run.done = 0;
        memset(out.data, SLACK, nbytes);
        CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_IO);
        CHECK_EQUAL(run.os_error, EIO);
        CHECK_EQUAL(run.bad_block, at / sealed_block);
        CHECK(all_are(out.data, nbytes, 0));
        for (broken_errno = 0; broken_errno <= ENOSPC; broken_errno += ENOSPC) {
            run.plain = plain.data;
            run.done = 0;
            CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_IO);
            CHECK_EQUAL(run.os_error, ENOSPC);
            CHECK(run.bad_block <= at / sealed_block);
        }
        run.plain = out.data;
        system_is = AS_IT_IS; /* what the broken system left is not whole: put it back */
        CHECK(pwrite(fd, sealed, sealed_nbytes, HEADER) == (ssize_t)sealed_nbytes);
    }
    CHECK_EQUAL(run.fd, fd);
    run.done = 0;
    CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_OK);
    close(fd);
    free(sealed);
    agsf_key_free(key);
    guarded_free(&plain);
    guarded_free(&out);
}

/* ---------------------------------------------------------------- whole files */

static bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

static void check_read_and_close(const char *path, size_t nbytes, size_t read_nbytes, agsf_status want) {
    guarded out = guarded_new(read_nbytes, AT_END);
    uint64_t size = 0;
    int fd = -1, os_error = 0;

    CHECK_EQUAL(agsf_open_file(NULL, path, NULL, 0, &fd, &size, &os_error), AGSF_OK);
    CHECK_EQUAL(size, nbytes);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_EQUAL(agsf_read_and_close(fd, out.data, read_nbytes, &os_error), want);
    CHECK(!is_open(fd));
    if (want == AGSF_OK) CHECK(all_are(out.data, read_nbytes, 'x'));
    guarded_free(&out);
}

/* A regular file that has enough is read and closed at once. Any other is only opened, and nothing is read. */
static void check_open_and_read(const char *path, size_t nbytes, size_t read_nbytes) {
    guarded out = guarded_new(read_nbytes, AT_END);
    uint64_t size = 0;
    int fd = -1, os_error = 0;

    CHECK_EQUAL(agsf_open_file(NULL, path, out.data, read_nbytes, &fd, &size, &os_error), AGSF_OK);
    CHECK_EQUAL(size, nbytes);
    CHECK(fd >= 0 ? is_open(fd) : all_are(out.data, read_nbytes, 'x'));
    CHECK_EQUAL(fd < 0, read_nbytes > 0 && read_nbytes <= nbytes && nbytes != UINT64_MAX);
    if (fd >= 0) {
        CHECK(all_are(out.data, read_nbytes, SLACK));
        close(fd);
    }
    guarded_free(&out);
}

static void check_whole_files(void) {
    char path[] = "/tmp/agsf-test-XXXXXX", text[1000];
    int fd = mkstemp(path), os_error = 0;
    uint64_t size = 0;

    checking("whole files");
    memset(text, 'x', sizeof(text));
    CHECK(fd >= 0 && write(fd, text, sizeof(text)) == sizeof(text) && close(fd) == 0);
    for (system_is = AS_IT_IS; system_is <= HESITANT; system_is++) {
        check_read_and_close(path, sizeof(text), sizeof(text), AGSF_OK);
        check_read_and_close(path, sizeof(text), 1, AGSF_OK);
        check_read_and_close(path, sizeof(text), 0, AGSF_OK);
        check_read_and_close(path, sizeof(text), sizeof(text) + 1, AGSF_SHORT);
        for (size_t n = 0; n <= 2; n++) {
            check_open_and_read(path, sizeof(text), n);
            check_open_and_read(path, sizeof(text), sizeof(text) + n - 1);
        }
        check_open_and_read("/", UINT64_MAX, 10);
        check_open_and_read("/dev/zero", UINT64_MAX, 10);
    }
    system_is = AS_IT_IS;
    fd = open(path, O_WRONLY);
    CHECK_EQUAL(agsf_read_and_close(fd, (uint8_t *)text, 1, &os_error), AGSF_IO);
    CHECK_EQUAL(os_error, EBADF);
    CHECK(!is_open(fd));
    CHECK(unlink(path) == 0);
    CHECK_EQUAL(agsf_open_file(NULL, path, NULL, 0, &fd, &size, &os_error), AGSF_IO);
    CHECK_EQUAL(os_error, ENOENT);
    CHECK_EQUAL(agsf_open_file(NULL, "/", NULL, 0, &fd, &size, &os_error), AGSF_OK); /* what has no size of its own */
    CHECK_EQUAL(size, UINT64_MAX);
    close(fd);
    CHECK_EQUAL(agsf_open_file(NULL, "/dev/null", NULL, 0, &fd, &size, &os_error), AGSF_OK);
    CHECK_EQUAL(size, UINT64_MAX);
    close(fd);
}

static int next_fd(void) {
    const int fd = open("/dev/null", O_RDONLY);

    close(fd);
    return fd;
}

/* Whatever comes of it, nothing stays open, and what is not the whole file is not said to be. */
static void check_read_whole(const char *path, size_t nbytes, const uint64_t *mtime_ns, bool want) {
    guarded out = guarded_new(nbytes, AT_END);
    const int fd = next_fd();

    CHECK_EQUAL(agsf_read_whole(NULL, path, out.data, nbytes, mtime_ns), want);
    if (want) CHECK(all_are(out.data, nbytes, 'x'));
    CHECK_EQUAL(next_fd(), fd);
    guarded_free(&out);
}

/* Whether a file was made, which must have all the bytes. If not, there is none. */
static bool write_whole(const char *root, const char *folder, bool sync) {
    static uint8_t data[5000];
    const int fd = next_fd();
    char name[100];
    bool made;

    memset(data, 'x', sizeof(data));
    nfsyncs = 0;
    (void)snprintf(name, sizeof(name), "%s/%s/name", root, folder);
    made = agsf_write_whole(root, folder, "name", data, sizeof(data), -1, NULL, sync);
    CHECK_EQUAL(next_fd(), fd);
    if (made) {
        CHECK_EQUAL(nfsyncs, sync);
        CHECK(access(name, W_OK) == 0);
        check_read_whole(name, sizeof(data), NULL, true);
    }
    CHECK_EQUAL(unlink(name) == 0, made);
    return made;
}

static void check_mode_and_time(const char *folder, const char *path) {
    const int64_t times[] = {0, 1, -1, 1700000000123456789, -5000000001};
    const mode_t old = umask(027);

    for (size_t i = 0; i < sizeof(times) / sizeof(*times); i++) {
        for (int mode = -1; mode <= 0777; mode += 0400) {
            struct stat status;

            if (!agsf_write_whole(folder, ".", "name", (const uint8_t *)"new", 3, mode, &times[i], false)) continue;
            CHECK(stat(path, &status) == 0 && unlink(path) == 0);
            CHECK_EQUAL(status.st_mode & 0777, (mode_t)(mode < 0 ? 0640 : mode));
            CHECK(status.st_mtim.tv_nsec >= 0 && status.st_mtim.tv_nsec < 1000000000);
            CHECK_EQUAL((int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec, times[i]);
        }
    }
    (void)umask(old);
}

static void check_one_call(void) {
    char folder[] = "/tmp/agsf-test-XXXXXX", path[100];
    uint64_t mtime_ns;
    struct stat status;
    int fd;

    checking("files in one call");
    CHECK(mkdtemp(folder) != NULL);
    (void)snprintf(path, sizeof(path), "%s/name", folder);

    fd = open(path, O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0 && write(fd, "xxxxx", 5) == 5 && fstat(fd, &status) == 0);
    mtime_ns = (uint64_t)status.st_mtim.tv_sec * 1000000000 + (uint64_t)status.st_mtim.tv_nsec;
    for (system_is = AS_IT_IS; system_is <= HESITANT; system_is++) {
        for (size_t n = 0; n <= 10; n++) check_read_whole(path, n, NULL, n == 5);
        check_read_whole(path, 5, &mtime_ns, true);
    }
    system_is = BROKEN;
    broken_from = 3;
    broken_errno = EIO;
    check_read_whole(path, 5, NULL, false);
    broken_from = 5; /* it cannot be known to end there */
    check_read_whole(path, 5, &mtime_ns, false);
    system_is = AS_IT_IS;
    mtime_ns++;
    check_read_whole(path, 5, &mtime_ns, false);
    CHECK(futimens(fd, (const struct timespec[2]){{-5, 0}, {-5, 0}}) == 0);
    mtime_ns = (uint64_t)-5 * 1000000000;
    check_read_whole(path, 5, &mtime_ns, false);
    CHECK(futimens(fd, (const struct timespec[2]){{0, 0}, {0, 7}}) == 0);
    mtime_ns = 7;
    check_read_whole(path, 5, &mtime_ns, true);
    close(fd);
    CHECK(!agsf_write_whole(folder, ".", "name", (const uint8_t *)"new", 3, -1, NULL, false)); /* never replaces */
    check_read_whole(path, 5, &mtime_ns, true);
    CHECK(unlink(path) == 0);
    check_read_whole(path, 0, NULL, false);
    CHECK(mkfifo(path, 0600) == 0);
    check_read_whole(path, 0, NULL, false);
    CHECK(unlink(path) == 0 && stat("/proc/self/status", &status) == 0);
    mtime_ns = (uint64_t)status.st_mtim.tv_sec * 1000000000 + (uint64_t)status.st_mtim.tv_nsec;
    check_read_whole("/proc/self/status", 0, &mtime_ns, false);
    check_read_whole("/", 0, NULL, false);
    check_read_whole("/dev/zero", 0, NULL, false);

    check_mode_and_time(folder, path);
    if (write_whole(folder, ".", false)) { /* else, this file system has no files without a name */
        for (int old = 0; old <= 1; old++) {
            links_by_path_only = old;
            system_is = HESITANT;
            CHECK(write_whole(folder, ".", false) && write_whole(folder, ".", true));
            CHECK(!write_whole(folder, "no", false) && !write_whole(folder, "..", false) &&
                  !write_whole("", ".", false));
            system_is = BROKEN;
            broken_errno = ENOSPC;
            for (broken_from = 0; broken_from < 5000; broken_from += 4999) CHECK(!write_whole(folder, ".", false));
            system_is = AS_IT_IS;
            fsync_fails = true;
            CHECK(!write_whole(folder, ".", true) && write_whole(folder, ".", false));
            fsync_fails = false;
            close_fails = true;
            CHECK(!write_whole(folder, ".", false));
            close_fails = false;
        }
        links_by_path_only = false;
    }
    CHECK(rmdir(folder) == 0);
}

/* The error of opening a path below a folder; 0 if it is opened, and must then be what `same` is, by its path. */
static int below(const char *root, const char *path, int flags, const char *same) {
    struct stat wanted, opened;
    int os_error = 0;
    const int before = next_fd(), fd = agsf_open_below(root, path, flags, 0600, &os_error);

    if (fd < 0) {
        CHECK(os_error != 0 && next_fd() == before);
        return os_error;
    }
    CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC && fstat(fd, &opened) == 0 && stat(same, &wanted) == 0);
    CHECK(opened.st_ino == wanted.st_ino && opened.st_dev == wanted.st_dev);
    close(fd);
    CHECK_EQUAL(next_fd(), before);
    return 0;
}

static void check_below(void) {
    char root[] = "/tmp/agsf-test-XXXXXX", long_name[300];
    const char *links[][2] = {{"..", "up"}, {"a/b", "in"}, {"/tmp", "out"}, {"me", "me"}, {"f", "file"}, {"no", "no"}};
    const char *fallback = getenv("AGS_FAST_OPENAT2");
    const int inner = fallback != NULL && strcmp(fallback, "0") == 0 ? EXDEV : 0; /* by steps, no link is followed */
    const int folder = O_RDONLY | O_DIRECTORY, by_path = O_PATH;
    char whole[100], self[32];
    int at, fd;

    checking("paths below a folder");
    CHECK(mkdtemp(root) != NULL);
    at = open(root, O_RDONLY | O_DIRECTORY);
    CHECK(mkdirat(at, "a", 0700) == 0 && mkdirat(at, "a/b", 0700) == 0);
    fd = openat(at, "a/b/f", O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0 && close(fd) == 0);
    for (size_t i = 0; i < sizeof(links) / sizeof(links[0]); i++) CHECK(symlinkat(links[i][0], at, links[i][1]) == 0);
    (void)snprintf(self, sizeof(self), "/proc/self/fd/%d", at);
    CHECK(symlinkat(self, at, "magic") == 0);

    (void)snprintf(whole, sizeof(whole), "%s/a/b/f", root);
    CHECK_EQUAL(below(root, ".", folder, root), 0);
    CHECK_EQUAL(below(root, "a/b/f", O_RDONLY, whole), 0);
    CHECK_EQUAL(below(root, "a/b/f", by_path, whole), 0);
    CHECK_EQUAL(below(root, "in/f", O_RDONLY, whole), inner);
    CHECK_EQUAL(below(root, "in/f", by_path, whole), inner);
    CHECK_EQUAL(below(root, "a/b/f/x", O_RDONLY, whole), ENOTDIR);
    CHECK_EQUAL(below(root, "a/b/f", O_WRONLY | O_CREAT | O_EXCL, whole), EEXIST);
    CHECK_EQUAL(below(root, "a/x/f", O_WRONLY | O_CREAT, whole), ENOENT);
    CHECK_EQUAL(below(root, "no", O_RDONLY, whole), inner == 0 ? ELOOP : inner); /* to itself */
    CHECK_EQUAL(below("/nowhere", "a", O_RDONLY, whole), ENOENT);
    CHECK_EQUAL(below(whole, "a", O_RDONLY, whole), ENOTDIR);
    for (int flags = 0; flags <= 1; flags++) {
        const int how = flags == 0 ? O_RDONLY : O_WRONLY | O_CREAT;
        CHECK_EQUAL(below(root, "up/agsf", how, whole), EXDEV);
        CHECK_EQUAL(below(root, "out/agsf", how, whole), EXDEV);
        CHECK_EQUAL(below(root, "magic/agsf", how, whole), EXDEV);
    }
    CHECK_EQUAL(below(root, "out", O_RDONLY | O_NOFOLLOW, whole), ELOOP);
    memset(long_name, 'x', sizeof(long_name) - 1);
    long_name[sizeof(long_name) - 1] = 0;
    CHECK_EQUAL(below(root, long_name, O_RDONLY, whole), ENAMETOOLONG);

    for (size_t i = 0; i < sizeof(links) / sizeof(links[0]); i++) CHECK(unlinkat(at, links[i][1], 0) == 0);
    CHECK(unlinkat(at, "magic", 0) == 0 && unlinkat(at, "a/b/f", 0) == 0);
    CHECK(unlinkat(at, "a/b", AT_REMOVEDIR) == 0 && unlinkat(at, "a", AT_REMOVEDIR) == 0);
    close(at);
    CHECK(rmdir(root) == 0);
}

static void check_advice(void) {
    for (size_t nbytes = 0; nbytes < 9 << 20; nbytes = nbytes * 2 + 4097) {
        guarded buffer = guarded_new(nbytes, AT_END);
        agsf_expect_fill(buffer.data, nbytes);
        CHECK(all_are(buffer.data, nbytes, SLACK));
        guarded_free(&buffer);
    }
    agsf_expect_fill(NULL, 0);
}

int main(void) {
    start();
    for (unsigned threads = 1; threads <= 3; threads += 2) {
        check_runs(1000, 700001, threads); /* many to a job */
        check_runs(100000, 1000000, threads);
        check_runs(600000, 1500000, threads); /* larger than what is read at once */
    }
    check_whole_files();
    check_one_call();
    check_below();
    check_advice();
    return 0;
}
