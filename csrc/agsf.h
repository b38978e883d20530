/*
 * agsf.h - the engine of ags_fast: seals and opens bytes with AES-GCM.
 *
 * The Python binding sees this header and agsf_parquet.h, and no other. The engine knows bytes, keys, threads and
 * file descriptors. It does not know Python, key management or where a stream's length comes from.
 *
 * Conventions of both headers:
 *
 * - Every size and offset is in bytes. A name that ends in _nbytes is a size, one in _ret is written by the
 *   callee, and an out-parameter is written only where the function says so.
 * - Pointers are never NULL unless the comment says so. A buffer of 0 bytes may be NULL.
 * - Every function that can fail returns agsf_status, which the caller must check. Nothing sets errno or a global
 *   error, prints or aborts. A size that would overflow is AGSF_BAD_ARGUMENT, never undefined.
 * - Every function may be called from any thread at any time. An agsf_key is immutable to its callers, so
 *   threads share it freely; it must not be freed while a call uses it.
 * - Input and output buffers must not overlap. If a buffer changes while a call uses it, the result is garbage, but
 *   memory is never corrupted. The garbage may even pass its tag: on some CPUs libcrypto reads a sealed buffer
 *   twice. So do not open memory that other processes can write, such as a shared mapping; a descriptor is safe.
 * - fork() is allowed at any moment, also while other threads are inside the engine. The child starts without helper
 *   threads, with no lock held, and with a random generator that shares nothing with the parent's.
 * - The engine frees what it allocates; the caller owns every buffer it passes.
 */
#ifndef AGSF_H
#define AGSF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define AGSF_MUST_CHECK __attribute__((warn_unused_result))
#else
#define AGSF_MUST_CHECK
#endif

enum {
    AGSF_NONCE_NBYTES = 12,    /* random, in front of each ciphertext */
    AGSF_TAG_NBYTES = 16,      /* behind each ciphertext */
    AGSF_OVERHEAD_NBYTES = 28, /* what sealing adds to a message: nonce and tag */
    AGSF_EXTRACT_NBYTES = 32,  /* what agsf_key_extract() gives */
    AGSF_MAX_THREADS = 256,    /* upper bound; larger requests are clamped */
};

/* How many messages one key value may seal: NIST SP 800-38D section 8.3, for random 96-bit nonces. */
#define AGSF_KEY_LIMIT (UINT64_C(1) << 32)

typedef enum agsf_status {
    AGSF_OK = 0,
    AGSF_PAUSED,       /* the run is not finished: handle signals, then call again */
    AGSF_BAD_TAG,      /* a message does not authenticate: wrong key, wrong AAD, or other bytes */
    AGSF_BAD_ARGUMENT, /* a size is impossible or overflows; nothing was done */
    AGSF_NO_MEMORY,    /* nothing was done */
    AGSF_LIMIT,        /* the key has sealed AGSF_KEY_LIMIT messages; nothing was done */
    AGSF_CRYPTO,       /* libcrypto refused: no such cipher, or no random numbers of its own */
    AGSF_IO,           /* the operating system refused; its error number is in os_error */
    AGSF_SHORT,        /* the descriptor ended before the run did */
    AGSF_BAD_FORMAT,   /* the bytes cannot be what they should */
    AGSF_ORDINAL,      /* a row group, column or page has a number above 32767 */
    AGSF_CHECKSUM,     /* a page's CRC is not that of its bytes */
    AGSF_LEVELS,       /* a page's levels are outside of its module, where no tag covers them */
    AGSF_NO_RANDOM,    /* the operating system gives no random bytes; nothing was sealed */
} agsf_status;

/* ---------------------------------------------------------------- library */

/*
 * agsf_library_init() prepares libcrypto, seeds its generator and sets the fork handlers. Call it before anything
 * else. It starts no thread. The environment variable AGS_FAST_AES is "auto" or not there, "openssl" or "vaes": whose
 * AES-GCM is used. AGSF_BAD_ARGUMENT if it is something else.
 */
