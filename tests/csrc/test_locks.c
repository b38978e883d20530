/*
 * test_locks.c - libcrypto's locks.
 *
 * Guards: libcrypto takes locks of its own only while one of ours is held, in no call and not when a thread ends
 * either. The fork handlers hold ours; one of libcrypto's that another thread holds while a process forks is held in
 * the child for ever, and the child's next draw waits for ever. test_fork.c meets such a child once in ten thousand
 * forks, this test finds the lock in the first call.
 *
 * Sees nothing where libcrypto is a shared library: --wrap does not reach into it.
 */
#include "support.h"

#include <pthread.h>

#include "pool.h"

static _Thread_local unsigned held;    /* mutexes, by this thread: only ours are mutexes */
static _Thread_local const char *call; /* what this thread is in */
static _Atomic bool watching;
static _Atomic unsigned long taken; /* locks of libcrypto's, rightly */

int __real_pthread_mutex_lock(pthread_mutex_t *mutex);
int __real_pthread_mutex_unlock(pthread_mutex_t *mutex);
int __real_pthread_rwlock_wrlock(pthread_rwlock_t *lock);
int __real_pthread_rwlock_rdlock(pthread_rwlock_t *lock);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex);
int __wrap_pthread_rwlock_wrlock(pthread_rwlock_t *lock);
int __wrap_pthread_rwlock_rdlock(pthread_rwlock_t *lock);

static void libcrypto_locks(void) {
    taken++;
    if (watching && held == 0) {
        failed(__FILE__, __LINE__, "libcrypto takes a lock in %s, where a fork does not wait for it",
               call != NULL ? call : "a helper thread");
    }
}

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex) {
    held++;
    return __real_pthread_mutex_lock(mutex);
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex) {
    held--;
    return __real_pthread_mutex_unlock(mutex);
}

int __wrap_pthread_rwlock_wrlock(pthread_rwlock_t *lock) {
    libcrypto_locks();
    return __real_pthread_rwlock_wrlock(lock);
}

int __wrap_pthread_rwlock_rdlock(pthread_rwlock_t *lock) {
    libcrypto_locks();
    return __real_pthread_rwlock_rdlock(lock);
}

enum { BLOCK = 100000, PLAIN = 20 * BLOCK, SEALED = PLAIN + 20 * AGSF_OVERHEAD_NBYTES };

/* A column of wrapped keys that is large enough for helpers, and then the same with a bad row. */
static void rewrap_all(agsf_key *key) {
    enum { ROWS = 5000, ROW = 16 + AGSF_OVERHEAD_NBYTES };
    static const uint8_t no_names[(ROWS + 1) * sizeof(int32_t)];
    static uint8_t in[ROWS * ROW], out[ROWS * ROW], offsets[sizeof(no_names)];
    const uint8_t dek[16] = {3};
    agsf_rewrap run = {.from = key,
                       .to = key,
                       .name_offsets = no_names,
                       .offsets = offsets,
                       .in = in,
                       .in_nbytes = sizeof(in),
                       .out = out,
                       .out_nbytes = sizeof(out),
                       .nrows = ROWS,
                       .threads = 3};
    agsf_status status;

    for (int32_t i = 0; i <= ROWS; i++) memcpy(offsets + (size_t)i * sizeof(i), &(int32_t){i * ROW}, sizeof(i));
    for (uint8_t *at = in; at < in + sizeof(in); at += ROW) {
        CHECK_EQUAL(agsf_seal(key, at, NULL, 0, dek, sizeof(dek), at + AGSF_NONCE_NBYTES), AGSF_OK);
    }
    while ((status = agsf_rewrap_run(&run)) == AGSF_PAUSED) continue;
    CHECK_EQUAL(status, AGSF_OK);
    in[sizeof(in) / 2] ^= 1;
    run.done = 0;
    while ((status = agsf_rewrap_run(&run)) == AGSF_PAUSED) continue;
    CHECK_EQUAL(status, AGSF_BAD_TAG);
}

/* Every call that there is, good and failing, in a thread that ends afterwards. */
static void *use_all(void *unused) {
    const uint8_t bytes[32] = {1}, nonce[AGSF_NONCE_NBYTES] = {2};
    uint8_t *plain = calloc(PLAIN, 1), *sealed = malloc(SEALED), out[16 + AGSF_TAG_NBYTES];
    agsf_run run = {.block_nbytes = BLOCK, .plain = plain, .plain_nbytes = PLAIN, .sealed = sealed, .threads = 3};
    agsf_key *key;

    (void)unused;
    CHECK(plain != NULL && sealed != NULL);
    call = "agsf_key_new()";
    CHECK_EQUAL(agsf_key_new(bytes, sizeof(bytes), &key), AGSF_OK);
    run.key = key;
    call = "agsf_key_sealed()";
    (void)agsf_key_sealed(key);
    call = "agsf_key_carry()";
    CHECK_EQUAL(agsf_key_carry(key, 10), AGSF_OK);
    call = "agsf_seal()";
    CHECK_EQUAL(agsf_seal(key, nonce, NULL, 0, plain, 16, out), AGSF_OK);
    call = "agsf_open()";
    CHECK_EQUAL(agsf_open(key, nonce, NULL, 0, out, 16, plain), AGSF_OK);
    out[0] ^= 1;
    CHECK_EQUAL(agsf_open(key, nonce, NULL, 0, out, 16, plain), AGSF_BAD_TAG);
    call = "agsf_seal_run()";
    CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_OK);
    call = "agsf_open_run()";
    run.done = 0;
    CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_OK);
    sealed[SEALED / 2] ^= 1;
    run.done = 0;
    CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_BAD_TAG);
    call = "agsf_rewrap_run()";
    rewrap_all(key);
    call = "agsf_libcrypto_version() or _cpu()";
    CHECK(agsf_libcrypto_version() != NULL);
    (void)agsf_libcrypto_cpu();
    call = "agsf_key_free()";
    agsf_key_free(key);
    call = "what a thread does when it ends";
    free(plain);
    free(sealed);
    return NULL;
}

int main(void) {
    start();
    CHECK(held == 0);
    watching = true;
    for (unsigned i = 0; i < 3; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, use_all, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    use_all(NULL);
    watching = false;
    CHECK_EQUAL(held, 0);
    if (taken == 0) puts("(no lock of libcrypto's seen: a shared library, or it needs none)");
    return 0;
}
