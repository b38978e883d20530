/*
 * test_failures.c - runs that fail.
 *
 * Guards: after a failed open all of the output is zeros, nothing beyond it was touched, and bad_block is the lowest
 * block that failed, with any number of threads, whether blocks are bad, missing, or both; the system's refusals come
 * back with their error numbers; sizes that cannot be are refused before anything is done.
 */
#include "support.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>

enum { HEADER = 8, BAD_MAX = 4 };

/* A stream to break: blocks that share a job, that are a job each, and that are larger than a scratch buffer. */
struct stream {
    size_t block_nbytes, nbytes, sealed_nbytes, nblocks;
    guarded plain, sealed;
    int fd;
    agsf_key *key;
};

static const uint8_t prefix[] = {1, 2, 3};

static agsf_run run_of(const struct stream *stream, bool from_memory, unsigned threads, uint8_t *plain) {
    return (agsf_run){.key = stream->key,
                      .aad_prefix = prefix,
                      .aad_prefix_nbytes = sizeof(prefix),
                      .block_nbytes = stream->block_nbytes,
                      .first_block = 5,
                      .plain = plain,
                      .plain_nbytes = stream->nbytes,
                      .sealed = from_memory ? stream->sealed.data : NULL,
                      .fd = stream->fd,
                      .fd_offset = HEADER,
                      .threads = threads};
}

static struct stream stream_new(size_t block_nbytes, size_t nbytes) {
    struct stream stream = {.block_nbytes = block_nbytes, .nbytes = nbytes, .key = key_of(24, block_nbytes)};
    agsf_run run;

    stream.nblocks = (size_t)blocks_of(nbytes, block_nbytes);
    stream.sealed_nbytes = nbytes + stream.nblocks * AGSF_OVERHEAD_NBYTES;
    stream.plain = guarded_new(nbytes, AT_END);
    stream.sealed = guarded_new(stream.sealed_nbytes, AT_END);
    stream.fd = memfd_create("stream", MFD_CLOEXEC);
    fill(stream.plain.data, nbytes, block_nbytes);
    run = run_of(&stream, true, 2, stream.plain.data);
    CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_OK);
    return stream;
}

static void stream_free(struct stream *stream) {
    close(stream->fd);
    guarded_free(&stream->plain);
    guarded_free(&stream->sealed);
    agsf_key_free(stream->key);
}

/* Opens what now is in memory, or its first `length` bytes in a file: `want` must come of it, at `bad_block`. */
static void check_open(const struct stream *stream, bool from_memory, unsigned threads, size_t length, agsf_status want,
                       size_t bad_block) {
    guarded out = guarded_new(stream->nbytes, threads % 2 ? AT_END : AT_START);
    agsf_run run = run_of(stream, from_memory, threads, out.data);

    if (!from_memory) {
        CHECK(ftruncate(stream->fd, 0) == 0);
        CHECK(pwrite(stream->fd, stream->sealed.data, length, HEADER) == (ssize_t)length);
    }
    memset(out.data, SLACK, out.nbytes);
    CHECK_EQUAL(finish(agsf_open_run, &run, NULL), want);
    if (want == AGSF_OK) {
        CHECK(memcmp(out.data, stream->plain.data, out.nbytes) == 0);
    } else {
        CHECK(all_are(out.data, out.nbytes, 0));
        CHECK_EQUAL(run.bad_block, bad_block);
        CHECK_EQUAL(run.os_error, 0);
    }
    guarded_free(&out);
}

