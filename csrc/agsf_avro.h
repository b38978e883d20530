/*
 * agsf_avro.h - fields of Avro records, found without decoding the rest. See agsf.h for the conventions.
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

#endif
