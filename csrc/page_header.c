/* page_header.c - a page's header: read, and written with edits. */
#include "page_header.h"

#include <string.h>

/* Ids of fields: parquet.thrift's, and two that it does not have. */
enum {
    HEADER_TYPE = 1,
    HEADER_UNCOMPRESSED = 2,
    HEADER_COMPRESSED = 3,
    HEADER_CRC = 4,
    HEADER_DATA = 5,
    HEADER_DICTIONARY = 7,
    HEADER_DATA_V2 = 8,
    FILLER_BOOL = 14,
    FILLER_BYTES = 15,
};

static void read_page_struct(agsf_cursor *cursor, agsf_page_header *header, int16_t kind) {
    int16_t id = 0;
    unsigned type;

    while (agsf_thrift_field(cursor, &id, &type)) {
        if (type == AGSF_THRIFT_I32) {
            const int64_t value = agsf_thrift_int(cursor);
            const bool v2 = kind == HEADER_DATA_V2;
            if (id == 1) header->values = value;
            if (id == (v2 ? 4 : 2)) header->encoding = value;
            if (v2 && (id == 5 || id == 6)) header->levels += value < 0 || value > INT32_MAX ? INT64_C(1) << 32 : value;
        } else {
            agsf_thrift_skip(cursor, type, false);
        }
    }
}

agsf_status agsf_header_read(const uint8_t *data, size_t nbytes, agsf_page_header *header) {
    static const int16_t kinds[AGSF_PAGE_TYPES] = {HEADER_DATA, 0, HEADER_DICTIONARY, HEADER_DATA_V2};
    agsf_cursor cursor = agsf_cursor_over(data, nbytes, 0);
    int16_t id = 0, kind = 0;
    unsigned type;

    *header = (agsf_page_header){.type = -1, .uncompressed = -1, .compressed = -1, .values = -1, .encoding = -1};
    while (agsf_thrift_field(&cursor, &id, &type)) {
        const size_t begin = (size_t)(cursor.at - data);
        if (type == AGSF_THRIFT_I32 && id >= HEADER_TYPE && id <= HEADER_CRC) {
            const int64_t value = agsf_thrift_int(&cursor);
            const agsf_span at = {begin, (size_t)(cursor.at - data)};
            if (id == HEADER_TYPE) header->type = value;
            if (id == HEADER_UNCOMPRESSED) header->uncompressed = value;
            if (id == HEADER_COMPRESSED) {
                header->compressed = value;
                header->compressed_at = at;
            }
            if (id == HEADER_CRC) {
                header->crc = value;
                header->crc_at = at;
                header->has_crc = true;
            }
        } else if (type == AGSF_THRIFT_STRUCT &&
                   (id == HEADER_DATA || id == HEADER_DICTIONARY || id == HEADER_DATA_V2)) {
            if (kind != 0) return AGSF_BAD_FORMAT; /* of two types at once */
            kind = id;
            read_page_struct(&cursor, header, id);
        } else {
            agsf_thrift_skip(&cursor, type, false);
        }
        header->last_id = id;
    }
    header->nbytes = (size_t)(cursor.at - data);
    if (cursor.bad) return AGSF_SHORT;
    /* An index page is refused, too: no file has one, and encryption has no module type for it. */
    if (header->type < 0 || header->type >= AGSF_PAGE_TYPES || kind == 0 || kinds[header->type] != kind ||
        header->uncompressed < 0 || header->uncompressed > INT32_MAX || header->compressed < 0 ||
        header->compressed > INT32_MAX || header->values < 0 || header->values > INT32_MAX ||
        header->levels > header->compressed) {
        return AGSF_BAD_FORMAT;
    }
    return AGSF_OK;
}

/*
 * Writes fields of exactly nbytes that no reader knows: a binary with id 15, and in front of it a bool with id 14 if
 * one more byte of length would overshoot. If last_id is 14 or more, the next ids are taken: last_id leaves room for
 * two. Their heads are short, because some readers do not know long ones.
 */
static uint8_t *put_filler(uint8_t *out, int16_t last_id, size_t nbytes) {
    int16_t id = last_id;
    size_t length;

    if (nbytes == 0) return out;
    length = nbytes < 2 ? 0 : nbytes - 2;
    while (length > 0 && 1 + agsf_thrift_varint_nbytes(length) + length > nbytes) length--;
    if (nbytes < 2 || 1 + agsf_thrift_varint_nbytes(length) + length < nbytes) {
        const int16_t next = id < FILLER_BOOL ? FILLER_BOOL : (int16_t)(id + 1);
        *out++ = (uint8_t)((unsigned)(next - id) << 4 | AGSF_THRIFT_TRUE);
        id = next;
        nbytes--;
    }
    if (nbytes > 0) {
        const int16_t next = id < FILLER_BYTES ? FILLER_BYTES : (int16_t)(id + 1);
        *out++ = (uint8_t)((unsigned)(next - id) << 4 | AGSF_THRIFT_BINARY);
        out = agsf_thrift_put_varint(out, length);
        memset(out, 0, length);
        out += length;
    }
    return out;
}

size_t agsf_header_write(const uint8_t *data, const agsf_page_header *header, const agsf_header_edit *edit,
                         uint8_t *out) {
    uint8_t *const begin = out;
    size_t copied = header->compressed_at.end;

    memcpy(out, data, header->compressed_at.begin);
    out = agsf_thrift_put_varint(out + header->compressed_at.begin, agsf_thrift_zigzag((int64_t)edit->compressed));
    if (edit->drop_crc) {
        /* The field between is gone: the next one's id is counted from the one before it. */
        const agsf_thrift_edit drop = {.id = HEADER_CRC};
        size_t nbytes, end;
        if (agsf_thrift_splice(data, header->nbytes, &drop, 1, begin, &nbytes, &end) != AGSF_OK) return 0;
        return nbytes; /* compressed stays as it was: a CRC is dropped only to keep the size */
    }
    if (header->has_crc) {
        memcpy(out, data + copied, header->crc_at.begin - copied);
        out += header->crc_at.begin - copied;
        out = agsf_thrift_put_varint(out, agsf_thrift_zigzag((int32_t)edit->crc));
        copied = header->crc_at.end;
    }
    memcpy(out, data + copied, header->nbytes - 1 - copied);
    out = put_filler(out + header->nbytes - 1 - copied, header->last_id, edit->filler);
    *out++ = AGSF_THRIFT_STOP;
    return (size_t)(out - begin);
}

size_t agsf_header_nbytes(const agsf_page_header *header, uint64_t compressed, uint32_t crc) {
    size_t nbytes = header->nbytes - (header->compressed_at.end - header->compressed_at.begin) +
                    agsf_thrift_varint_nbytes(agsf_thrift_zigzag((int64_t)compressed));

    if (header->has_crc) {
        nbytes -= header->crc_at.end - header->crc_at.begin;
        nbytes += agsf_thrift_varint_nbytes(agsf_thrift_zigzag((int32_t)crc));
    }
    return nbytes;
}
