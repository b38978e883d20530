/*
 * agsf.h - the engine of ags_fast: seals and opens bytes with AES-GCM.
 *
 * This is the only header that the Python binding sees. The engine knows bytes, keys, threads and file
 * descriptors. It knows nothing of Python, of key management or of where a stream's length comes from.
 *
 * Conventions, said once:
 *
 * - Every size and offset is in bytes. A name that ends in _nbytes is a size, one in _ret is written by the
 *   callee, and an out-parameter is written only where the function says so.
 * - Pointers are never NULL unless the comment says so. A buffer of 0 bytes may be NULL.
 * - Every function that can fail returns agsf_status, which must be looked at. There is no errno, no global
 *   error, no printing and no abort. A size that would overflow is AGSF_BAD_ARGUMENT, never undefined.
 * - Every function may be called from any thread at any time. An agsf_key is immutable to its callers, so
 *   threads share it freely; it must not be freed while a call uses it.
 * - Input and output buffers must not overlap. Whoever changes a buffer while a call uses it gets garbage,
 *   but never memory corruption. The garbage may even pass its tag: on some CPUs libcrypto reads a sealed buffer
 *   twice. So do not open memory that somebody else can write, such as a shared mapping; a descriptor is safe.
 * - fork() is allowed at any moment, also while other threads are inside the engine: the child starts with no
 *   threads, no lock held, and a random generator that shares nothing with its parent's.
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
    AGSF_MAX_THREADS = 256,    /* more are asked for in vain */
};

/* How many messages one key value may seal: NIST SP 800-38D section 8.3, for random 96-bit nonces. */
#define AGSF_KEY_LIMIT (UINT64_C(1) << 32)

