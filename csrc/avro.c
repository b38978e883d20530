/* avro.c - picks fields out of Avro records: one walk over the bytes, by a program that a schema was compiled to. */
#include "agsf_avro.h"

#include "thrift.h"

enum { NESTING_MAX = 32 };

/* A record whose fields, or an array whose items, are being passed. */
typedef struct frame {
    size_t next, end;     /* of a record: its next field and its end, in the program */
    size_t item;          /* of an array: the node of an item; 0 for a record */
    int64_t count;        /* of an array: items that are left of the block */
    const uint8_t *begin; /* of an array: where its last item began */
} frame;

typedef struct walker {
    agsf_cursor cursor; /* Avro's numbers are encoded as the compact protocol's are */
    const uint8_t *begin;
    const int32_t *program;
    size_t length; /* of the program, in numbers */
    size_t slots;
    int64_t *values; /* of the current record */
    bool wrong;      /* the program is not one */
    size_t depth;
    frame frames[NESTING_MAX];
} walker;

static size_t wrong(walker *self) {
    self->wrong = true;
    self->cursor.bad = true;
    return 0;
}

static size_t number_at(walker *self, size_t at) {
    return at < self->length && self->program[at] >= 0 ? (size_t)self->program[at] : wrong(self);
}

static void pass(walker *self, int64_t nbytes) {
    if (nbytes < 0 || nbytes > self->cursor.end - self->cursor.at) {
        self->cursor.bad = true;
    } else {
        self->cursor.at += nbytes;
    }
}

static void keep(walker *self, size_t slot, int64_t value, int64_t nbytes) {
    if (slot == 0 || self->cursor.bad) return;
    if (slot > self->slots) {
        wrong(self);
    } else {
        self->values[2 * slot - 2] = value;
        self->values[2 * slot - 1] = nbytes;
    }
}

/* keep_within() keeps a number that its type has. Decoders would take another number for it. */
static void keep_within(walker *self, size_t slot, int64_t lowest, int64_t highest) {
    const int64_t value = agsf_thrift_int(&self->cursor);

    if (value < lowest || value > highest) self->cursor.bad = true;
    keep(self, slot, value, 0);
}

static void pass_bytes(walker *self, size_t slot, int64_t nbytes) {
    const int64_t begin = self->cursor.at - self->begin;

    pass(self, nbytes);
    keep(self, slot, begin, nbytes);
}

static void enter(walker *self, frame entered) {
    if (self->depth == NESTING_MAX) {
        wrong(self);
    } else {
        self->frames[self->depth++] = entered;
    }
}

/* branch() reads which branch of a union comes, and returns its node. */
static size_t branch(walker *self, size_t at) {
    const size_t branches = number_at(self, at);
    const int64_t chosen = agsf_thrift_int(&self->cursor);
    size_t node = at + 1 + branches;

    if (chosen < 0 || (uint64_t)chosen >= branches) self->cursor.bad = true;
    for (int64_t i = 0; i < chosen && !self->cursor.bad; i++) node += number_at(self, at + 1 + (size_t)i);
    return node;
}

/* take() passes a scalar, or enters a record or an array. */
static void take(walker *self, size_t at) {
    size_t kind = number_at(self, at);

    for (int i = 0; kind == AGSF_AVRO_UNION && !self->cursor.bad; i++) { /* Avro has no union in a union */
        at = i == 0 ? branch(self, at + 3) : wrong(self);
        kind = number_at(self, at);
    }
    if (self->cursor.bad) return;
    const size_t end = at + number_at(self, at + 1), slot = number_at(self, at + 2);
    switch (kind) {
        case AGSF_AVRO_NULL: break;
        case AGSF_AVRO_NUMBER: keep(self, slot, agsf_thrift_int(&self->cursor), 0); break;
        case AGSF_AVRO_INT: keep_within(self, slot, INT32_MIN, INT32_MAX); break;
        case AGSF_AVRO_ENUM: keep_within(self, slot, 0, (int64_t)number_at(self, at + 3) - 1); break;
        case AGSF_AVRO_BYTES: pass_bytes(self, slot, agsf_thrift_int(&self->cursor)); break;
        case AGSF_AVRO_FIXED: pass_bytes(self, slot, (int64_t)number_at(self, at + 3)); break;
        case AGSF_AVRO_ITEMS: enter(self, (frame){.item = at + 3}); break;
        case AGSF_AVRO_RECORD: enter(self, (frame){.next = at + 3, .end = end}); break;
        default: wrong(self);
    }
}

/* next_item() goes to an array's next item; false at its end. A block with a negative count says its bytes. */
static bool next_item(walker *self, frame *array) {
    while (array->count == 0 && !self->cursor.bad) {
        array->count = agsf_thrift_int(&self->cursor);
        array->begin = NULL;
        if (array->count == 0) return false;
        if (array->count < 0) {
            pass(self, agsf_thrift_int(&self->cursor));
            array->count = 0;
        }
    }
    if (self->cursor.at == array->begin) self->cursor.bad = true; /* or a few bytes could count endless nulls */
    array->begin = self->cursor.at;
    array->count--;
    return true;
}

static void pass_record(walker *self) {
    self->depth = 0;
    take(self, 0);
    while (self->depth > 0 && !self->cursor.bad) {
        frame *const top = &self->frames[self->depth - 1];
        if (top->item != 0) {
            if (next_item(self, top)) {
                take(self, top->item);
            } else {
                self->depth--;
            }
        } else if (top->next < top->end) {
            const size_t field = top->next, length = number_at(self, field + 1);
            top->next = field + (length != 0 ? length : wrong(self));
            take(self, field);
        } else {
            self->depth--;
        }
    }
}

agsf_status agsf_avro_pick(const int32_t *program, size_t length, const uint8_t *data, size_t nbytes, size_t records,
                           size_t slots, int64_t *values) {
    walker self = {{data, data, false}, data, program, length, slots, values, false, 0, {{0}}};

    if (nbytes > 0) self.cursor = agsf_cursor_over(data, nbytes, 0);
    for (size_t i = 0; i < records && !self.cursor.bad; i++, self.values += 2 * slots) {
        for (size_t slot = 0; slot < slots; slot++) {
            self.values[2 * slot] = 0;
            self.values[2 * slot + 1] = -1;
        }
        pass_record(&self);
    }
    if (self.wrong) return AGSF_BAD_ARGUMENT;
    return self.cursor.bad || self.cursor.at != self.cursor.end ? AGSF_BAD_FORMAT : AGSF_OK;
}
