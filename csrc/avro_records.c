/* avro_records.c - the columns of Arrow, encoded to Avro records: the mirror of avro_columns.c. */
#include <string.h>

#include "agsf_avro.h"
#include "thrift.h"

enum { NESTING_MAX = 32, DECIMAL_NBYTES = 16 };

/* Rows that are being written: of the fields of a record one, of the items of an array or a map all. */
typedef struct frame {
    const agsf_avro_array *begin, *end; /* the arrays that have these rows */
    const agsf_avro_array *next;        /* the one whose value comes next */
    size_t row, stop;
    bool items;
} frame;

typedef struct sink {
    uint8_t *at, *end;
    bool full;  /* there is no room for a value */
    bool wrong; /* an array is not what it should be */
    size_t depth;
    frame frames[NESTING_MAX];
} sink;

static bool has_room(sink *self, size_t nbytes) {
    if (nbytes > (size_t)(self->end - self->at)) self->full = true;
    return !self->full;
}

static void put(sink *self, const void *value, size_t nbytes) {
    if (!has_room(self, nbytes)) return;
    memcpy(self->at, value, nbytes);
    self->at += nbytes;
}

static void put_byte(sink *self, uint8_t value) {
    if (has_room(self, 1)) *self->at++ = value;
}

static void put_number(sink *self, int64_t value) {
    if (has_room(self, AGSF_VARINT_NBYTES)) self->at = agsf_thrift_put_varint(self->at, agsf_thrift_zigzag(value));
}

static bool bit(const uint8_t *bits, size_t at) { return (bits[at / 8] >> at % 8 & 1) != 0; }

static void put_int(sink *self, const agsf_avro_array *array, size_t at) {
    int32_t wide;
    int16_t narrow;

    if (array->size == sizeof(wide)) {
        memcpy(&wide, array->values + at * sizeof(wide), sizeof(wide));
    } else if (array->size == sizeof(narrow)) {
        memcpy(&narrow, array->values + at * sizeof(narrow), sizeof(narrow));
        wide = narrow;
    } else {
        wide = array->values[at] < 0x80 ? array->values[at] : array->values[at] - 0x100;
    }
    put_number(self, wide);
}

/* put_decimal() writes the low bytes, the highest of them first, if the others only repeat the sign. */
static void put_decimal(sink *self, const agsf_avro_array *array, size_t at) {
    const uint8_t *const value = array->values + at * DECIMAL_NBYTES;
    const uint8_t sign = value[DECIMAL_NBYTES - 1] < 0x80 ? 0 : 0xff;

    if (array->size == 0 || array->size > DECIMAL_NBYTES || (value[array->size - 1] ^ sign) >= 0x80) {
        self->wrong = true;
        return;
    }
    for (size_t i = array->size; i < DECIMAL_NBYTES; i++) {
        if (value[i] != sign) self->wrong = true;
    }
    for (size_t i = array->size; i > 0; i--) put_byte(self, value[i - 1]);
}

/* span() finds what a row has of the `rows` that are inside of an array. */
static bool span(sink *self, const agsf_avro_array *array, size_t at, size_t rows, size_t *begin_ret, size_t *end_ret) {
    const int32_t begin = array->offsets[at], end = array->offsets[at + 1];

    if (begin < 0 || end < begin || (size_t)end > rows) self->wrong = true;
    *begin_ret = (size_t)begin;
    *end_ret = (size_t)end;
    return !self->wrong;
}

static void put_bytes(sink *self, const agsf_avro_array *array, size_t at) {
    size_t begin, end;

    if (!span(self, array, at, array->nbytes, &begin, &end)) return;
    put_number(self, (int64_t)(end - begin));
    put(self, array->values + begin, end - begin);
}

static void enter(sink *self, const agsf_avro_array *array, size_t row, size_t stop, bool items) {
    if (self->depth == NESTING_MAX) {
        self->wrong = true;
    } else {
        self->frames[self->depth++] = (frame){array + 1, array + array->count, array + 1, row, stop, items};
    }
}

