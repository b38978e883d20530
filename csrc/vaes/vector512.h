/* vector512.h - vectors of 4 blocks, for kernel.h: AVX-512 (F and BW), VAES and VPCLMULQDQ. */
#ifndef AGSF_VECTOR512_H
#define AGSF_VECTOR512_H

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 4 };

typedef __m512i vec;

#define VEC_KEEP(a) __asm__("" : "+v"(a))
#define vec_clmul(a, b, halves) _mm512_clmulepi64_epi128(a, b, halves)

static inline vec vec_load(const uint8_t *at) { return _mm512_loadu_si512((const void *)at); }
static inline void vec_store(uint8_t *at, vec a) { _mm512_storeu_si512((void *)at, a); }
static inline vec vec_zero(void) { return _mm512_setzero_si512(); }
static inline vec vec_first(__m128i a) { return _mm512_inserti32x4(_mm512_setzero_si512(), a, 0); }
static inline vec vec_all(__m128i a) { return _mm512_broadcast_i32x4(a); }
static inline vec vec_xor(vec a, vec b) { return _mm512_xor_si512(a, b); }
static inline vec vec_and(vec a, vec b) { return _mm512_and_si512(a, b); }
static inline vec vec_add32(vec a, vec b) { return _mm512_add_epi32(a, b); }
static inline vec vec_shuffle(vec a, vec order) { return _mm512_shuffle_epi8(a, order); }
static inline vec vec_swap(vec a) { return _mm512_shuffle_epi32(a, _MM_PERM_BADC); }
static inline vec vec_aes(vec a, vec round) { return _mm512_aesenc_epi128(a, round); }
static inline vec vec_aes_last(vec a, vec round) { return _mm512_aesenclast_epi128(a, round); }

static inline __m128i vec_sum(vec a) {
    const __m256i halves = _mm256_xor_si256(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));

    return _mm_xor_si128(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

#endif
