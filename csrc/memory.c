/* memory.c - advice to the system about large buffers. */
#define _DEFAULT_SOURCE
#include "agsf.h"

#include <sys/mman.h>

enum {
    HUGE_MIN_NBYTES = 4 << 20, /* two huge pages of the usual 2 MiB: below that there may be none to be had */
    PAGE_NBYTES = 64 << 10,    /* the largest page of any system that we run on */
};

void agsf_expect_fill(uint8_t *buffer, size_t nbytes) {
#ifdef MADV_HUGEPAGE
    const size_t skipped = (PAGE_NBYTES - (uintptr_t)buffer % PAGE_NBYTES) % PAGE_NBYTES;

    if (nbytes < HUGE_MIN_NBYTES) return;
    (void)madvise(buffer + skipped, (nbytes - skipped) / PAGE_NBYTES * PAGE_NBYTES, MADV_HUGEPAGE);
#else
    (void)buffer;
    (void)nbytes;
    (void)HUGE_MIN_NBYTES;
    (void)PAGE_NBYTES;
#endif
}
