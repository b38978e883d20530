/*
 * test_avro.c - fields of Avro records, and columns, decoded and encoded.
 *
 * Guards: each kind is passed as long as it is, and what a slot names is found; records that are cut anywhere, and
 * counts, lengths and branches that lie, are refused and never read past the end; a program that is none is refused.
 * Columns have each value in its place, zeros for null, and are never written past their room. Arrays are encoded from
 * any row on, never past the room, and never read past what they are said to have, however they are changed.
 */
#include "support.h"

#include "agsf_avro.h"

/* A record: a number (slot 1), null or bytes (slot 2), an array of records of a number and bytes, 4 fixed bytes. */
/* clang-format off */
static const int32_t PROGRAM[] = {
    AGSF_AVRO_RECORD, 34, 0,
    AGSF_AVRO_NUMBER, 3, 1,
    AGSF_AVRO_UNION, 12, 0, 2, 3, 3, AGSF_AVRO_NULL, 3, 0, AGSF_AVRO_BYTES, 3, 2,
    AGSF_AVRO_ITEMS, 12, 0, AGSF_AVRO_RECORD, 9, 0, AGSF_AVRO_NUMBER, 3, 0, AGSF_AVRO_BYTES, 3, 0,
    AGSF_AVRO_FIXED, 4, 3, 4,
};
/* clang-format on */

static agsf_status pick(const int32_t *program, size_t length, const char *hex, size_t records, int64_t *values) {
    guarded data = guarded_new(strlen(hex) / 2, AT_END);
    agsf_status status;

    from_hex(data.data, hex);
    status = agsf_avro_pick(program, length, data.data, data.nbytes, records, 3, values);
    guarded_free(&data);
    return status;
}

static void check_records(void) {
    int64_t values[12];

    /* 5, "ab", [(1, "x"), (2, "")], 4 bytes; then -3, null, [] and 4 bytes */
    CHECK_EQUAL(pick(PROGRAM, COUNT(PROGRAM), "0a02046162040202780400000102030405000000000000", 2, values), AGSF_OK);
    CHECK_EQUAL(values[0], 5);
    CHECK_EQUAL(values[1], 0);
    CHECK_EQUAL(values[2], 3);
    CHECK_EQUAL(values[3], 2);
    CHECK_EQUAL(values[4], 12);
    CHECK_EQUAL(values[5], 4);
    CHECK(values[6] == -3);
    CHECK(values[9] == -1); /* null */
    CHECK_EQUAL(values[10], 19);
    /* an array's block that says its bytes: -2, 5 bytes */
    CHECK_EQUAL(pick(PROGRAM, COUNT(PROGRAM), "0a00030a02027804000001020304", 1, values), AGSF_OK);
    CHECK_EQUAL(values[0], 5);
}

static void check_cuts(void) {
    static const char whole[] = "0a020461620402027804000001020304";
    int64_t values[6];
    char part[sizeof(whole)];

    CHECK_EQUAL(pick(PROGRAM, COUNT(PROGRAM), whole, 1, values), AGSF_OK);
    for (size_t n = 0; n < sizeof(whole) - 1; n += 2) {
        memcpy(part, whole, n);
        part[n] = '\0';
        checking("the first %zu digits", n);
        CHECK_EQUAL(pick(PROGRAM, COUNT(PROGRAM), part, 1, values), AGSF_BAD_FORMAT);
    }
    CHECK_EQUAL(pick(PROGRAM, COUNT(PROGRAM), "0a02046162040202780400000102030400", 1, values), AGSF_BAD_FORMAT);
}