agsf_status agsf_library_init(void) AGSF_MUST_CHECK;

/* agsf_libcrypto_version() is libcrypto's own version text, as it is at run time. Static; not to be freed. */
const char *agsf_libcrypto_version(void);

/* agsf_aes_kernel() is who does AES-GCM: "openssl", or the name of a kernel of our own. Static; not to be freed. */
const char *agsf_aes_kernel(void);

/* agsf_aes_complaint() is why that is not what it should be, or NULL. Static; not to be freed. */
const char *agsf_aes_complaint(void);

/* agsf_fips() is whether libcrypto's configuration asks for FIPS algorithms only. */
bool agsf_fips(void);

/* agsf_libcrypto_cpu() is libcrypto's text for the CPU features it uses, or NULL. Static; not to be freed. */
const char *agsf_libcrypto_cpu(void);

/*
 * agsf_expect_fill() advises the system that all of a fresh buffer is about to be written, so that the buffer may get
 * huge pages. With pages of 4 KiB, the page faults take longer than the encryption.
 */
void agsf_expect_fill(uint8_t *buffer, size_t nbytes);

/* ---------------------------------------------------------------- files */

/*
 * agsf_open_below() opens a path below the folder root, even if folders are renamed meanwhile. path is relative
 * and has no "..", or is "." for root itself. flags and mode are those of open(). Returns a descriptor, or -1 and the
 * error number in *os_error_ret. EXDEV: a link leads out of root, or only a walk step by step can tell whether one
 * does: the link is absolute, or the kernel has no openat2(). Links in root itself are followed.
 */
int agsf_open_below(const char *root, const char *path, int flags, unsigned mode, int *os_error_ret) AGSF_MUST_CHECK;

/*
 * agsf_open_file() opens a file for reading, below root unless root is NULL. *nbytes_ret becomes the size of a regular
 * file, or UINT64_MAX for any other kind. A pipe without a writer does not block. The caller must close *fd_ret. If
 * nbytes is not 0 and a regular file has at least nbytes, the first nbytes are read to out, the file is closed, and
 * *fd_ret is -1. Failures: AGSF_SHORT, and AGSF_IO with the error number in *os_error_ret, also for EINTR and
 * agsf_open_below()'s EXDEV.
 */
agsf_status agsf_open_file(const char *root, const char *path, uint8_t *out, size_t nbytes, int *fd_ret,
                           uint64_t *nbytes_ret, int *os_error_ret) AGSF_MUST_CHECK;

/* agsf_read_and_close() reads the first nbytes and always closes the descriptor. Failures: AGSF_IO, AGSF_SHORT. */
agsf_status agsf_read_and_close(int fd, uint8_t *out, size_t nbytes, int *os_error_ret) AGSF_MUST_CHECK;

/*
 * Whole small files, in one call each. These two functions handle the usual case only. After false, the caller reads or
 * writes the file step by step, and so learns what is wrong, if anything is.
 *
 * agsf_read_whole() reads a regular file of exactly nbytes, below root unless root is NULL. With mtime_ns, the file
 * must also end there when it is read, and after the read it must still have this modification time, in nanoseconds
 * since the epoch.
 */
bool agsf_read_whole(const char *root, const char *path, uint8_t *out, size_t nbytes,
                     const uint64_t *mtime_ns) AGSF_MUST_CHECK;

/*
 * agsf_write_whole() creates a file in a folder below root ("." for root itself). The file has no name, not even a
 * temporary one, until it is complete and, with sync, on the disk: a process that dies before leaves nothing. Then the
 * file gets its name, unless another file has it. After false, nothing was created.
 *
 * mode: the permission bits of the file, or -1 for what the umask and the folder say. mtime_ns: NULL, or the time of
 * the last change, in nanoseconds since the epoch. The file has both before it has a name.
 */
