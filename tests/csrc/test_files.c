/*
 * test_files.c - descriptors on which the system does what it may.
 *
 * Guards: reads and writes that are interrupted or that do a part only go on where they were; an error in the middle
 * of a run is that error, at the right block, and zeros; a file opened here is closed whatever comes; advice on huge
 * pages changes nothing.
 */
#include "support.h"

#include <fcntl.h>
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

/* ---------------------------------------------------------------- runs */

enum { HEADER = 8, KEY_SEED = 4 };

static void check_runs(size_t block_nbytes, size_t nbytes, unsigned threads) {
    const size_t sealed_nbytes = (size_t)agsf_sealed_nbytes(nbytes, block_nbytes);
    const size_t sealed_block = block_nbytes + AGSF_OVERHEAD_NBYTES;
    guarded plain = guarded_new(nbytes, AT_END), out = guarded_new(nbytes, AT_START);
    uint8_t *sealed = malloc(sealed_nbytes);
    agsf_key *key = key_of(16, KEY_SEED);
    const int fd = memfd_create("run", MFD_CLOEXEC);
    agsf_run run = {.key = key, .block_nbytes = block_nbytes, .plain = plain.data, .plain_nbytes = nbytes, .fd = fd,
                    .fd_offset = HEADER, .threads = threads};

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

    CHECK_EQUAL(agsf_open_file(path, NULL, 0, &fd, &size, &os_error), AGSF_OK);
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

    CHECK_EQUAL(agsf_open_file(path, out.data, read_nbytes, &fd, &size, &os_error), AGSF_OK);
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
    CHECK_EQUAL(agsf_open_file(path, NULL, 0, &fd, &size, &os_error), AGSF_IO);
    CHECK_EQUAL(os_error, ENOENT);
    CHECK_EQUAL(agsf_open_file("/", NULL, 0, &fd, &size, &os_error), AGSF_OK); /* what has no size of its own */
    CHECK_EQUAL(size, UINT64_MAX);
    close(fd);
    CHECK_EQUAL(agsf_open_file("/dev/null", NULL, 0, &fd, &size, &os_error), AGSF_OK);
    CHECK_EQUAL(size, UINT64_MAX);
    close(fd);
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
    start(100);
    for (unsigned threads = 1; threads <= 3; threads += 2) {
        check_runs(1000, 700001, threads);   /* many to a job */
        check_runs(100000, 1000000, threads);
        check_runs(600000, 1500000, threads); /* larger than what is read at once */
    }
    check_whole_files();
    check_advice();
    return 0;
}
