/*
 * test_runs.c - runs that succeed: memory to memory, memory to descriptor and back, on any number of threads.
 *
 * Guards: what a run seals is what single messages put together by hand are; every byte is read and written inside
 * its buffer (guard pages) and its part of the file; sizes around blocks, jobs, scratch buffers and pieces; nonces
 * that never repeat; each block counted once.
 */
#include "support.h"

#include <fcntl.h>

#include "aead.h"

static const uint8_t prefix[] = "a prefix of the AAD";
enum {
    FILE_SLACK = 100,                 /* bytes in the file behind the run, which must stay */
    PIECE = AGSF_SCRATCH_NBYTES - 64, /* what ags1.c puts through a scratch buffer at once, if a block is larger */
};

static int file_of(size_t nbytes) {
    const int fd = memfd_create("run", MFD_CLOEXEC);
    uint8_t *bytes = malloc(nbytes);

    CHECK(fd >= 0 && bytes != NULL);
    memset(bytes, SLACK, nbytes);
    CHECK(pwrite(fd, bytes, nbytes, 0) == (ssize_t)nbytes);
    free(bytes);
    CHECK(lseek(fd, 3, SEEK_SET) == 3);
    return fd;
}

/* Closes the file of a run: what was around the run is still there, and the descriptor's position where it was. */
static void close_file(int fd, uint64_t offset, size_t sealed_nbytes) {
    uint8_t *around = malloc((size_t)offset + FILE_SLACK);

    CHECK(around != NULL && lseek(fd, 0, SEEK_CUR) == 3);
    CHECK(pread(fd, around, (size_t)offset, 0) == (ssize_t)offset);
    CHECK(pread(fd, around + offset, FILE_SLACK + 1, (off_t)(offset + sealed_nbytes)) == FILE_SLACK);
    CHECK(all_are(around, (size_t)offset + FILE_SLACK, SLACK));
    free(around);
    close(fd);
}

/* Seals and opens `nbytes` in each combination of memory and descriptor. */
static void check_run(agsf_key *key, size_t block_nbytes, size_t nbytes, unsigned threads, uint64_t first_block,
                      enum side side) {
    const uint64_t nblocks = blocks_of(nbytes, block_nbytes), offset = nbytes % 3 ? 8 : 4097;
    const size_t sealed_nbytes = nbytes + (size_t)nblocks * AGSF_OVERHEAD_NBYTES;
    guarded plain = guarded_new(nbytes, side), sealed = guarded_new(sealed_nbytes, side);
    guarded from_file = guarded_new(sealed_nbytes, side);
    const int fd = file_of((size_t)offset + sealed_nbytes + FILE_SLACK);
    const uint64_t counted = agsf_key_sealed(key);
    agsf_run run = {.key = key,
                    .aad_prefix = prefix,
                    .aad_prefix_nbytes = nbytes % 2 ? sizeof(prefix) : 0,
                    .block_nbytes = block_nbytes,
                    .first_block = first_block,
                    .plain = plain.data,
                    .plain_nbytes = nbytes,
                    .threads = threads};

    checking("%zu bytes in blocks of %zu from block %" PRIu64 ", %u threads, at the %s", nbytes, block_nbytes,
             first_block, threads, side == AT_END ? "end" : "start");
    fill(plain.data, nbytes, nbytes + block_nbytes);
    CHECK_EQUAL(agsf_sealed_nbytes(nbytes, block_nbytes), sealed_nbytes);

    run.sealed = sealed.data;
    CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_OK);
    CHECK_EQUAL(run.done, nblocks);
    CHECK_EQUAL(agsf_key_sealed(key), counted + nblocks);
    CHECK(is_sealed_run(&run, sealed.data, plain.data));

    run.sealed = NULL;
    run.fd = fd;
    run.fd_offset = offset;
    run.done = 0;
    CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_OK);
    CHECK(pread(fd, from_file.data, sealed_nbytes, (off_t)offset) == (ssize_t)sealed_nbytes);
    CHECK(is_sealed_run(&run, from_file.data, plain.data));
    CHECK(memcmp(sealed.data, from_file.data, AGSF_NONCE_NBYTES) != 0);

    for (unsigned from_memory = 0; from_memory < 2; from_memory++) {
        guarded opened = guarded_new(nbytes, side);
        run.sealed = from_memory ? sealed.data : NULL;
        run.plain = opened.data;
        run.done = 0;
        CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_OK);
        CHECK_EQUAL(run.done, nblocks);
        CHECK(memcmp(opened.data, plain.data, nbytes) == 0);
        guarded_free(&opened);
    }
    CHECK_EQUAL(agsf_key_sealed(key), counted + 2 * nblocks);
    close_file(fd, offset, sealed_nbytes);
    guarded_free(&plain);
    guarded_free(&sealed);
    guarded_free(&from_file);
}

