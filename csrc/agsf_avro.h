/*
 * agsf_avro.h - fields of Avro records: found without decoding the rest, decoded to columns, or encoded from columns.
 * See agsf.h for the conventions.
 *
 * A schema is compiled, outside of the engine, to a program: int32 numbers, one node behind the other. A node is
 *
 *     kind, length of the node in numbers, slot (from 1; 0: the value is not picked), and what its kind needs:
 *
 *     AGSF_AVRO_NULL     nothing, for null
 *     AGSF_AVRO_NUMBER   nothing, for long
 *     AGSF_AVRO_INT      nothing, for int, which has 32 bits
 *     AGSF_AVRO_ENUM     how many symbols there are
 *     AGSF_AVRO_BYTES    nothing, for bytes and string
 *     AGSF_AVRO_FIXED    the number of bytes: of boolean 1, float 4, double 8, fixed its own
 *     AGSF_AVRO_ITEMS    the node of an item of an array, or of a pair of a map (a record of a string and the value)
 *     AGSF_AVRO_UNION    the number of branches, the length of each branch's node, and these nodes
 *     AGSF_AVRO_RECORD   the nodes of the fields
 */
#ifndef AGSF_AVRO_H
#define AGSF_AVRO_H

#include "agsf.h"

typedef enum agsf_avro_kind {
    AGSF_AVRO_NULL = 0,
    AGSF_AVRO_NUMBER,
    AGSF_AVRO_BYTES,
    AGSF_AVRO_FIXED,
    AGSF_AVRO_ITEMS,
    AGSF_AVRO_UNION,
    AGSF_AVRO_RECORD,
    AGSF_AVRO_INT,
    AGSF_AVRO_ENUM,
    AGSF_AVRO_DECIMAL, /* of agsf_avro_array only: a fixed that is a decimal */
} agsf_avro_kind;

/*
 * agsf_avro_pick() walks over a block: `records` records that fill nbytes of data. Of each record it writes two numbers
 * a slot to `values`, in the order of slots: of a number its value and 0, of bytes their offset in data and how many
 * they are, of what is null or not there 0 and -1. A slot inside of items keeps the last one.
 *
 * AGSF_BAD_FORMAT if the bytes are not such records. AGSF_BAD_ARGUMENT if the program is not one: it is never read
 * outside of its length, nor is a value written outside of its slots. In both cases `values` are garbage.
 */
agsf_status agsf_avro_pick(const int32_t *program, size_t length, const uint8_t *data, size_t nbytes, size_t records,
                           size_t slots, int64_t *values) AGSF_MUST_CHECK;

/*
 * A field of a flat record as a column in Arrow's layout, with room for all rows. Without `values` the field is only
 * passed.
 */
typedef struct agsf_avro_column {
    agsf_avro_kind kind; /* AGSF_AVRO_NUMBER, _INT, _ENUM, _BYTES or _FIXED */
    int null_branch;     /* which of two branches is null: 0 or 1; -1 if the field is no union */
    size_t size;         /* of _FIXED the bytes of a value, of _ENUM how many symbols there are */
    bool bits;           /* a boolean: of _FIXED of 1 byte, a value takes a bit */
    uint8_t *values;  /* one behind the other: of _NUMBER 8 bytes, of _INT and _ENUM 4; of _BYTES those of all rows */
    size_t room;      /* of _BYTES: how many bytes `values` takes */
    int32_t *offsets; /* of _BYTES: where each row begins in `values`, and the last one ends. The first is 0. */
    uint8_t *valid;   /* of a union: a bit for each row, whether it has a value */
} agsf_avro_column;

/*
 * agsf_avro_columns() decodes a block: `records` records of these fields, in nbytes of data, which become the rows from
 * `row` on. What is null has zeros.
 *
 * AGSF_BAD_FORMAT if the bytes are not such records. Then the columns are garbage. AGSF_BAD_ARGUMENT if a column has no
 * room for them.
 */
agsf_status agsf_avro_columns(const uint8_t *data, size_t nbytes, size_t records, size_t row,
                              const agsf_avro_column *columns, size_t ncolumns) AGSF_MUST_CHECK;

/*
 * An array in Arrow's layout, which becomes a field of records, or the items of one. What is inside of it follows: of
 * _ITEMS the array of the items, or of a map the keys and the values; of _RECORD its fields.
 */
typedef struct agsf_avro_array {
    agsf_avro_kind kind;    /* AGSF_AVRO_NULL, _NUMBER, _INT, _BYTES, _FIXED, _DECIMAL, _ITEMS or _RECORD */
    bool optional;          /* Avro has a union of the type and null, in this order */
    size_t size;            /* bytes of a value: of _INT 1, 2 or 4 in Arrow; of _FIXED, 0 for a boolean, which takes a
                               bit in Arrow; of _DECIMAL in Avro, 16 at most: it is a decimal128 in Arrow */
    size_t count;           /* this array, and those inside of it */
    size_t first, rows;     /* which row of the buffers is row 0, and how many rows there are from it on */
    const uint8_t *valid;   /* a bit for each row, whether it has a value; NULL: all have */
    const int32_t *offsets; /* of _BYTES and _ITEMS: where each row begins in what is inside, and the last one ends */
    const uint8_t *values;  /* one behind the other: of _NUMBER 8 bytes; of _BYTES those of all rows */
    size_t nbytes;          /* of _BYTES: how many bytes `values` has */
} agsf_avro_array;

/*
 * agsf_avro_records() encodes the rows from `row` on as records, one behind the other, each with a field for each of
 * the `count` arrays that is not inside of another. It stops behind the row that makes `limit` bytes or more, before a
 * row that has no room in `out`, and before the row `end`. A number has room where 10 bytes are free.
 *
 * AGSF_BAD_ARGUMENT if an array is not as described, or has no such row; if a value is null, or a decimal too large,
 * where its type in Avro does not have it; or if arrays are nested more than 32 deep. Then `out` is garbage.
 */
agsf_status agsf_avro_records(const agsf_avro_array *arrays, size_t count, size_t row, size_t end, size_t limit,
                              uint8_t *out, size_t room, size_t *rows_ret, size_t *nbytes_ret) AGSF_MUST_CHECK;

#endif
