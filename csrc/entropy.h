/*
 * entropy.h - random bytes of the operating system. Private to csrc.
 */
#ifndef AGSF_ENTROPY_H
#define AGSF_ENTROPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { AGSF_ENTROPY_MAX_NBYTES = 256 }; /* of one call, as getentropy() has it */

/* agsf_entropy_init() finds the fast way, if there is one. Call it once, before any other thread draws. */
void agsf_entropy_init(void);

/*
 * agsf_entropy() fills out with random bytes, or returns false: then the system has none. Two processes, and two
 * virtual machines resumed from one snapshot, never get the same. It takes no lock.
 */
bool agsf_entropy(uint8_t *out, size_t nbytes);

#endif