static void enter_items(sink *self, const agsf_avro_array *array, size_t at) {
    size_t begin, end;

    if (array->count < 2) {
        self->wrong = true;
    } else if (span(self, array, at, array[1].rows, &begin, &end)) {
        if (begin < end) put_number(self, (int64_t)(end - begin));
        enter(self, array, begin, end, true);
    }
}

/* take() writes a scalar, or enters a record or an array. */
static inline void take(sink *self, const agsf_avro_array *array, size_t row) {
    const size_t at = array->first + row;

    if (row >= array->rows) {
        self->wrong = true;
        return;
    }
    const bool there = array->valid == NULL || bit(array->valid, at);
    if (array->optional) {
        put_byte(self, there ? 0 : 2);
    } else if (!there) {
        self->wrong = true;
    }
    if (!there) return;
    switch (array->kind) {
        case AGSF_AVRO_NULL: break;
        case AGSF_AVRO_NUMBER: {
            int64_t number;
            memcpy(&number, array->values + at * sizeof(number), sizeof(number));
            put_number(self, number);
            break;
        }
        case AGSF_AVRO_INT: put_int(self, array, at); break;
        case AGSF_AVRO_BYTES: put_bytes(self, array, at); break;
        case AGSF_AVRO_FIXED:
            if (array->size == 0) {
                put_byte(self, bit(array->values, at));
            } else {
                put(self, array->values + at * array->size, array->size);
            }
            break;
        case AGSF_AVRO_DECIMAL: put_decimal(self, array, at); break;
        case AGSF_AVRO_ITEMS: enter_items(self, array, at); break;
        case AGSF_AVRO_RECORD: enter(self, array, row, row + 1, false); break;
        default: self->wrong = true;
    }
}

/* step() writes the next value of a frame, or ends the frame. */
static void step(sink *self) {
    frame *const top = &self->frames[self->depth - 1];

    if (top->next == top->end) {
        top->next = top->begin;
        top->row++;
    }
    if (top->row == top->stop) {
        if (top->items) put_byte(self, 0);
        self->depth--;
    } else {
        const agsf_avro_array *const array = top->next;
        top->next += array->count;
        take(self, array, top->row);
    }
}

/* put_record() writes a row of all arrays. */
static void put_record(sink *self, const agsf_avro_array *arrays, const agsf_avro_array *end, size_t row) {
    self->depth = 0;
    for (const agsf_avro_array *array = arrays; array < end; array += array->count) {
        take(self, array, row);
        while (self->depth > 0 && !self->full && !self->wrong) step(self);
    }
}

/* are_nested() returns whether each array ends where the one around it does, or before. */
static bool are_nested(const agsf_avro_array *arrays, size_t count) {
    size_t ends[NESTING_MAX + 1], depth = 0;

    ends[0] = count;
    for (size_t i = 0; i < count; i++) {
        while (i == ends[depth]) depth--;
        if (arrays[i].count == 0 || arrays[i].count > ends[depth] - i) return false;
        if (arrays[i].count == 1) continue;
        if (depth == NESTING_MAX) return false;
        ends[++depth] = i + arrays[i].count;
    }
    return true;
}

agsf_status agsf_avro_records(const agsf_avro_array *arrays, size_t count, size_t row, size_t end, size_t limit,
                              uint8_t *out, size_t room, size_t *rows_ret, size_t *nbytes_ret) {
    sink self = {out, out + room, false, false, 0, {{0}}};
    const size_t begin = row;

    *rows_ret = *nbytes_ret = 0;
    if (!are_nested(arrays, count)) return AGSF_BAD_ARGUMENT;
    while (row < end && (row == begin || *nbytes_ret < limit)) {
        put_record(&self, arrays, arrays + count, row);
        if (self.wrong) return AGSF_BAD_ARGUMENT;
        if (self.full) break;
        *rows_ret = ++row - begin;
        *nbytes_ret = (size_t)(self.at - out);
    }
    return AGSF_OK;
}
