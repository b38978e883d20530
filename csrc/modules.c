/* modules.c - Parquet's modules: their AADs and frames. */
#include "modules.h"

#include <string.h>

struct suffix {
    uint8_t bytes[7];
    size_t nbytes;
};

/* A module's place in its file, as its AAD ends in it. Only data pages and their headers have a page ordinal. */
static struct suffix aad_suffix(const agsf_modules *modules, unsigned type, uint32_t page) {
    const uint16_t row_group = (uint16_t)modules->row_group, column = (uint16_t)modules->column;
    struct suffix suffix = {{(uint8_t)type, (uint8_t)row_group, (uint8_t)(row_group >> 8), (uint8_t)column,
                             (uint8_t)(column >> 8), (uint8_t)page, (uint8_t)(page >> 8)},
                            5};

    if (type == AGSF_FOOTER) suffix.nbytes = 1;
    if (type == AGSF_DATA_PAGE || type == AGSF_DATA_PAGE_HEADER) suffix.nbytes = 7;
    if (modules->without_aad) suffix.nbytes = 0;
    return suffix;
}

static agsf_message message_of(const agsf_modules *modules, const struct suffix *suffix, const uint8_t *nonce) {
    return (agsf_message){.nonce = nonce,
                          .prefix = modules->aad,
                          .suffix = suffix->bytes,
                          .prefix_nbytes = modules->without_aad ? 0 : modules->aad_nbytes,
                          .suffix_nbytes = suffix->nbytes,
                          .cached = true};
}

agsf_status agsf_seal_frame(agsf_lane *lane, const agsf_modules *modules, unsigned type, uint32_t page,
                            const uint8_t *nonce, const uint8_t *in, size_t nbytes, uint8_t *out) {
    const struct suffix suffix = aad_suffix(modules, type, page);
    const agsf_message message = message_of(modules, &suffix, nonce);

    agsf_put_u32(out, (uint32_t)(nbytes + AGSF_OVERHEAD_NBYTES));
    memcpy(out + AGSF_LENGTH_NBYTES, nonce, AGSF_NONCE_NBYTES);
    return agsf_lane_seal(lane, &message, in, nbytes, out + AGSF_LENGTH_NBYTES + AGSF_NONCE_NBYTES);
}

agsf_status agsf_open_frame(agsf_lane *lane, const agsf_modules *modules, unsigned type, uint32_t page,
                            const uint8_t *in, size_t nbytes, uint8_t *out) {
    const struct suffix suffix = aad_suffix(modules, type, page);
    const agsf_message message = message_of(modules, &suffix, in + AGSF_LENGTH_NBYTES);

    return agsf_lane_open(lane, &message, in + AGSF_LENGTH_NBYTES + AGSF_NONCE_NBYTES, nbytes, out);
}

agsf_status agsf_module_seal(const agsf_modules *modules, unsigned type, const uint8_t *in, size_t in_nbytes,
                             uint8_t *out) {
    uint8_t nonce[AGSF_NONCE_NBYTES];
    agsf_lane *lane;
    agsf_status status;

    if (in_nbytes > INT32_MAX - AGSF_FRAME_NBYTES) return AGSF_BAD_ARGUMENT;
    status = agsf_key_reserve(modules->key, 1);
    if (status == AGSF_OK) status = agsf_draw(nonce, sizeof(nonce));
    if (status == AGSF_OK) status = agsf_lane_borrow(modules->key, 0, &lane);
    if (status != AGSF_OK) return status;
    status = agsf_seal_frame(lane, modules, type, 0, nonce, in, in_nbytes, out);
    agsf_lane_return(modules->key, lane);
    return status;
}

agsf_status agsf_module_open(const agsf_modules *modules, unsigned type, const uint8_t *in, size_t in_nbytes,
                             uint8_t *out, size_t *nbytes_ret, size_t *frame_nbytes_ret) {
    agsf_lane *lane;
    agsf_status status;
    size_t length;

    if (in_nbytes < AGSF_LENGTH_NBYTES) return AGSF_BAD_FORMAT;
    length = agsf_get_u32(in);
    if (length < AGSF_OVERHEAD_NBYTES || length > in_nbytes - AGSF_LENGTH_NBYTES) return AGSF_BAD_FORMAT;
    *nbytes_ret = length - AGSF_OVERHEAD_NBYTES;
    *frame_nbytes_ret = AGSF_LENGTH_NBYTES + length;
    status = agsf_lane_borrow(modules->key, 0, &lane);
    if (status == AGSF_OK) {
        status = agsf_open_frame(lane, modules, type, 0, in, *nbytes_ret, out);
        agsf_lane_return(modules->key, lane);
    }
    if (status != AGSF_OK && *nbytes_ret > 0) memset(out, 0, *nbytes_ret);
    return status;
}
