/* thrift.c - the compact protocol: a cursor, and edits of a struct that copy what they do not change. */
#include "thrift.h"

#include <string.h>

enum {
    NESTING_MAX = 64, /* Parquet needs less than ten */
};

/* ---------------------------------------------------------------- the cursor */

static uint64_t bad(agsf_cursor *cursor) { return agsf_cursor_bad(cursor); }

static size_t left(const agsf_cursor *cursor) { return agsf_cursor_left(cursor); }

static unsigned byte(agsf_cursor *cursor) { return cursor->at < cursor->end ? *cursor->at++ : (unsigned)bad(cursor); }

static void pass(agsf_cursor *cursor, uint64_t nbytes) {
    if (nbytes > left(cursor)) {
        bad(cursor);
    } else {
        cursor->at += nbytes;
    }
}

const uint8_t *agsf_thrift_binary(agsf_cursor *cursor, size_t *nbytes_ret) {
    const uint64_t nbytes = agsf_thrift_varint(cursor);
    const uint8_t *const data = cursor->at;

    pass(cursor, nbytes);
    *nbytes_ret = cursor->bad ? 0 : (size_t)nbytes;
    return data;
}

bool agsf_thrift_field(agsf_cursor *cursor, int16_t *id, unsigned *type_ret) {
    const unsigned head = byte(cursor);
    int64_t next;

    if (cursor->bad || head == AGSF_THRIFT_STOP) return false;
    next = head >> 4 != 0 ? *id + (int64_t)(head >> 4) : agsf_thrift_int(cursor);
    if (next <= *id || next > INT16_MAX) bad(cursor);
    if (cursor->bad) return false;
    *id = (int16_t)next;
    *type_ret = head & 15;
    return true;
}

size_t agsf_thrift_list(agsf_cursor *cursor, unsigned *type_ret) {
    const unsigned head = byte(cursor);
    const uint64_t count = head >> 4 < 15 ? head >> 4 : agsf_thrift_varint(cursor);

    *type_ret = head & 15;
    return count > left(cursor) ? (size_t)bad(cursor) : (size_t)count; /* an element has one byte at least */
}

static void pass_varint(agsf_cursor *cursor) {
    const uint8_t *at = cursor->at;
    const uint8_t *const end = left(cursor) > AGSF_VARINT_NBYTES ? at + AGSF_VARINT_NBYTES : cursor->end;

    while (at < end && *at >= 0x80) at++;
    if (at < end) {
        cursor->at = at + 1;
    } else {
        bad(cursor);
    }
}

/* Passes a value that holds no other, or says that it does. */
static bool pass_simple(agsf_cursor *cursor, unsigned type, bool in_list) {
    switch (type) {
        case AGSF_THRIFT_TRUE:
        case AGSF_THRIFT_FALSE:
            if (in_list) pass(cursor, 1);
            return true;
        case AGSF_THRIFT_I8: pass(cursor, 1); return true;
        case AGSF_THRIFT_I16:
        case AGSF_THRIFT_I32:
        case AGSF_THRIFT_I64: pass_varint(cursor); return true;
        case AGSF_THRIFT_DOUBLE: pass(cursor, 8); return true;
        case AGSF_THRIFT_BINARY: pass(cursor, agsf_thrift_varint(cursor)); return true;
        case AGSF_THRIFT_UUID: pass(cursor, 16); return true;
        default: return false;
    }
}

/*
 * Passes fields of a struct, one behind the other, while there are bytes enough around them, and each is a value that
 * holds no other, with a short head. Nothing here branches on a field's type, which no CPU foresees: where a footer of
 * many columns is read, that takes most of the time.
 */
