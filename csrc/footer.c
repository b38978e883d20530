/* footer.c - Parquet's footers and offset indexes: where their parts are, and copies with some of them changed. */
#include <stdlib.h>
#include <string.h>

#include "thrift.h"

/* Ids of fields, as parquet.thrift numbers them. */
enum {
    FILE_SCHEMA = 2,
    FILE_ROWS = 3,
    FILE_ROW_GROUPS = 4,
    FILE_ALGORITHM = 8,
    ELEMENT_NAME = 4,
    ELEMENT_CHILDREN = 5,
    GROUP_COLUMNS = 1,
    CHUNK_FILE_PATH = 1,
    CHUNK_METADATA = 3,
    CHUNK_OFFSET_INDEX = 4,
    CHUNK_OFFSET_INDEX_NBYTES = 5,
    CHUNK_COLUMN_INDEX = 6,
    CHUNK_COLUMN_INDEX_NBYTES = 7,
    CHUNK_CRYPTO = 8,
    CHUNK_SEALED_METADATA = 9,
    CRYPTO_FOOTER_KEY = 1,
    CRYPTO_COLUMN_KEY = 2,
    COLUMN_KEY_METADATA = 2,
    METADATA_ENCODINGS = 2,
    METADATA_PATH = 3,
    METADATA_CODEC = 4,
    METADATA_NUM_VALUES = 5,
    METADATA_UNCOMPRESSED = 6,
    METADATA_COMPRESSED = 7,
    METADATA_DATA_PAGE = 9,
    METADATA_INDEX_PAGE = 10,
    METADATA_DICTIONARY_PAGE = 11,
    METADATA_ENCODING_STATS = 13,
    METADATA_BLOOM_FILTER = 14,
    METADATA_BLOOM_FILTER_NBYTES = 15,
    INDEX_LOCATIONS = 1,
    LOCATION_OFFSET = 1,
    LOCATION_NBYTES = 2,
};

enum {
    SCHEMA_DEPTH = 64,                            /* of groups in groups */
    SCHEMA_ELEMENTS = 8 * (AGSF_ORDINAL_MAX + 1), /* lists and maps have three for a column */
};

enum { STRUCT_MIN_NBYTES = 3 }; /* of a struct with one field: no required field is a bool */

/* ---------------------------------------------------------------- walking a footer */

static size_t struct_list(agsf_cursor *cursor) {
    unsigned type;
    const size_t count = agsf_thrift_list(cursor, &type);

    if (count > 0 && type != AGSF_THRIFT_STRUCT) cursor->bad = true;
    return cursor->bad ? 0 : count;
}

/* Makes room for one element more, at first for as many as are to come, so that a hostile footer's are not copied. */
static bool grow(void **array, size_t count, size_t *room, size_t nbytes, const agsf_cursor *cursor, size_t to_come) {
    const size_t most = (size_t)(cursor->end - cursor->at) / STRUCT_MIN_NBYTES + 1;
    const size_t more = *room > 0 ? *room + *room / 2 + 1 : to_come < most ? to_come : most;
    void *bigger;

    if (count < *room) return true;
    bigger = realloc(*array, more * nbytes);
    if (bigger == NULL) return false;
    *array = bigger;
    *room = more;
    return true;
}

static bool is_int(unsigned type) { return type >= AGSF_THRIFT_I16 && type <= AGSF_THRIFT_I64; }

static void schema_element(agsf_cursor *cursor, const uint8_t *data, agsf_schema_element *element) {
    const uint8_t *const begin = cursor->at;
    int16_t id = 0;
    unsigned type;

    *element = (agsf_schema_element){0};
    while (agsf_thrift_field(cursor, &id, &type)) {
        if (id == ELEMENT_NAME && type == AGSF_THRIFT_BINARY) {
            size_t nbytes;
            const uint8_t *name = agsf_thrift_binary(cursor, &nbytes);
            element->name = (uint32_t)(name - data);
            element->name_nbytes = (uint32_t)nbytes;
        } else if (id == ELEMENT_CHILDREN && is_int(type)) {
            const int64_t children = agsf_thrift_int(cursor);
            element->children = children > 0 && children < INT32_MAX ? (uint32_t)children : 0;
        } else {
            agsf_thrift_skip(cursor, type, false);
        }
    }
    if (cursor->at - begin < STRUCT_MIN_NBYTES) cursor->bad = true;
}