/* Flips a bit in some blocks, cuts the file somewhere, or both; every seventh time nothing. */
static void check_bad_blocks(struct stream *stream, uint64_t seed) {
    const size_t sealed_block = stream->block_nbytes + AGSF_OVERHEAD_NBYTES;
    uint64_t random = seed;

    for (unsigned trial = 0; trial < 84; trial++) {
        const unsigned threads = 1 + trial % 4;
        const bool flip = trial % 7 != 0, cut = trial % 7 == 0 ? trial % 2 : trial % 3 == 0;
        size_t places[BAD_MAX], bad = SIZE_MAX, length = stream->sealed_nbytes;
        agsf_status want = AGSF_OK;
        unsigned nplaces = 0;

        for (; flip && nplaces < 1 + trial % BAD_MAX; nplaces++) {
            const size_t place = (size_t)random_below(&random, stream->sealed_nbytes);
            places[nplaces] = place;
            stream->sealed.data[place] ^= (uint8_t)(1 << nplaces); /* so that two at one place do not cancel out */
            if (place / sealed_block < bad) bad = place / sealed_block;
            want = AGSF_BAD_TAG;
        }
        checking("blocks of %zu, trial %u: block %zd bad, %u threads", stream->block_nbytes, trial, (ssize_t)bad,
                 threads);
        check_open(stream, true, threads, 0, want, bad);
        if (cut) length = (size_t)random_below(&random, stream->sealed_nbytes);
        if (trial % 5 == 0) length -= length % sealed_block; /* cut between two blocks */
        if (length < stream->sealed_nbytes && length / sealed_block <= bad) {
            /* A block that is cut short is short, whatever else is wrong with it. */
            bad = length / sealed_block;
            want = AGSF_SHORT;
        }
        checking("blocks of %zu, trial %u: block %zd bad, %zu of %zu bytes in the file, %u threads",
                 stream->block_nbytes, trial, (ssize_t)bad, length, stream->sealed_nbytes, threads);
        check_open(stream, false, threads, length, want, bad);
        while (nplaces-- > 0) stream->sealed.data[places[nplaces]] ^= (uint8_t)(1 << nplaces);
    }
}

/* ---------------------------------------------------------------- refusals of the system */

static void check_os_error(const struct stream *stream, bool seal, int fd, int want) {
    guarded out = guarded_new(stream->nbytes, AT_END);
    agsf_run run = run_of(stream, false, 2, seal ? stream->plain.data : out.data);

    checking("%s on a descriptor that gives \"%s\", blocks of %zu", seal ? "seal" : "open", strerror(want),
             stream->block_nbytes);
    memset(out.data, SLACK, out.nbytes);
    run.fd = fd;
    CHECK_EQUAL(finish(seal ? agsf_seal_run : agsf_open_run, &run, NULL), AGSF_IO);
    CHECK_EQUAL(run.os_error, want);
    CHECK(run.bad_block < stream->nblocks);
    CHECK(all_are(out.data, out.nbytes, seal ? SLACK : 0));
    guarded_free(&out);
}

static void check_os_errors(const struct stream *stream) {
    char path[] = "/tmp/agsf-test-XXXXXX";
    const int both = mkstemp(path), reading = open(path, O_RDONLY), writing = open(path, O_WRONLY);
    const int folder = open("/", O_RDONLY | O_DIRECTORY), full = open("/dev/full", O_RDWR);
    const int closed = dup(both);
    struct rlimit limit;
    int ends[2];

    CHECK(both >= 0 && reading >= 0 && writing >= 0 && folder >= 0 && full >= 0 && unlink(path) == 0);
    CHECK(pipe(ends) == 0 && close(closed) == 0);
    check_os_error(stream, true, closed, EBADF);
    check_os_error(stream, false, closed, EBADF);
    check_os_error(stream, true, -1, EBADF);
    check_os_error(stream, false, -1, EBADF);
    check_os_error(stream, true, reading, EBADF);
    check_os_error(stream, false, writing, EBADF);
    check_os_error(stream, false, folder, EISDIR);
    check_os_error(stream, true, full, ENOSPC);
    check_os_error(stream, true, ends[1], ESPIPE);
    check_os_error(stream, false, ends[0], ESPIPE);

    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0 && signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){stream->sealed_nbytes / 2, limit.rlim_max}) == 0);
    check_os_error(stream, true, both, EFBIG);
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    close(both);
    close(reading);
    close(writing);
    close(folder);
    close(full);
    close(ends[0]);
    close(ends[1]);
}

/* ---------------------------------------------------------------- impossible arguments */

static void check_refused(agsf_run run, bool seal) {
    const uint64_t counted = agsf_key_sealed(run.key);

    CHECK_EQUAL(seal ? agsf_seal_run(&run) : agsf_open_run(&run), AGSF_BAD_ARGUMENT);
    CHECK_EQUAL(agsf_key_sealed(run.key), counted);
    CHECK_EQUAL(run.done, 0);
}

