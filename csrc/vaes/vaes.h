/*
 * vaes.h - AES-GCM of our own, for CPUs whose AES and carry-less multiplication work on whole vectors. Private to csrc.
 *
 * There is one kernel for each vector width: vaes128.c, vaes256.c and vaes512.c are kernel.h, compiled three times. The
 * narrowest is for CPUs with AES instructions for single blocks. On other CPUs and compilers there is none, and
 * libcrypto does all the work. A kernel allocates nothing, takes no lock and cannot fail.
 *
 * Buffers: `out` is `in`, or the two do not overlap. Sizes are in bytes. A buffer of 0 bytes may be NULL.
 */
#ifndef AGSF_VAES_H
#define AGSF_VAES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Compilers that know the instructions. */
#if defined(__x86_64__) && (defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 8))
#define AGSF_HAS_VAES 1
#else
#define AGSF_HAS_VAES 0
#endif

enum {
    AGSF_VAES_BLOCK_NBYTES = 16,
    AGSF_VAES_MAX_ROUNDS = 14,
    AGSF_VAES_MAX_LANES = 4,                        /* blocks in a vector */
    AGSF_VAES_MAX_POWERS = 8 * AGSF_VAES_MAX_LANES, /* blocks in a batch of 8 vectors */
};

/*
 * What a kernel makes of a key: immutable, so threads may share one. It belongs to the kernel that made it. Whoever
 * frees its memory wipes all of it first.
 */
typedef struct agsf_vaes_key {
    uint8_t rounds[AGSF_VAES_MAX_ROUNDS + 1][AGSF_VAES_BLOCK_NBYTES];
    /* Powers of the hash key, the highest first; behind the last, a vector's width that is only ever multiplied by 0.
     */
    uint8_t powers[AGSF_VAES_MAX_POWERS + AGSF_VAES_MAX_LANES][AGSF_VAES_BLOCK_NBYTES];
    uint8_t folded[AGSF_VAES_MAX_POWERS + AGSF_VAES_MAX_LANES][AGSF_VAES_BLOCK_NBYTES]; /* both halves, added up */
    size_t nrounds;
} agsf_vaes_key;

/* A message that goes through a kernel in pieces. begin() sets all of it, finish_seal() and finish_open() wipe it. */
typedef struct agsf_vaes_message {
    const agsf_vaes_key *key;
    uint64_t aad_nbytes, nbytes;
    uint8_t sum[AGSF_VAES_BLOCK_NBYTES];    /* GHASH so far, without what is in `block` */
    uint8_t block[AGSF_VAES_BLOCK_NBYTES];  /* the unfinished block, of AAD or of ciphertext */
    uint8_t stream[AGSF_VAES_BLOCK_NBYTES]; /* the key stream of the unfinished block */
    uint8_t nonce[12];
    uint32_t counter; /* of the next block */
    bool seal;
} agsf_vaes_message;

typedef struct agsf_vaes {
    const char *name;

    /* key_nbytes: 16, 24 or 32. */
    void (*key_init)(agsf_vaes_key *key, const uint8_t *bytes, size_t key_nbytes);

    /* A message in one call. open() returns whether the tag is right; if not, out is all zeros. */
    void (*seal)(const agsf_vaes_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                 const uint8_t *in, size_t nbytes, uint8_t *out, uint8_t *tag_ret);
    bool (*open)(const agsf_vaes_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                 const uint8_t *in, size_t nbytes, uint8_t *out, const uint8_t *tag);

    /*
     * A message in pieces of any size: begin, all of its AAD, all of its text, the end. What piece() writes while
     * opening is unchecked until finish_open() returns true: the caller must clear it otherwise. A message has at most
     * 2^36 - 32 bytes; the caller sees to that.
     */
    void (*begin)(agsf_vaes_message *message, const agsf_vaes_key *key, const uint8_t *nonce, bool seal);
    void (*aad)(agsf_vaes_message *message, const uint8_t *aad, size_t nbytes);
    void (*piece)(agsf_vaes_message *message, const uint8_t *in, size_t nbytes, uint8_t *out);
    void (*finish_seal)(agsf_vaes_message *message, uint8_t *tag_ret);
    bool (*finish_open)(agsf_vaes_message *message, const uint8_t *tag);
} agsf_vaes;

#if AGSF_HAS_VAES
extern const agsf_vaes agsf_vaes128, agsf_vaes256, agsf_vaes512;
#endif

/* agsf_vaes_widest() is the widest kernel that this CPU and its operating system run, or NULL. */
const agsf_vaes *agsf_vaes_widest(void);

#endif
