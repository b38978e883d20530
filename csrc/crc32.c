/* crc32.c - CRC-32, sixteen bytes a step. */
#include "crc32.h"

enum { SLICES = 16 };

static const uint32_t POLYNOMIAL = UINT32_C(0xedb88320); /* bits reversed */
static uint32_t tables[SLICES][256];                     /* [k][b]: what a byte b adds that has k bytes behind it */

void agsf_crc32_init(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][b] = crc;
    }
    for (int k = 1; k < SLICES; k++) {
        for (int b = 0; b < 256; b++) tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 0xff];
    }
}

uint32_t agsf_crc32(const uint8_t *data, size_t nbytes) {
    uint32_t crc = UINT32_C(0xffffffff);

    for (; nbytes >= SLICES; data += SLICES, nbytes -= SLICES) {
        uint32_t next = 0;
        for (int i = 0; i < 4; i++) next ^= tables[SLICES - 1 - i][(data[i] ^ crc >> 8 * i) & 0xff];
        for (int i = 4; i < SLICES; i++) next ^= tables[SLICES - 1 - i][data[i]];
        crc = next;
    }
    while (nbytes-- > 0) crc = crc >> 8 ^ tables[0][(crc ^ *data++) & 0xff];
    return ~crc;
}
