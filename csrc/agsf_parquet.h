/*
 * agsf_parquet.h - the engine of ags_fast for Parquet: footers, and the modules of Modular Encryption.
 *
 * agsf.h has the conventions of the engine. Nothing here decodes values: a module is sealed or opened as it is.
 */
#ifndef AGSF_PARQUET_H
#define AGSF_PARQUET_H

#include "agsf.h"

/* ---------------------------------------------------------------- Thrift, compact protocol */

/*
 * Parquet's footers and page headers are read without generated classes, so that unknown fields survive. Every count
 * and length is checked against the bytes that are left, nesting has a limit, and the ids of a struct's fields must
 * ascend from 1, so that no field comes twice. AGSF_BAD_FORMAT otherwise.
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

/* A value and where it stands. A bool field has no bytes: its type is its value. */
typedef struct agsf_thrift_value {
    int16_t id;
    unsigned type;
    size_t begin, end;
} agsf_thrift_value;

/*
 * agsf_thrift_next() goes to the next field of a struct. Before the first call, the caller sets id to 0 and end to the
 * beginning of the struct. At the end of the struct, type is AGSF_THRIFT_STOP, and end is behind the struct. With
 * in_list, the function goes to the next element of a list instead: agsf_thrift_list_head() has read the head, the
 * caller counts.
 */
agsf_status agsf_thrift_next(const uint8_t *data, size_t nbytes, bool in_list,
                             agsf_thrift_value *value) AGSF_MUST_CHECK;
agsf_status agsf_thrift_list_head(const uint8_t *data, size_t nbytes, agsf_thrift_value *value,
                                  size_t *count_ret) AGSF_MUST_CHECK;

/* Replaces the field with the same id, or is inserted in order. Type AGSF_THRIFT_STOP removes the field. */
typedef struct agsf_thrift_edit {
    int16_t id;
    unsigned type;
    const uint8_t *value;
    size_t nbytes;
} agsf_thrift_edit;

/*
 * agsf_thrift_splice() copies the struct at the start of data with edits, whose ids ascend from 1. All other fields are
 * copied as they are. out has room for agsf_thrift_splice_nbytes(), which returns 0 if the size overflows. *end_ret
 * becomes the end of the struct in data.
 */
size_t agsf_thrift_splice_nbytes(size_t nbytes, const agsf_thrift_edit *edits, size_t nedits);
agsf_status agsf_thrift_splice(const uint8_t *data, size_t nbytes, const agsf_thrift_edit *edits, size_t nedits,
                               uint8_t *out, size_t *nbytes_ret, size_t *end_ret) AGSF_MUST_CHECK;

/* ---------------------------------------------------------------- Parquet: footers */

/*
 * A footer (FileMetaData), walked once: where its schema elements, row groups and column chunks are. All offsets are
 * into the caller's bytes, which must outlive the agsf_footer. The arrays take less memory than the bytes; for hostile
 * bytes, up to five times as much. The schema is a tree, of at most 32768 columns.
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
    size_t end;       /* of the struct; what follows is padding */
    int64_t rows;     /* 0 if it does not say */
    size_t algorithm; /* where its encryption_algorithm begins, or 0: only a signed footer has one */
    agsf_schema_element *schema;
    agsf_row_group *groups;
    agsf_chunk_span *chunks;
    size_t nschema, ngroups, nchunks;
    size_t ncolumns; /* elements without children, beside the root */
} agsf_footer;

/* On AGSF_OK, agsf_footer_clear() must follow. Failures: AGSF_BAD_FORMAT, AGSF_NO_MEMORY, AGSF_ORDINAL. */
agsf_status agsf_footer_read(const uint8_t *data, size_t nbytes, agsf_footer *footer) AGSF_MUST_CHECK;
void agsf_footer_clear(agsf_footer *footer);

/*
 * agsf_footer_plain() copies a footer's struct without crypto_metadata and encrypted_column_metadata. If metas[i] is
 * not NULL, it becomes the meta_data of chunk i. out has room for the struct and all metas, plus 8 bytes for each.
 */
agsf_status agsf_footer_plain(const uint8_t *data, const agsf_footer *footer, const uint8_t *const *metas,
                              const size_t *metas_nbytes, uint8_t *out, size_t *nbytes_ret) AGSF_MUST_CHECK;

/* The numbers of a ColumnMetaData. -1: the field is missing. */
typedef struct agsf_column_metadata {
    size_t begin, end;
    int64_t codec, num_values, uncompressed_nbytes, compressed_nbytes;
    int64_t data_page, index_page, dictionary_page, bloom_filter, bloom_filter_nbytes;
    size_t path, encodings, encoding_stats; /* where these values begin, or 0 */
} agsf_column_metadata;

