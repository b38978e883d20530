/* aead.c - one key, one message: AES-GCM over OpenSSL EVP, or by a kernel of vaes/. Only this file and choice.c include
 * OpenSSL. */
#define _POSIX_C_SOURCE 200809L
#include "aead.h"
#include "choice.h"
#include "counters.h"
#include "crc32.h"
#include "entropy.h"
#include "pool.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/params.h>
#include <openssl/rand.h>

enum {
    KEY_MAX_NBYTES = 32,
    LANES_KEPT = 16,     /* unused lanes that a key keeps */
    SCRATCHES_KEPT = 16, /* scratch buffers that the process keeps: a thousand open files need no more of them */
    SECRET_NBYTES = 16,
    FRESH_NBYTES = 32,
    AAD_JOINED_NBYTES = 1024,  /* up to here prefix and suffix are joined: a second call costs more than the copy */
    AAD_STEP_NBYTES = 1 << 30, /* EVP counts in int */
    STEP_MIN_NBYTES = 2048,
    CACHED_STEP_MIN_NBYTES = 16 * 1024,
    STEP_MAX_NBYTES = 128 * 1024,
};

struct agsf_lane {
    EVP_CIPHER_CTX *ctx; /* NULL if the kernel takes messages of any size */
    EVP_CIPHER_CTX *ctr; /* NULL until it was borrowed with it */
    uint8_t *scratch;    /* NULL unless it was borrowed with one */
    size_t step_min_nbytes;
    agsf_vaes_key schedule; /* for the kernel, if there is one, and */
    agsf_vaes_message message;
};

struct agsf_key {
    const EVP_CIPHER *cipher, *ctr;
    _Atomic(agsf_counter *) counter; /* NULL until the first seal */
    _Atomic(agsf_lane *) idle[LANES_KEPT];
    size_t nbytes;
    uint8_t bytes[KEY_MAX_NBYTES];
};

/*
 * libcrypto takes locks of its own when it fetches or draws. A fork in that moment would leave them held for
 * ever in the child, so all such calls are made under this lock, and the fork handler takes it first.
 */
static pthread_mutex_t aead_mutex = PTHREAD_MUTEX_INITIALIZER;
static EVP_CIPHER *gcm_128, *gcm_192, *gcm_256; /* aead_mutex; fetched once, then constant */
static EVP_CIPHER *ctr_128, *ctr_192, *ctr_256; /* likewise */
static EVP_MD *sha256;                          /* likewise */
static EVP_RAND_CTX *generator;                 /* aead_mutex */
static uint8_t secret[SECRET_NBYTES];           /* drawn once, then constant */
static agsf_choice choice;                      /* made once, then constant */
static bool forked;                             /* aead_mutex; in a child that is yet to reseed the generator */

void agsf_aead_lock(void) { pthread_mutex_lock(&aead_mutex); }
void agsf_aead_unlock(void) { pthread_mutex_unlock(&aead_mutex); }

/* ---------------------------------------------------------------- library */

static void before_fork(void) {
    agsf_pool_lock();
    agsf_aead_lock();
}

static void after_fork_in_parent(void) {
    agsf_aead_unlock();
    agsf_pool_unlock();
}

static void after_fork_in_child(void) {
    forked = true;
    agsf_aead_unlock();
    agsf_pool_forget();
    agsf_pool_unlock();
}

/*
 * libcrypto's generator, an instance of our own under its primary one. RAND_bytes() would make one for each thread, and
 * take a lock of libcrypto's when that thread ends, where no fork handler can wait for it. So would the first thread
 * that asked for the primary one, and so this is done at once.
 */
static EVP_RAND_CTX *new_generator(void) {
    char cipher[] = "AES-256-CTR";
    const OSSL_PARAM params[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_DRBG_PARAM_CIPHER, cipher, 0),
        OSSL_PARAM_END,
    };
    EVP_RAND *kind = EVP_RAND_fetch(NULL, "CTR-DRBG", NULL);
    EVP_RAND_CTX *made = kind == NULL ? NULL : EVP_RAND_CTX_new(kind, RAND_get0_primary(NULL));

    EVP_RAND_free(kind);
    if (made != NULL && EVP_RAND_instantiate(made, 256, 0, NULL, 0, params) == 1) return made;
    EVP_RAND_CTX_free(made);
    return NULL;
}

