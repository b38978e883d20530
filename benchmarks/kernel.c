/*
 * kernel.c - the kernels of csrc/vaes beside the bare calls of EVP: one thread, one key, one message after the other, in
 * memory that is in a cache. Prints GB/s and nanoseconds a message, the best of many rounds. All contenders take turns,
 * so that a busy machine slows them alike. Linked against the very libcrypto of the last build:
 *
 *   benchmarks/kernel.sh [KEY_NBYTES]
 *
 * What EVP's loop leaves out is what limit.c leaves out: its context is ready, and its tag is in place.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <openssl/evp.h>

#include "vaes/vaes.h"

enum {
    NONCE = 12,
    TAG = 16,
    AAD = 27, /* as a Parquet module's often is */
    LARGEST = 1 << 20,
    ROUNDS = 40,
    ROUND_NBYTES = 1 << 21, /* what a round goes through, or */
    ROUND_MESSAGES = 4000,  /* this, whichever is less */
};

static const uint8_t iv[NONCE] = {1}, prefix[AAD] = {2}, secret[32] = {3};

/* What takes part. A NULL kernel is EVP. */
struct contender {
    const char *name;
    const agsf_vaes *kernel;
    agsf_vaes_key key;
    EVP_CIPHER_CTX *ctx;
};

static double now(void) {
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void must(bool done, const char *what) {
    if (done) return;
    fprintf(stderr, "%s failed\n", what);
    exit(1);
}

static bool evp(EVP_CIPHER_CTX *ctx, bool seal, const uint8_t *in, size_t nbytes, uint8_t *out, uint8_t *tag) {
    uint8_t none[TAG];
    int n;

    return EVP_CipherInit_ex2(ctx, NULL, NULL, iv, seal, NULL) == 1 && EVP_CipherUpdate(ctx, NULL, &n, prefix, AAD) == 1 &&
           EVP_CipherUpdate(ctx, out, &n, in, (int)nbytes) == 1 &&
           (seal || EVP_CIPHER_CTX_ctrl(ctx, EVP_CTRL_AEAD_SET_TAG, TAG, tag) == 1) && EVP_CipherFinal_ex(ctx, none, &n) == 1 &&
           (!seal || EVP_CIPHER_CTX_ctrl(ctx, EVP_CTRL_AEAD_GET_TAG, TAG, tag) == 1);
}

static bool run_once(const struct contender *who, bool seal, const uint8_t *in, size_t nbytes, uint8_t *out, uint8_t *tag) {
    if (who->kernel == NULL) return evp(who->ctx, seal, in, nbytes, out, tag);
    if (!seal) return who->kernel->open(&who->key, iv, prefix, AAD, in, nbytes, out, tag);
    who->kernel->seal(&who->key, iv, prefix, AAD, in, nbytes, out, tag);
    return true;
}

/* Seconds a message. */
static double time_round(const struct contender *who, bool seal, const uint8_t *in, size_t nbytes, uint8_t *out, uint8_t *tag) {
    const size_t fitting = ROUND_NBYTES / nbytes, n = fitting < ROUND_MESSAGES ? fitting : ROUND_MESSAGES;
    const double start = now();

    for (size_t i = 0; i < n; i++) must(run_once(who, seal, in, nbytes, out, tag), who->name);
    return (now() - start) / (double)n;
}

static void compare(const struct contender *all, size_t count, size_t nbytes, const uint8_t *plain, uint8_t *sealed, uint8_t *out) {
    double best[2][4];
    uint8_t tag[TAG];

    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < count; i++) {
            for (int seal = 1; seal >= 0; seal--) {
                const double took = time_round(&all[i], seal, seal ? plain : sealed, nbytes, seal ? sealed : out, tag);
                if (round == 0 || took < best[seal][i]) best[seal][i] = took;
            }
        }
    }
    for (size_t i = 0; i < count; i++) {
        printf("%8zu  %-8s  seal %7.3f GB/s %10.1f ns   open %7.3f GB/s %10.1f ns\n", nbytes, all[i].name,
               1e-9 * (double)nbytes / best[1][i], 1e9 * best[1][i], 1e-9 * (double)nbytes / best[0][i], 1e9 * best[0][i]);
    }
}

static size_t find_kernels(struct contender *all) {
    size_t count = 1;
    const agsf_vaes *const widest = agsf_vaes_widest();

    all[0].name = "EVP";
#if AGSF_HAS_VAES
    if (widest != NULL) all[count++].kernel = &agsf_vaes128;
    if (widest == &agsf_vaes256 || widest == &agsf_vaes512) all[count++].kernel = &agsf_vaes256;
    if (widest == &agsf_vaes512) all[count++].kernel = &agsf_vaes512;
#else
    (void)widest;
#endif
    if (count == 1) printf("No kernel: this CPU, or this compiler, has no AES instructions.\n");
    return count;
}

int main(int argc, char **argv) {
    const size_t key_nbytes = argc > 1 ? (size_t)atoi(argv[1]) : 16;
    const EVP_CIPHER *const cipher = key_nbytes == 16   ? EVP_aes_128_gcm()
                                     : key_nbytes == 24 ? EVP_aes_192_gcm()
                                                        : EVP_aes_256_gcm();
    struct contender all[4] = {{0}};
    const size_t count = find_kernels(all);
    uint8_t *const plain = calloc(3, LARGEST);

    must(plain != NULL && (key_nbytes == 16 || key_nbytes == 24 || key_nbytes == 32), "a key of 16, 24 or 32 bytes");
    memset(plain, 5, 3 * (size_t)LARGEST);
    all[0].ctx = EVP_CIPHER_CTX_new();
    must(EVP_CipherInit_ex2(all[0].ctx, cipher, secret, NULL, 1, NULL) == 1, "EVP_CipherInit_ex2()");
    for (size_t i = 1; i < count; i++) {
        all[i].name = all[i].kernel->name;
        all[i].kernel->key_init(&all[i].key, secret, key_nbytes);
    }
    for (size_t nbytes = 16; nbytes <= LARGEST; nbytes *= nbytes < 1024 ? 2 : 4) {
        compare(all, count, nbytes, plain, plain + LARGEST, plain + 2 * (size_t)LARGEST);
    }
    EVP_CIPHER_CTX_free(all[0].ctx);
    free(plain);
    return 0;
}
