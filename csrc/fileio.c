/* fileio.c - positional reads and writes of a descriptor: all of it, or an error. */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include "fileio.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STEP_MAX_NBYTES = 1 << 30 }; /* some systems refuse what does not fit an int */

agsf_status agsf_read_at(int fd, uint64_t offset, uint8_t *out, size_t nbytes, size_t *got_ret, int *os_error_ret) {
    size_t done = 0;
    agsf_status status = AGSF_OK;

    while (done < nbytes) {
        const size_t step = nbytes - done < STEP_MAX_NBYTES ? nbytes - done : STEP_MAX_NBYTES;
        const ssize_t got = pread(fd, out + done, step, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            status = got == 0 ? AGSF_SHORT : AGSF_IO;
            if (got < 0) *os_error_ret = errno;
            break;
        }
        done += (size_t)got;
    }
    *got_ret = done;
    return status;
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

agsf_status agsf_open_file(const char *path, uint8_t *out, size_t nbytes, int *fd_ret, uint64_t *nbytes_ret,
                           int *os_error_ret) {
    struct stat status;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0 || fstat(fd, &status) != 0) {
        *os_error_ret = errno;
        if (fd >= 0) (void)close(fd);
        return AGSF_IO;
    }
    *fd_ret = fd;
    *nbytes_ret = S_ISREG(status.st_mode) ? (uint64_t)status.st_size : UINT64_MAX;
    if (nbytes == 0 || !S_ISREG(status.st_mode) || (uint64_t)status.st_size < nbytes) return AGSF_OK;
    *fd_ret = -1;
    return agsf_read_and_close(fd, out, nbytes, os_error_ret);
}

agsf_status agsf_read_and_close(int fd, uint8_t *out, size_t nbytes, int *os_error_ret) {
    size_t got;
    const agsf_status status = agsf_read_at(fd, 0, out, nbytes, &got, os_error_ret);

    (void)close(fd);
    return status;
}