static void check_arguments(void) {
    const uint64_t blocks = UINT64_C(1) << 32, block_max = (UINT64_C(1) << 31) - 1;
    guarded plain = guarded_new(64, AT_END), sealed = guarded_new(64 + 4 * AGSF_OVERHEAD_NBYTES, AT_END);
    agsf_key *key = key_of(16, 3);
    const agsf_run good = {
        .key = key, .block_nbytes = 16, .plain = plain.data, .plain_nbytes = 64, .sealed = sealed.data, .threads = 1};
    static const uint64_t last[] = {INT64_MAX, UINT64_MAX, (uint64_t)INT64_MAX - 64 - 4 * 28 + 1};
    agsf_run bad;

    CHECK_EQUAL(agsf_sealed_nbytes(0, 0), 0);
    CHECK_EQUAL(agsf_sealed_nbytes(1, block_max + 1), 0);
    CHECK_EQUAL(agsf_sealed_nbytes(1, UINT64_MAX), 0);
    CHECK_EQUAL(agsf_sealed_nbytes(block_max, block_max), block_max + 28);
    CHECK_EQUAL(agsf_sealed_nbytes(block_max + 1, block_max), block_max + 1 + 2 * 28);
    CHECK_EQUAL(agsf_sealed_nbytes(UINT64_MAX, 1), 0);
    CHECK_EQUAL(agsf_sealed_nbytes(UINT64_MAX / 29, 1), UINT64_MAX / 29 * 29);
    CHECK_EQUAL(agsf_sealed_nbytes(UINT64_MAX / 29 + 1, 1), 0);
    CHECK_EQUAL(agsf_sealed_nbytes(UINT64_MAX - 28 * 3, UINT64_MAX), 0);

    for (unsigned seal = 0; seal < 2; seal++) {
        checking("what %s refuses", seal ? "agsf_seal_run()" : "agsf_open_run()");
        bad = good;
        bad.block_nbytes = 0;
        check_refused(bad, seal);
        bad.block_nbytes = (size_t)block_max + 1;
        check_refused(bad, seal);
        bad.block_nbytes = SIZE_MAX;
        check_refused(bad, seal);
        bad = good;
        bad.first_block = blocks;
        check_refused(bad, seal);
        bad.first_block = UINT64_MAX;
        check_refused(bad, seal);
        bad.first_block = blocks - 3; /* has room for three of the four */
        check_refused(bad, seal);
        bad = good;
        bad.sealed = NULL;
        for (unsigned i = 0; i < COUNT(last); i++) {
            bad.fd = -1;
            bad.fd_offset = last[i];
            check_refused(bad, seal);
        }
    }
    CHECK(all_are(sealed.data, sealed.nbytes, SLACK));

    /* A limit that the run would pass by one message stops all of it. */
    checking("the key's limit");
    CHECK_EQUAL(agsf_key_carry(key, AGSF_KEY_LIMIT - 7), AGSF_OK);
    bad = good;
    CHECK_EQUAL(agsf_seal_run(&bad), AGSF_OK);
    memset(sealed.data, SLACK, sealed.nbytes);
    bad.done = 0;
    CHECK_EQUAL(agsf_seal_run(&bad), AGSF_LIMIT);
    CHECK(all_are(sealed.data, sealed.nbytes, SLACK));
    CHECK_EQUAL(agsf_key_sealed(key), 4);
    bad.plain_nbytes = 48;
    CHECK_EQUAL(agsf_seal_run(&bad), AGSF_OK);

    /* More than there can be: no memory has so many bytes, so that none may be touched. */
    checking("a size that overflows");
    for (unsigned seal = 0; seal < 2; seal++) {
        bad = good;
        bad.plain_nbytes = SIZE_MAX;
        bad.block_nbytes = 1;
        check_refused(bad, seal);
        bad.plain_nbytes = (size_t)(blocks * 16 + 1); /* one block too many */
        bad.block_nbytes = 16;
        if (seal) check_refused(bad, seal);
    }
    guarded_free(&plain);
    guarded_free(&sealed);
    agsf_key_free(key);
}

int main(void) {
    static const struct {
        size_t block_nbytes, nbytes;
    } shapes[] = {{1000, 900 * 1000 - 1},
                  {4096, 300 * 4096},
                  {65536, 20 * 65536 + 3},
                  {300000, 7 * 300000},
                  {1 << 20, (3 << 20) + 1}};

    start();
    for (size_t i = 0; i < COUNT(shapes); i++) {
        struct stream stream = stream_new(shapes[i].block_nbytes, shapes[i].nbytes);
        check_os_errors(&stream);
        check_bad_blocks(&stream, i);
        stream_free(&stream);
    }
    check_arguments();
    return 0;
}
