"""What csrc offers to the binding. csrc/agsf.h, csrc/agsf_parquet.h and csrc/agsf_avro.h explain it."""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "agsf.h" nogil:
    enum:
        AGSF_NONCE_NBYTES
        AGSF_EXTRACT_NBYTES
        AGSF_TAG_NBYTES
        AGSF_OVERHEAD_NBYTES
        AGSF_MAX_THREADS
        AGSF_LIBCRYPTO_BUNDLED  # a macro of the build, not of the header
    ctypedef enum agsf_status:
        AGSF_OK
        AGSF_PAUSED
        AGSF_BAD_TAG
        AGSF_BAD_ARGUMENT
        AGSF_NO_MEMORY
        AGSF_LIMIT
        AGSF_CRYPTO
        AGSF_IO
        AGSF_SHORT
        AGSF_BAD_FORMAT
        AGSF_ORDINAL
        AGSF_CHECKSUM
        AGSF_LEVELS
        AGSF_NO_RANDOM
    ctypedef struct agsf_key:
        pass
    ctypedef struct agsf_run:
        agsf_key *key
        const uint8_t *aad_prefix
        size_t aad_prefix_nbytes
        size_t block_nbytes
        uint64_t first_block
        uint8_t *plain
        size_t plain_nbytes
        uint8_t *sealed
        int fd
        uint64_t fd_offset
        unsigned threads
        uint64_t done
        uint64_t bad_block
        int os_error
    agsf_status agsf_library_init()
    void agsf_end_idle_threads()
    int agsf_open_below(const char *root, const char *path, int flags, unsigned mode, int *os_error_ret)
    agsf_status agsf_open_file(const char *root, const char *path, uint8_t *out, size_t nbytes, int *fd_ret,
                               uint64_t *nbytes_ret, int *os_error_ret)
    agsf_status agsf_read_and_close(int fd, uint8_t *out, size_t nbytes, int *os_error_ret)
    bint agsf_read_whole(const char *root, const char *path, uint8_t *out, size_t nbytes, const uint64_t *mtime_ns)
    bint agsf_write_whole(const char *root, const char *folder, const char *name, const uint8_t *data, size_t nbytes,
                          int mode, const int64_t *mtime_ns, bint sync)
    void agsf_expect_fill(uint8_t *buffer, size_t nbytes)
    const char *agsf_libcrypto_version()
    const char *agsf_libcrypto_cpu()
    const char *agsf_aes_kernel()
    const char *agsf_aes_complaint()
    bint agsf_fips()
    agsf_status agsf_key_new(const uint8_t *key, size_t key_nbytes, agsf_key **key_ret)
    void agsf_key_free(agsf_key *key)
    uint64_t agsf_key_sealed(agsf_key *key)
    agsf_status agsf_key_carry(agsf_key *key, uint64_t sealed_before)
    agsf_status agsf_key_extract(agsf_key *key, const uint8_t *salt, size_t salt_nbytes, uint8_t *out_ret)
    agsf_status agsf_seal(agsf_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                          const uint8_t *plain, size_t plain_nbytes, uint8_t *out)
    agsf_status agsf_open(agsf_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                          const uint8_t *sealed, size_t plain_nbytes, uint8_t *out)
    uint64_t agsf_sealed_nbytes(uint64_t plain_nbytes, uint64_t block_nbytes)
    agsf_status agsf_seal_run(agsf_run *run)
    agsf_status agsf_open_run(agsf_run *run)
    ctypedef struct agsf_ahead:
        pass
    agsf_status agsf_open_ahead(const agsf_run *run, agsf_ahead **ahead_ret)
    agsf_status agsf_seal_ahead(const agsf_run *run, agsf_ahead **ahead_ret)
    bint agsf_ahead_done(agsf_ahead *ahead)
    ctypedef enum agsf_ahead_end:
        AGSF_AHEAD_FAILED
        AGSF_AHEAD_GOOD
        AGSF_AHEAD_INTO
    agsf_ahead_end agsf_ahead_finish(agsf_ahead *ahead, bint wanted, uint8_t *into)
    enum:
        AGSF_DEK_MAX_NBYTES
    ctypedef struct agsf_rewrap:
        agsf_key *source "from"
        agsf_key *to
        const uint8_t *prefix
        size_t prefix_nbytes
        const uint8_t *name_offsets
        const uint8_t *names
        size_t names_nbytes
        const uint8_t *offsets
        const uint8_t *data "in"
        size_t in_nbytes
        uint8_t *out
        size_t out_nbytes
        size_t nrows
        unsigned threads
        size_t done, begin, end, bad_row
    agsf_status agsf_rewrap_run(agsf_rewrap *run)
    void agsf_wipe(void *memory, size_t nbytes)