/* Limits hold while elements are read: nobody has authenticated them, and there may be as many as bytes allow. */
static agsf_status read_schema(agsf_cursor *cursor, const uint8_t *data, agsf_footer *footer) {
    const size_t count = struct_list(cursor);
    uint32_t left[SCHEMA_DEPTH + 1] = {1}; /* elements that are still to come, of each group around the next one */
    size_t room = 0, depth = 1, leaves = 0;

    if (count > SCHEMA_ELEMENTS) return AGSF_ORDINAL;
    for (size_t i = 0; i < count && !cursor->bad; i++) {
        agsf_schema_element *element;
        if (!grow((void **)&footer->schema, footer->nschema, &room, sizeof(*element), cursor, count)) {
            return AGSF_NO_MEMORY;
        }
        element = &footer->schema[footer->nschema++];
        schema_element(cursor, data, element);
        while (depth > 0 && left[depth - 1] == 0) depth--;
        if (depth == 0 || (element->children > 0 && depth > SCHEMA_DEPTH)) return AGSF_BAD_FORMAT;
        left[depth - 1]--;
        if (element->children > 0) left[depth++] = element->children;
        if (element->children == 0 && ++leaves > AGSF_ORDINAL_MAX + 1) return AGSF_ORDINAL;
        if (i > 0) footer->ncolumns = leaves;
    }
    while (depth > 0 && left[depth - 1] == 0) depth--;
    if (count > 0 && depth > 0) cursor->bad = true; /* a group lacks children */
    return AGSF_OK;
}

static void chunk_span(agsf_cursor *cursor, const uint8_t *data, agsf_chunk_span *span) {
    const uint8_t *head = cursor->at;
    int16_t id = 0;
    unsigned type;

    *span = (agsf_chunk_span){.begin = (uint32_t)(cursor->at - data)};
    for (; agsf_thrift_field(cursor, &id, &type); head = cursor->at) {
        if (id == CHUNK_CRYPTO && type == AGSF_THRIFT_STRUCT) span->crypto = (uint32_t)(head - data);
        agsf_thrift_skip(cursor, type, false);
    }
    span->end = (uint32_t)(cursor->at - data);
    if (span->end - span->begin < STRUCT_MIN_NBYTES) cursor->bad = true;
}

static agsf_status read_columns(agsf_cursor *cursor, const uint8_t *data, agsf_footer *footer, size_t groups,
                                size_t *room) {
    const size_t count = struct_list(cursor);

    if (count > AGSF_ORDINAL_MAX + 1) return AGSF_ORDINAL;
    for (size_t i = 0; i < count && !cursor->bad; i++) {
        if (!grow((void **)&footer->chunks, footer->nchunks, room, sizeof(*footer->chunks), cursor, groups * count)) {
            return AGSF_NO_MEMORY;
        }
        chunk_span(cursor, data, &footer->chunks[footer->nchunks++]);
    }
    return AGSF_OK;
}

static agsf_status read_row_groups(agsf_cursor *cursor, const uint8_t *data, agsf_footer *footer) {
    const size_t count = struct_list(cursor);
    size_t room = 0, chunks_room = 0;
    agsf_status status = AGSF_OK;

    if (count > AGSF_ORDINAL_MAX + 1) return AGSF_ORDINAL;
    for (size_t i = 0; i < count && !cursor->bad && status == AGSF_OK; i++) {
        agsf_row_group group = {.begin = (uint32_t)(cursor->at - data), .first = (uint32_t)footer->nchunks};
        int16_t id = 0;
        unsigned type;
        while (status == AGSF_OK && agsf_thrift_field(cursor, &id, &type)) {
            if (id == GROUP_COLUMNS && type == AGSF_THRIFT_LIST) {
                status = read_columns(cursor, data, footer, count, &chunks_room);
            } else {
                agsf_thrift_skip(cursor, type, false);
            }
        }
        group.end = (uint32_t)(cursor->at - data);
        group.count = (uint32_t)footer->nchunks - group.first;
        if (!grow((void **)&footer->groups, footer->ngroups, &room, sizeof(group), cursor, count))
            return AGSF_NO_MEMORY;
        footer->groups[footer->ngroups++] = group;
    }
    return status;
}