/* Sizes at and around the edges of blocks, and where a last block is just small or large enough for something. */
static void check_sizes(agsf_key *key, size_t block_nbytes) {
    const size_t tails[] = {0,
                            1,
                            15,
                            16,
                            17,
                            4096,
                            PIECE - 1,
                            PIECE,
                            PIECE + 1,
                            2 * PIECE,
                            AGSF_SCRATCH_NBYTES - 29,
                            AGSF_SCRATCH_NBYTES - 28,
                            AGSF_SCRATCH_NBYTES - 27,
                            block_nbytes - 1};
    const size_t many = 600000 / (block_nbytes + 50) + 1; /* blocks, so that helpers are worth it: not for tiny ones */
    const size_t counts[] = {0, 1, 2, many};

    for (size_t c = 0; c < COUNT(counts); c++) {
        for (size_t t = 0; t < COUNT(tails); t++) {
            const size_t nbytes = counts[c] * block_nbytes + tails[t];
            if (tails[t] >= block_nbytes) continue;
            check_run(key, block_nbytes, nbytes, 1 + (unsigned)(c + t) % 4, t % 2 ? 0 : 100000, (c + t) % 2);
        }
    }
}

static int compare_nonces(const void *a, const void *b) { return memcmp(a, b, AGSF_NONCE_NBYTES); }

/* All nonces of some runs on one key, and of a run of many slices, are different. */
static void check_nonces(void) {
    agsf_key *key = key_of(16, 1);
    enum { BLOCKS = 70000, SEALED = 1 + AGSF_OVERHEAD_NBYTES };
    uint8_t *plain = calloc(BLOCKS, 1), *sealed = malloc((size_t)BLOCKS * SEALED);
    uint8_t *nonces = malloc((size_t)2 * BLOCKS * AGSF_NONCE_NBYTES), *end = nonces;

    checking("nonces");
    CHECK(plain != NULL && sealed != NULL && nonces != NULL);
    for (unsigned n = 0; n < 2; n++) {
        agsf_run run = {
            .key = key, .block_nbytes = 1, .plain = plain, .plain_nbytes = BLOCKS, .sealed = sealed, .threads = 2};
        CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_OK);
        for (size_t i = 0; i < BLOCKS; i++, end += AGSF_NONCE_NBYTES)
            memcpy(end, sealed + i * SEALED, AGSF_NONCE_NBYTES);
    }
    qsort(nonces, (size_t)2 * BLOCKS, AGSF_NONCE_NBYTES, compare_nonces);
    for (uint8_t *next = nonces + AGSF_NONCE_NBYTES; next < end; next += AGSF_NONCE_NBYTES) {
        CHECK(compare_nonces(next - AGSF_NONCE_NBYTES, next) != 0);
    }
    free(plain);
    free(sealed);
    free(nonces);
    agsf_key_free(key);
}

/* The empty stream: one empty block. Where there are no bytes, there need be no pointer. */
static void check_nothing(void) {
    agsf_key *key = key_of(16, 2);
    guarded sealed = guarded_new(AGSF_OVERHEAD_NBYTES, AT_END);
    agsf_run run = {.key = key, .block_nbytes = 1 << 20, .sealed = sealed.data, .threads = 2};

    checking("a run of nothing");
    CHECK_EQUAL(agsf_seal_run(&run), AGSF_OK);
    CHECK_EQUAL(run.done, 1);
    CHECK(is_sealed_run(&run, sealed.data, NULL));
    run.done = 0;
    CHECK_EQUAL(agsf_open_run(&run), AGSF_OK);
    sealed.data[20] ^= 1;
    run.done = 0;
    CHECK_EQUAL(agsf_open_run(&run), AGSF_BAD_TAG);
    CHECK_EQUAL(run.bad_block, 0);
    guarded_free(&sealed);
    agsf_key_free(key);
}

int main(void) {
    static const size_t blocks[] = {1,
                                    2,
                                    15,
                                    16,
                                    17,
                                    1000,
                                    4096,
                                    65536,
                                    PIECE,
                                    AGSF_SCRATCH_NBYTES - 28, /* with nonce and tag exactly a scratch buffer */
                                    AGSF_SCRATCH_NBYTES - 27,
                                    2 * PIECE,
                                    2 * PIECE + 1,
                                    1 << 20};

    start();
    for (size_t i = 0; i < COUNT(blocks); i++) {
        agsf_key *key = key_of(i % 3 * 8 + 16, i);
        check_sizes(key, blocks[i]);
        agsf_key_free(key);
    }
    for (size_t nbytes = 0; nbytes < 70; nbytes++) { /* every small size, up to the last index there is */
        agsf_key *key = key_of(32, nbytes);
        check_run(key, 7, nbytes, 2, (UINT64_C(1) << 32) - blocks_of(nbytes, 7), nbytes % 2);
        agsf_key_free(key);
    }
    check_nothing();
    check_nonces();
    return 0;
}
