/* crc32.h - the CRC-32 of Ethernet and zip, as Parquet's page headers carry it. Private to csrc. */
#ifndef AGSF_CRC32_H
#define AGSF_CRC32_H

#include <stddef.h>
#include <stdint.h>

/* agsf_crc32_init() makes the tables; once, before anything else. */
void agsf_crc32_init(void);

uint32_t agsf_crc32(const uint8_t *data, size_t nbytes);

#endif