/* A number that its type does not have is refused: a decoder could wrap it. */
static void check_bounds(void) {
    static const int32_t of_int[] = {AGSF_AVRO_INT, 3, 1}, of_enum[] = {AGSF_AVRO_ENUM, 4, 1, 3};
    static const int32_t of_none[] = {AGSF_AVRO_ENUM, 4, 1, 0};
    int64_t values[6];

    CHECK_EQUAL(pick(of_int, COUNT(of_int), "feffffff0f", 1, values), AGSF_OK);
    CHECK(values[0] == INT32_MAX);
    CHECK_EQUAL(pick(of_int, COUNT(of_int), "ffffffff0f", 1, values), AGSF_OK);
    CHECK(values[0] == INT32_MIN);
    CHECK_EQUAL(pick(of_int, COUNT(of_int), "8080808010", 1, values), AGSF_BAD_FORMAT);
    CHECK_EQUAL(pick(of_int, COUNT(of_int), "8180808010", 1, values), AGSF_BAD_FORMAT);
    CHECK_EQUAL(pick(of_int, COUNT(of_int), "ffffffffffffffffff01", 1, values), AGSF_BAD_FORMAT);
    CHECK_EQUAL(pick(of_enum, COUNT(of_enum), "04", 1, values), AGSF_OK);
    CHECK_EQUAL(values[0], 2);
    CHECK_EQUAL(pick(of_enum, COUNT(of_enum), "06", 1, values), AGSF_BAD_FORMAT);
    CHECK_EQUAL(pick(of_enum, COUNT(of_enum), "01", 1, values), AGSF_BAD_FORMAT);
    CHECK_EQUAL(pick(of_none, COUNT(of_none), "00", 1, values), AGSF_BAD_FORMAT);
}

static void check_lies(void) {
    static const char *const lies[] = {
        "0a0401",                     /* a third branch */
        "0a01",                       /* branch -1 */
        "0a02ffffffffffffffffff01",   /* a length below 0 */
        "0a02feffffffffffffffff01",   /* the longest length */
        "0a00feffffffffffffffff01",   /* the largest count */
        "0a0003feffffffffffffffff01", /* a block that says the largest length */
        "0a0003ffffffffffffffffff01", /* and one below 0 */
    };
    static const int32_t nulls[] = {AGSF_AVRO_ITEMS, 6, 0, AGSF_AVRO_NULL, 3, 0};
    int64_t values[6];

    for (size_t i = 0; i < COUNT(lies); i++) {
        checking("%s", lies[i]);
        CHECK_EQUAL(pick(PROGRAM, COUNT(PROGRAM), lies[i], 1, values), AGSF_BAD_FORMAT);
    }
    checking("2**62 nulls in an array");
    CHECK_EQUAL(pick(nulls, COUNT(nulls), "feffffffffffffffff0000", 1, values), AGSF_BAD_FORMAT);
}

/* Any numbers as a program, over any bytes: refused, or followed within bounds. */
static void check_programs(void) {
    uint64_t state = 7;
    int64_t values[6];

    for (int round = 0; round < 20000; round++) {
        int32_t program[COUNT(PROGRAM)];
        uint8_t data[16];
        agsf_status status;
        memcpy(program, PROGRAM, sizeof(program));
        for (int change = 0; change < 3; change++) {
            program[random_below(&state, COUNT(program))] = (int32_t)random_below(&state, 40) - 2;
        }
        fill(data, sizeof(data), (uint64_t)round);
        status = agsf_avro_pick(program, random_below(&state, COUNT(program) + 1), data, sizeof(data), 1, 3, values);
        CHECK(status == AGSF_OK || status == AGSF_BAD_FORMAT || status == AGSF_BAD_ARGUMENT);
    }
    CHECK_EQUAL(pick(NULL, 0, "00", 1, values), AGSF_BAD_ARGUMENT);
}

/* Columns of three rows of: a number, null or bytes, a boolean or null, an enum of 3, 3 fixed bytes, an int. */
enum { ROWS = 3, COLUMNS = 6, TEXT_ROOM = 8 };

typedef struct made {
    agsf_avro_column columns[COLUMNS];
    int64_t numbers[ROWS];
    int32_t offsets[ROWS + 1], symbols[ROWS], ints[ROWS];
    uint8_t fixed[3 * ROWS], bits, valid_texts, valid_bits;
    guarded text;
} made;

static agsf_status columns_of(made *out, const char *hex, size_t records, size_t row) {
    guarded data = guarded_new(strlen(hex) / 2, AT_END);
    agsf_status status;
    agsf_avro_column columns[COLUMNS] = {
        {AGSF_AVRO_NUMBER, -1, 0, false, (uint8_t *)out->numbers, 0, NULL, NULL},
        {AGSF_AVRO_BYTES, 0, 0, false, out->text.data, out->text.nbytes, out->offsets, &out->valid_texts},
        {AGSF_AVRO_FIXED, 1, 1, true, &out->bits, 0, NULL, &out->valid_bits},
        {AGSF_AVRO_ENUM, -1, 3, false, (uint8_t *)out->symbols, 0, NULL, NULL},
        {AGSF_AVRO_FIXED, -1, 3, false, out->fixed, 0, NULL, NULL},
        {AGSF_AVRO_INT, -1, 0, false, (uint8_t *)out->ints, 0, NULL, NULL},
    };

    from_hex(data.data, hex);
    status = agsf_avro_columns(data.data, data.nbytes, records, row, columns, COLUMNS);
    for (size_t i = 0; i < COLUMNS && status == AGSF_OK; i++) columns[i].values = NULL; /* each is passed over, too */
    if (status == AGSF_OK)
        CHECK_EQUAL(agsf_avro_columns(data.data, data.nbytes, records, row, columns, COLUMNS), AGSF_OK);
    guarded_free(&data);
    return status;
}