agsf_status agsf_footer_read(const uint8_t *data, size_t nbytes, agsf_footer *footer) {
    agsf_cursor cursor = agsf_cursor_over(data, nbytes, 0);
    agsf_status status = AGSF_OK;
    int16_t id = 0;
    unsigned type;

    *footer = (agsf_footer){0};
    if (nbytes > UINT32_MAX) return AGSF_BAD_FORMAT;
    while (status == AGSF_OK && agsf_thrift_field(&cursor, &id, &type)) {
        if (id == FILE_SCHEMA && type == AGSF_THRIFT_LIST) {
            status = read_schema(&cursor, data, footer);
        } else if (id == FILE_ROW_GROUPS && type == AGSF_THRIFT_LIST) {
            status = read_row_groups(&cursor, data, footer);
        } else if (id == FILE_ROWS && is_int(type)) {
            footer->rows = agsf_thrift_int(&cursor);
        } else {
            if (id == FILE_ALGORITHM) footer->algorithm = (size_t)(cursor.at - data);
            agsf_thrift_skip(&cursor, type, false);
        }
    }
    footer->end = (size_t)(cursor.at - data);
    if (status == AGSF_OK && (cursor.bad || footer->nschema == 0)) status = AGSF_BAD_FORMAT;
    if (status != AGSF_OK) agsf_footer_clear(footer);
    return status;
}

void agsf_footer_clear(agsf_footer *footer) {
    free(footer->schema);
    free(footer->groups);
    free(footer->chunks);
    *footer = (agsf_footer){0};
}

agsf_status agsf_footer_plain(const uint8_t *data, const agsf_footer *footer, const uint8_t *const *metas,
                              const size_t *metas_nbytes, uint8_t *out, size_t *nbytes_ret) {
    uint8_t *const begin = out;
    size_t copied = 0;

    for (size_t i = 0; i < footer->nchunks; i++) {
        const agsf_chunk_span *const span = &footer->chunks[i];
        const size_t nbytes = span->end - span->begin;
        if (span->crypto == 0) continue; /* stays as it is */
        memcpy(out, data + copied, span->begin - copied);
        out += span->begin - copied;
        copied = span->end;
        if (metas[i] == NULL && span->crypto + 5 == span->end && data[span->crypto] >> 4 != 0) {
            /* Nearly always, under the footer key: crypto_metadata takes four bytes, and nothing is behind it. */
            memcpy(out, data + span->begin, span->crypto - span->begin);
            out += span->crypto - span->begin;
            *out++ = AGSF_THRIFT_STOP;
        } else {
            const agsf_thrift_edit edits[] = {
                {CHUNK_METADATA, AGSF_THRIFT_STRUCT, metas[i], metas_nbytes[i]},
                {.id = CHUNK_CRYPTO},
                {.id = CHUNK_SEALED_METADATA},
            };
            const size_t skipped = metas[i] == NULL;
            size_t written, end;
            agsf_status status =
                agsf_thrift_splice(data + span->begin, nbytes, edits + skipped, 3 - skipped, out, &written, &end);
            if (status != AGSF_OK) return status;
            out += written;
        }
    }
    memcpy(out, data + copied, footer->end - copied);
    *nbytes_ret = (size_t)(out - begin) + footer->end - copied;
    return AGSF_OK;
}

/* ---------------------------------------------------------------- one column chunk */

/* A ColumnCryptoMetaData: a union, of which a column key is believed first. */
static void read_crypto(agsf_cursor *cursor, const uint8_t *data, agsf_chunk *chunk) {
    int16_t id = 0, inner = 0;
    unsigned type;

    while (agsf_thrift_field(cursor, &id, &type)) {
        if (id == CRYPTO_FOOTER_KEY) chunk->footer_key = true;
        if (id != CRYPTO_COLUMN_KEY || type != AGSF_THRIFT_STRUCT) {
            agsf_thrift_skip(cursor, type, false);
            continue;
        }
        chunk->column_key = true;
        while (agsf_thrift_field(cursor, &inner, &type)) {
            if (inner == COLUMN_KEY_METADATA && type == AGSF_THRIFT_BINARY) {
                chunk->key_metadata = (size_t)(agsf_thrift_binary(cursor, &chunk->key_metadata_nbytes) - data);
            } else {
                agsf_thrift_skip(cursor, type, false);
            }
        }
    }
}