cdef extern from "agsf_parquet.h" nogil:
    enum:
        AGSF_THRIFT_STOP
        AGSF_THRIFT_I32
        AGSF_THRIFT_I64
        AGSF_THRIFT_BINARY
        AGSF_THRIFT_LIST
        AGSF_THRIFT_STRUCT
        AGSF_THRIFT_UUID
        AGSF_FRAME_NBYTES
        AGSF_ENCODINGS
        AGSF_PAGE_TYPES
        AGSF_FOOTER
        AGSF_COLUMN_INDEX
        AGSF_OFFSET_INDEX
        AGSF_BLOOM_FILTER_HEADER
        AGSF_DATA_PAGE
        AGSF_DATA_PAGE_HEADER
        AGSF_ORDINAL_MAX
    ctypedef struct agsf_thrift_value:
        short id
        unsigned type
        size_t begin, end
    agsf_status agsf_thrift_next(const uint8_t *data, size_t nbytes, bint in_list, agsf_thrift_value *value)
    agsf_status agsf_thrift_list_head(const uint8_t *data, size_t nbytes, agsf_thrift_value *value, size_t *count_ret)
    ctypedef struct agsf_thrift_edit:
        short id
        unsigned type
        const uint8_t *value
        size_t nbytes
    size_t agsf_thrift_splice_nbytes(size_t nbytes, const agsf_thrift_edit *edits, size_t nedits)
    agsf_status agsf_thrift_splice(const uint8_t *data, size_t nbytes, const agsf_thrift_edit *edits, size_t nedits,
                                   uint8_t *out, size_t *nbytes_ret, size_t *end_ret)
    ctypedef struct agsf_schema_element:
        uint32_t name, name_nbytes, children
    ctypedef struct agsf_row_group:
        uint32_t begin, end, first, count
    ctypedef struct agsf_chunk_span:
        uint32_t begin, end, crypto
    ctypedef struct agsf_footer:
        size_t end, algorithm
        int64_t rows
        agsf_schema_element *schema
        agsf_row_group *groups
        agsf_chunk_span *chunks
        size_t nschema, ngroups, nchunks, ncolumns
    agsf_status agsf_footer_read(const uint8_t *data, size_t nbytes, agsf_footer *footer)
    void agsf_footer_clear(agsf_footer *footer)
    agsf_status agsf_footer_plain(const uint8_t *data, const agsf_footer *footer, const uint8_t *const *metas,
                                  const size_t *metas_nbytes, uint8_t *out, size_t *nbytes_ret)
    ctypedef struct agsf_column_metadata:
        size_t begin, end
        int64_t codec, num_values, uncompressed_nbytes, compressed_nbytes
        int64_t data_page, index_page, dictionary_page, bloom_filter, bloom_filter_nbytes
        size_t path, encodings, encoding_stats
    ctypedef struct agsf_chunk:
        size_t begin, end, crypto, key_metadata, key_metadata_nbytes, sealed_metadata, sealed_metadata_nbytes
        agsf_column_metadata metadata
        bint file_path, footer_key, column_key
        int64_t offset_index, offset_index_nbytes, column_index, column_index_nbytes
    agsf_status agsf_chunk_read(const uint8_t *data, size_t nbytes, size_t begin, agsf_chunk *chunk)
    agsf_status agsf_column_metadata_read(const uint8_t *data, size_t nbytes, size_t begin,
                                          agsf_column_metadata *metadata)
    ctypedef struct agsf_modules:
        agsf_key *key
        const uint8_t *aad
        size_t aad_nbytes
        int16_t row_group, column
        bint without_aad, ctr
    agsf_status agsf_module_seal(const agsf_modules *modules, unsigned type, const uint8_t *plain, size_t nbytes,
                                 uint8_t *out)
    agsf_status agsf_module_open(const agsf_modules *modules, unsigned type, const uint8_t *sealed, size_t nbytes,
                                 uint8_t *out, size_t *nbytes_ret, size_t *frame_nbytes_ret)
    ctypedef enum agsf_pages_mode:
        AGSF_PAGES_COPY
        AGSF_PAGES_SAME_SIZE
        AGSF_PAGES_VIEW
        AGSF_PAGES_CHECK
        AGSF_PAGES_LIST
    ctypedef enum agsf_pages_stop:
        AGSF_STOP_NOT
        AGSF_STOP_DONE
        AGSF_STOP_INPUT
        AGSF_STOP_OUTPUT
        AGSF_STOP_HEADER
        AGSF_STOP_TABLE
        AGSF_STOP_FAILED
    ctypedef struct agsf_page:
        uint64_t in_offset, out_offset, in_nbytes, out_nbytes
    ctypedef struct agsf_pages:
        const agsf_modules *source "from"
        const agsf_modules *to
        agsf_pages_mode mode
        uint64_t nbytes, values_left
        int v2_layout
        bint short_sizes, keep_checksum, refuse_levels, dictionary
        const uint8_t *data "in"
        size_t in_nbytes
        bint in_is_all
        uint8_t *out
        size_t out_nbytes
        uint8_t *header
        size_t header_nbytes
        agsf_page *table
        size_t table_room
        size_t in_done, out_done
        agsf_pages_stop stop
        size_t wanted
        agsf_status status
        unsigned bad_module
        uint32_t page
        bint began
        size_t table_count
        uint64_t in_total, out_total, uncompressed, values
        uint32_t dictionary_pages, v2_pages, v2_levels, outside_levels, wrong_checksums, dropped_checksums, checksums
        uint32_t encodings[4][16]
    agsf_status agsf_pages_run(agsf_pages **runs, size_t nruns, unsigned threads)
    agsf_status agsf_offset_index(const uint8_t *data, size_t nbytes, const agsf_page *table, size_t npages,
                                  int64_t in_chunk, int64_t out_chunk, uint8_t *out, size_t *nbytes_ret)
    agsf_status agsf_offset_index_pages(const uint8_t *data, size_t nbytes, size_t *npages_ret)

