/*
 * lanes.h - stands in for csrc/vaes/vector*.h: a vector is LANES blocks, one 128-bit instruction after the other. So
 * every CPU with AES and PCLMULQDQ runs the source of kernels that it could not run, only slower.
 *
 * A program defines LANES_WANTED before, and has nothing else: the rest, with main(), is here. What it guards: gcm.h.
 */
#ifndef AGSF_TEST_LANES_H
#define AGSF_TEST_LANES_H

#include "support.h"

#include "gcm.h"

#if AGSF_HAS_VAES
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("ssse3,aes,pclmul"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("ssse3,aes,pclmul")
#endif

enum { LANES = LANES_WANTED };

typedef struct vec {
    __m128i lane[LANES];
} vec;

/* With the kernel's own inlining a sanitizer's code becomes so large that its compiler takes minutes. */
#define ALWAYS_INLINE static

#define EACH(expression) \
    vec result; \
    for (int i = 0; i < LANES; i++) result.lane[i] = (expression); \
    return result

/* A compiler has nothing to do better here: speed is not tested. */
#define VEC_KEEP(a) ((void)&(a))
#define vec_clmul(a, b, halves) ((halves) == 0x00 ? clmul_low(a, b) : clmul_high(a, b))

static inline vec clmul_low(vec a, vec b) { EACH(_mm_clmulepi64_si128(a.lane[i], b.lane[i], 0x00)); }
static inline vec clmul_high(vec a, vec b) { EACH(_mm_clmulepi64_si128(a.lane[i], b.lane[i], 0x11)); }
static inline vec vec_load(const uint8_t *at) { EACH(_mm_loadu_si128((const void *)(at + 16 * i))); }
static inline vec vec_zero(void) { EACH(_mm_setzero_si128()); }
static inline vec vec_first(__m128i a) { EACH(i == 0 ? a : _mm_setzero_si128()); }
static inline vec vec_all(__m128i a) { EACH(a); }
static inline vec vec_xor(vec a, vec b) { EACH(_mm_xor_si128(a.lane[i], b.lane[i])); }
static inline vec vec_and(vec a, vec b) { EACH(_mm_and_si128(a.lane[i], b.lane[i])); }
static inline vec vec_add32(vec a, vec b) { EACH(_mm_add_epi32(a.lane[i], b.lane[i])); }
static inline vec vec_shuffle(vec a, vec order) { EACH(_mm_shuffle_epi8(a.lane[i], order.lane[i])); }
static inline vec vec_swap(vec a) { EACH(_mm_shuffle_epi32(a.lane[i], 0x4e)); }
static inline vec vec_aes(vec a, vec round) { EACH(_mm_aesenc_si128(a.lane[i], round.lane[i])); }
static inline vec vec_aes_last(vec a, vec round) { EACH(_mm_aesenclast_si128(a.lane[i], round.lane[i])); }

static inline void vec_store(uint8_t *at, vec a) {
    for (int i = 0; i < LANES; i++) _mm_storeu_si128((void *)(at + 16 * i), a.lane[i]);
}

static inline __m128i vec_sum(vec a) {
    __m128i sum = a.lane[0];

    for (int i = 1; i < LANES; i++) sum = _mm_xor_si128(sum, a.lane[i]);
    return sum;
}

#define KERNEL_LINKAGE static
#define KERNEL kernel_by_lanes
#define KERNEL_NAME "lanes"
#include "vaes/kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

int main(void) {
    watch_for_hangs();
#if AGSF_HAS_VAES
    if (__builtin_cpu_supports("ssse3") && __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul")) {
        check_kernel(&KERNEL);
        return 0;
    }
#endif
    printf("skipped: this CPU, or this compiler, has no AES and PCLMULQDQ\n");
    return 0;
}

#endif