agsf_status agsf_library_init(void) {
    const char *const wanted = getenv("AGS_FAST_AES"); /* NOLINT(concurrency-mt-unsafe): once in a process */
    uint8_t random[AGSF_CHOICE_RANDOM_NBYTES];
    /* No clean-up at exit: it would free libcrypto's tables under threads that still work. */
    uint64_t options = OPENSSL_INIT_NO_ATEXIT;
    agsf_status status = AGSF_CRYPTO;

#if AGSF_LIBCRYPTO_BUNDLED
    options |= OPENSSL_INIT_NO_LOAD_CONFIG; /* no file of the machine configures our own copy */
#endif
    if (!agsf_can_choose(wanted)) return AGSF_BAD_ARGUMENT;
    agsf_aead_lock();
    if (generator != NULL) {
        agsf_aead_unlock();
        return AGSF_OK;
    }
    if (OPENSSL_init_crypto(options, NULL) != 1) goto out;
    agsf_crc32_init();
    agsf_entropy_init();
    gcm_128 = EVP_CIPHER_fetch(NULL, "AES-128-GCM", NULL);
    gcm_192 = EVP_CIPHER_fetch(NULL, "AES-192-GCM", NULL);
    gcm_256 = EVP_CIPHER_fetch(NULL, "AES-256-GCM", NULL);
    ctr_128 = EVP_CIPHER_fetch(NULL, "AES-128-CTR", NULL);
    ctr_192 = EVP_CIPHER_fetch(NULL, "AES-192-CTR", NULL);
    ctr_256 = EVP_CIPHER_fetch(NULL, "AES-256-CTR", NULL);
    if (gcm_128 == NULL || gcm_192 == NULL || gcm_256 == NULL) goto out;
    if (ctr_128 == NULL || ctr_192 == NULL || ctr_256 == NULL) goto out;
    sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
    if (sha256 == NULL) goto out;
    generator = new_generator();
    if (generator == NULL) goto out;
    if (EVP_RAND_generate(generator, secret, sizeof(secret), 256, 0, NULL, 0) != 1 ||
        EVP_RAND_generate(generator, random, sizeof(random), 256, 0, NULL, 0) != 1) {
        EVP_RAND_CTX_free(generator); /* not ready: the next call tries again */
        generator = NULL;
        goto out;
    }
    choice = agsf_choose(wanted, random);
    if (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0) {
        status = AGSF_OK;
    } else {
        EVP_RAND_CTX_free(generator); /* likewise */
        generator = NULL;
        status = AGSF_NO_MEMORY;
    }
out:
    ERR_clear_error();
    agsf_aead_unlock();
    return status;
}

const char *agsf_aes_kernel(void) { return choice.kernel == NULL ? "openssl" : choice.kernel->name; }

const char *agsf_aes_complaint(void) { return choice.complaint; }

bool agsf_fips(void) { return EVP_default_properties_is_fips_enabled(NULL) == 1; }

const char *agsf_libcrypto_version(void) { return OpenSSL_version(OPENSSL_VERSION); }

const char *agsf_libcrypto_cpu(void) { return OPENSSL_info(OPENSSL_INFO_CPU_SETTINGS); }

