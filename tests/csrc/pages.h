/*
 * pages.h - what the tests of Parquet's pages share: headers and bodies put together by hand, and a driver that hands
 * an agsf_pages its input and its room for output in steps of any size.
 */
#ifndef AGSF_TEST_PAGES_H
#define AGSF_TEST_PAGES_H

#include "support.h"

#include "agsf_parquet.h"

/* ---------------------------------------------------------------- memory */

static size_t largest_array; /* that csrc has asked realloc() for, in bytes; a test sets it to 0 */

void *__real_realloc(void *old, size_t nbytes);
void *__wrap_realloc(void *old, size_t nbytes);

void *__wrap_realloc(void *old, size_t nbytes) {
    if (nbytes > largest_array) largest_array = nbytes;
    return __real_realloc(old, nbytes);
}

/* ---------------------------------------------------------------- Thrift by hand */

__attribute__((unused)) static uint8_t *put_number(uint8_t *out, uint64_t value) {
    for (; value >= 0x80; value >>= 7) *out++ = (uint8_t)(value | 0x80);
    *out++ = (uint8_t)value;
    return out;
}

__attribute__((unused)) static uint64_t zigzag(int64_t value) {
    return value < 0 ? ~((uint64_t)value << 1) : (uint64_t)value << 1;
}

/* The head of a field. With `last` 0 above the id's reach, or where the test wants one, a long one. */
__attribute__((unused)) static uint8_t *put_field(uint8_t *out, int *last, int id, unsigned type, bool long_head) {
    const int delta = id - *last;

    *last = id;
    if (!long_head && delta >= 1 && delta <= 15) {
        *out++ = (uint8_t)(delta << 4 | (int)type);
        return out;
    }
    *out++ = (uint8_t)type;
    return put_number(out, zigzag(id));
}

__attribute__((unused)) static uint8_t *put_i32(uint8_t *out, int *last, int id, int64_t value, bool long_head) {
    return put_number(put_field(out, last, id, AGSF_THRIFT_I32, long_head), zigzag(value));
}

/* ---------------------------------------------------------------- pages by hand */

enum { V1 = 0, DICTIONARY = 2, V2 = 3 };

/* A page header, as the test wants it. */
struct plan {
    int type;
    int32_t uncompressed, compressed, values, levels[2]; /* repetition, definition */
    bool has_crc, long_heads;
    uint32_t crc;
    int unknown;    /* the id of a field that nobody knows, behind all others, or 0 */
    size_t padding; /* zeros behind the struct: only where it is sealed */
};

enum { HEADER_ROOM = 2048 };

__attribute__((unused)) static size_t put_plan(uint8_t *out, const struct plan *plan) {
    static const int ids[] = {5, 6, 7, 8};
    uint8_t *const begin = out;
    int last = 0, inner = 0;

    out = put_i32(out, &last, 1, plan->type, plan->long_heads);
    out = put_i32(out, &last, 2, plan->uncompressed, plan->long_heads);
    out = put_i32(out, &last, 3, plan->compressed, plan->long_heads);
    if (plan->has_crc) out = put_i32(out, &last, 4, (int32_t)plan->crc, plan->long_heads);
    out = put_field(out, &last, ids[plan->type], AGSF_THRIFT_STRUCT, plan->long_heads);
    out = put_i32(out, &inner, 1, plan->values, plan->long_heads);
    out = put_i32(out, &inner, plan->type == V2 ? 4 : 2, plan->type == DICTIONARY ? 2 : 8, plan->long_heads);
    if (plan->type == V2) {
        out = put_i32(out, &inner, 5, plan->levels[1], plan->long_heads);
        out = put_i32(out, &inner, 6, plan->levels[0], plan->long_heads);
    } else if (plan->type == V1) {
        /* Statistics, one of which is a list of 17 bools: more than fit into a short list head. */
        out = put_field(out, &inner, 5, AGSF_THRIFT_STRUCT, false);
        *out++ = 0x18;
        *out++ = 3;
        memcpy(out, "abc", 3);
        out += 3;
        *out++ = 0x19;
        *out++ = 0xf2;
        *out++ = 17;
        memset(out, 1, 17);
        out += 17;
        *out++ = AGSF_THRIFT_STOP;
    }
    *out++ = AGSF_THRIFT_STOP;
    if (plan->unknown > 0) {
        out = put_field(out, &last, plan->unknown, AGSF_THRIFT_MAP, plan->long_heads);
        *out++ = 2; /* pairs of an i16 and a UUID */
        *out++ = AGSF_THRIFT_I16 << 4 | AGSF_THRIFT_UUID;
        for (int i = 0; i < 2; i++) {
            *out++ = 0xfe;
            *out++ = 1;
            memset(out, 'u', 16);
            out += 16;
        }
    }
    *out++ = AGSF_THRIFT_STOP;
    memset(out, 0, plan->padding);
    return (size_t)(out - begin) + plan->padding;
}