bool agsf_write_whole(const char *root, const char *folder, const char *name, const uint8_t *in, size_t nbytes,
                      int mode, const int64_t *mtime_ns, bool sync) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- keys */

/*
 * An agsf_key holds an AES key, and one cipher context with a finished key schedule for each thread that has used the
 * key at once. Contexts are kept between calls, so a message costs no allocation.
 */
typedef struct agsf_key agsf_key;

/*
 * agsf_key_new() copies key_nbytes (16, 24 or 32) of key material. Any other size is AGSF_BAD_ARGUMENT.
 * On AGSF_OK, *key_ret must be given to agsf_key_free().
 */
agsf_status agsf_key_new(const uint8_t *key, size_t key_nbytes, agsf_key **key_ret) AGSF_MUST_CHECK;

/* agsf_key_free() wipes the key and everything derived from it. If key is NULL, nothing happens. */
void agsf_key_free(agsf_key *key);

/*
 * agsf_key_sealed() returns how many messages this process has sealed with this key's *value*, by any agsf_key that
 * holds it. The number never goes down, also when every such agsf_key has been freed.
 */
uint64_t agsf_key_sealed(agsf_key *key);

/*
 * agsf_key_carry() notes that other processes have sealed sealed_before messages with this key's value. The largest
 * such number counts against AGSF_KEY_LIMIT; agsf_key_sealed() does not include it. AGSF_LIMIT if sealed_before is
 * above AGSF_KEY_LIMIT.
 */
agsf_status agsf_key_carry(agsf_key *key, uint64_t sealed_before) AGSF_MUST_CHECK;

/*
 * agsf_key_extract() is HKDF-Extract (RFC 5869) with SHA-256: HMAC-SHA-256 of the key's value, under the salt. What it
 * gives may make keys for other uses; nobody can compute the key from it. Failures: AGSF_BAD_ARGUMENT for a salt of
 * 2 GiB, AGSF_CRYPTO.
 */
agsf_status agsf_key_extract(agsf_key *key, const uint8_t *salt, size_t salt_nbytes,
                             uint8_t out_ret[AGSF_EXTRACT_NBYTES]) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- threads */

/*
 * agsf_end_idle_threads() ends the helper threads that have no work, and returns when they have left the system. It
 * waits for no job: helpers in a job stay. Any thread may call it at any time. Called before a fork, it makes a program
 * without threads of its own single-threaded. New helpers are started when there is work.
 */
void agsf_end_idle_threads(void);

/* ---------------------------------------------------------------- one message */

/*
 * agsf_seal() seals one message under the caller's nonce. It exists for test vectors and for formats that prescribe the
 * nonce. The caller must never use a nonce twice under a key. out receives in_nbytes of ciphertext and then
 * AGSF_TAG_NBYTES of tag. The message counts against the key's limit.
 */
agsf_status agsf_seal(agsf_key *key, const uint8_t nonce[AGSF_NONCE_NBYTES], const uint8_t *aad, size_t aad_nbytes,
                      const uint8_t *in, size_t in_nbytes, uint8_t *out) AGSF_MUST_CHECK;

/*
 * Like agsf_seal(), but agsf_open() checks and opens: in is in_nbytes of ciphertext and then the tag. out
 * receives in_nbytes of plaintext, or in_nbytes of zeros if the status is not AGSF_OK.
 */
agsf_status agsf_open(agsf_key *key, const uint8_t nonce[AGSF_NONCE_NBYTES], const uint8_t *aad, size_t aad_nbytes,
                      const uint8_t *in, size_t in_nbytes, uint8_t *out) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- AES GCM Stream (AGS1) */