agsf_status agsf_draw(uint8_t *out, size_t nbytes) {
    uint8_t fresh[FRESH_NBYTES];
    bool ok;

    /* A few bytes are the kernel's own, which takes 0.05 us; libcrypto's generator takes 1.2 us, whatever it makes. */
    if (nbytes <= AGSF_ENTROPY_MAX_NBYTES) return agsf_entropy(out, nbytes) ? AGSF_OK : AGSF_NO_RANDOM;
    /*
     * The generator's state is memory: two virtual machines resumed from one snapshot have the same state, and would
     * draw the same nonces. So each draw mixes in fresh bytes from the kernel, which reseeds when it notices that it
     * was resumed.
     */
    if (!agsf_entropy(fresh, sizeof(fresh))) return AGSF_NO_RANDOM;
    agsf_aead_lock();
    /* libcrypto itself knows a child by its process number, which two containers, or time, can give out twice. */
    ok = !forked || EVP_RAND_reseed(generator, 1, NULL, 0, NULL, 0) == 1;
    if (ok) {
        forked = false;
        ok = EVP_RAND_generate(generator, out, nbytes, 256, 0, fresh, sizeof(fresh)) == 1;
    }
    if (!ok) ERR_clear_error();
    agsf_aead_unlock();
    return ok ? AGSF_OK : AGSF_CRYPTO;
}

/* ---------------------------------------------------------------- keys and their counters */

agsf_status agsf_key_new(const uint8_t *key, size_t key_nbytes, agsf_key **key_ret) {
    const EVP_CIPHER *cipher = key_nbytes == 16   ? gcm_128
                               : key_nbytes == 24 ? gcm_192
                               : key_nbytes == 32 ? gcm_256
                                                  : NULL;
    agsf_key *made;

    if (cipher == NULL) return AGSF_BAD_ARGUMENT;
    made = calloc(1, sizeof(*made));
    if (made == NULL) return AGSF_NO_MEMORY;
    made->cipher = cipher;
    made->ctr = key_nbytes == 16 ? ctr_128 : key_nbytes == 24 ? ctr_192 : ctr_256;
    made->nbytes = key_nbytes;
    memcpy(made->bytes, key, key_nbytes);
    *key_ret = made;
    return AGSF_OK;
}

static void lane_free(agsf_lane *lane) {
    if (lane == NULL) return;
    EVP_CIPHER_CTX_free(lane->ctx); /* wipes the key schedule */
    EVP_CIPHER_CTX_free(lane->ctr);
    OPENSSL_cleanse(lane, sizeof(*lane));
    free(lane);
}

void agsf_key_free(agsf_key *key) {
    if (key == NULL) return;
    for (size_t i = 0; i < LANES_KEPT; i++) lane_free(atomic_load(&key->idle[i]));
    OPENSSL_cleanse(key, sizeof(*key));
    free(key);
}

/*
 * What a key's value is counted under. The secret keeps others from choosing keys that share a counter with one of
 * ours, and what is left in memory from telling anything about a key.
 */
static agsf_status hash_of(const agsf_key *key, uint64_t *hash_ret) {
    uint8_t bytes[sizeof(secret) + KEY_MAX_NBYTES], digest[EVP_MAX_MD_SIZE];
    bool ok;

    memcpy(bytes, secret, sizeof(secret));
    memcpy(bytes + sizeof(secret), key->bytes, key->nbytes);
    ok = EVP_Digest(bytes, sizeof(secret) + key->nbytes, digest, NULL, sha256, NULL) == 1;
    if (ok) {
        memcpy(hash_ret, digest, sizeof(*hash_ret));
    } else {
        ERR_clear_error();
    }
    OPENSSL_cleanse(bytes, sizeof(bytes));
    OPENSSL_cleanse(digest, sizeof(digest));
    return ok ? AGSF_OK : AGSF_CRYPTO;
}

/* The counter of a key's value; NULL if there is none, which with `make` is a failure. */
static agsf_status counter_of(agsf_key *key, bool make, agsf_counter **counter_ret) {
    agsf_status status;
    uint64_t hash;

    *counter_ret = atomic_load(&key->counter);
    if (*counter_ret != NULL) return AGSF_OK;
    agsf_aead_lock();
    status = hash_of(key, &hash);
    if (status == AGSF_OK) *counter_ret = agsf_counter_find(hash, make);
    agsf_aead_unlock();
    if (*counter_ret != NULL) atomic_store(&key->counter, *counter_ret);
    return status == AGSF_OK && make && *counter_ret == NULL ? AGSF_NO_MEMORY : status;
}

