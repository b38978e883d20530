/* avro.c - picks fields out of Avro records: one walk over the bytes, by a program that a schema was compiled to. */
#include "agsf_avro.h"

#include "thrift.h"

enum { NESTING_MAX = 64 };

typedef struct walker {
    agsf_cursor cursor; /* Avro's numbers are encoded as the compact protocol's are */
    const uint8_t *begin;
    const int32_t *program;
    size_t length; /* of the program, in numbers */
    size_t slots;
    int64_t *values; /* of the current record */
    bool wrong;      /* the program is not one */
} walker;

static int32_t number_at(walker *self, size_t at) {
    if (at < self->length && self->program[at] >= 0) return self->program[at];
    self->wrong = true;
    self->cursor.bad = true;
    return 0;
}

static size_t left(const walker *self) { return (size_t)(self->cursor.end - self->cursor.at); }

static void pass(walker *self, int64_t nbytes) {
    if (nbytes < 0 || (uint64_t)nbytes > left(self)) {
        self->cursor.bad = true;
    } else {
        self->cursor.at += nbytes;
    }
}

static void keep(walker *self, int32_t slot, int64_t value, int64_t nbytes) {
    if (slot == 0 || self->cursor.bad) return;
    if ((size_t)slot > self->slots) {
        self->wrong = true;
        return;
    }
    self->values[2 * (slot - 1)] = value;
    self->values[2 * (slot - 1) + 1] = nbytes;
}

static void pass_number(walker *self, int32_t slot, bool is_bytes) {
    const int64_t number = agsf_thrift_int(&self->cursor);
    const uint8_t *const data = self->cursor.at;

    if (is_bytes) {
        pass(self, number);
        keep(self, slot, data - self->begin, number);
    } else {
        keep(self, slot, number, 0);
    }
}

static size_t walk(walker *self, size_t at, int depth);

/* The items of an array, or the pairs of a map. A block with a negative count says its bytes. */
static void pass_items(walker *self, size_t item, int depth) {
    for (;;) {
        const int64_t count = agsf_thrift_int(&self->cursor);
        if (self->cursor.bad || count == 0) return;
        if (count < 0) {
            pass(self, agsf_thrift_int(&self->cursor));
            continue;
        }
        for (int64_t i = 0; i < count && !self->cursor.bad; i++) {
            const uint8_t *const begin = self->cursor.at;
            walk(self, item, depth);
            if (self->cursor.at == begin) self->cursor.bad = true; /* or a few bytes could count endless nulls */
        }
    }
}

static void pass_branch(walker *self, size_t at, int depth) {
    const int32_t branches = number_at(self, at);
    const int64_t branch = agsf_thrift_int(&self->cursor);
    size_t begin = at + 1 + (size_t)branches;

    if (branch < 0 || branch >= branches) {
        self->cursor.bad = true;
        return;
    }
    for (int64_t i = 0; i < branch; i++) {
        begin += (size_t)number_at(self, at + 1 + (size_t)i);
    }
    walk(self, begin, depth);
}

/* walk() passes one value, and returns where its node ends in the program if that is not known from its length. */
static size_t walk(walker *self, size_t at, int depth) {
    const int32_t kind = number_at(self, at), length = number_at(self, at + 1), slot = number_at(self, at + 2);

    if (self->cursor.bad) return at;
    if (depth > NESTING_MAX) {
        self->cursor.bad = true;
        return at;
    }
    switch (kind) {
        case AGSF_AVRO_NULL:
            break;
        case AGSF_AVRO_NUMBER:
        case AGSF_AVRO_BYTES:
            pass_number(self, slot, kind == AGSF_AVRO_BYTES);
            break;
        case AGSF_AVRO_FIXED: {
            const uint8_t *const data = self->cursor.at;
            const int32_t nbytes = number_at(self, at + 3);
            pass(self, nbytes);
            keep(self, slot, data - self->begin, nbytes);
            break;
        }
        case AGSF_AVRO_ITEMS:
            pass_items(self, at + 3, depth + 1);
            break;
        case AGSF_AVRO_UNION:
            pass_branch(self, at + 3, depth + 1);
            break;
        case AGSF_AVRO_RECORD: {
            const size_t end = at + (size_t)length;
            for (size_t field = at + 3; field < end && !self->cursor.bad;) {
                field = walk(self, field, depth + 1);
            }
            break;
        }
        default:
            self->wrong = true;
            self->cursor.bad = true;
    }
    if (length < 3) { /* or a record would not end */
        self->wrong = true;
        self->cursor.bad = true;
    }
    return at + (size_t)length;
}

agsf_status agsf_avro_pick(const int32_t *program, size_t length, const uint8_t *data, size_t nbytes, size_t records,
                           size_t slots, int64_t *values) {
    walker self = {{data, data, false}, data, program, length, slots, values, false};

    if (nbytes > 0) self.cursor = agsf_cursor_over(data, nbytes, 0);
    for (size_t i = 0; i < records && !self.cursor.bad; i++, self.values += 2 * slots) {
        for (size_t slot = 0; slot < slots; slot++) {
            self.values[2 * slot] = 0;
            self.values[2 * slot + 1] = -1;
        }
        walk(&self, 0, 0);
    }
    if (self.wrong) return AGSF_BAD_ARGUMENT;
    return self.cursor.bad || self.cursor.at != self.cursor.end ? AGSF_BAD_FORMAT : AGSF_OK;
}