static void check_columns(void) {
    static const char first[] = "0a020461620001046162630d", others[] = "0500020078797a0200020000000441424304";
    static const char *const lies[] = {
        "0a040461620001046162630d",                   /* a third branch */
        "0a020161620001046162630d",                   /* a length below 0 */
        "0a020661620001046162630d",                   /* a longer one than there are bytes */
        "0a020461620001066162630d",                   /* a fourth symbol */
        "0a020461620001046162638080808010",           /* more than 32 bits */
        "0a020461620001046162630d00",                 /* more than a record */
        "ffffffffffffffffff02020461620001046162630d", /* more than 64 bits */
    };
    made out = {.bits = 0xff, .valid_texts = 0xff, .valid_bits = 0xff, .text = guarded_new(TEXT_ROOM, AT_END)};
    char part[sizeof(first)];

    CHECK_EQUAL(columns_of(&out, first, 1, 0), AGSF_OK);
    CHECK_EQUAL(columns_of(&out, others, 2, 1), AGSF_OK);
    CHECK(out.numbers[0] == 5 && out.numbers[1] == -3 && out.numbers[2] == 0);
    CHECK(out.offsets[0] == 0 && out.offsets[1] == 2 && out.offsets[2] == 2 && out.offsets[3] == 2);
    CHECK(memcmp(out.text.data, "ab", 2) == 0);
    CHECK_EQUAL(out.valid_texts, 5);
    CHECK_EQUAL(out.valid_bits, 5);
    CHECK_EQUAL(out.bits, 1);
    CHECK(out.symbols[0] == 2 && out.symbols[1] == 0 && out.symbols[2] == 2);
    CHECK(memcmp(out.fixed, "abcxyzABC", 9) == 0);
    CHECK(out.ints[0] == -7 && out.ints[1] == 1 && out.ints[2] == 2);
    CHECK_EQUAL(columns_of(&out, first, 2, 0), AGSF_BAD_FORMAT);
    CHECK_EQUAL(columns_of(&out, "0a02126161616161616161610001046162630d", 1, 0), AGSF_BAD_ARGUMENT);
    for (size_t n = 0; n < sizeof(first) - 1; n += 2) {
        memcpy(part, first, n);
        part[n] = '\0';
        checking("the first %zu digits", n);
        CHECK_EQUAL(columns_of(&out, part, 1, 0), AGSF_BAD_FORMAT);
    }
    for (size_t i = 0; i < COUNT(lies); i++) {
        checking("%s", lies[i]);
        CHECK_EQUAL(columns_of(&out, lies[i], 1, 0), AGSF_BAD_FORMAT);
    }
    guarded_free(&out.text);
}

/*
 * Arrays whose row 0 is row 1 of their buffers. Row by row: -3 and 5; null and "ab"; true and false; shorts -2 and 300;
 * -1.28 and null, as decimals of 2 bytes; [7, null] and []; {"x": 1 byte} and {}; records of a float, and of nothing.
 */