uint64_t agsf_key_sealed(agsf_key *key) {
    agsf_counter *counter;

    if (counter_of(key, false, &counter) != AGSF_OK || counter == NULL) return 0;
    return agsf_counter_sealed(counter);
}

agsf_status agsf_key_carry(agsf_key *key, uint64_t sealed_before) {
    agsf_counter *counter;
    agsf_status status;

    if (sealed_before > AGSF_KEY_LIMIT) return AGSF_LIMIT;
    status = counter_of(key, true, &counter);
    if (status == AGSF_OK) agsf_counter_carry(counter, sealed_before);
    return status;
}

agsf_status agsf_key_extract(agsf_key *key, const uint8_t *salt, size_t salt_nbytes,
                             uint8_t out_ret[AGSF_EXTRACT_NBYTES]) {
    bool ok;

    if (salt_nbytes > INT_MAX) return AGSF_BAD_ARGUMENT;
    agsf_aead_lock(); /* HMAC() fetches */
    ok = HMAC(sha256, salt_nbytes == 0 ? (const uint8_t *)"" : salt, (int)salt_nbytes, key->bytes, key->nbytes, out_ret,
              NULL) != NULL;
    if (!ok) ERR_clear_error();
    agsf_aead_unlock();
    return ok ? AGSF_OK : AGSF_CRYPTO;
}

agsf_status agsf_key_reserve(agsf_key *key, uint64_t messages) {
    agsf_counter *counter;
    const agsf_status status = counter_of(key, true, &counter);

    if (status != AGSF_OK) return status;
    return agsf_counter_reserve(counter, messages) ? AGSF_OK : AGSF_LIMIT;
}

/* ---------------------------------------------------------------- lanes */

static agsf_status keyed_context(const agsf_key *key, const EVP_CIPHER *cipher, EVP_CIPHER_CTX **ctx_ret) {
    bool ok;

    agsf_aead_lock();
    *ctx_ret = EVP_CIPHER_CTX_new();
    ok = *ctx_ret != NULL && EVP_EncryptInit_ex2(*ctx_ret, cipher, key->bytes, NULL, NULL) == 1;
    if (!ok) {
        ERR_clear_error();
        EVP_CIPHER_CTX_free(*ctx_ret);
        *ctx_ret = NULL;
    }
    agsf_aead_unlock();
    return ok ? AGSF_OK : AGSF_CRYPTO;
}

static agsf_status lane_new(const agsf_key *key, agsf_lane **lane_ret) {
    agsf_lane *lane = calloc(1, sizeof(*lane));
    agsf_status status = AGSF_OK;

    if (lane == NULL) return AGSF_NO_MEMORY;
    if (choice.kernel != NULL) choice.kernel->key_init(&lane->schedule, key->bytes, key->nbytes);
    if (choice.max_nbytes < AGSF_MESSAGE_MAX_NBYTES) status = keyed_context(key, key->cipher, &lane->ctx);
    if (status != AGSF_OK) {
        lane_free(lane);
        return status;
    }
    *lane_ret = lane;
    return AGSF_OK;
}

static _Atomic(uint8_t *) idle_scratches[SCRATCHES_KEPT];

/*
 * Each place holds a buffer or NULL and is taken and filled by one atomic step, here as with a key's idle lanes: there
 * is no lock that a fork could leave held.
 */
static uint8_t *scratch_borrow(void) {
    for (size_t i = 0; i < SCRATCHES_KEPT; i++) {
        uint8_t *scratch = NULL;
        if (atomic_load_explicit(&idle_scratches[i], memory_order_relaxed) != NULL) {
            scratch = atomic_exchange(&idle_scratches[i], NULL);
        }
        if (scratch != NULL) return scratch;
    }
    return malloc(AGSF_SCRATCH_NBYTES);
}

static void scratch_return(uint8_t *scratch) {
    if (scratch == NULL) return;
    for (size_t i = 0; i < SCRATCHES_KEPT; i++) {
        uint8_t *none = NULL;
        if (atomic_compare_exchange_strong(&idle_scratches[i], &none, scratch)) return;
    }
    free(scratch);
}