/*
 * An AGS1 stream is a header and then blocks, each sealed on its own: nonce, ciphertext, tag. Block i
 * authenticates aad_prefix followed by i as four little-endian bytes. All blocks hold block_nbytes of
 * plaintext, but the last may hold less.
 *
 * An agsf_run is consecutive blocks of one stream on one side in the plaintext buffer `plain` and on the other
 * in the sealed buffer `sealed`, or, where sealed is NULL, in the file descriptor fd from position fd_offset.
 * The plaintext is plain_nbytes; only its last block may be shorter than block_nbytes. If plain_nbytes is 0,
 * the run is one empty block. The sealed side has agsf_sealed_nbytes() bytes.
 *
 * The caller fills in the first group of fields, sets the second group to zero, and calls agsf_seal_run() or
 * agsf_open_run() until the status is not AGSF_PAUSED. The engine comes back with AGSF_PAUSED about every
 * tenth of a second, so that a caller can answer an interrupt. If the caller of agsf_open_run() stops before AGSF_OK,
 * it must zero the plain_nbytes of output.
 */
typedef struct agsf_run {
    agsf_key *key;
    const uint8_t *aad_prefix;
    size_t aad_prefix_nbytes;
    size_t block_nbytes;  /* plaintext of a full block: 1 to 2^31 - 1 */
    uint64_t first_block; /* index of the run's first block in its stream; the last must be below 2^32 */
    uint8_t *plain;       /* read by agsf_seal_run(), written by agsf_open_run() */
    size_t plain_nbytes;
    uint8_t *sealed;    /* written by agsf_seal_run(), read by agsf_open_run(); NULL: use fd */
    int fd;             /* open for pread or pwrite; its own position is neither used nor moved */
    uint64_t fd_offset; /* where in the file the run's first block begins */
    unsigned threads;   /* at most this many threads work, the caller among them; at least 1 */

    uint64_t done;      /* blocks finished so far */
    uint64_t bad_block; /* after a failure: the run's lowest failed block, counted from the run's first */
    int os_error;       /* after AGSF_IO: the system's error number */
} agsf_run;

/*
 * agsf_sealed_nbytes() returns the size of a sealed run, or 0 if block_nbytes or the result is impossible.
 */
uint64_t agsf_sealed_nbytes(uint64_t plain_nbytes, uint64_t block_nbytes);

/*
 * agsf_seal_run() seals every block of the run, each under a nonce drawn inside this call. All blocks count
 * against the key's limit before the first is sealed. After a failure the output is undefined, but never plaintext.
 * Failures: AGSF_BAD_ARGUMENT, AGSF_NO_MEMORY, AGSF_LIMIT, AGSF_CRYPTO, AGSF_NO_RANDOM, AGSF_IO.
 */
agsf_status agsf_seal_run(agsf_run *run) AGSF_MUST_CHECK;

/*
 * agsf_open_run() checks and opens every block of the run. On AGSF_OK all of it is authentic. After any other
 * status but AGSF_PAUSED all plain_nbytes of output are zero, also the blocks that were good, and bad_block is
 * the lowest block that failed. Until the status is AGSF_OK the output must not be used: it may hold bytes whose
 * tag is yet to be checked. Failures: AGSF_BAD_ARGUMENT, AGSF_NO_MEMORY, AGSF_BAD_TAG, AGSF_CRYPTO,
 * AGSF_IO, AGSF_SHORT.
 */
agsf_status agsf_open_run(agsf_run *run) AGSF_MUST_CHECK;

/*
 * agsf_open_ahead() and agsf_seal_ahead() let a helper thread do a run while their caller does something else. The
 * fields of the run are as for agsf_open_run() and agsf_seal_run(), with at least one byte. All buffers, the key and
 * the descriptor must stay as they are until agsf_ahead_finish(), which must be called once. At most run->threads - 1
 * threads help. Failures: AGSF_BAD_ARGUMENT, also for 2^16 blocks to seal, AGSF_NO_MEMORY, AGSF_CRYPTO; to seal,
 * AGSF_LIMIT and AGSF_NO_RANDOM.
 *
 * agsf_ahead_done() is whether agsf_ahead_finish() will do nothing and wait for nothing.
 *
 * agsf_ahead_finish() ends the run and waits for its thread. If the run is wanted and no thread has begun it, it is
 * done here: opened to `into` instead of its own buffer unless `into` is NULL. It may also be called in a child of the
 * process, which seals nothing.
 */
