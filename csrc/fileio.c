/* fileio.c - positional reads and writes of a descriptor: all of it, or an error. */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include "fileio.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STEP_MAX_NBYTES = 1 << 30 }; /* some systems refuse what does not fit an int */

agsf_status agsf_read_at(int fd, uint64_t offset, uint8_t *out, size_t nbytes, int *os_error_ret) {
    while (nbytes > 0) {
        const ssize_t got = pread(fd, out, nbytes < STEP_MAX_NBYTES ? nbytes : STEP_MAX_NBYTES, (off_t)offset);
        if (got == 0) return AGSF_SHORT;
        if (got < 0) {
            if (errno == EINTR) continue;
            *os_error_ret = errno;
            return AGSF_IO;
        }
        out += got;
        offset += (uint64_t)got;
        nbytes -= (size_t)got;
    }
    return AGSF_OK;
}

agsf_status agsf_write_at(int fd, uint64_t offset, const uint8_t *in, size_t nbytes, int *os_error_ret) {
    while (nbytes > 0) {
        const ssize_t put = pwrite(fd, in, nbytes < STEP_MAX_NBYTES ? nbytes : STEP_MAX_NBYTES, (off_t)offset);
        if (put <= 0) {
            if (put < 0 && errno == EINTR) continue;
            *os_error_ret = put < 0 ? errno : ENOSPC;
            return AGSF_IO;
        }
        in += put;
        offset += (uint64_t)put;
        nbytes -= (size_t)put;
    }
    return AGSF_OK;
}

agsf_status agsf_open_file(const char *path, int *fd_ret, uint64_t *nbytes_ret, int *os_error_ret) {
    struct stat status;
    int fd;

    do {
        fd = open(path, O_RDONLY | O_CLOEXEC);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0 || fstat(fd, &status) != 0) {
        *os_error_ret = errno;
        if (fd >= 0) (void)close(fd);
        return AGSF_IO;
    }
    *fd_ret = fd;
    *nbytes_ret = S_ISREG(status.st_mode) ? (uint64_t)status.st_size : UINT64_MAX;
    return AGSF_OK;
}

agsf_status agsf_read_and_close(int fd, uint8_t *out, size_t nbytes, int *os_error_ret) {
    const agsf_status status = agsf_read_at(fd, 0, out, nbytes, os_error_ret);

    (void)close(fd);
    return status;
}
