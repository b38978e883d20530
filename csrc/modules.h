/*
 * modules.h - a Parquet module's frame: its length in 4 bytes, nonce, ciphertext, tag. Private to csrc.
 */
#ifndef AGSF_MODULES_H
#define AGSF_MODULES_H

#include "aead.h"
#include "agsf_parquet.h"

enum { AGSF_LENGTH_NBYTES = 4 };

static inline uint32_t agsf_get_u32(const uint8_t *in) {
    return (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

static inline void agsf_put_u32(uint8_t *out, uint32_t value) {
    for (int i = 0; i < 4; i++) out[i] = (uint8_t)(value >> 8 * i);
}

/*
 * agsf_seal_frame() seals a module of in_nbytes to a frame at out. `page` is the page ordinal: only the AADs of data
 * pages and their headers have one. in may be the place in out where the ciphertext goes.
 */
agsf_status agsf_seal_frame(agsf_lane *lane, const agsf_modules *modules, unsigned type, uint32_t page,
                            const uint8_t *nonce, const uint8_t *in, size_t in_nbytes, uint8_t *out) AGSF_MUST_CHECK;

/*
 * agsf_open_frame() opens a frame with out_nbytes of plaintext. The caller has checked its length, and clears out if
 * the status is not AGSF_OK.
 */
agsf_status agsf_open_frame(agsf_lane *lane, const agsf_modules *modules, unsigned type, uint32_t page,
                            const uint8_t *in, size_t out_nbytes, uint8_t *out) AGSF_MUST_CHECK;

#endif
