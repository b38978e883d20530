/*
 * counters.h - how often each key value has sealed in this process. Private to csrc; knows nothing of cryptography.
 *
 * A counter is made at a value's first seal and never freed: the count must last as long as the process. That is for
 * every key value that a process ever seals with, so a counter takes 23 bytes at the most, all told.
 */
#ifndef AGSF_COUNTERS_H
#define AGSF_COUNTERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct agsf_counter agsf_counter;

/*
 * agsf_counter_find() is the counter of the key value with this hash; NULL if there is none, or, with `make`, no
 * memory. Two values with one hash share a counter, so what they seal is counted for both, never too little. Call it
 * under the lock of aead.c. The others need no lock; a counter stays where it is.
 */
agsf_counter *agsf_counter_find(uint64_t hash, bool make);

/* agsf_counter_sealed() returns how many messages were reserved. */
uint64_t agsf_counter_sealed(agsf_counter *counter);

/* agsf_counter_carry() notes that other processes have sealed this many messages, up to AGSF_KEY_LIMIT. The largest
 * counts. */
void agsf_counter_carry(agsf_counter *counter, uint64_t sealed_before);

/* agsf_counter_reserve() counts all of these messages, or none if they would pass AGSF_KEY_LIMIT. */
bool agsf_counter_reserve(agsf_counter *counter, uint64_t messages);

#endif
