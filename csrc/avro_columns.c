/* avro_columns.c - blocks of flat Avro records, decoded to the columns of Arrow, and checked on the way. */
#include <string.h>

#include "agsf_avro.h"
#include "thrift.h"

static void set_bit(uint8_t *bits, size_t at, bool on) {
    const unsigned below = bits[at / 8] & ((1U << at % 8) - 1); /* the others are of rows to come */

    bits[at / 8] = (uint8_t)(below | (unsigned)on << at % 8);
}

static void put(const agsf_avro_column *column, size_t row, const void *value, size_t nbytes) {
    if (column->values != NULL) memcpy(column->values + row * nbytes, value, nbytes);
}

/* take_number() takes a number of 32 bits, or an enum's, that its type has. Others could be taken for another number.
 */
static void take_number(agsf_cursor *cursor, const agsf_avro_column *column, size_t row, int64_t low, int64_t high) {
    const int64_t value = agsf_thrift_int(cursor);
    const int32_t narrow = (int32_t)value;

    if (value < low || value > high) cursor->bad = true;
    put(column, row, &narrow, sizeof(narrow));
}

/* take_bytes() appends bytes to those of the rows before. False if there is no room for them. */
static bool take_bytes(agsf_cursor *cursor, const agsf_avro_column *column, size_t row) {
    const int64_t nbytes = agsf_thrift_int(cursor);

    if (nbytes < 0 || nbytes > cursor->end - cursor->at) {
        cursor->bad = true;
        return true;
    }
    if (column->values != NULL) {
        const size_t begin = (size_t)column->offsets[row], end = begin + (size_t)nbytes;
        if (end > column->room || end > INT32_MAX) return false;
        memcpy(column->values + begin, cursor->at, (size_t)nbytes);
        column->offsets[row + 1] = (int32_t)end;
    }
    cursor->at += nbytes;
    return true;
}

static void take_fixed(agsf_cursor *cursor, const agsf_avro_column *column, size_t row) {
    if (column->size > (size_t)(cursor->end - cursor->at)) {
        cursor->bad = true;
        return;
    }
    if (column->bits && column->values != NULL) {
        set_bit(column->values, row, *cursor->at != 0);
    } else if (column->size == 8) { /* of a known size it takes one move */
        put(column, row, cursor->at, 8);
    } else {
        put(column, row, cursor->at, column->size);
    }
    cursor->at += column->size;
}

static void take_null(const agsf_avro_column *column, size_t row) {
    static const uint8_t zeros[sizeof(int64_t)];

    if (column->values == NULL) return;
    if (column->kind == AGSF_AVRO_BYTES) {
        column->offsets[row + 1] = column->offsets[row];
    } else if (column->bits) {
        set_bit(column->values, row, false);
    } else if (column->kind == AGSF_AVRO_FIXED) {
        memset(column->values + row * column->size, 0, column->size);
    } else {
        put(column, row, zeros, column->kind == AGSF_AVRO_NUMBER ? sizeof(int64_t) : sizeof(int32_t));
    }
}

/* take() takes the value of a row. False if the column has no room. */
static inline bool take(agsf_cursor *cursor, const agsf_avro_column *column, size_t row) {
    int64_t number;

    if (column->null_branch >= 0) {
        const int64_t branch = agsf_thrift_int(cursor);
        if (branch < 0 || branch > 1) cursor->bad = true;
        if (column->values != NULL) set_bit(column->valid, row, branch != column->null_branch);
        if (branch == column->null_branch) {
            take_null(column, row);
            return true;
        }
    }
    switch (column->kind) {
        case AGSF_AVRO_NUMBER:
            number = agsf_thrift_int(cursor);
            put(column, row, &number, sizeof(number));
            return true;
        case AGSF_AVRO_INT: take_number(cursor, column, row, INT32_MIN, INT32_MAX); return true;
        case AGSF_AVRO_ENUM: take_number(cursor, column, row, 0, (int64_t)column->size - 1); return true;
        case AGSF_AVRO_BYTES: return take_bytes(cursor, column, row);
        case AGSF_AVRO_FIXED: take_fixed(cursor, column, row); return true;
        default: return false;
    }
}

agsf_status agsf_avro_columns(const uint8_t *data, size_t nbytes, size_t records, size_t row,
                              const agsf_avro_column *columns, size_t ncolumns) {
    agsf_cursor cursor = {data, data + nbytes, false};

    for (size_t end = row + records; row < end; row++) {
        for (size_t i = 0; i < ncolumns; i++) {
            if (!take(&cursor, &columns[i], row)) return AGSF_BAD_ARGUMENT;
        }
        if (cursor.bad) return AGSF_BAD_FORMAT;
    }
    return cursor.at == cursor.end ? AGSF_OK : AGSF_BAD_FORMAT;
}
