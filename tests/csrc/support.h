/*
 * support.h - what the C tests share: checks that end the program, buffers that end where memory ends, and AGS1
 * put together by hand from single messages.
 *
 * A test is a main() that returns 0. A failed check prints where and what, and exits with 1; a hang is ended
 * by watch_for_hangs(). Each program's first comment says what it guards.
 */
#ifndef AGSF_TEST_SUPPORT_H
#define AGSF_TEST_SUPPORT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agsf.h"

/* Sanitizers have their own threads, limits and locks: some tests leave out what those would break. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---------------------------------------------------------------- checks */

/* What this thread is about to check, for the message of a failure: a loop says here which turn it is in. */
static _Thread_local char now_checking[200];

__attribute__((format(printf, 1, 2), unused)) static void checking(const char *format, ...) {
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(now_checking, sizeof(now_checking), format, arguments);
    va_end(arguments);
}

__attribute__((format(printf, 3, 4), noreturn, unused)) static void failed(const char *file, int line,
                                                                           const char *format, ...) {
    char text[400];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s:%d: %s%s%s\n", file, line, text, now_checking[0] != '\0' ? "; checking " : "", now_checking);
    fflush(NULL);
    _exit(1);
}

#define CHECK(condition) ((condition) ? (void)0 : failed(__FILE__, __LINE__, "not true: %s", #condition))

#define CHECK_EQUAL(got, want) \
    do { \
        const uint64_t got_ = (uint64_t)(got), want_ = (uint64_t)(want); \
        if (got_ != want_) failed(__FILE__, __LINE__, "%s is %" PRIu64 ", not %" PRIu64, #got, got_, want_); \
    } while (0)

/* A child that must end well. One that hangs is ended by its own alarm, since fork() clears its parent's. */
#define CHECK_CHILD(pid) \
    do { \
        int how_; \
        CHECK(waitpid(pid, &how_, 0) == (pid)); \
        if (WIFSIGNALED(how_)) failed(__FILE__, __LINE__, "child ended by signal %d (14: it hung)", WTERMSIG(how_)); \
        CHECK_EQUAL(WEXITSTATUS(how_), 0); \
    } while (0)

/*
 * Ends a program, or a child, that hangs. How fast the machine is decides nothing: what is to happen is waited for,
 * however long it takes, and no program works for more than a small part of this, even on a machine that is busy.
 */
__attribute__((unused)) static void watch_for_hangs(void) { alarm(600); }

__attribute__((unused)) static void start(void) {
    watch_for_hangs();
    CHECK_EQUAL(agsf_library_init(), AGSF_OK);
}

/* ---------------------------------------------------------------- bytes */

/* Bytes that look random and are the same for the same seed. */
__attribute__((unused)) static void fill(uint8_t *out, size_t nbytes, uint64_t seed) {
    uint64_t state = seed * UINT64_C(0x9e3779b97f4a7c15) + UINT64_C(0x2545f4914f6cdd1d);

    for (size_t step; nbytes > 0; out += step, nbytes -= step) {
        step = nbytes < sizeof(state) ? nbytes : sizeof(state);
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memcpy(out, &state, step);
    }
}

/* A number below `limit`; the next of a sequence that `state` begins and keeps. */
__attribute__((unused)) static uint64_t random_below(uint64_t *state, uint64_t limit) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (*state >> 33) % limit;
}

__attribute__((unused)) static bool all_are(const uint8_t *bytes, size_t nbytes, uint8_t value) {
    return nbytes == 0 || (bytes[0] == value && memcmp(bytes, bytes + 1, nbytes - 1) == 0);
}

__attribute__((unused)) static void from_hex(uint8_t *out, const char *hex) {
    for (unsigned byte; sscanf(hex, "%2x", &byte) == 1; hex += 2) *out++ = (uint8_t)byte;
}

/* ---------------------------------------------------------------- buffers */

/*
 * A buffer between two pages that may not be touched: at the very end of what is between them, or at its start.
 * A read or write over that edge is a SIGSEGV; a write over the other one is found by guarded_check().
 */
typedef struct guarded {
    uint8_t *data;
    size_t nbytes;
    uint8_t *between; /* the pages around data */
    size_t between_nbytes;
} guarded;

