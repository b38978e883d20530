/*
 * test_counters.c - counters of very many key values.
 *
 * Guards: with any number of key values, all that is kept for them is at most 24 bytes for each, also while a table
 * grows; none is forgotten, none is counted for another one, and a child of a fork has them; where memory ends in the
 * midst, nothing is lost and nothing goes uncounted.
 *
 * All allocations come through here by --wrap, and count with what the allocator itself adds.
 */
#include "support.h"

#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>

#include "aead.h"
#include "counters.h"

static _Atomic size_t held, held_most; /* bytes */
static _Atomic bool out_of_memory;

void *__real_malloc(size_t nbytes);
void *__real_calloc(size_t n, size_t nbytes);
void *__real_realloc(void *old, size_t nbytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t nbytes);
void *__wrap_calloc(size_t n, size_t nbytes);
void *__wrap_realloc(void *old, size_t nbytes);
void __wrap_free(void *memory);

static size_t size_of(void *memory) { return memory == NULL ? 0 : malloc_usable_size(memory) + sizeof(size_t); }

static void *count(void *memory) {
    const size_t nbytes = size_of(memory), now = atomic_fetch_add(&held, nbytes) + nbytes;

    if (now > held_most) held_most = now;
    return memory;
}

void *__wrap_malloc(size_t nbytes) { return out_of_memory ? NULL : count(__real_malloc(nbytes)); }
void *__wrap_calloc(size_t n, size_t nbytes) { return out_of_memory ? NULL : count(__real_calloc(n, nbytes)); }

void *__wrap_realloc(void *old, size_t nbytes) {
    const size_t before = size_of(old);
    void *const memory = out_of_memory ? NULL : __real_realloc(old, nbytes);

    if (memory != NULL) held -= before;
    return memory == NULL ? NULL : count(memory);
}

void __wrap_free(void *memory) {
    held -= size_of(memory);
    __real_free(memory);
}

static agsf_key *numbered(uint32_t number) {
    uint8_t bytes[32] = {1};
    agsf_key *key;

    memcpy(bytes + 4, &number, sizeof(number));
    CHECK_EQUAL(agsf_key_new(bytes, sizeof(bytes), &key), AGSF_OK);
    return key;
}

/* What a key value seals in the tests: some seal more than once. */
static uint64_t messages_of(uint32_t number) { return 1 + number % 3; }

static void check_all(uint32_t first, uint32_t end, uint32_t step) {
    for (uint32_t i = first; i < end; i += step) {
        agsf_key *key = numbered(i);
        CHECK_EQUAL(agsf_key_sealed(key), messages_of(i));
        agsf_key_free(key);
    }
}

enum { MANY = SANITIZED ? 200000 : 1000000, BYTES_PER_KEY = 24 };

static void check_memory(void) {
    const size_t before = held;

    for (uint32_t i = 0; i < MANY; i++) {
        agsf_key *key = numbered(i);
        CHECK_EQUAL(agsf_key_reserve(key, messages_of(i)), AGSF_OK);
        agsf_key_free(key);
        checking("what %u key values take", i + 1);
        if (i >= 20000) CHECK(held_most - before <= (i + 1) * (size_t)BYTES_PER_KEY);
        if (i % 1000 == 0) check_all(0, i + 1, 1 + i / 10);
    }
    checking("whether %d key values are known", MANY);
    check_all(0, MANY, 1);
    printf("(%.1f bytes a key value)\n", (double)(held_most - before) / MANY);
}

static void check_fork(void) {
    const pid_t child = fork();

    checking("counters after a fork");
    CHECK(child >= 0);
    if (child == 0) {
        watch_for_hangs();
        check_all(0, MANY, MANY / 100);
        _exit(0);
    }
    CHECK_CHILD(child);
}

/* A value is carried and counted by bits that lie beside its hash's: neither may touch the other. */
static void check_edges(void) {
    const uint64_t hashes[] = {0, UINT64_MAX, UINT64_MAX >> 2, UINT64_C(0x7fffffff), UINT64_C(0x3fffffff80000000)};

    for (size_t i = 0; i < COUNT(hashes); i++) {
        agsf_counter *const counter = agsf_counter_find(hashes[i], true);
        checking("a counter with the hash %" PRIx64, hashes[i]);
        CHECK(counter != NULL);
        CHECK_EQUAL(agsf_counter_sealed(counter), 0);
        CHECK(agsf_counter_reserve(counter, AGSF_KEY_LIMIT - 1));
        agsf_counter_carry(counter, 1);
        agsf_counter_carry(counter, 0);
        CHECK(!agsf_counter_reserve(counter, 1) && agsf_counter_reserve(counter, 0));
        agsf_counter_carry(counter, AGSF_KEY_LIMIT);
        CHECK(!agsf_counter_reserve(counter, 0));
        CHECK(!agsf_counter_reserve(counter, UINT64_MAX));
        CHECK_EQUAL(agsf_counter_sealed(counter), AGSF_KEY_LIMIT - 1);
    }
    for (size_t i = 0; i < COUNT(hashes); i++) {
        CHECK_EQUAL(agsf_counter_sealed(agsf_counter_find(hashes[i], false)), AGSF_KEY_LIMIT - 1);
    }
    CHECK(agsf_counter_find(12345, false) == NULL);
}

/* Without memory the tables fill up, and then new values are refused; the old ones go on. */
static void check_without_memory(void) {
    uint32_t refused = 0;
    static bool known[50000];

    checking("counters when memory has ended");
    for (uint32_t i = 0; i < COUNT(known); i++) {
        agsf_counter *counter;

        out_of_memory = true;
        counter = agsf_counter_find(UINT64_C(0x9e3779b97f4a7c15) * (i + 1), true);
        out_of_memory = false;
        known[i] = counter != NULL;
        refused += !known[i];
        if (counter != NULL) CHECK(agsf_counter_reserve(counter, messages_of(i)));
    }
    CHECK(refused > 0);
    for (uint32_t i = 0; i < COUNT(known); i++) {
        agsf_counter *const counter = agsf_counter_find(UINT64_C(0x9e3779b97f4a7c15) * (i + 1), true);
        CHECK(counter != NULL);
        CHECK_EQUAL(agsf_counter_sealed(counter), known[i] ? messages_of(i) : 0);
    }
}

enum { RACERS = 4, RACED = 3000 };

static void *race(void *unused) {
    for (uint32_t i = 0; i < RACED; i++) {
        agsf_key *key = numbered(3 * MANY + i);
        CHECK_EQUAL(agsf_key_reserve(key, 1), AGSF_OK);
        CHECK(agsf_key_sealed(key) >= 1 && agsf_key_sealed(key) <= RACERS);
        agsf_key_free(key);
    }
    return unused;
}

static void check_race(void) {
    pthread_t threads[RACERS];

    checking("threads that make the same counters");
    for (unsigned i = 0; i < RACERS; i++) CHECK(pthread_create(&threads[i], NULL, race, NULL) == 0);
    for (unsigned i = 0; i < RACERS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (uint32_t i = 0; i < RACED; i++) {
        agsf_key *key = numbered(3 * MANY + i);
        CHECK_EQUAL(agsf_key_sealed(key), RACERS);
        agsf_key_free(key);
    }
}

int main(void) {
    start();
    check_memory();
    check_fork();
    check_race();
    check_edges();
    check_without_memory();
    return 0;
}