static void read_metadata(agsf_cursor *cursor, const uint8_t *data, agsf_column_metadata *metadata) {
    int16_t id = 0;
    unsigned type;

    *metadata = (agsf_column_metadata){.begin = (size_t)(cursor->at - data),
                                       .codec = -1,
                                       .num_values = -1,
                                       .uncompressed_nbytes = -1,
                                       .compressed_nbytes = -1,
                                       .data_page = -1,
                                       .index_page = -1,
                                       .dictionary_page = -1,
                                       .bloom_filter = -1,
                                       .bloom_filter_nbytes = -1};
    while (agsf_thrift_field(cursor, &id, &type)) {
        int64_t *number = NULL;
        if (id == METADATA_CODEC) number = &metadata->codec;
        if (id == METADATA_NUM_VALUES) number = &metadata->num_values;
        if (id == METADATA_UNCOMPRESSED) number = &metadata->uncompressed_nbytes;
        if (id == METADATA_COMPRESSED) number = &metadata->compressed_nbytes;
        if (id == METADATA_DATA_PAGE) number = &metadata->data_page;
        if (id == METADATA_INDEX_PAGE) number = &metadata->index_page;
        if (id == METADATA_DICTIONARY_PAGE) number = &metadata->dictionary_page;
        if (id == METADATA_BLOOM_FILTER) number = &metadata->bloom_filter;
        if (id == METADATA_BLOOM_FILTER_NBYTES) number = &metadata->bloom_filter_nbytes;
        if (number != NULL && is_int(type)) {
            *number = agsf_thrift_int(cursor);
            continue;
        }
        if (id == METADATA_PATH) metadata->path = (size_t)(cursor->at - data);
        if (id == METADATA_ENCODINGS) metadata->encodings = (size_t)(cursor->at - data);
        if (id == METADATA_ENCODING_STATS) metadata->encoding_stats = (size_t)(cursor->at - data);
        agsf_thrift_skip(cursor, type, false);
    }
    metadata->end = (size_t)(cursor->at - data);
}

agsf_status agsf_column_metadata_read(const uint8_t *data, size_t nbytes, size_t begin,
                                      agsf_column_metadata *metadata) {
    agsf_cursor cursor = agsf_cursor_over(data, nbytes, begin);

    read_metadata(&cursor, data, metadata);
    return cursor.bad ? AGSF_BAD_FORMAT : AGSF_OK;
}

agsf_status agsf_chunk_read(const uint8_t *data, size_t nbytes, size_t begin, agsf_chunk *chunk) {
    agsf_cursor cursor = agsf_cursor_over(data, nbytes, begin);
    int16_t id = 0;
    unsigned type;

    *chunk = (agsf_chunk){
        .begin = begin, .offset_index = -1, .offset_index_nbytes = -1, .column_index = -1, .column_index_nbytes = -1};
    while (agsf_thrift_field(&cursor, &id, &type)) {
        int64_t *number = NULL;
        if (id == CHUNK_OFFSET_INDEX) number = &chunk->offset_index;
        if (id == CHUNK_OFFSET_INDEX_NBYTES) number = &chunk->offset_index_nbytes;
        if (id == CHUNK_COLUMN_INDEX) number = &chunk->column_index;
        if (id == CHUNK_COLUMN_INDEX_NBYTES) number = &chunk->column_index_nbytes;
        if (number != NULL && is_int(type)) {
            *number = agsf_thrift_int(&cursor);
            continue;
        }
        if (id == CHUNK_FILE_PATH) chunk->file_path = true;
        if (id == CHUNK_METADATA && type == AGSF_THRIFT_STRUCT) {
            read_metadata(&cursor, data, &chunk->metadata);
        } else if (id == CHUNK_CRYPTO && type == AGSF_THRIFT_STRUCT) {
            chunk->crypto = (size_t)(cursor.at - data);
            read_crypto(&cursor, data, chunk);
        } else if (id == CHUNK_SEALED_METADATA && type == AGSF_THRIFT_BINARY) {
            chunk->sealed_metadata = (size_t)(agsf_thrift_binary(&cursor, &chunk->sealed_metadata_nbytes) - data);
        } else {
            agsf_thrift_skip(&cursor, type, false);
        }
    }
    chunk->end = (size_t)(cursor.at - data);
    return cursor.bad ? AGSF_BAD_FORMAT : AGSF_OK;
}

/* ---------------------------------------------------------------- offset indexes */

agsf_status agsf_offset_index_pages(const uint8_t *in, size_t in_nbytes, size_t *npages_ret) {
    agsf_cursor cursor = agsf_cursor_over(in, in_nbytes, 0);
    int16_t id = 0;
    unsigned type;

    *npages_ret = 0;
    while (agsf_thrift_field(&cursor, &id, &type)) {
        if (id == INDEX_LOCATIONS && type == AGSF_THRIFT_LIST) {
            const size_t count = agsf_thrift_list(&cursor, &type);
            *npages_ret = count;
            for (size_t i = 0; i < count && !cursor.bad; i++) agsf_thrift_skip(&cursor, type, true);
        } else {
            agsf_thrift_skip(&cursor, type, false);
        }
    }
    return cursor.bad ? AGSF_BAD_FORMAT : AGSF_OK;
}