cdef extern from "agsf_avro.h" nogil:
    enum:
        AGSF_AVRO_NULL
        AGSF_AVRO_NUMBER
        AGSF_AVRO_BYTES
        AGSF_AVRO_FIXED
        AGSF_AVRO_ITEMS
        AGSF_AVRO_UNION
        AGSF_AVRO_RECORD
        AGSF_AVRO_INT
        AGSF_AVRO_ENUM
        AGSF_AVRO_DECIMAL
    agsf_status agsf_avro_pick(const int32_t *program, size_t length, const uint8_t *data, size_t nbytes,
                               size_t records, size_t slots, int64_t *values)
    ctypedef enum agsf_avro_kind:
        pass
    ctypedef struct agsf_avro_column:
        agsf_avro_kind kind
        int null_branch
        size_t size
        bint bits
        uint8_t *values
        size_t room
        int32_t *offsets
        uint8_t *valid
    agsf_status agsf_avro_columns(const uint8_t *data, size_t nbytes, size_t records, size_t row,
                                  const agsf_avro_column *columns, size_t ncolumns)
    ctypedef struct agsf_avro_array:
        agsf_avro_kind kind
        bint optional
        size_t size
        size_t count
        size_t first
        size_t rows
        const uint8_t *valid
        const int32_t *offsets
        const uint8_t *values
        size_t nbytes
    agsf_status agsf_avro_records(const agsf_avro_array *arrays, size_t count, size_t row, size_t end, size_t limit,
                                  uint8_t *out, size_t room, size_t *rows_ret, size_t *nbytes_ret)
