/* page_header.h - a page's header: read, and written with edits. Private to csrc. */
#ifndef AGSF_PAGE_HEADER_H
#define AGSF_PAGE_HEADER_H

#include "agsf_parquet.h"
#include "thrift.h"

/* The types of pages, as parquet.thrift numbers them. No file has an index page. */
enum { AGSF_PAGE_DATA, AGSF_PAGE_INDEX, AGSF_PAGE_DICTIONARY, AGSF_PAGE_DATA_V2 };

typedef struct agsf_span {
    size_t begin, end;
} agsf_span;

/* What a header holds. -1: the header lacks that field. */
typedef struct agsf_page_header {
    size_t nbytes; /* of the struct */
    int64_t type, uncompressed, compressed, crc, values, encoding;
    int64_t levels;                  /* bytes of a V2 page's repetition and definition levels */
    agsf_span compressed_at, crc_at; /* crc_at is the later one, since field ids ascend */
    bool has_crc;
    int16_t last_id; /* of the struct's last field */
} agsf_page_header;

/* How a header changes. All other fields stay. */
typedef struct agsf_header_edit {
    uint64_t compressed;
    uint32_t crc;  /* of a header that has one */
    bool drop_crc; /* then filler must be 0 */
    size_t filler; /* bytes of unknown fields to append, so that the header gets a given size */
} agsf_header_edit;

/*
 * agsf_header_read() reads the struct at the start of nbytes. AGSF_SHORT: the header is cut, or is not Thrift; the two
 * look alike. AGSF_BAD_FORMAT: the struct is not the header of a page that Parquet has.
 */
agsf_status agsf_header_read(const uint8_t *data, size_t nbytes, agsf_page_header *header) AGSF_MUST_CHECK;

/* agsf_header_nbytes() is the size of a header that gets these two values, without a filler. */
size_t agsf_header_nbytes(const agsf_page_header *header, uint64_t compressed, uint32_t crc);

/* agsf_header_write() writes the header to out with its edits, and returns its size. */
size_t agsf_header_write(const uint8_t *data, const agsf_page_header *header, const agsf_header_edit *edit,
                         uint8_t *out);

#endif
