/*
 * test_large.c - sizes that do not fit an int. Takes 2 GiB of memory, so that `run.sh large` runs it and nothing else.
 *
 * Guards: libcrypto counts in int; a message and a block of 2^31 - 1 bytes and more go through it in steps and come
 * back. What is sealed is zeros, since those can be had without memory: the page of zeros, read 2^19 times.
 */
#include "support.h"

static const size_t BLOCK_MAX = INT32_MAX;

static uint8_t *reserve(size_t nbytes, int protection) {
    uint8_t *map = mmap(NULL, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    CHECK(map != MAP_FAILED);
    return map;
}

/* A buffer that looks large and is one MiB, again and again. What is written must be the same everywhere: zeros. */
static uint8_t *folded(size_t nbytes) {
    const size_t fold = 1 << 20;
    const int fd = memfd_create("folded", MFD_CLOEXEC);
    uint8_t *map = reserve(nbytes, PROT_NONE);

    CHECK(ftruncate(fd, (off_t)fold) == 0);
    for (size_t at = 0; at < nbytes; at += fold) {
        const size_t here = nbytes - at < fold ? nbytes - at : fold;
        CHECK(mmap(map + at, here, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == map + at);
    }
    close(fd);
    return map;
}

int main(void) {
    const size_t message = BLOCK_MAX + 17, largest = BLOCK_MAX + 1000;
    const uint8_t nonce[AGSF_NONCE_NBYTES] = {1};
    uint8_t *zeros = reserve(largest, PROT_READ), *sealed = reserve(largest, PROT_READ | PROT_WRITE);
    uint8_t *opened = folded(largest), first[16];
    agsf_key *key;
    agsf_run run;

    start();
    key = key_of(16, 1);
    checking("a message of %zu bytes", message);
    CHECK_EQUAL(agsf_seal(key, nonce, NULL, 0, zeros, message, sealed), AGSF_OK);
    memset(opened, SLACK, 16);
    CHECK_EQUAL(agsf_open(key, nonce, NULL, 0, sealed, message, opened), AGSF_OK);
    CHECK(all_are(opened, 16, 0));
    memcpy(first, sealed, 16);
    CHECK(memcmp(first, sealed + ((size_t)1 << 30), 16) != 0); /* the counter goes on from step to step */
    sealed[message - 1] ^= 1;
    CHECK_EQUAL(agsf_open(key, nonce, NULL, 0, sealed, message, opened), AGSF_BAD_TAG);

    for (unsigned tail = 0; tail < 2; tail++) {
        run = (agsf_run){.key = key,
                         .block_nbytes = BLOCK_MAX,
                         .plain = zeros,
                         .plain_nbytes = BLOCK_MAX + tail,
                         .sealed = sealed,
                         .threads = 2};
        checking("a run of %zu bytes in blocks of 2^31 - 1", run.plain_nbytes);
        CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_OK);
        run.plain = opened;
        run.done = 0;
        memset(opened, SLACK, 16);
        CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_OK);
        CHECK(all_are(opened, 16, 0));
        sealed[BLOCK_MAX] ^= 1;
        run.done = 0;
        CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_BAD_TAG);
    }
    agsf_key_free(key);
    return 0;
}