agsf_status agsf_lane_borrow(agsf_key *key, unsigned with, agsf_lane **lane_ret) {
    agsf_lane *lane = NULL;
    agsf_status status = AGSF_OK;

    for (size_t i = 0; i < LANES_KEPT && lane == NULL; i++) {
        if (atomic_load_explicit(&key->idle[i], memory_order_relaxed) != NULL)
            lane = atomic_exchange(&key->idle[i], NULL);
    }
    if (lane == NULL) {
        status = lane_new(key, &lane);
        if (status != AGSF_OK) return status;
    }
    if (with & AGSF_WITH_CTR && lane->ctr == NULL) status = keyed_context(key, key->ctr, &lane->ctr);
    if (status == AGSF_OK && with & AGSF_WITH_SCRATCH) {
        lane->scratch = scratch_borrow();
        if (lane->scratch == NULL) status = AGSF_NO_MEMORY;
    }
    if (status == AGSF_OK) {
        *lane_ret = lane;
    } else {
        agsf_lane_return(key, lane);
    }
    return status;
}

void agsf_lane_return(agsf_key *key, agsf_lane *lane) {
    scratch_return(lane->scratch);
    lane->scratch = NULL;
    for (size_t i = 0; i < LANES_KEPT; i++) {
        agsf_lane *none = NULL;
        if (atomic_compare_exchange_strong(&key->idle[i], &none, lane)) return;
    }
    lane_free(lane);
}

uint8_t *agsf_lane_scratch(agsf_lane *lane) { return lane->scratch; }

/* A worker's errors are told by status; its error queue must not grow. Not for a bad tag, which queues nothing. */
static agsf_status crypto_failed(void) {
    ERR_clear_error();
    return AGSF_CRYPTO;
}

static bool add_aad(EVP_CIPHER_CTX *ctx, const uint8_t *aad, size_t nbytes) {
    while (nbytes > 0) {
        const int step = nbytes < AAD_STEP_NBYTES ? (int)nbytes : AAD_STEP_NBYTES;
        int written;
        if (EVP_CipherUpdate(ctx, NULL, &written, aad, step) != 1) return false;
        aad += step;
        nbytes -= (size_t)step;
    }
    return true;
}

/* Joins both parts of the AAD, unless they are too long for that. */
static bool join_aad(const agsf_message *message, uint8_t aad_ret[AAD_JOINED_NBYTES]) {
    const size_t prefix = message->prefix_nbytes, suffix = message->suffix_nbytes;

    if (suffix > AAD_JOINED_NBYTES || prefix > AAD_JOINED_NBYTES - suffix) return false;
    if (prefix > 0) memcpy(aad_ret, message->prefix, prefix);
    if (suffix > 0) memcpy(aad_ret + prefix, message->suffix, suffix);
    return true;
}

static agsf_status begin(agsf_lane *lane, int seal, const agsf_message *message) {
    uint8_t aad[AAD_JOINED_NBYTES];
    bool ok;

    if (lane->ctx == NULL) {
        choice.kernel->begin(&lane->message, &lane->schedule, message->nonce, seal);
        choice.kernel->aad(&lane->message, message->prefix, message->prefix_nbytes);
        choice.kernel->aad(&lane->message, message->suffix, message->suffix_nbytes);
        return AGSF_OK;
    }
    lane->step_min_nbytes = message->cached ? CACHED_STEP_MIN_NBYTES : STEP_MIN_NBYTES;
    ok = EVP_CipherInit_ex2(lane->ctx, NULL, NULL, message->nonce, seal, NULL) == 1;
    if (ok && join_aad(message, aad)) {
        ok = add_aad(lane->ctx, aad, message->prefix_nbytes + message->suffix_nbytes);
    } else {
        ok = ok && add_aad(lane->ctx, message->prefix, message->prefix_nbytes) &&
             add_aad(lane->ctx, message->suffix, message->suffix_nbytes);
    }
    return ok ? AGSF_OK : crypto_failed();
}

agsf_status agsf_lane_begin_seal(agsf_lane *lane, const agsf_message *message) { return begin(lane, 1, message); }