typedef enum agsf_status {
    AGSF_OK = 0,
    AGSF_PAUSED,       /* the run is not finished: look for signals, then call again */
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
 * else. It starts no thread.
 */
agsf_status agsf_library_init(void) AGSF_MUST_CHECK;

/* agsf_libcrypto_version() is libcrypto's own version text, as it is at run time. Static; not to be freed. */
const char *agsf_libcrypto_version(void);

/* agsf_libcrypto_cpu() is libcrypto's text for the CPU features it uses, or NULL. Static; not to be freed. */
const char *agsf_libcrypto_cpu(void);

/*
 * agsf_expect_fill() tells the system that all of a fresh buffer is about to be written, so that it may come in
 * huge pages: where it comes in pages of 4 KiB, the page faults take longer than the encryption. Only advice.
 */
void agsf_expect_fill(uint8_t *buffer, size_t nbytes);

/* ---------------------------------------------------------------- files */

/*
 * agsf_open_below() opens a path below the folder root, whatever somebody renames meanwhile. path is relative, with no
 * "..", or it is "." for root itself. flags and mode are open()'s. Returns a descriptor, or -1 and the error number in
 * *os_error_ret. EXDEV: a link leads out of root, or only steps can tell whether one does, as with an absolute link or
 * on a kernel without openat2(). The links of root itself are followed.
 */
int agsf_open_below(const char *root, const char *path, int flags, unsigned mode, int *os_error_ret) AGSF_MUST_CHECK;

/*
 * agsf_open_file() opens a file for reading, below root unless that is NULL, and asks what it is: *nbytes_ret is the
 * size of a regular file, or UINT64_MAX of anything else. A pipe without a writer does not block. *fd_ret must be
 * closed. If nbytes is not 0, and a regular file has so many, these are read to out, the file is closed, and *fd_ret is
 * -1. AGSF_IO with the error number in *os_error_ret, EINTR and agsf_open_below()'s EXDEV too. AGSF_SHORT.
 */
agsf_status agsf_open_file(const char *root, const char *path, uint8_t *out, size_t nbytes, int *fd_ret,
                           uint64_t *nbytes_ret, int *os_error_ret) AGSF_MUST_CHECK;

/* agsf_read_and_close() reads the first nbytes and closes the descriptor, whatever comes. AGSF_IO or AGSF_SHORT. */
agsf_status agsf_read_and_close(int fd, uint8_t *out, size_t nbytes, int *os_error_ret) AGSF_MUST_CHECK;

/*
 * Small files, whole, in one call each. These two do the usual case and nothing else: false says that the file must be
 * dealt with step by step, which also tells what is wrong with it, if anything is.
 *
 * agsf_read_whole() reads a regular file, below root unless that is NULL, that has exactly nbytes. mtime_ns, unless it
 * is NULL: that ends there, too, and, after it was read, still has this time of its last change, in nanoseconds since
 * the epoch.
 */
bool agsf_read_whole(const char *root, const char *path, uint8_t *out, size_t nbytes,
                     const uint64_t *mtime_ns) AGSF_MUST_CHECK;

/*
 * agsf_write_whole() makes a file in a folder below root ("." for root itself). The file has no name, not even a
 * temporary one, until it is complete and, with sync, on the disk: whatever dies before leaves nothing. Then it gets
 * its name, if nobody else has it. After false there is no such file.
 */
bool agsf_write_whole(const char *root, const char *folder, const char *name, const uint8_t *in, size_t nbytes,
                      bool sync) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- keys */

/*
 * An agsf_key holds an AES key and, for as many threads as have used it at once, a cipher context whose key
 * schedule is done. Contexts are kept between calls, so a message costs no allocation.
 */
typedef struct agsf_key agsf_key;

/*
 * agsf_key_new() copies key_nbytes (16, 24 or 32) of key material. Any other size is AGSF_BAD_ARGUMENT.
 * On AGSF_OK, *key_ret must be given to agsf_key_free().
 */
agsf_status agsf_key_new(const uint8_t *key, size_t key_nbytes, agsf_key **key_ret) AGSF_MUST_CHECK;

/* agsf_key_free() wipes the key and everything derived from it. NULL is no key and no action. */
void agsf_key_free(agsf_key *key);

/*
 * agsf_key_sealed() says how many messages this process has sealed with this key's *value*, by whatever
 * agsf_key holds it. It never goes down, also when every such agsf_key has been freed.
 */
uint64_t agsf_key_sealed(agsf_key *key);

/*
 * agsf_key_carry() tells that other processes sealed sealed_before messages with this key's value. The largest
 * number told for a key value counts against AGSF_KEY_LIMIT; agsf_key_sealed() does not include it.
 * AGSF_LIMIT if it is more than AGSF_KEY_LIMIT.
 */
agsf_status agsf_key_carry(agsf_key *key, uint64_t sealed_before) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- threads */

/*
 * agsf_end_idle_threads() ends the helper threads that have no work, and returns when the system has them no more. Those
 * that are in a job stay: it waits for no job. Any thread may call it at any time; before a fork it leaves a program that
 * has no threads of its own single-threaded. New helpers are started when they are wanted.
 */
void agsf_end_idle_threads(void);

/* ---------------------------------------------------------------- one message */

/*
 * agsf_seal() seals one message under a nonce that the caller answers for. It exists for test vectors and for
 * formats that prescribe the nonce; a nonce must never be used twice under a key. out receives in_nbytes of
 * ciphertext and then AGSF_TAG_NBYTES of tag. The message counts against the key's limit.
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
 * tenth of a second, so that a caller can answer an interrupt. A caller that gives up in the middle of opening
 * must itself clear the plain_nbytes of output.
 */
typedef struct agsf_run {
    agsf_key *key;
    const uint8_t *aad_prefix;
    size_t aad_prefix_nbytes;
    size_t block_nbytes;  /* plaintext of a full block: 1 to 2^31 - 1 */
    uint64_t first_block; /* index of the run's first block in its stream; the last must be below 2^32 */
    uint8_t *plain;       /* read by agsf_seal_run(), written by agsf_open_run() */
    size_t plain_nbytes;
    uint8_t *sealed;      /* written by agsf_seal_run(), read by agsf_open_run(); NULL: use fd */
    int fd;               /* open for pread or pwrite; its own position is neither used nor moved */
    uint64_t fd_offset;   /* where in the file the run's first block begins */
    unsigned threads;     /* at most so many threads work, the caller among them; at least 1 */

    uint64_t done;        /* blocks finished so far */
    uint64_t bad_block;   /* after a failure: the run's lowest failed block, counted from the run's first */
    int os_error;         /* after AGSF_IO: the system's error number */
} agsf_run;

/*
 * agsf_sealed_nbytes() is the size of a sealed run, or 0 if block_nbytes or the result is impossible.
 */
uint64_t agsf_sealed_nbytes(uint64_t plain_nbytes, uint64_t block_nbytes);

/*
 * agsf_seal_run() seals every block of the run, each under a nonce drawn inside this call. All blocks count
 * against the key's limit before the first is sealed. After a failure the output is undefined (but it is
 * ciphertext). Failures: AGSF_BAD_ARGUMENT, AGSF_NO_MEMORY, AGSF_LIMIT, AGSF_CRYPTO, AGSF_NO_RANDOM, AGSF_IO.
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

/* ---------------------------------------------------------------- wrapped keys */

enum { AGSF_DEK_MAX_NBYTES = 64 };

/*
 * A column of wrapped data keys (DEKs): each is a nonce, the DEK of 1 to AGSF_DEK_MAX_NBYTES sealed under a key
 * encryption key (KEK), and a tag. What it authenticates is `prefix` followed by the row's name. An agsf_rewrap takes
 * nrows of them from one KEK to another; nothing but the KEK and the nonce changes, so that each keeps its size.
 *
 * Names and wrapped keys are binary arrays as Arrow has them: nrows + 1 offsets, each an int32_t in native byte order,
 * of no alignment; row i is what lies between offsets i and i + 1 of the data. The first need not be 0.
 *
 * The caller fills in the first group, sets the second to zero, and calls agsf_rewrap_run() until the status is not
 * AGSF_PAUSED. One that gives up in the middle must itself clear what is between begin and end of out.
 */
typedef struct agsf_rewrap {
    agsf_key *from, *to;
    const uint8_t *prefix;
    size_t prefix_nbytes;
    const uint8_t *name_offsets, *names;
    size_t names_nbytes;
    const uint8_t *offsets, *in; /* of in, and of out */
    size_t in_nbytes;
    uint8_t *out; /* as in: bytes before the first row and behind the last are left alone */
    size_t out_nbytes;
    size_t nrows;
    unsigned threads; /* at most so many threads work, the caller among them; at least 1 */

    size_t done;       /* rows finished so far */
    size_t begin, end; /* of all rows, in `in` and in out */
    size_t bad_row;    /* after AGSF_BAD_ARGUMENT and AGSF_BAD_TAG: the lowest */
} agsf_rewrap;

/*
 * agsf_rewrap_run() opens each row under `from` and seals it under `to`, with a nonce drawn inside this call. Every
 * row's offsets are checked before anything else, and then all rows count against the limit of `to`: after
 * AGSF_BAD_ARGUMENT (a row that is not inside its buffers, or whose size no wrapped key has) and AGSF_LIMIT nothing was
 * done. After any other failure, AGSF_BAD_TAG, AGSF_NO_MEMORY, AGSF_CRYPTO or AGSF_NO_RANDOM, all of out from begin to end
 * is zero. A DEK is never anywhere but on the stack of the thread that has it, which is wiped.
 *
 * If another thread changes offsets meanwhile, AGSF_BAD_ARGUMENT may come later, and then all of out is zero, too.
 */
agsf_status agsf_rewrap_run(agsf_rewrap *run) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- Thrift, compact protocol */

/*
 * Parquet's footers and page headers are read without generated classes, so that what this version does not know
 * survives. Bytes are checked before they are believed: no count or length reaches past their end, nesting has a limit,
 * and the ids of a struct's fields ascend from 1, so that none comes twice. AGSF_BAD_FORMAT otherwise.
 */
enum {
    AGSF_THRIFT_STOP,
    AGSF_THRIFT_TRUE,
    AGSF_THRIFT_FALSE,
    AGSF_THRIFT_I8,
    AGSF_THRIFT_I16,
    AGSF_THRIFT_I32,
    AGSF_THRIFT_I64,
    AGSF_THRIFT_DOUBLE,
    AGSF_THRIFT_BINARY,
    AGSF_THRIFT_LIST,
    AGSF_THRIFT_SET,
    AGSF_THRIFT_MAP,
    AGSF_THRIFT_STRUCT,
    AGSF_THRIFT_UUID,
};

/* A value and where it stands. A bool field's value has no bytes of its own: its type says it. */
typedef struct agsf_thrift_value {
    int16_t id;
    unsigned type;
    size_t begin, end;
} agsf_thrift_value;

/*
 * agsf_thrift_next() goes to the next field of a struct: the caller sets id to 0 and end to where the struct begins
 * before the first call. At the struct's end type is AGSF_THRIFT_STOP, and end is behind it. With in_list, to the next
 * element of a list whose head agsf_thrift_list_head() has read; the caller counts.
 */
agsf_status agsf_thrift_next(const uint8_t *data, size_t nbytes, bool in_list, agsf_thrift_value *value) AGSF_MUST_CHECK;
agsf_status agsf_thrift_list_head(const uint8_t *data, size_t nbytes, agsf_thrift_value *value,
                                  size_t *count_ret) AGSF_MUST_CHECK;

/* A field to be put in place of the one with its id, or in order where there is none. Type AGSF_THRIFT_STOP removes. */
typedef struct agsf_thrift_edit {
    int16_t id;
    unsigned type;
    const uint8_t *value;
    size_t nbytes;
} agsf_thrift_edit;

/*
 * agsf_thrift_splice() copies the struct at the start of data with edits, whose ids ascend from 1. All other fields are
 * copied as they are. out has room for agsf_thrift_splice_nbytes(), which is 0 if that overflows. In *end_ret is where
 * the struct ended in data.
 */
size_t agsf_thrift_splice_nbytes(size_t nbytes, const agsf_thrift_edit *edits, size_t nedits);
agsf_status agsf_thrift_splice(const uint8_t *data, size_t nbytes, const agsf_thrift_edit *edits, size_t nedits,
                               uint8_t *out, size_t *nbytes_ret, size_t *end_ret) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- Parquet: footers */

/*
 * A footer (FileMetaData), walked once: where its schema elements, row groups and column chunks are. All offsets are
 * into the caller's bytes, which must outlive it. It takes less memory than they do; of hostile bytes, up to ten times
 * as much.
 */
typedef struct agsf_schema_element {
    uint32_t name, name_nbytes;
    uint32_t children;
} agsf_schema_element;

typedef struct agsf_row_group {
    uint32_t begin, end;
    uint32_t first, count; /* its column chunks, in agsf_footer.chunks */
} agsf_row_group;

typedef struct agsf_chunk_span {
    uint32_t begin, end;
    uint32_t crypto; /* where the head of its crypto_metadata begins, or 0 */
} agsf_chunk_span;

typedef struct agsf_footer {
    size_t end; /* of the struct; what follows is padding */
    agsf_schema_element *schema;
    agsf_row_group *groups;
    agsf_chunk_span *chunks;
    size_t nschema, ngroups, nchunks;
} agsf_footer;

/* On AGSF_OK, agsf_footer_clear() must follow. Failures: AGSF_BAD_FORMAT, AGSF_NO_MEMORY, AGSF_ORDINAL. */
agsf_status agsf_footer_read(const uint8_t *data, size_t nbytes, agsf_footer *footer) AGSF_MUST_CHECK;
void agsf_footer_clear(agsf_footer *footer);

/*
 * agsf_footer_plain() copies a footer's struct without crypto_metadata and encrypted_column_metadata. metas[i], where
 * it is not NULL, becomes the meta_data of chunk i. out has room for the struct and all metas, plus 8 bytes for each.
 */
agsf_status agsf_footer_plain(const uint8_t *data, const agsf_footer *footer, const uint8_t *const *metas,
                              const size_t *metas_nbytes, uint8_t *out, size_t *nbytes_ret) AGSF_MUST_CHECK;

/* A ColumnMetaData's numbers. -1 where it has none. */
typedef struct agsf_column_metadata {
    size_t begin, end;
    int64_t codec, num_values, uncompressed_nbytes, compressed_nbytes;
    int64_t data_page, index_page, dictionary_page, bloom_filter, bloom_filter_nbytes;
    size_t path, encodings, encoding_stats; /* where these values begin, or 0 */
} agsf_column_metadata;

/* A ColumnChunk's. */
typedef struct agsf_chunk {
    size_t begin, end;
    size_t metadata;                      /* where its meta_data begins, or 0 */
    size_t crypto;                        /* where its crypto_metadata begins, or 0 */
    size_t sealed_metadata, sealed_metadata_nbytes; /* its encrypted_column_metadata; 0 if it has none */
    bool file_path;                       /* the pages are in another file */
    int64_t offset_index, offset_index_nbytes, column_index, column_index_nbytes;
} agsf_chunk;

agsf_status agsf_chunk_read(const uint8_t *data, size_t nbytes, size_t begin, agsf_chunk *chunk) AGSF_MUST_CHECK;
agsf_status agsf_column_metadata_read(const uint8_t *data, size_t nbytes, size_t begin,
                                      agsf_column_metadata *metadata) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- Parquet: modules */

/* The type of a module, as it stands in its AAD. */
enum {
    AGSF_FOOTER,
    AGSF_COLUMN_METADATA,
    AGSF_DATA_PAGE,
    AGSF_DICTIONARY_PAGE,
    AGSF_DATA_PAGE_HEADER,
    AGSF_DICTIONARY_PAGE_HEADER,
    AGSF_COLUMN_INDEX,
    AGSF_OFFSET_INDEX,
    AGSF_BLOOM_FILTER_HEADER,
    AGSF_BLOOM_FILTER_BITSET,
};

enum {
    AGSF_FRAME_NBYTES = 32, /* what sealing adds to a module: its length in 4 bytes, nonce and tag */
    AGSF_ORDINAL_MAX = 32767,
};

/* How the modules of one column chunk, or a footer, are sealed. */
typedef struct agsf_modules {
    agsf_key *key;
    const uint8_t *aad; /* aad_prefix followed by aad_file_unique */
    size_t aad_nbytes;
    int16_t row_group, column;
    bool without_aad; /* no AAD at all: what DuckDB writes */
    bool ctr;         /* AES_GCM_CTR_V1: the bodies of pages are encrypted, but have no tag */
} agsf_modules;

/*
 * agsf_module_seal() seals one module, which is not a page: in_nbytes become in_nbytes + AGSF_FRAME_NBYTES. The nonce
 * is drawn inside. agsf_module_open() opens the module at the start of in; out has room for in_nbytes, and on failure
 * nothing or zeros. AGSF_BAD_FORMAT: in cannot hold a module as long as it says.
 */
agsf_status agsf_module_seal(const agsf_modules *modules, unsigned type, const uint8_t *in, size_t in_nbytes,
                             uint8_t *out) AGSF_MUST_CHECK;
agsf_status agsf_module_open(const agsf_modules *modules, unsigned type, const uint8_t *in, size_t in_nbytes, uint8_t *out,
                             size_t *nbytes_ret, size_t *frame_nbytes_ret) AGSF_MUST_CHECK;

/*
 * An agsf_pages takes the pages of one column chunk from one side to another. Each side is plain (NULL) or sealed.
 * Nothing of a page is decoded: its header is edited, and its body sealed or opened as it is.
 *
 * The caller hands out a part of the input and room for output, calls agsf_pages_run(), and looks at `stop`: whether the
 * chunk is done or what it wants more of. What was not consumed is handed in again, with more behind it.
 */
typedef enum agsf_pages_mode {
    AGSF_PAGES_COPY,      /* to the other side */
    AGSF_PAGES_SAME_SIZE, /* sealed to sealed, in the same algorithm: every frame keeps its size */
    AGSF_PAGES_VIEW,      /* sealed to plain: every page keeps its size, an unknown field fills its header up */
    AGSF_PAGES_CHECK,     /* tags and CRCs are checked; out is only scratch, for one body of a sealed chunk */
    AGSF_PAGES_LIST,      /* headers only; in_done may pass the end of what was handed in */
} agsf_pages_mode;

typedef enum agsf_pages_stop {
    AGSF_STOP_NOT, /* not run yet */
    AGSF_STOP_DONE,
    AGSF_STOP_INPUT, /* `wanted` bytes of input, counted from in + in_done, or fewer if there are no more */
    AGSF_STOP_OUTPUT, /* `wanted` bytes of output, counted from out + out_done */
    AGSF_STOP_HEADER, /* `wanted` bytes of header */
    AGSF_STOP_TABLE,  /* a larger table */
    AGSF_STOP_FAILED, /* see status */
} agsf_pages_stop;

/* What a data page became. Offsets count from the chunk's first byte, sizes are header and body. */
typedef struct agsf_page {
    uint64_t in_offset, out_offset;
    uint64_t in_nbytes, out_nbytes;
} agsf_page;

enum { AGSF_ENCODINGS = 16, AGSF_PAGE_TYPES = 4 };

typedef struct agsf_pages {
    const agsf_modules *from, *to;
    agsf_pages_mode mode;
    uint64_t nbytes;      /* the chunk's on the side it comes from; a plain one may go on if its values do */
    uint64_t values_left; /* of a plain chunk; a sealed one ends where its bytes end */
    int v2_layout;        /* of V2 pages to be sealed: 0 as they were, 1 all of the body, 2 only the values */
    bool short_sizes;     /* compressed_page_size leaves out the frame: what DuckDB writes */
    bool keep_checksum;   /* a wrong CRC stays wrong; otherwise it is AGSF_CHECKSUM */
    bool refuse_levels;   /* levels outside of a sealed page's module are AGSF_LEVELS */
    bool dictionary;      /* the first page should be one: says what failed if it cannot be read */

    const uint8_t *in; /* of this call */
    size_t in_nbytes;
    bool in_is_all; /* nothing follows */
    uint8_t *out;
    size_t out_nbytes;
    uint8_t *header; /* room for an opened page header: plaintext, the caller wipes it */
    size_t header_nbytes;
    agsf_page *table; /* of data pages, appended to */
    size_t table_room;

    size_t in_done, out_done; /* by this call */
    agsf_pages_stop stop;
    size_t wanted;
    agsf_status status;
    unsigned bad_module; /* after a failure: its type */

    uint32_t page;      /* the next data page's ordinal */
    bool began;         /* past the place where a dictionary page may be */
    size_t table_count;
    uint64_t in_total, out_total;
    uint64_t uncompressed; /* total_uncompressed_size on the other side: bodies, and headers as they are there */
    uint64_t values;
    uint32_t dictionary_pages, v2_pages;
    uint32_t v2_levels;        /* V2 pages with levels, which the two layouts keep differently */
    uint32_t outside_levels;   /* V2 pages that were opened, and whose levels were outside of the module, in plain text */
    uint32_t wrong_checksums;  /* that were kept wrong */
    uint32_t dropped_checksums; /* which did not fit into a header of the same size */
    uint32_t checksums;
    uint32_t encodings[AGSF_PAGE_TYPES][AGSF_ENCODINGS]; /* pages by page type and encoding */
} agsf_pages;

/*
 * agsf_pages_run() runs every agsf_pages whose stop is AGSF_STOP_NOT, in parallel; none may be given twice. AGSF_PAUSED:
 * not all of them were begun, call again. A failure is one run's, whose output of this call is zero: the others are not to
 * be used either. AGSF_BAD_ARGUMENT: a mode without the sides it needs. After it, AGSF_NO_MEMORY, AGSF_CRYPTO and
 * AGSF_LIMIT, which are no one run's, the output of all of them is zero.
 */
agsf_status agsf_pages_run(agsf_pages **runs, size_t nruns, unsigned threads) AGSF_MUST_CHECK;

/*
 * agsf_offset_index() copies an OffsetIndex with new locations of its pages: from a table sorted by in_offset, both of
 * whose offsets count from in_chunk and out_chunk, or, where table is NULL, moved by out_chunk - in_chunk. out has room
 * for in_nbytes plus 16 for each page. AGSF_BAD_FORMAT if a page is not in the table, or cannot be where it would be.
 */
agsf_status agsf_offset_index(const uint8_t *in, size_t in_nbytes, const agsf_page *table, size_t npages, int64_t in_chunk,
                              int64_t out_chunk, uint8_t *out, size_t *nbytes_ret) AGSF_MUST_CHECK;

/* agsf_offset_index_pages() is how many pages it lists. */
agsf_status agsf_offset_index_pages(const uint8_t *in, size_t in_nbytes, size_t *npages_ret) AGSF_MUST_CHECK;

/* agsf_wipe() clears memory that held plaintext, whatever the compiler thinks of that. */
void agsf_wipe(void *memory, size_t nbytes);

#endif