/* The numbers of a ColumnChunk. -1: the field is missing. */
typedef struct agsf_chunk {
    size_t begin, end;
    agsf_column_metadata metadata;                  /* whose `begin` is 0 if there are none */
    size_t crypto;                                  /* where its crypto_metadata begins, or 0 */
    bool footer_key, column_key;                    /* what its crypto_metadata say, if they are known ones */
    size_t key_metadata, key_metadata_nbytes;       /* of the column key; 0 if it has none */
    size_t sealed_metadata, sealed_metadata_nbytes; /* its encrypted_column_metadata; 0 if it has none */
    bool file_path;                                 /* the pages are in another file */
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
 * agsf_module_seal() seals one module that is not a page: in_nbytes become in_nbytes + AGSF_FRAME_NBYTES. The nonce is
 * drawn inside the call. agsf_module_open() opens the module at the start of in. out has room for in_nbytes, and after
 * a failure it is unchanged or zero. AGSF_BAD_FORMAT: the module claims more bytes than in has.
 */
agsf_status agsf_module_seal(const agsf_modules *modules, unsigned type, const uint8_t *in, size_t in_nbytes,
                             uint8_t *out) AGSF_MUST_CHECK;
agsf_status agsf_module_open(const agsf_modules *modules, unsigned type, const uint8_t *in, size_t in_nbytes,
                             uint8_t *out, size_t *nbytes_ret, size_t *frame_nbytes_ret) AGSF_MUST_CHECK;

/*
 * An agsf_pages takes the pages of one column chunk from one side to another. Each side is plain (NULL) or sealed.
 * Pages are not decoded: the header is edited, and the body is sealed or opened as it is.
 *
 * The caller passes part of the input and room for output, calls agsf_pages_run(), and looks at `stop`: the chunk is
 * done, or needs more of something. The caller passes what was not consumed again, with more behind it.
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
    AGSF_STOP_INPUT,  /* `wanted` bytes of input, counted from in + in_done, or fewer if there are no more */
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

    uint32_t page; /* the next data page's ordinal */
    bool began;    /* past the place where a dictionary page may be */
    size_t table_count;
    uint64_t in_total, out_total;
    uint64_t uncompressed; /* total_uncompressed_size on the other side: bodies, and headers as they are there */
    uint64_t values;
    uint32_t dictionary_pages, v2_pages;
    uint32_t v2_levels;      /* V2 pages with levels, which the two layouts keep differently */
    uint32_t outside_levels; /* V2 pages that were opened, and whose levels were outside of the module, in plain text */
    uint32_t wrong_checksums;   /* that were kept wrong */
    uint32_t dropped_checksums; /* which did not fit into a header of the same size */
    uint32_t checksums;
    uint32_t encodings[AGSF_PAGE_TYPES][AGSF_ENCODINGS]; /* pages by page type and encoding */
} agsf_pages;

/*
 * agsf_pages_run() runs every agsf_pages whose stop is AGSF_STOP_NOT, in parallel. No run may be passed twice.
 * AGSF_PAUSED: some runs were not begun; call again. If one run fails, its status says so, its output of this call is
 * zero, and the output of the other runs must not be used. AGSF_BAD_ARGUMENT: a mode lacks a side that it needs. After
 * AGSF_BAD_ARGUMENT, AGSF_NO_MEMORY, AGSF_CRYPTO or AGSF_LIMIT as this function's status, the output of all runs is
 * zero.
 */
agsf_status agsf_pages_run(agsf_pages **runs, size_t nruns, unsigned threads) AGSF_MUST_CHECK;

/*
 * agsf_offset_index() copies an OffsetIndex with new locations of its pages. The locations come from a table sorted by
 * in_offset, whose offsets count from in_chunk and out_chunk. If table is NULL, all pages move by out_chunk - in_chunk.
 * out has room for in_nbytes plus 16 for each page. AGSF_BAD_FORMAT: a page is not in the table, or its location
 * overflows.
 */
agsf_status agsf_offset_index(const uint8_t *in, size_t in_nbytes, const agsf_page *table, size_t npages,
                              int64_t in_chunk, int64_t out_chunk, uint8_t *out, size_t *nbytes_ret) AGSF_MUST_CHECK;

/* agsf_offset_index_pages() counts the pages that an OffsetIndex lists. */
agsf_status agsf_offset_index_pages(const uint8_t *in, size_t in_nbytes, size_t *npages_ret) AGSF_MUST_CHECK;

#endif
