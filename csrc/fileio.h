/* fileio.h - positional reads and writes of a descriptor: all of it, or an error. Private to csrc. */
#ifndef AGSF_FILEIO_H
#define AGSF_FILEIO_H

#include "agsf.h"

/*
 * agsf_read_at() reads nbytes at offset. AGSF_SHORT if the file ends before, AGSF_IO with the error number in
 * *os_error_ret if the system refuses; in *got_ret is how many bytes were read. Interrupted calls go on.
 */
agsf_status agsf_read_at(int fd, uint64_t offset, uint8_t *out, size_t nbytes, size_t *got_ret,
                         int *os_error_ret) AGSF_MUST_CHECK;

/* Like agsf_read_at(), but writes. Never AGSF_SHORT: a disk that takes no more is an AGSF_IO. */
agsf_status agsf_write_at(int fd, uint64_t offset, const uint8_t *in, size_t nbytes, int *os_error_ret) AGSF_MUST_CHECK;

#endif
