/*
 * thrift.h - the compact protocol, without generated classes: a cursor over bytes, and edits that leave every other
 * byte as it was. Private to csrc.
 *
 * A cursor never reads outside its bytes, never recurses and never allocates. Once something is wrong it is `bad` and
 * stays there: whatever it returns then is zero, so a caller may check once, at the end.
 */
#ifndef AGSF_THRIFT_H
#define AGSF_THRIFT_H

#include <stdbool.h>

#include "agsf_parquet.h"

typedef struct agsf_cursor {
    const uint8_t *at, *end;
    bool bad; /* the bytes end too early, or cannot be the compact protocol */
} agsf_cursor;

/* agsf_cursor_over() begins at `begin` of nbytes. Of no bytes it is bad at once, and data may be NULL. */
static inline agsf_cursor agsf_cursor_over(const uint8_t *data, size_t nbytes, size_t begin) {
    if (nbytes == 0) return (agsf_cursor){data, data, true}; /* C lets nothing be added to NULL, not even 0 */
    return (agsf_cursor){data + begin, data + nbytes, false};
}

static inline size_t agsf_cursor_left(const agsf_cursor *cursor) { return (size_t)(cursor->end - cursor->at); }

static inline uint64_t agsf_cursor_bad(agsf_cursor *cursor) {
    cursor->bad = true;
    cursor->at = cursor->end;
    return 0;
}

enum { AGSF_VARINT_NBYTES = 10 }; /* at most */

/* Of Avro's columns nearly each value is a number, so a loop over them has the code of these two in its place. */
static inline uint64_t agsf_thrift_varint(agsf_cursor *cursor) {
    const uint8_t *at = cursor->at;
    const uint8_t *const end = agsf_cursor_left(cursor) > AGSF_VARINT_NBYTES ? at + AGSF_VARINT_NBYTES : cursor->end;
    uint64_t value = 0;

    for (unsigned shift = 0; at < end; shift += 7) {
        const uint64_t next = *at++;
        if (shift == 63 && next > 1) break; /* more than 64 bits */
        value |= (next & 0x7f) << shift;
        if (next >= 0x80) continue;
        cursor->at = at;
        return value;
    }
    return agsf_cursor_bad(cursor);
}

/* zigzag, as i16, i32 and i64 are */
static inline int64_t agsf_thrift_int(agsf_cursor *cursor) {
    const uint64_t value = agsf_thrift_varint(cursor);

    return (int64_t)(value >> 1 ^ (UINT64_C(0) - (value & 1)));
}

/* agsf_thrift_binary() passes a string of *nbytes_ret bytes and returns where it begins. */
const uint8_t *agsf_thrift_binary(agsf_cursor *cursor, size_t *nbytes_ret);

/*
 * agsf_thrift_field() reads the head of a struct's next field: *id goes from the last field's id (0 at first) to this
 * one's, and *type_ret becomes its type. False at the end of the struct, which is passed, or if the cursor is bad.
 *
 * Ids must ascend from 1, as all writers have them. The protocol does not ask for it; but of a field that comes twice,
 * one reader believes the first and another the last, and an edit of the one would leave the other as it was.
 */
bool agsf_thrift_field(agsf_cursor *cursor, int16_t *id, unsigned *type_ret);

/* agsf_thrift_list() reads the head of a list or set. It has no more elements than there are bytes left. */
size_t agsf_thrift_list(agsf_cursor *cursor, unsigned *type_ret);

/* agsf_thrift_skip() passes a field's value. With in_list, an element's, where a bool has a byte of its own. */
void agsf_thrift_skip(agsf_cursor *cursor, unsigned type, bool in_list);

/* How many bytes a varint takes, and one written to out, where there must be room for ten. */
size_t agsf_thrift_varint_nbytes(uint64_t value);
uint8_t *agsf_thrift_put_varint(uint8_t *out, uint64_t value);

static inline uint64_t agsf_thrift_zigzag(int64_t value) { return (uint64_t)value << 1 ^ (uint64_t)(value >> 63); }

#endif
