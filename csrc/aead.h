/*
 * aead.h - one key, one message, one thread at a time. Private to csrc.
 *
 * A lane is what one thread needs to work under a key: a cipher context and a scratch buffer. The thread that
 * starts a run borrows a lane for each thread that will work on it, so that those threads allocate nothing.
 */
#ifndef AGSF_AEAD_H
#define AGSF_AEAD_H

#include <stdbool.h>

#include "agsf.h"

/* A lane's scratch: small enough to stay in a core's second-level cache, large enough that a system call is cheap. */
enum { AGSF_SCRATCH_NBYTES = 256 * 1024 };

typedef struct agsf_lane agsf_lane;

/* What a lane may have besides: one of the process's scratch buffers, and AES-CTR. */
enum { AGSF_WITH_SCRATCH = 1, AGSF_WITH_CTR = 2 };

/*
 * agsf_lane_borrow() takes a lane of the key, made now if none is free, with what `with` asks for. Give it back with
 * agsf_lane_return(). Failures: AGSF_NO_MEMORY, AGSF_CRYPTO.
 */
agsf_status agsf_lane_borrow(agsf_key *key, unsigned with, agsf_lane **lane_ret) AGSF_MUST_CHECK;
void agsf_lane_return(agsf_key *key, agsf_lane *lane);

/* agsf_lane_scratch() is AGSF_SCRATCH_NBYTES of memory. Only sealed bytes may be put there: it is not wiped. */
uint8_t *agsf_lane_scratch(agsf_lane *lane);

/* What a message has beside its text. Its AAD is prefix followed by suffix; a part of 0 bytes may be NULL. */
typedef struct agsf_message {
    const uint8_t *nonce;
    const uint8_t *prefix, *suffix;
    size_t prefix_nbytes, suffix_nbytes;
    bool cached; /* the text was read or written just now, and so is in a cache, not in memory */
} agsf_message;

/*
 * A message in one call: in is in_nbytes of text, and out gets as many with a tag behind. To open, in has the tag
 * behind, and out gets in_nbytes of text, which the caller must clear unless the status is AGSF_OK. Neither allocates.
 */
agsf_status agsf_lane_seal(agsf_lane *lane, const agsf_message *message, const uint8_t *in, size_t in_nbytes,
                           uint8_t *out) AGSF_MUST_CHECK;
agsf_status agsf_lane_open(agsf_lane *lane, const agsf_message *message, const uint8_t *in, size_t in_nbytes,
                           uint8_t *out) AGSF_MUST_CHECK;

/*
 * A message that is too large for one buffer is begun, then goes through agsf_lane_update() in pieces of any size (a
 * multiple of 16 but for the last is faster), and is finished. None of these allocates. What agsf_lane_update() writes
 * while opening is unchecked until agsf_lane_finish_open() says AGSF_OK: the caller must clear it otherwise.
 */
agsf_status agsf_lane_begin_seal(agsf_lane *lane, const agsf_message *message) AGSF_MUST_CHECK;
agsf_status agsf_lane_begin_open(agsf_lane *lane, const agsf_message *message) AGSF_MUST_CHECK;
agsf_status agsf_lane_update(agsf_lane *lane, const uint8_t *in, size_t nbytes, uint8_t *out) AGSF_MUST_CHECK;
agsf_status agsf_lane_finish_seal(agsf_lane *lane, uint8_t tag_ret[AGSF_TAG_NBYTES]) AGSF_MUST_CHECK;
agsf_status agsf_lane_finish_open(agsf_lane *lane, const uint8_t tag[AGSF_TAG_NBYTES]) AGSF_MUST_CHECK;

/*
 * agsf_lane_ctr() encrypts or decrypts, which is the same, with AES-CTR, whose counter begins at 1 behind the nonce.
 * There is no tag: a change of the bytes goes unnoticed.
 */
agsf_status agsf_lane_ctr(agsf_lane *lane, const uint8_t *nonce, const uint8_t *in, size_t nbytes,
                          uint8_t *out) AGSF_MUST_CHECK;

/*
 * agsf_key_reserve() counts messages that are about to be sealed, all or none of them. Every seal must
 * be reserved before it begins. AGSF_LIMIT if the key's value would pass its limit.
 */
agsf_status agsf_key_reserve(agsf_key *key, uint64_t messages) AGSF_MUST_CHECK;

/* agsf_draw() fills out with random bytes. They are for the call at hand: kept ones would be shared by a fork. */
agsf_status agsf_draw(uint8_t *out, size_t nbytes) AGSF_MUST_CHECK;

/* The lock around everything of libcrypto that is not a lane's own; fork() waits for it. For agsf_library_init(). */
void agsf_aead_lock(void);
void agsf_aead_unlock(void);

#endif