/* ---------------------------------------------------------------- a run, step by step */

struct steps {
    size_t in, out; /* so much more each time; 0: all at once */
    unsigned threads;
};

struct driven {
    agsf_status status; /* AGSF_SHORT: the input or the room was used up */
    size_t consumed, produced;
};

/* A table that run->table begins with comes from malloc() and grows. */
__attribute__((unused)) static struct driven drive(agsf_pages *run, const uint8_t *in, size_t in_nbytes, uint8_t *out,
                                                   size_t out_nbytes, struct steps steps) {
    struct driven driven = {.status = AGSF_OK};
    size_t in_have = steps.in > 0 && steps.in < in_nbytes ? steps.in : in_nbytes;
    size_t out_have = steps.out > 0 && steps.out < out_nbytes ? steps.out : out_nbytes;
    guarded header = guarded_new(0, AT_END);

    for (;;) {
        const size_t at = driven.consumed < in_have ? driven.consumed : in_have;
        run->in = in + at;
        run->in_nbytes = in_have - at;
        run->in_is_all = in_have == in_nbytes;
        run->out = out == NULL ? NULL : out + driven.produced;
        run->out_nbytes = out_have - driven.produced;
        run->stop = AGSF_STOP_NOT;
        if (driven.consumed > in_have) run->in_nbytes = 0; /* a LIST that is past the end */
        while ((driven.status = agsf_pages_run(&run, 1, steps.threads > 0 ? steps.threads : 1)) == AGSF_PAUSED)
            continue;
        if (driven.status != AGSF_OK) break;
        if (run->stop == AGSF_STOP_FAILED) {
            driven.status = run->status;
            CHECK(driven.status != AGSF_OK && run->bad_module <= AGSF_DICTIONARY_PAGE_HEADER);
            break;
        }
        driven.consumed += run->in_done;
        driven.produced += run->out_done;
        CHECK(driven.produced <= out_have);
        CHECK(run->mode == AGSF_PAGES_LIST || driven.consumed <= in_have);
        if (run->stop == AGSF_STOP_DONE) break;
        if (run->stop == AGSF_STOP_INPUT) {
            CHECK(!run->in_is_all);
            CHECK(driven.consumed > in_have || run->wanted > in_have - driven.consumed);
            in_have = steps.in < in_nbytes - in_have ? in_have + steps.in : in_nbytes;
            if (driven.consumed > in_have) in_have = driven.consumed < in_nbytes ? driven.consumed : in_nbytes;
        } else if (run->stop == AGSF_STOP_OUTPUT) {
            CHECK(run->wanted > out_have - driven.produced);
            if (out_have == out_nbytes) {
                driven.status = AGSF_SHORT;
                break;
            }
            out_have = steps.out < out_nbytes - out_have ? out_have + steps.out : out_nbytes;
        } else if (run->stop == AGSF_STOP_HEADER) {
            CHECK(run->wanted > run->header_nbytes && run->wanted <= in_nbytes);
            guarded_free(&header);
            header = guarded_new(run->wanted, AT_END);
            run->header = header.data;
            run->header_nbytes = run->wanted;
        } else {
            CHECK_EQUAL(run->stop, AGSF_STOP_TABLE);
            run->table = realloc(run->table, ++run->table_room * sizeof(*run->table));
            CHECK(run->table != NULL);
        }
    }
    guarded_free(&header);
    run->header = NULL;
    run->header_nbytes = 0;
    return driven;
}

#endif
