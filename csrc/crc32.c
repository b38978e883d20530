/* crc32.c - CRC-32: by tables, by carry-less multiplication (x86-64), or by the CPU's own instructions (AArch64). */
#include "crc32.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define CRC_BY_FOLDS 1
#include <emmintrin.h>
#include <wmmintrin.h>
#elif defined(__aarch64__) && defined(__AARCH64EL__) && (defined(__linux__) || defined(__APPLE__))
#define CRC_BY_INSTRUCTIONS 1
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

enum { SLICES = 16 };

static const uint32_t POLYNOMIAL = UINT32_C(0xedb88320); /* bits reversed */
static uint32_t tables[SLICES][256];                     /* [k][b]: what a byte b adds that has k bytes behind it */

/* Each way takes the CRC so far, and returns it with the data behind it. The bits of both are not inverted. */
static uint32_t by_tables(uint32_t crc, const uint8_t *data, size_t nbytes) {
    for (; nbytes >= SLICES; data += SLICES, nbytes -= SLICES) {
        uint32_t next = 0;
        for (int i = 0; i < 4; i++) next ^= tables[SLICES - 1 - i][(data[i] ^ crc >> 8 * i) & 0xff];
        for (int i = 4; i < SLICES; i++) next ^= tables[SLICES - 1 - i][data[i]];
        crc = next;
    }
    while (nbytes-- > 0) crc = crc >> 8 ^ tables[0][(crc ^ *data++) & 0xff];
    return crc;
}

#ifdef CRC_BY_FOLDS

/*
 * The CRC is a remainder, so bytes may be replaced by any others that leave the same one. A fold takes 16 bytes away
 * and adds to the 16 bytes that are N bits behind them what makes up for it: each half, times x^N modulo the
 * polynomial. At last 16 bytes are left, for the tables. (V. Gopal et al., Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction, Intel 2009.) Four folds run at once, because each multiplication waits for the one
 * before it.
 */
enum { LANE_NBYTES = 16, LANES = 4, STEP_NBYTES = LANES * LANE_NBYTES };

#define FOLDS __attribute__((target("pclmul,sse2")))

FOLDS static inline __m128i load(const uint8_t *data) { return _mm_loadu_si128((const __m128i *)(const void *)data); }

FOLDS static inline __m128i fold(__m128i lane, __m128i factors, __m128i behind) {
    const __m128i low = _mm_clmulepi64_si128(lane, factors, 0x00), high = _mm_clmulepi64_si128(lane, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), behind);
}

FOLDS static uint32_t by_folds(uint32_t crc, const uint8_t *data, size_t nbytes) {
    /* x^(N + 32) and x^(N - 32) modulo the polynomial, bits reversed, one place to the left; N is 512, then 128. */
    const __m128i by_step = _mm_set_epi64x(INT64_C(0x1c6e41596), INT64_C(0x154442bd4));
    const __m128i by_lane = _mm_set_epi64x(INT64_C(0x0ccaa009e), INT64_C(0x1751997d0));
    uint8_t left[LANE_NBYTES];
    __m128i lanes[LANES];

    if (nbytes < STEP_NBYTES) return by_tables(crc, data, nbytes);
    for (int i = 0; i < LANES; i++) lanes[i] = load(data + (size_t)i * LANE_NBYTES);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)crc));
    for (data += STEP_NBYTES, nbytes -= STEP_NBYTES; nbytes >= STEP_NBYTES; data += STEP_NBYTES, nbytes -= STEP_NBYTES)
        for (int i = 0; i < LANES; i++) lanes[i] = fold(lanes[i], by_step, load(data + (size_t)i * LANE_NBYTES));
    for (int i = 1; i < LANES; i++) lanes[0] = fold(lanes[0], by_lane, lanes[i]);
    for (; nbytes >= LANE_NBYTES; data += LANE_NBYTES, nbytes -= LANE_NBYTES)
        lanes[0] = fold(lanes[0], by_lane, load(data));
    memcpy(left, &lanes[0], sizeof(left));
    return by_tables(by_tables(0, left, sizeof(left)), data, nbytes);
}

static bool is_faster_than_tables(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul");
}

#define FASTER by_folds

#elif defined(CRC_BY_INSTRUCTIONS)

#ifdef __clang__ /* older ones have arm_acle.h's functions only if all code may use the instructions */
#define INSTRUCTIONS __attribute__((target("crc")))
#define CRC_8_NBYTES __builtin_arm_crc32d
#define CRC_1_BYTE __builtin_arm_crc32b
#else
#define INSTRUCTIONS __attribute__((target("+crc")))
#define CRC_8_NBYTES __builtin_aarch64_crc32x
#define CRC_1_BYTE __builtin_aarch64_crc32b
#endif

INSTRUCTIONS static uint32_t by_instructions(uint32_t crc, const uint8_t *data, size_t nbytes) {
    for (; nbytes >= sizeof(uint64_t); data += sizeof(uint64_t), nbytes -= sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, data, sizeof(word));
        crc = CRC_8_NBYTES(crc, word);
    }
    while (nbytes-- > 0) crc = CRC_1_BYTE(crc, *data++);
    return crc;
}

static bool is_faster_than_tables(void) {
#ifdef __APPLE__
    return true; /* every such CPU of Apple's has the instructions */
#else
    return getauxval(AT_HWCAP) & HWCAP_CRC32;
#endif
}

#define FASTER by_instructions

#endif

static uint32_t (*update)(uint32_t crc, const uint8_t *data, size_t nbytes) = by_tables;

void agsf_crc32_init(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][b] = crc;
    }
    for (int k = 1; k < SLICES; k++) {
        for (int b = 0; b < 256; b++) tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 0xff];
    }
#ifdef FASTER
    if (is_faster_than_tables()) update = FASTER;
#endif
}

uint32_t agsf_crc32(const uint8_t *data, size_t nbytes) { return ~update(UINT32_C(0xffffffff), data, nbytes); }

uint32_t agsf_crc32_by_tables(const uint8_t *data, size_t nbytes) {
    return ~by_tables(UINT32_C(0xffffffff), data, nbytes);
}
