/*
 * kernel.c - the kernels of csrc/vaes beside the bare calls of EVP: one thread, one key, one message after the other, in
 * memory that is in a cache. All contenders take turns, so that a busy machine slows them alike. evp.py calls it for the
 * rows "kernel" of `python -m benchmarks`. As a program it prints GB/s and nanoseconds a message, the best of many
 * rounds, with the very libcrypto of the last build:
 *
 *   benchmarks/kernel.sh [KEY_NBYTES]
 *
 * What EVP's loop leaves out is what evp.c leaves out: its context and its parameters are ready.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <openssl/core_names.h>
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
static struct contender {
    const char *name;
    const agsf_vaes *kernel;
    agsf_vaes_key key;
    EVP_CIPHER_CTX *ctx;
} contenders[4]; /* EVP, and the kernels that this CPU runs, by their width */
static size_t count;

/* A message. Whoever opens it opens what another one has sealed. */
static uint8_t plain[LARGEST], sealed[LARGEST], opened[LARGEST], tag[TAG];
static size_t sealed_nbytes;

unsigned kernel_widest(void);
double kernel_run(unsigned bits, int seal, size_t nbytes);

static double now(void) {
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---------------------------------------------------------------- messages */

static bool evp(EVP_CIPHER_CTX *ctx, bool seal, size_t nbytes) {
    OSSL_PARAM params[] = {{OSSL_CIPHER_PARAM_AEAD_TAG, OSSL_PARAM_OCTET_STRING, tag, TAG, 0}, OSSL_PARAM_END};
    uint8_t none[TAG];
    int n;

    return EVP_CipherInit_ex2(ctx, NULL, NULL, iv, seal, NULL) == 1 && EVP_CipherUpdate(ctx, NULL, &n, prefix, AAD) == 1 &&
           EVP_CipherUpdate(ctx, seal ? sealed : opened, &n, seal ? plain : sealed, (int)nbytes) == 1 &&
           (seal || EVP_CIPHER_CTX_set_params(ctx, params) == 1) && EVP_CipherFinal_ex(ctx, none, &n) == 1 &&
           (!seal || EVP_CIPHER_CTX_get_params(ctx, params) == 1);
}

static bool run_once(const struct contender *who, bool seal, size_t nbytes) {
    if (who->kernel == NULL) return evp(who->ctx, seal, nbytes);
    if (!seal) return who->kernel->open(&who->key, iv, prefix, AAD, sealed, nbytes, opened, tag);
    who->kernel->seal(&who->key, iv, prefix, AAD, plain, nbytes, sealed, tag);
    return true;
}

/* Seconds a message, or -1 if one did not open. */
static double time_round(const struct contender *who, bool seal, size_t nbytes) {
    const size_t fitting = ROUND_NBYTES / nbytes, n = fitting < ROUND_MESSAGES ? fitting : ROUND_MESSAGES;
    const double start = now();
    bool good = true;

    for (size_t i = 0; i < n; i++) good = run_once(who, seal, nbytes) && good;
    return good ? (now() - start) / (double)n : -1;
}

/* ---------------------------------------------------------------- contenders */

static bool begin(size_t key_nbytes) {
    const EVP_CIPHER *const cipher = key_nbytes == 16   ? EVP_aes_128_gcm()
                                     : key_nbytes == 24 ? EVP_aes_192_gcm()
                                                        : EVP_aes_256_gcm();
    const agsf_vaes *const widest = agsf_vaes_widest();

    memset(plain, 5, LARGEST);
    contenders[0].name = "EVP";
    contenders[0].ctx = EVP_CIPHER_CTX_new();
    count = 1;
#if AGSF_HAS_VAES
    if (widest != NULL) contenders[count++].kernel = &agsf_vaes128;
    if (widest == &agsf_vaes256 || widest == &agsf_vaes512) contenders[count++].kernel = &agsf_vaes256;
    if (widest == &agsf_vaes512) contenders[count++].kernel = &agsf_vaes512;
#else
    (void)widest;
#endif
    for (size_t i = 1; i < count; i++) {
        contenders[i].name = contenders[i].kernel->name;
        contenders[i].kernel->key_init(&contenders[i].key, secret, key_nbytes);
    }
    return contenders[0].ctx != NULL && EVP_CipherInit_ex2(contenders[0].ctx, cipher, secret, NULL, 1, NULL) == 1;
}

/* kernel_widest() is how many bits the widest kernel's vectors have: 0 if this CPU, or this compiler, has none. */
unsigned kernel_widest(void) {
    static const unsigned bits[] = {0, 128, 256, 512};

    return count > 0 || begin(16) ? bits[count - 1] : 0;
}

/*
 * kernel_run() returns the seconds that a message takes with AES-128, or -1. bits: the kernel's; 0 is EVP. What it opens
 * is what the last call sealed, if that had the same size.
 */
double kernel_run(unsigned bits, int seal, size_t nbytes) {
    const size_t number = bits / 128 - bits / 512;

    if (bits > kernel_widest() || nbytes == 0 || nbytes > LARGEST) return -1;
    if (seal) sealed_nbytes = nbytes;
    if (sealed_nbytes != nbytes && !run_once(&contenders[0], true, sealed_nbytes = nbytes)) return -1;
    return time_round(&contenders[number], seal != 0, nbytes);
}

/* ---------------------------------------------------------------- the program */

static void must(bool done, const char *what) {
    if (done) return;
    fprintf(stderr, "%s failed\n", what);
    exit(1);
}

static void compare(size_t nbytes) {
    double best[2][4];

    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < count; i++) {
            for (int seal = 1; seal >= 0; seal--) {
                const double took = time_round(&contenders[i], seal, nbytes);
                must(took >= 0, contenders[i].name);
                if (round == 0 || took < best[seal][i]) best[seal][i] = took;
            }
        }
    }
    for (size_t i = 0; i < count; i++) {
        printf("%8zu  %-8s  seal %7.3f GB/s %10.1f ns   open %7.3f GB/s %10.1f ns\n", nbytes, contenders[i].name,
               1e-9 * (double)nbytes / best[1][i], 1e9 * best[1][i], 1e-9 * (double)nbytes / best[0][i], 1e9 * best[0][i]);
    }
}

int main(int argc, char **argv) {
    const size_t key_nbytes = argc > 1 ? (size_t)atoi(argv[1]) : 16;

    must(key_nbytes == 16 || key_nbytes == 24 || key_nbytes == 32, "a key of 16, 24 or 32 bytes");
    must(begin(key_nbytes), "EVP_CipherInit_ex2()");
    if (count == 1) printf("No kernel: this CPU, or this compiler, has no AES instructions.\n");
    for (size_t nbytes = 16; nbytes <= LARGEST; nbytes *= nbytes < 1024 ? 2 : 4) compare(nbytes);
    EVP_CIPHER_CTX_free(contenders[0].ctx);
    return 0;
}