static void pass_plain_fields(agsf_cursor *cursor) {
    static const uint8_t fixed[16] = {[AGSF_THRIFT_I8] = 1, [AGSF_THRIFT_DOUBLE] = 8, [AGSF_THRIFT_UUID] = 16};
    static const uint8_t has_varint[16] = {
        [AGSF_THRIFT_I16] = 0xff, [AGSF_THRIFT_I32] = 0xff, [AGSF_THRIFT_I64] = 0xff, [AGSF_THRIFT_BINARY] = 0xff};
    static const uint8_t has_length[16] = {[AGSF_THRIFT_BINARY] = 0x7f};
    enum { HEAD_AND_WORD_NBYTES = 9, HOLDERS = 0xde01 }; /* lists, sets, maps, structs, what there is no type for */

    while (left(cursor) >= HEAD_AND_WORD_NBYTES) {
        const unsigned head = cursor->at[0], type = head & 15;
        uint64_t word = 0, ends;
        size_t varint, nbytes;
        if (head >> 4 == 0 || (HOLDERS >> type & 1)) return;
        for (unsigned i = 0; i < 8; i++) word |= (uint64_t)cursor->at[1 + i] << 8 * i;
        ends = ~word & UINT64_C(0x8080808080808080); /* a bit in each byte that ends a varint */
        if (ends == 0) return;
        varint = ((size_t)__builtin_ctzll(ends) >> 3) + 1;
        if (varint > 1 && has_length[type] != 0) return; /* a long text */
        nbytes = 1 + (size_t)fixed[type] + (varint & has_varint[type]) + (word & has_length[type]);
        if (nbytes > left(cursor)) return;
        cursor->at += nbytes;
    }
}

void agsf_thrift_skip(agsf_cursor *cursor, unsigned type, bool in_list) {
    /* What is open around the value at hand. Of a struct only the end is to be found; a map alternates its types. */
    struct {
        uint64_t elements; /* that are still to come, of a list or map */
        unsigned type, other;
        bool is_struct;
    } open[NESTING_MAX];
    unsigned depth = 0;

    for (;;) {
        if (!pass_simple(cursor, type, in_list)) {
            if (depth == NESTING_MAX) {
                bad(cursor);
                return;
            }
            if (type == AGSF_THRIFT_STRUCT) {
                open[depth].is_struct = true;
            } else if (type == AGSF_THRIFT_LIST || type == AGSF_THRIFT_SET) {
                open[depth].is_struct = false;
                open[depth].elements = agsf_thrift_list(cursor, &open[depth].type);
                open[depth].other = open[depth].type;
            } else if (type == AGSF_THRIFT_MAP) {
                const uint64_t pairs = agsf_thrift_varint(cursor);
                const unsigned types = pairs == 0 ? 0 : byte(cursor);
                if (pairs > left(cursor) / 2) bad(cursor);
                open[depth].is_struct = false;
                open[depth].elements = cursor->bad ? 0 : pairs * 2;
                open[depth].type = types >> 4;
                open[depth].other = types & 15;
            } else {
                bad(cursor);
            }
            depth++;
        }
        for (;;) { /* to the next value inside what is open */
            if (cursor->bad || depth == 0) return;
            if (open[depth - 1].is_struct) {
                unsigned head;
                pass_plain_fields(cursor);
                head = byte(cursor);
                if (head != AGSF_THRIFT_STOP) {
                    if (head >> 4 == 0) pass_varint(cursor);
                    type = head & 15;
                    in_list = false;
                    break;
                }
                if (cursor->bad) return;
            } else if (open[depth - 1].elements > 0) {
                const unsigned here = open[depth - 1].type;
                open[depth - 1].elements--;
                open[depth - 1].type = open[depth - 1].other;
                open[depth - 1].other = here;
                type = here;
                in_list = true;
                break;
            }
            depth--;
        }
    }
}

agsf_status agsf_thrift_next(const uint8_t *data, size_t nbytes, bool in_list, agsf_thrift_value *value) {
    agsf_cursor cursor = agsf_cursor_over(data, nbytes, value->end);

    if (in_list) {
        value->begin = value->end;
        agsf_thrift_skip(&cursor, value->type, true);
    } else {
        const bool found = agsf_thrift_field(&cursor, &value->id, &value->type);
        if (!found) value->type = AGSF_THRIFT_STOP;
        value->begin = (size_t)(cursor.at - data);
        if (found) agsf_thrift_skip(&cursor, value->type, false);
    }
    value->end = (size_t)(cursor.at - data);
    return cursor.bad ? AGSF_BAD_FORMAT : AGSF_OK;
}

