/*
 * test_memory.c - what the engine does with the memory it asks for.
 *
 * Guards: a freed key leaves nothing of itself in memory, neither its bytes nor a key schedule; nothing that is freed
 * before holds any of it; helper threads allocate nothing; an allocation that fails, whichever it is, is a status,
 * leaves zeros in the output of an open, leaks nothing, and the next call works; no call leaves an error in
 * libcrypto's queue.
 *
 * All allocations of csrc come through here by --wrap, those of libcrypto by its own hook.
 */
#include "support.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <pthread.h>

#include "agsf_parquet.h"
#include "pool.h"

/* ---------------------------------------------------------------- the allocator */

void *__real_malloc(size_t nbytes);
void *__real_calloc(size_t n, size_t nbytes);
void *__real_realloc(void *old, size_t nbytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t nbytes);
void *__wrap_calloc(size_t n, size_t nbytes);
void *__wrap_realloc(void *old, size_t nbytes);
void __wrap_free(void *memory);

/* What lies in front of each piece of memory: all pieces in use are a circle. */
struct header {
    struct header *next, *prev;
    size_t nbytes;
    bool held_secret; /* when find_secrets() looked */
    bool
        of_helper; /* libcrypto's, in a helper thread: after a thread's first error it keeps a record until that ends */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct header in_use = {&in_use, &in_use, 0, false, false};
static uint8_t secret[32]; /* what is looked for: a key, as far as it goes */
static size_t secret_nbytes;
static bool must_be_wiped;            /* what held the secret must be zeros now when it is freed */
static long fail_at = -1, failed_one; /* the allocation that fails, counted down; below 0: none */
static bool fail_on;                  /* and all after it */
static unsigned helper_allocations;   /* of threads that are not the test's */
static bool may_reseed;               /* helpers draw nonces: libcrypto allocates when it takes a new seed */
static _Thread_local bool of_the_test;

/* Any 8 bytes of the key in a row are too much: a schedule begins with the key, perhaps in another byte order. */
static bool holds_secret(const uint8_t *bytes, size_t nbytes) {
    for (size_t at = 0; secret_nbytes > 0 && at + 8 <= secret_nbytes; at += 4) {
        uint8_t turned[8];
        for (unsigned i = 0; i < 8; i++) turned[i] = secret[at + 7 - i];
        if (memmem(bytes, nbytes, secret + at, 8) != NULL || memmem(bytes, nbytes, turned, 8) != NULL) return true;
    }
    return false;
}

static void *allocate(size_t nbytes, bool zeroed, bool of_libcrypto) {
    struct header *header;

    pthread_mutex_lock(&mutex);
    helper_allocations += !of_the_test && !(of_libcrypto && may_reseed);
    if (fail_at == 0 || (fail_at > 0 && --fail_at == 0)) {
        failed_one = 1;
        if (!fail_on) fail_at = -1;
        pthread_mutex_unlock(&mutex);
        return NULL;
    }
    header = nbytes > SIZE_MAX - sizeof(*header) ? NULL : __real_malloc(sizeof(*header) + nbytes);
    if (header != NULL) {
        *header = (struct header){&in_use, in_use.prev, nbytes, false, of_libcrypto && !of_the_test};
        header->prev->next = in_use.prev = header;
        memset(header + 1, zeroed ? 0 : 0x5c, nbytes);
    }
    pthread_mutex_unlock(&mutex);
    return header != NULL ? header + 1 : NULL;
}

void *__wrap_malloc(size_t nbytes) { return allocate(nbytes, false, false); }
void *__wrap_calloc(size_t n, size_t nbytes) {
    return n > 0 && nbytes > SIZE_MAX / n ? NULL : allocate(n * nbytes, true, false);
}

void __wrap_free(void *memory) {
    struct header *header;

    if (memory == NULL) return;
    header = (struct header *)memory - 1;
    pthread_mutex_lock(&mutex);
    CHECK(!holds_secret(memory, header->nbytes));
    if (must_be_wiped && header->held_secret) CHECK(all_are(memory, header->nbytes, 0));
    header->next->prev = header->prev;
    header->prev->next = header->next;
    pthread_mutex_unlock(&mutex);
    __real_free(header);
}

void *__wrap_realloc(void *old, size_t nbytes) {
    void *memory = allocate(nbytes, false, false);
    const size_t old_nbytes = old != NULL ? ((struct header *)old - 1)->nbytes : 0;

    if (memory == NULL) return NULL;
    if (old != NULL) memcpy(memory, old, old_nbytes < nbytes ? old_nbytes : nbytes);
    __wrap_free(old);
    return memory;
}

static void *crypto_malloc(size_t nbytes, const char *file, int line) {
    (void)file, (void)line;
    return nbytes > 0 ? allocate(nbytes, false, true) : NULL;
}

static void *crypto_realloc(void *old, size_t nbytes, const char *file, int line) {
    (void)file, (void)line;
    return __wrap_realloc(old, nbytes);
}

static void crypto_free(void *memory, const char *file, int line) {
    (void)file, (void)line;
    __wrap_free(memory);
}

/* Marks and counts the pieces of memory that hold the secret now. */
static unsigned find_secrets(void) {
    unsigned n = 0;

    pthread_mutex_lock(&mutex);
    for (struct header *h = in_use.next; h != &in_use; h = h->next)
        n += h->held_secret = holds_secret((uint8_t *)(h + 1), h->nbytes);
    pthread_mutex_unlock(&mutex);
    return n;
}

static void helpers_may_reseed(bool may) {
    pthread_mutex_lock(&mutex);
    may_reseed = may;
    pthread_mutex_unlock(&mutex);
}

static size_t count_in_use(void) {
    size_t n = 0;

    for (struct header *h = in_use.next; h != &in_use; h = h->next) n += !h->of_helper;
    return n;
}

/* ---------------------------------------------------------------- the calls */

enum { BLOCK = 70000, BLOCKS = 30, PLAIN = BLOCK * BLOCKS, SEALED = PLAIN + BLOCKS * AGSF_OVERHEAD_NBYTES };

static uint8_t plain[PLAIN], sealed[SEALED], out[PLAIN];
static uint8_t message[100 + AGSF_TAG_NBYTES];
static const uint8_t nonce[AGSF_NONCE_NBYTES] = {3};
static int fd;

static agsf_status run_with(agsf_key *key, bool seal, bool use_file, unsigned threads) {
    agsf_run run = {.key = key,
                    .block_nbytes = BLOCK,
                    .plain = seal ? plain : out,
                    .plain_nbytes = PLAIN,
                    .fd = fd,
                    .sealed = use_file ? NULL : sealed,
                    .threads = threads};

    return finish(seal ? agsf_seal_run : agsf_open_run, &run, NULL);
}

/* Pages: so many chunks of one page each, from plaintext to frames with a key and back; with helpers. */
enum { CHUNKS = 10, PAGE = 200000, CHUNK_ROOM = PAGE + 200 };

static uint8_t chunks[CHUNKS][CHUNK_ROOM], chunks_out[CHUNKS * CHUNK_ROOM];

static agsf_status pages_with(agsf_key *key, bool seal, bool ctr) {
    static const uint8_t header[] = {0x15, 0,    0x15, 0,    0x15, 0x80, 0xb5, 0x18,
                                     0x2c, 0x15, 2,    0x15, 0,    0,    0}; /* of 200000 bytes */
    uint8_t headers[CHUNKS][100];
    static size_t sizes[CHUNKS];
    agsf_modules modules[CHUNKS];
    agsf_pages runs[CHUNKS], *pointers[CHUNKS];
    agsf_status status;

    for (int i = 0; i < CHUNKS; i++) {
        modules[i] = (agsf_modules){.key = key, .row_group = 1, .column = (int16_t)i, .ctr = ctr};
        if (seal) memcpy(chunks_out + i * CHUNK_ROOM, header, sizeof(header));
        runs[i] = (agsf_pages){.from = seal ? NULL : &modules[i],
                               .to = seal ? &modules[i] : NULL,
                               .in_is_all = true,
                               .in = seal ? chunks_out + i * CHUNK_ROOM : chunks[i],
                               .out = seal ? chunks[i] : chunks_out + i * CHUNK_ROOM,
                               .in_nbytes = seal ? sizeof(header) + PAGE : sizes[i],
                               .out_nbytes = CHUNK_ROOM,
                               .values_left = 1,
                               .header = headers[i],
                               .header_nbytes = sizeof(headers[i])};
        runs[i].nbytes = runs[i].in_nbytes;
        pointers[i] = &runs[i];
    }
    helpers_may_reseed(seal);
    while ((status = agsf_pages_run(pointers, CHUNKS, 3)) == AGSF_PAUSED) continue;
    helpers_may_reseed(false);
    for (int i = 0; i < CHUNKS && status == AGSF_OK; i++) {
        if (runs[i].stop == AGSF_STOP_FAILED) status = runs[i].status;
        CHECK(status != AGSF_OK || runs[i].stop == AGSF_STOP_DONE);
        if (seal) sizes[i] = (size_t)runs[i].out_total;
    }
    memcpy(out, chunks_out, sizeof(out) < sizeof(chunks_out) ? sizeof(out) : sizeof(chunks_out));
    return status;
}

/* A column of wrapped keys, enough of them for helpers, which draw nonces. The names are empty. */
enum { ROWS = 5000, ROW = 16 + AGSF_OVERHEAD_NBYTES };

static uint8_t wrapped[ROWS * ROW];

static agsf_status do_wrap(agsf_key *key) {
    agsf_status status = AGSF_OK;

    for (uint8_t *at = wrapped; at < wrapped + sizeof(wrapped) && status == AGSF_OK; at += ROW) {
        status = agsf_seal(key, at, NULL, 0, plain, 16, at + AGSF_NONCE_NBYTES);
    }
    return status;
}

static agsf_status do_rewrap(agsf_key *key) {
    static uint8_t no_names[(ROWS + 1) * sizeof(int32_t)], offsets[sizeof(no_names)];
    agsf_rewrap run = {.from = key,
                       .to = key,
                       .name_offsets = no_names,
                       .offsets = offsets,
                       .in = wrapped,
                       .in_nbytes = sizeof(wrapped),
                       .out = out,
                       .out_nbytes = sizeof(out),
                       .nrows = ROWS,
                       .threads = 3};
    agsf_status status;

    for (int32_t i = 0; i <= ROWS; i++) memcpy(offsets + (size_t)i * sizeof(i), &(int32_t){i * ROW}, sizeof(i));
    helpers_may_reseed(true);
    while ((status = agsf_rewrap_run(&run)) == AGSF_PAUSED) continue;
    helpers_may_reseed(false);
    return status;
}

static agsf_status do_carry(agsf_key *key) { return agsf_key_carry(key, 1); }
static agsf_status do_seal(agsf_key *key) { return agsf_seal(key, nonce, NULL, 0, plain, 100, message); }
static agsf_status do_open(agsf_key *key) { return agsf_open(key, nonce, NULL, 0, message, 100, out); }
static agsf_status do_seal_run(agsf_key *key) { return run_with(key, true, false, 3); }
static agsf_status do_open_run(agsf_key *key) { return run_with(key, false, false, 3); }
static agsf_status do_seal_file(agsf_key *key) { return run_with(key, true, true, 3); }
static agsf_status do_open_file(agsf_key *key) { return run_with(key, false, true, 3); }
static agsf_status do_seal_pages(agsf_key *key) { return pages_with(key, true, false); }
static agsf_status do_open_pages(agsf_key *key) { return pages_with(key, false, false); }
static agsf_status do_seal_ctr_pages(agsf_key *key) { return pages_with(key, true, true); }
static agsf_status do_open_ctr_pages(agsf_key *key) { return pages_with(key, false, true); }

/* In an order in which each finds what it opens. */
static const struct call {
    const char *name;
    agsf_status (*make)(agsf_key *key);
    size_t opens_nbytes;
} calls[] = {
    {"agsf_key_carry()", do_carry, 0},
    {"agsf_seal()", do_seal, 0},
    {"agsf_open()", do_open, 100},
    {"agsf_seal() of many", do_wrap, 0},
    {"agsf_rewrap_run()", do_rewrap, ROWS * ROW},
    {"agsf_seal_run() to memory", do_seal_run, 0},
    {"agsf_open_run() from memory", do_open_run, PLAIN},
    {"agsf_seal_run() to a file", do_seal_file, 0},
    {"agsf_open_run() from a file", do_open_file, PLAIN},
    {"agsf_pages_run() that seals", do_seal_pages, 0},
    {"agsf_pages_run() that opens", do_open_pages, CHUNKS * CHUNK_ROOM},
    {"agsf_pages_run() that seals, CTR", do_seal_ctr_pages, 0},
    {"agsf_pages_run() that opens, CTR", do_open_ctr_pages, CHUNKS * CHUNK_ROOM},
};

static void check_wiping(size_t key_nbytes) {
    agsf_key *key;

    checking("what a key of %zu bytes leaves", key_nbytes);
    fill(secret, sizeof(secret), key_nbytes);
    secret_nbytes = key_nbytes;
    CHECK_EQUAL(find_secrets(), 0);
    CHECK_EQUAL(agsf_key_new(secret, key_nbytes, &key), AGSF_OK);
    for (size_t i = 0; i < COUNT(calls); i++) CHECK_EQUAL(calls[i].make(key), AGSF_OK);
    CHECK(find_secrets() >= 2); /* the key, and at least one schedule: else this looks for the wrong thing */
    must_be_wiped = true;
    agsf_key_free(key);
    must_be_wiped = false;
    CHECK_EQUAL(find_secrets(), 0);
    secret_nbytes = 0;
}

static void check_failing_allocations(const struct call *call, bool and_all_after) {
    const uint64_t seed = (uint64_t)(call - calls) + (and_all_after ? 100 : 0);
    const size_t before = count_in_use();

    for (long n = 1;; n++) {
        agsf_key *key = key_of(16, 7000 + seed); /* has sealed nothing, so that its counter too may find no memory */
        agsf_status status;

        checking("%s when allocation %ld%s fails", call->name, n, and_all_after ? " and all after it" : "");
        if (call->opens_nbytes > 0) { /* sealed by another object of the same key */
            agsf_key *sealer = key_of(16, 7000 + seed);
            for (const struct call *c = calls; c < call; c++) CHECK(c->opens_nbytes > 0 || c->make(sealer) == AGSF_OK);
            agsf_key_free(sealer);
        }
        memset(out, SLACK, sizeof(out));
        fail_on = and_all_after;
        failed_one = 0;
        fail_at = n;
        status = call->make(key);
        fail_at = -1;
        CHECK(status == AGSF_OK || status == AGSF_NO_MEMORY || (failed_one && status == AGSF_CRYPTO));
        if (status != AGSF_OK) CHECK(all_are(out, call->opens_nbytes, 0));
        CHECK_EQUAL(ERR_peek_error(), 0);
        CHECK_EQUAL(call->make(key), AGSF_OK);
        agsf_key_free(key);
        if (!failed_one) break;
        CHECK(n < 1000);
    }
    /* What may stay: a chunk of counters, the table of chunks, and a table of counters. */
    CHECK(count_in_use() <= before + 3);
}

static void check_helpers(void) {
    agsf_key *key = key_of(32, 9);
    uint8_t byte;

    checking("what helpers allocate");
    CHECK(agsf_pool_threads() > 0);
    helper_allocations = 0;
    for (unsigned i = 0; i < 20; i++) {
        for (size_t c = 0; c < COUNT(calls); c++) CHECK_EQUAL(calls[c].make(key), AGSF_OK);
        /* Also when they fail: where bytes were changed in memory and in the file, and where the file ends. */
        sealed[SEALED / 2] ^= 1;
        CHECK_EQUAL(run_with(key, false, false, 4), AGSF_BAD_TAG);
        CHECK(pread(fd, &byte, 1, SEALED / 3) == 1);
        byte ^= 1;
        CHECK(pwrite(fd, &byte, 1, SEALED / 3) == 1);
        CHECK_EQUAL(run_with(key, false, true, 4), AGSF_BAD_TAG);
        CHECK(ftruncate(fd, SEALED / 4) == 0);
        CHECK_EQUAL(run_with(key, false, true, 4), AGSF_SHORT);
        CHECK_EQUAL(ERR_peek_error(), 0);
    }
    CHECK_EQUAL(helper_allocations, 0);
    agsf_key_free(key);
}

int main(void) {
    agsf_key *warm;

    of_the_test = true;
    CHECK(CRYPTO_set_mem_functions(crypto_malloc, crypto_realloc, crypto_free) == 1);
    start();
    fd = memfd_create("run", MFD_CLOEXEC);
    fill(plain, sizeof(plain), 1);
    for (size_t key_nbytes = 16; key_nbytes <= 32; key_nbytes += 8) check_wiping(key_nbytes);

    warm = key_of(16, 2); /* what libcrypto makes once is made: that it may fail then is between it and the system */
    for (size_t i = 0; i < COUNT(calls); i++) CHECK_EQUAL(calls[i].make(warm), AGSF_OK);
    for (size_t i = 0; i < COUNT(calls) * 2; i++) check_failing_allocations(&calls[i / 2], i % 2);
    agsf_key_free(warm);
    check_helpers();
    return 0;
}