agsf_status agsf_lane_begin_open(agsf_lane *lane, const agsf_message *message) { return begin(lane, 0, message); }

/*
 * How much of a message goes to EVP at once. Where the data come from memory and not from a cache, libcrypto's AVX-512
 * code takes up to twice as long for a message in one call as for the same in two or more. Measured with OpenSSL 3.5.7,
 * 64 MiB of 64 KiB blocks: 7 GB/s opened in one call, 15 GB/s in halves; benchmarks/evp.c tries other steps, too.
 * A step that is not a multiple of a cache line is slow again.
 */
static size_t update_step(size_t nbytes, size_t min_nbytes) {
    const size_t half = (nbytes / 2 + 63) & ~(size_t)63;

    if (nbytes < min_nbytes) return nbytes;
    return half < STEP_MAX_NBYTES ? half : STEP_MAX_NBYTES;
}

agsf_status agsf_lane_update(agsf_lane *lane, const uint8_t *in, size_t nbytes, uint8_t *out) {
    const size_t at_once = update_step(nbytes, lane->step_min_nbytes);

    if (lane->ctx == NULL) {
        if (nbytes > AGSF_MESSAGE_MAX_NBYTES - lane->message.nbytes) return AGSF_CRYPTO;
        choice.kernel->piece(&lane->message, in, nbytes, out);
        return AGSF_OK;
    }
    while (nbytes > 0) {
        const size_t step = nbytes < at_once ? nbytes : at_once;
        int written;
        if (EVP_CipherUpdate(lane->ctx, out, &written, in, (int)step) != 1 || (size_t)written != step) {
            return crypto_failed();
        }
        in += step;
        out += step;
        nbytes -= step;
    }
    return AGSF_OK;
}

agsf_status agsf_lane_finish_seal(agsf_lane *lane, uint8_t tag_ret[AGSF_TAG_NBYTES]) {
    OSSL_PARAM params[] = {
        OSSL_PARAM_construct_octet_string(OSSL_CIPHER_PARAM_AEAD_TAG, tag_ret, AGSF_TAG_NBYTES),
        OSSL_PARAM_END,
    };
    uint8_t none[EVP_MAX_BLOCK_LENGTH]; /* GCM has nothing to add, but EVP wants a place for it */
    int written;

    if (lane->ctx == NULL) {
        choice.kernel->finish_seal(&lane->message, tag_ret);
        return AGSF_OK;
    }
    if (EVP_CipherFinal_ex(lane->ctx, none, &written) != 1) return crypto_failed();
    return EVP_CIPHER_CTX_get_params(lane->ctx, params) == 1 ? AGSF_OK : crypto_failed();
}

agsf_status agsf_lane_finish_open(agsf_lane *lane, const uint8_t tag[AGSF_TAG_NBYTES]) {
    uint8_t expected[AGSF_TAG_NBYTES];
    OSSL_PARAM params[] = {
        OSSL_PARAM_construct_octet_string(OSSL_CIPHER_PARAM_AEAD_TAG, expected, AGSF_TAG_NBYTES),
        OSSL_PARAM_END,
    };
    uint8_t none[EVP_MAX_BLOCK_LENGTH];
    int written;

    if (lane->ctx == NULL) return choice.kernel->finish_open(&lane->message, tag) ? AGSF_OK : AGSF_BAD_TAG;
    memcpy(expected, tag, sizeof(expected)); /* OSSL_PARAM has no const */
    if (EVP_CIPHER_CTX_set_params(lane->ctx, params) != 1) return crypto_failed();
    return EVP_CipherFinal_ex(lane->ctx, none, &written) == 1 ? AGSF_OK : AGSF_BAD_TAG;
}

/* Whether the kernel takes a message of this size in one call, for which its AAD must be in one place. */
static bool in_one_call(const agsf_message *message, size_t nbytes, uint8_t aad_ret[AAD_JOINED_NBYTES]) {
    return choice.kernel != NULL && nbytes <= choice.max_nbytes && join_aad(message, aad_ret);
}