enum { INSIDE_ROWS = 2 };
static const int64_t NUMBERS[] = {99, -3, 5};
static const int16_t SHORTS[] = {99, -2, 300};
static const int32_t TEXTS[] = {0, 1, 1, 3}, LISTS[] = {0, 0, 2, 2}, ITEMS[] = {7, 99}, MAPS[] = {0, 0, 1, 1};
static const int32_t KEYS[] = {0, 1};
static const float FLOATS[] = {0.5F, 2};
static const uint8_t LAST[] = {4}, MIDDLE[] = {2}, FIRST[] = {1}, BYTE[] = {0x80};
static const uint8_t DECIMALS[48] = {[16] = 0x80, [17] = 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                                     0xff,        0xff,        0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
/* clang-format off */
static const agsf_avro_array ARRAYS[] = {
    {AGSF_AVRO_NUMBER, false, 0, 1, 1, 2, NULL, NULL, (const uint8_t *)NUMBERS, 0},
    {AGSF_AVRO_BYTES, true, 0, 1, 1, 2, LAST, TEXTS, (const uint8_t *)"_ab", 3},
    {AGSF_AVRO_FIXED, false, 0, 1, 1, 2, NULL, NULL, MIDDLE, 0},
    {AGSF_AVRO_INT, false, 2, 1, 1, 2, NULL, NULL, (const uint8_t *)SHORTS, 0},
    {AGSF_AVRO_DECIMAL, true, 2, 1, 1, 2, MIDDLE, NULL, DECIMALS, 0},
    {AGSF_AVRO_ITEMS, false, 0, 2, 1, 2, NULL, LISTS, NULL, 0},
        {AGSF_AVRO_INT, true, 4, 1, 0, INSIDE_ROWS, FIRST, NULL, (const uint8_t *)ITEMS, 0},
    {AGSF_AVRO_ITEMS, false, 0, 3, 1, 2, NULL, MAPS, NULL, 0},
        {AGSF_AVRO_BYTES, false, 0, 1, 0, 1, NULL, KEYS, (const uint8_t *)"x", 1},
        {AGSF_AVRO_INT, false, 1, 1, 0, 1, NULL, NULL, BYTE, 0},
    {AGSF_AVRO_RECORD, false, 0, 4, 1, 2, NULL, NULL, NULL, 0},
        {AGSF_AVRO_FIXED, false, 4, 1, 0, 2, NULL, NULL, (const uint8_t *)FLOATS, 0},
        {AGSF_AVRO_RECORD, false, 0, 1, 0, 2, NULL, NULL, NULL, 0},
        {AGSF_AVRO_NULL, false, 0, 1, 0, 2, NULL, NULL, NULL, 0},
};
/* clang-format on */
static const char RECORDS[] = "05"
                              "02"
                              "01"
                              "03"
                              "00ff80"
                              "04000e0200"
                              "020278ff0100"
                              "0000003f"
                              "0a"
                              "00046162"
                              "00"
                              "d804"
                              "02"
                              "00"
                              "00"
                              "00000040";

typedef struct encoded {
    size_t rows, nbytes;
    uint8_t bytes[100];
} encoded;

static agsf_status encode(const agsf_avro_array *arrays, size_t row, size_t limit, size_t room, encoded *out) {
    guarded buffer = guarded_new(room, AT_END);
    const agsf_status status =
        agsf_avro_records(arrays, COUNT(ARRAYS), row, 2, limit, buffer.data, room, &out->rows, &out->nbytes);

    CHECK(out->nbytes <= room && room <= sizeof(out->bytes));
    memcpy(out->bytes, buffer.data, out->nbytes);
    guarded_free(&buffer);
    return status;
}

static void check_arrays(void) {
    uint8_t expected[(sizeof(RECORDS) - 1) / 2];
    const size_t first = 22, room = sizeof(expected) + 10;
    encoded out;

    from_hex(expected, RECORDS);
    CHECK_EQUAL(encode(ARRAYS, 0, SIZE_MAX, room, &out), AGSF_OK);
    CHECK_EQUAL(out.rows, 2);
    CHECK_EQUAL(out.nbytes, sizeof(expected));
    CHECK(memcmp(out.bytes, expected, sizeof(expected)) == 0);
    CHECK_EQUAL(encode(ARRAYS, 1, SIZE_MAX, room, &out), AGSF_OK);
    CHECK_EQUAL(out.nbytes, sizeof(expected) - first);
    CHECK(memcmp(out.bytes, expected + first, sizeof(expected) - first) == 0);
    for (size_t limit = 0; limit < sizeof(expected); limit++) { /* a row that reaches the limit is the last one */
        checking("a limit of %zu bytes", limit);
        CHECK_EQUAL(encode(ARRAYS, 0, limit, room, &out), AGSF_OK);
        CHECK_EQUAL(out.rows, limit <= first ? 1 : 2);
    }
    for (size_t less = 0; less < room; less++) {
        checking("room for %zu bytes", less);
        CHECK_EQUAL(encode(ARRAYS, 0, SIZE_MAX, less, &out), AGSF_OK);
        CHECK_EQUAL(out.nbytes, out.rows == 0 ? 0 : out.rows == 1 ? first : sizeof(expected));
        CHECK(memcmp(out.bytes, expected, out.nbytes) == 0);
        CHECK(out.rows == 2 || less < sizeof(expected) + 10);
    }
    CHECK_EQUAL(encode(ARRAYS, 2, SIZE_MAX, room, &out), AGSF_OK);
    CHECK_EQUAL(out.rows, 0);
}

/* What is not as Avro's types say is refused. */
static void check_refused(void) {
    static const int32_t backwards[] = {0, 1, 3, 1}, below[] = {0, 1, -1, 3}, behind[] = {0, 0, 3, 3};
    static const uint8_t sign[48] = {[16] = 0, 0x80}, high[48] = {[18] = 1}, low[48] = {[16] = 0, 0, 0xff, 0xff};
    agsf_avro_array arrays[COUNT(ARRAYS)];
    encoded out;

#define REFUSED(index, field, value) \
    do { \
        checking("%s", "of " #index " " #field " is " #value); \
        memcpy(arrays, ARRAYS, sizeof(arrays)); \
        arrays[index].field = value; \
        CHECK_EQUAL(encode(arrays, 0, SIZE_MAX, 100, &out), AGSF_BAD_ARGUMENT); \
    } while (0)
    REFUSED(0, valid, LAST); /* null, and no union */
    REFUSED(0, rows, 1);     /* the second row is missing */
    REFUSED(1, offsets, backwards);
    REFUSED(1, offsets, below);
    REFUSED(1, nbytes, 2);
    REFUSED(4, size, 0); /* a decimal of no bytes */
    REFUSED(4, size, 17);
    REFUSED(4, values, sign);
    REFUSED(4, values, high);
    REFUSED(4, values, low);
    REFUSED(5, offsets, behind);
    REFUSED(5, count, 1); /* a list without items */
    REFUSED(6, rows, 1);
    REFUSED(0, kind, AGSF_AVRO_UNION);
    REFUSED(0, count, 0);
    REFUSED(13, count, 2); /* more than there are */
    REFUSED(12, count, 3);
#undef REFUSED
}

/* Arrays in arrays, up to 32 deep. */
static void check_depth(void) {
    agsf_avro_array arrays[34];
    size_t rows, nbytes;
    uint8_t out[10];

    for (size_t depth = 32; depth <= 33; depth++) {
        for (size_t i = 0; i <= depth; i++) {
            arrays[i] = (agsf_avro_array){AGSF_AVRO_RECORD, false, 0, depth + 1 - i, 0, 1, NULL, NULL, NULL, 0};
        }
        arrays[depth].kind = AGSF_AVRO_NULL;
        CHECK_EQUAL(agsf_avro_records(arrays, depth + 1, 0, 1, 1, out, sizeof(out), &rows, &nbytes),
                    depth == 32 ? AGSF_OK : AGSF_BAD_ARGUMENT);
    }
}

/* Any change of what arrays say of each other: refused, or followed within bounds. */
static void check_changed(void) {
    uint64_t state = 7;

    for (int round = 0; round < 20000; round++) {
        agsf_avro_array arrays[COUNT(ARRAYS)];
        int32_t lists[] = {0, 0, 2, 2}, texts[] = {0, 1, 1, 3};
        agsf_avro_array *const changed = &arrays[random_below(&state, COUNT(arrays))];
        encoded out;
        memcpy(arrays, ARRAYS, sizeof(arrays));
        arrays[1].offsets = texts;
        arrays[5].offsets = lists;
        changed->count = (size_t)random_below(&state, COUNT(arrays) + 2);
        if (random_below(&state, 2) == 0) changed->rows = (size_t)random_below(&state, changed->rows + 1);
        lists[1 + random_below(&state, 3)] = (int32_t)random_below(&state, 6) - 2;
        texts[1 + random_below(&state, 3)] = (int32_t)random_below(&state, 6) - 2;
        const agsf_status status = encode(arrays, 0, SIZE_MAX, (size_t)random_below(&state, 80), &out);
        CHECK(status == AGSF_OK || status == AGSF_BAD_ARGUMENT);
    }
}

int main(void) {
    start();
    check_records();
    check_cuts();
    check_bounds();
    check_lies();
    check_programs();
    check_columns();
    check_arrays();
    check_refused();
    check_depth();
    check_changed();
    return 0;
}
