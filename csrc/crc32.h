/* crc32.h - the CRC-32 of Ethernet and zip, as Parquet's page headers carry it. Private to csrc. */
#ifndef AGSF_CRC32_H
#define AGSF_CRC32_H

#include <stddef.h>
#include <stdint.h>

/* agsf_crc32_init() makes the tables, and chooses the fastest way that the CPU has; once, before anything else. */
void agsf_crc32_init(void);

uint32_t agsf_crc32(const uint8_t *data, size_t nbytes);

/* agsf_crc32_by_tables() is agsf_crc32() on a CPU that has nothing faster. For tests and benchmarks. */
uint32_t agsf_crc32_by_tables(const uint8_t *data, size_t nbytes);

#endif