agsf_status agsf_thrift_list_head(const uint8_t *data, size_t nbytes, agsf_thrift_value *value, size_t *count_ret) {
    agsf_cursor cursor = agsf_cursor_over(data, nbytes, value->begin);

    *count_ret = agsf_thrift_list(&cursor, &value->type);
    value->end = (size_t)(cursor.at - data);
    return cursor.bad ? AGSF_BAD_FORMAT : AGSF_OK;
}

/* ---------------------------------------------------------------- edits */

size_t agsf_thrift_varint_nbytes(uint64_t value) {
    size_t nbytes = 1;

    while (value >= 0x80) {
        value >>= 7;
        nbytes++;
    }
    return nbytes;
}

uint8_t *agsf_thrift_put_varint(uint8_t *out, uint64_t value) {
    while (value >= 0x80) {
        *out++ = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    *out++ = (uint8_t)value;
    return out;
}

enum { FIELD_HEAD_MAX_NBYTES = 4 }; /* a byte, and three of a zigzag i16 */

size_t agsf_thrift_splice_nbytes(size_t nbytes, const agsf_thrift_edit *edits, size_t nedits) {
    size_t most = nbytes + FIELD_HEAD_MAX_NBYTES * (nedits * 2 + 1); /* a field behind an edit may need a longer head */

    for (size_t i = 0; i < nedits; i++) {
        if (edits[i].nbytes > SIZE_MAX / 4 || most > SIZE_MAX / 2) return 0;
        most += edits[i].nbytes;
    }
    return most;
}

static uint8_t *put_head(uint8_t *out, int16_t last, int16_t id, unsigned type) {
    const int delta = id - last;

    if (delta >= 1 && delta <= 15) {
        *out++ = (uint8_t)((unsigned)delta << 4 | type);
        return out;
    }
    *out++ = (uint8_t)type;
    return agsf_thrift_put_varint(out, agsf_thrift_zigzag(id));
}

static uint8_t *put_edit(uint8_t *out, int16_t *last, const agsf_thrift_edit *edit) {
    if (edit->type == AGSF_THRIFT_STOP) return out; /* removed */
    out = put_head(out, *last, edit->id, edit->type);
    if (edit->nbytes > 0) memcpy(out, edit->value, edit->nbytes);
    *last = edit->id;
    return out + edit->nbytes;
}

agsf_status agsf_thrift_splice(const uint8_t *data, size_t nbytes, const agsf_thrift_edit *edits, size_t nedits,
                               uint8_t *out, size_t *nbytes_ret, size_t *end_ret) {
    agsf_cursor cursor = agsf_cursor_over(data, nbytes, 0);
    const uint8_t *field = data; /* where the head of the field at hand begins */
    uint8_t *const begin = out;
    int16_t id = 0, last_in = 0, last_out = 0;
    size_t next = 0;
    unsigned type;

    for (; agsf_thrift_field(&cursor, &id, &type); field = cursor.at, last_in = id) {
        const uint8_t *const value = cursor.at;
        agsf_thrift_skip(&cursor, type, false);
        if (cursor.bad) break;
        while (next < nedits && edits[next].id < id) out = put_edit(out, &last_out, &edits[next++]);
        if (next < nedits && edits[next].id == id) {
            out = put_edit(out, &last_out, &edits[next++]);
            continue;
        }
        if (last_in == last_out) { /* nothing before it changed: its head stays, also one that could be shorter */
            memcpy(out, field, (size_t)(cursor.at - field));
            out += cursor.at - field;
        } else {
            out = put_head(out, last_out, id, type);
            memcpy(out, value, (size_t)(cursor.at - value));
            out += cursor.at - value;
        }
        last_out = id;
    }
    if (cursor.bad) return AGSF_BAD_FORMAT;
    while (next < nedits) out = put_edit(out, &last_out, &edits[next++]);
    *out++ = AGSF_THRIFT_STOP;
    *nbytes_ret = (size_t)(out - begin);
    *end_ret = (size_t)(cursor.at - data);
    return AGSF_OK;
}