typedef struct agsf_ahead agsf_ahead;

typedef enum agsf_ahead_end {
    AGSF_AHEAD_FAILED, /* what was opened is all zero. agsf_open_run() or agsf_seal_run() tells what is wrong, if
                          anything */
    AGSF_AHEAD_GOOD,   /* all of it is sealed, or opened and authentic, */
    AGSF_AHEAD_INTO,   /* and is in `into` */
} agsf_ahead_end;

agsf_status agsf_open_ahead(const agsf_run *run, agsf_ahead **ahead_ret) AGSF_MUST_CHECK;
agsf_status agsf_seal_ahead(const agsf_run *run, agsf_ahead **ahead_ret) AGSF_MUST_CHECK;
bool agsf_ahead_done(agsf_ahead *ahead);
agsf_ahead_end agsf_ahead_finish(agsf_ahead *ahead, bool wanted, uint8_t *into);

/* ---------------------------------------------------------------- wrapped keys */

enum { AGSF_DEK_MAX_NBYTES = 64 };

/*
 * A column of wrapped data keys (DEKs). Each row is a nonce, a DEK of 1 to AGSF_DEK_MAX_NBYTES sealed under a key
 * encryption key (KEK), and a tag. The row authenticates `prefix` followed by the row's name. An agsf_rewrap takes
 * nrows rows from one KEK to another. Only the KEK and the nonce change, so each row keeps its size.
 *
 * Names and wrapped keys are binary arrays in Arrow's layout: nrows + 1 offsets, each an int32_t in native byte order
 * and of any alignment. Row i lies between offsets i and i + 1 of the data. The first offset need not be 0.
 *
 * The caller fills in the first group, sets the second to zero, and calls agsf_rewrap_run() until the status is not
 * AGSF_PAUSED. If the caller stops before that, it must zero out from begin to end.
 */
typedef struct agsf_rewrap {
    agsf_key *from, *to;
    const uint8_t *prefix;
    size_t prefix_nbytes;
    const uint8_t *name_offsets, *names;
    size_t names_nbytes;
    const uint8_t *offsets, *in; /* of in, and of out */
    size_t in_nbytes;
    uint8_t *out; /* laid out as `in`; bytes before the first row and behind the last stay */
    size_t out_nbytes;
    size_t nrows;
    unsigned threads; /* at most this many threads work, the caller among them; at least 1 */

    size_t done;       /* rows finished so far */
    size_t begin, end; /* of all rows, in `in` and in out */
    size_t bad_row;    /* after AGSF_BAD_ARGUMENT and AGSF_BAD_TAG: the lowest */
} agsf_rewrap;

/*
 * agsf_rewrap_run() opens each row under `from` and seals it under `to`, with a nonce drawn inside this call. First it
 * checks the offsets of every row: AGSF_BAD_ARGUMENT if a row is not inside its buffers or has an impossible size. Then
 * all rows count against the limit of `to`: AGSF_LIMIT. After these two failures nothing was done. After any other
 * failure (AGSF_BAD_TAG, AGSF_NO_MEMORY, AGSF_CRYPTO, AGSF_NO_RANDOM) all of out from begin to end is zero. A DEK
 * exists only on the stack of the thread that works on it, and is wiped there.
 *
 * If another thread changes the offsets meanwhile, AGSF_BAD_ARGUMENT may come later; then all of out is zero, too.
 */
agsf_status agsf_rewrap_run(agsf_rewrap *run) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- memory */

/* agsf_wipe() clears memory that held plaintext. The compiler cannot leave this out. */
void agsf_wipe(void *memory, size_t nbytes);

#endif
