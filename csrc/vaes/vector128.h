/* vector128.h - vectors of one block, for kernel.h: AES, PCLMULQDQ, and AVX for its three operands. */
#ifndef AGSF_VECTOR128_H
#define AGSF_VECTOR128_H

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 1 };

typedef __m128i vec;

#define VEC_KEEP(a) __asm__("" : "+x"(a))
#define vec_clmul(a, b, halves) _mm_clmulepi64_si128(a, b, halves)

static inline vec vec_load(const uint8_t *at) { return _mm_loadu_si128((const void *)at); }
static inline void vec_store(uint8_t *at, vec a) { _mm_storeu_si128((void *)at, a); }
static inline vec vec_zero(void) { return _mm_setzero_si128(); }
static inline vec vec_first(__m128i a) { return a; }
static inline vec vec_all(__m128i a) { return a; }
static inline vec vec_xor(vec a, vec b) { return _mm_xor_si128(a, b); }
static inline vec vec_and(vec a, vec b) { return _mm_and_si128(a, b); }
static inline vec vec_add32(vec a, vec b) { return _mm_add_epi32(a, b); }
static inline vec vec_shuffle(vec a, vec order) { return _mm_shuffle_epi8(a, order); }
static inline vec vec_swap(vec a) { return _mm_shuffle_epi32(a, 0x4e); }
static inline vec vec_aes(vec a, vec round) { return _mm_aesenc_si128(a, round); }
static inline vec vec_aes_last(vec a, vec round) { return _mm_aesenclast_si128(a, round); }
static inline __m128i vec_sum(vec a) { return a; }

#endif
