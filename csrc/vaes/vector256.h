/* vector256.h - vectors of 2 blocks, for kernel.h: AVX2, VAES and VPCLMULQDQ. */
#ifndef AGSF_VECTOR256_H
#define AGSF_VECTOR256_H

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 2 };

typedef __m256i vec;

#define VEC_KEEP(a) __asm__("" : "+x"(a))
#define vec_clmul(a, b, halves) _mm256_clmulepi64_epi128(a, b, halves)

static inline vec vec_load(const uint8_t *at) { return _mm256_loadu_si256((const void *)at); }
static inline void vec_store(uint8_t *at, vec a) { _mm256_storeu_si256((void *)at, a); }
static inline vec vec_zero(void) { return _mm256_setzero_si256(); }
static inline vec vec_first(__m128i a) { return _mm256_inserti128_si256(_mm256_setzero_si256(), a, 0); }
static inline vec vec_all(__m128i a) { return _mm256_broadcastsi128_si256(a); }
static inline vec vec_xor(vec a, vec b) { return _mm256_xor_si256(a, b); }
static inline vec vec_and(vec a, vec b) { return _mm256_and_si256(a, b); }
static inline vec vec_add32(vec a, vec b) { return _mm256_add_epi32(a, b); }
static inline vec vec_shuffle(vec a, vec order) { return _mm256_shuffle_epi8(a, order); }
static inline vec vec_swap(vec a) { return _mm256_shuffle_epi32(a, 0x4e); }
static inline vec vec_aes(vec a, vec round) { return _mm256_aesenc_epi128(a, round); }
static inline vec vec_aes_last(vec a, vec round) { return _mm256_aesenclast_epi128(a, round); }

static inline __m128i vec_sum(vec a) {
    return _mm_xor_si128(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}

#endif