static const agsf_page *find_page(const agsf_page *table, size_t npages, size_t guess, uint64_t in_offset) {
    size_t low = 0, high = npages;

    if (guess < npages && table[guess].in_offset == in_offset) return &table[guess];
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (table[middle].in_offset < in_offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < npages && table[low].in_offset == in_offset ? &table[low] : NULL;
}

/* One PageLocation: its two first fields are the page's, as it is now; the others are copied. */
static uint8_t *put_location(agsf_cursor *cursor, const agsf_page *page, int64_t out_chunk, uint8_t *out) {
    const uint8_t *copied = cursor->at;
    int16_t id = 0;
    unsigned type;

    while (agsf_thrift_field(cursor, &id, &type)) {
        const uint8_t *const value = cursor->at;
        agsf_thrift_skip(cursor, type, false);
        if ((id != LOCATION_OFFSET && id != LOCATION_NBYTES) || cursor->bad) continue;
        memcpy(out, copied, (size_t)(value - copied));
        out += value - copied;
        out =
            agsf_thrift_put_varint(out, agsf_thrift_zigzag(id == LOCATION_OFFSET ? (int64_t)page->out_offset + out_chunk
                                                                                 : (int64_t)page->out_nbytes));
        copied = cursor->at;
    }
    memcpy(out, copied, (size_t)(cursor->at - copied));
    return out + (cursor->at - copied);
}

agsf_status agsf_offset_index(const uint8_t *in, size_t in_nbytes, const agsf_page *table, size_t npages,
                              int64_t in_chunk, int64_t out_chunk, uint8_t *out, size_t *nbytes_ret) {
    agsf_cursor cursor = agsf_cursor_over(in, in_nbytes, 0);
    uint8_t *const begin = out;
    const uint8_t *copied = in;
    int16_t id = 0;
    unsigned type;

    if (in_chunk < 0 || out_chunk < 0) return AGSF_BAD_ARGUMENT;
    while (agsf_thrift_field(&cursor, &id, &type)) {
        size_t count;
        if (id != INDEX_LOCATIONS || type != AGSF_THRIFT_LIST) {
            agsf_thrift_skip(&cursor, type, false);
            continue;
        }
        count = agsf_thrift_list(&cursor, &type);
        if (count > 0 && type != AGSF_THRIFT_STRUCT) return AGSF_BAD_FORMAT;
        memcpy(out, copied, (size_t)(cursor.at - copied));
        out += cursor.at - copied;
        for (size_t i = 0; i < count && !cursor.bad; i++) {
            agsf_cursor look = cursor;
            int64_t offset = -1, nbytes = -1;
            agsf_page moved;
            const agsf_page *page = &moved;
            id = 0;
            while (agsf_thrift_field(&look, &id, &type)) {
                if (id == LOCATION_OFFSET && is_int(type)) {
                    offset = agsf_thrift_int(&look);
                } else if (id == LOCATION_NBYTES && is_int(type)) {
                    nbytes = agsf_thrift_int(&look);
                } else {
                    agsf_thrift_skip(&look, type, false);
                }
            }
            if (look.bad || offset < in_chunk || nbytes < 0) return AGSF_BAD_FORMAT;
            if (table != NULL) {
                page = find_page(table, npages, i, (uint64_t)(offset - in_chunk));
                if (page == NULL) return AGSF_BAD_FORMAT;
            } else {
                moved = (agsf_page){.out_offset = (uint64_t)(offset - in_chunk), .out_nbytes = (uint64_t)nbytes};
            }
            if (page->out_offset > (uint64_t)(INT64_MAX - out_chunk)) return AGSF_BAD_FORMAT;
            out = put_location(&cursor, page, out_chunk, out);
        }
        copied = cursor.at;
        id = INDEX_LOCATIONS;
    }
    if (cursor.bad) return AGSF_BAD_FORMAT;
    memcpy(out, copied, (size_t)(cursor.at - copied));
    *nbytes_ret = (size_t)(out - begin) + (size_t)(cursor.at - copied);
    return AGSF_OK;
}
