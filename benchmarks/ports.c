/*
 * ports.c - how fast this CPU could be at AES-128-GCM if nothing but its ports for AES and for carry-less products held
 * it up: a loop of as many of these instructions as 16 bytes need, with no data and no memory. No kernel is faster, and
 * a good one, which also loads, stores and adds, comes near. Compiled with evp.c, and called by evp.py.
 *
 * 16 bytes need 10 instructions of AES (9 aesenc, 1 aesenclast) and 3 products (Karatsuba's). Two more reduce the sum
 * of a batch. With VAES, an instruction does two or four times as much.
 */
#define _POSIX_C_SOURCE 200809L
#include <stddef.h>
#include <stdint.h>
#include <time.h>

double ports_run(size_t nbytes, unsigned *bits);

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>

enum {
    CHAINS =
        10, /* of AES, each a vector: two ports need 8 for the four cycles that an instruction takes, and some spare */
    ROUNDS = 10,
    PRODUCTS = 3 * CHAINS + 2,
    PER_ROUND = 4, /* of the products, until there are no more */
    SUMS = 4,      /* chains of products */
};

/*
 * A function that makes `steps` batches of CHAINS vectors. What it stores keeps the compiler from leaving the loop out:
 * every instruction takes the result of an earlier one.
 */
#define PORTS(name, isa, vector, set, aes, last, product, store) \
    __attribute__((target(isa))) static void name(size_t steps, void *out) { \
        vector state[CHAINS], sum[SUMS]; \
        const vector key = set(0x5a), power = set(0x3c); \
\
        for (int i = 0; i < CHAINS; i++) state[i] = set((char)i); \
        for (int i = 0; i < SUMS; i++) sum[i] = set((char)(i + 1)); \
        for (size_t step = 0; step < steps; step++) { \
            _Pragma("GCC unroll 16") for (int round = 0; round < ROUNDS; round++) { \
                _Pragma("GCC unroll 16") for (int i = 0; i < CHAINS; i++) { \
                    state[i] = round < ROUNDS - 1 ? aes(state[i], key) : last(state[i], key); \
                } \
                _Pragma("GCC unroll 16") for (int i = 0; i < PER_ROUND; i++) { \
                    if (PER_ROUND * round + i < PRODUCTS) { \
                        sum[(PER_ROUND * round + i) % SUMS] = \
                            product(sum[(PER_ROUND * round + i) % SUMS], power, 0x10); \
                    } \
                } \
            } \
        } \
        for (int i = 0; i < CHAINS; i++) store((vector *)out + i, state[i]); \
        for (int i = 0; i < SUMS; i++) store((vector *)out + CHAINS + i, sum[i]); \
    }

PORTS(ports_128, "aes,pclmul,sse4.1", __m128i, _mm_set1_epi8, _mm_aesenc_si128, _mm_aesenclast_si128,
      _mm_clmulepi64_si128, _mm_storeu_si128)
PORTS(ports_256, "vaes,vpclmulqdq,avx2", __m256i, _mm256_set1_epi8, _mm256_aesenc_epi128, _mm256_aesenclast_epi128,
      _mm256_clmulepi64_epi128, _mm256_storeu_si256)
PORTS(ports_512, "vaes,vpclmulqdq,avx512f", __m512i, _mm512_set1_epi8, _mm512_aesenc_epi128, _mm512_aesenclast_epi128,
      _mm512_clmulepi64_epi128, _mm512_storeu_si512)

typedef void ports(size_t steps, void *out);

/* The widest that this CPU has; NULL if it has none. */
static ports *widest(unsigned *bits) {
    unsigned a, b, features = 0, d;
    bool vector;

    __builtin_cpu_init();
    if (!__get_cpuid_count(7, 0, &a, &b, &features, &d)) features = 0;
    vector = (features & bit_VAES) && (features & bit_VPCLMULQDQ); /* clang 14 cannot ask the builtin for these */
    *bits = vector && __builtin_cpu_supports("avx512f") ? 512 : vector && __builtin_cpu_supports("avx2") ? 256 : 128;
    if (*bits > 128) return *bits == 512 ? ports_512 : ports_256;
    return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul") ? ports_128 : NULL;
}

static double now(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ports_run() returns the seconds that the instructions for nbytes take, or -1, and how wide they are. */
double ports_run(size_t nbytes, unsigned *bits) {
    char out[(CHAINS + SUMS) * 64];
    ports *const run = widest(bits);
    double start;

    if (run == NULL) return -1;
    start = now();
    run(nbytes / (CHAINS * (*bits / 8)), out);
    return now() - start;
}
#else
double ports_run(size_t nbytes, unsigned *bits) {
    (void)nbytes;
    *bits = 0;
    return -1;
}
#endif