enum side { AT_END, AT_START };
enum { SLACK = 0xa5 };

__attribute__((unused)) static guarded guarded_new(size_t nbytes, enum side side) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (nbytes + page - 1) / page * page;
    uint8_t *map = mmap(NULL, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    guarded buffer = {.nbytes = nbytes, .between = map + page, .between_nbytes = inner};

    CHECK(map != MAP_FAILED);
    CHECK(inner == 0 || mprotect(map + page, inner, PROT_READ | PROT_WRITE) == 0);
    buffer.data = side == AT_START ? map + page : map + page + inner - nbytes;
    memset(buffer.between, SLACK, inner);
    return buffer;
}

__attribute__((unused)) static guarded guarded_copy(const uint8_t *bytes, size_t nbytes, enum side side) {
    guarded buffer = guarded_new(nbytes, side);

    if (nbytes > 0) memcpy(buffer.data, bytes, nbytes);
    return buffer;
}

__attribute__((unused)) static void guarded_check(const guarded *buffer) {
    const size_t before = (size_t)(buffer->data - buffer->between);

    CHECK(all_are(buffer->between, before, SLACK));
    CHECK(all_are(buffer->data + buffer->nbytes, buffer->between_nbytes - before - buffer->nbytes, SLACK));
}

__attribute__((unused)) static void guarded_free(guarded *buffer) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);

    guarded_check(buffer);
    CHECK(munmap(buffer->between - page, buffer->between_nbytes + 2 * page) == 0);
}

/* ---------------------------------------------------------------- keys and runs */

__attribute__((unused)) static agsf_key *key_of(size_t nbytes, uint64_t seed) {
    uint8_t bytes[32];
    agsf_key *key;

    fill(bytes, sizeof(bytes), seed);
    CHECK_EQUAL(agsf_key_new(bytes, nbytes, &key), AGSF_OK);
    return key;
}

/* Calls `step` until it does not pause; how often it paused is added to *pauses unless that is NULL. */
__attribute__((unused)) static agsf_status finish(agsf_status (*step)(agsf_run *), agsf_run *run, unsigned *pauses) {
    agsf_status status;

    while ((status = step(run)) == AGSF_PAUSED) {
        if (pauses != NULL) ++*pauses;
    }
    return status;
}

__attribute__((unused)) static uint64_t blocks_of(uint64_t plain_nbytes, uint64_t block_nbytes) {
    return plain_nbytes == 0 ? 1 : plain_nbytes / block_nbytes + (plain_nbytes % block_nbytes != 0);
}

/*
 * Opens a sealed run with agsf_open(), which the test vectors vouch for, one block after the other, and compares.
 * Returns false at the first that does not open or is not `plain`.
 */
__attribute__((unused)) static bool is_sealed_run(const agsf_run *run, const uint8_t *sealed, const uint8_t *plain) {
    uint8_t *const aad = malloc(run->aad_prefix_nbytes + 4), *const opened = malloc(run->block_nbytes);
    const uint64_t nblocks = blocks_of(run->plain_nbytes, run->block_nbytes);
    bool good = true;

    CHECK(aad != NULL && opened != NULL);
    if (run->aad_prefix_nbytes > 0) memcpy(aad, run->aad_prefix, run->aad_prefix_nbytes);
    for (uint64_t i = 0, done = 0; good && i < nblocks; i++) {
        const uint64_t left = run->plain_nbytes - done, index = run->first_block + i;
        const size_t nbytes = (size_t)(left < run->block_nbytes ? left : run->block_nbytes);
        for (unsigned byte = 0; byte < 4; byte++) aad[run->aad_prefix_nbytes + byte] = (uint8_t)(index >> (8 * byte));
        good = agsf_open(run->key, sealed, aad, run->aad_prefix_nbytes + 4, sealed + 12, nbytes, opened) == AGSF_OK &&
               (nbytes == 0 || memcmp(opened, plain + done, nbytes) == 0);
        sealed += 12 + nbytes + 16;
        done += nbytes;
    }
    free(aad);
    free(opened);
    return good;
}

#endif