agsf_status agsf_lane_seal(agsf_lane *lane, const agsf_message *message, const uint8_t *in, size_t in_nbytes,
                           uint8_t *out) {
    uint8_t aad[AAD_JOINED_NBYTES];
    agsf_status status;

    if (in_one_call(message, in_nbytes, aad)) {
        choice.kernel->seal(&lane->schedule, message->nonce, aad, message->prefix_nbytes + message->suffix_nbytes, in,
                            in_nbytes, out, out + in_nbytes);
        return AGSF_OK;
    }
    status = agsf_lane_begin_seal(lane, message);
    if (status == AGSF_OK) status = agsf_lane_update(lane, in, in_nbytes, out);
    if (status == AGSF_OK) status = agsf_lane_finish_seal(lane, out + in_nbytes);
    return status;
}

agsf_status agsf_lane_open(agsf_lane *lane, const agsf_message *message, const uint8_t *in, size_t in_nbytes,
                           uint8_t *out) {
    uint8_t aad[AAD_JOINED_NBYTES];
    agsf_status status;

    if (in_one_call(message, in_nbytes, aad)) {
        return choice.kernel->open(&lane->schedule, message->nonce, aad,
                                   message->prefix_nbytes + message->suffix_nbytes, in, in_nbytes, out, in + in_nbytes)
                   ? AGSF_OK
                   : AGSF_BAD_TAG;
    }
    status = agsf_lane_begin_open(lane, message);
    if (status == AGSF_OK) status = agsf_lane_update(lane, in, in_nbytes, out);
    if (status == AGSF_OK) status = agsf_lane_finish_open(lane, in + in_nbytes);
    return status;
}

agsf_status agsf_lane_ctr(agsf_lane *lane, const uint8_t *nonce, const uint8_t *in, size_t nbytes, uint8_t *out) {
    uint8_t iv[16] = {0};
    int written;

    memcpy(iv, nonce, AGSF_NONCE_NBYTES);
    iv[15] = 1;
    if (EVP_CipherInit_ex2(lane->ctr, NULL, NULL, iv, 1, NULL) != 1) return crypto_failed();
    while (nbytes > 0) {
        const size_t step = nbytes < STEP_MAX_NBYTES ? nbytes : STEP_MAX_NBYTES;
        if (EVP_CipherUpdate(lane->ctr, out, &written, in, (int)step) != 1 || (size_t)written != step)
            return crypto_failed();
        in += step;
        out += step;
        nbytes -= step;
    }
    return AGSF_OK;
}

void agsf_wipe(void *memory, size_t nbytes) { OPENSSL_cleanse(memory, nbytes); }

/* ---------------------------------------------------------------- one message */

agsf_status agsf_seal(agsf_key *key, const uint8_t nonce[AGSF_NONCE_NBYTES], const uint8_t *aad, size_t aad_nbytes,
                      const uint8_t *in, size_t in_nbytes, uint8_t *out) {
    const agsf_message message = {.nonce = nonce, .prefix = aad, .prefix_nbytes = aad_nbytes};
    agsf_lane *lane;
    agsf_status status = agsf_key_reserve(key, 1);

    if (status != AGSF_OK) return status;
    status = agsf_lane_borrow(key, 0, &lane);
    if (status != AGSF_OK) return status;
    status = agsf_lane_seal(lane, &message, in, in_nbytes, out);
    agsf_lane_return(key, lane);
    return status;
}

agsf_status agsf_open(agsf_key *key, const uint8_t nonce[AGSF_NONCE_NBYTES], const uint8_t *aad, size_t aad_nbytes,
                      const uint8_t *in, size_t in_nbytes, uint8_t *out) {
    const agsf_message message = {.nonce = nonce, .prefix = aad, .prefix_nbytes = aad_nbytes};
    agsf_lane *lane;
    agsf_status status = agsf_lane_borrow(key, 0, &lane);

    if (status == AGSF_OK) {
        status = agsf_lane_open(lane, &message, in, in_nbytes, out);
        agsf_lane_return(key, lane);
    }
    if (status != AGSF_OK && in_nbytes > 0) memset(out, 0, in_nbytes);
    return status;
}
