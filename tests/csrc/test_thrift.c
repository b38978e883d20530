/*
 * test_thrift.c - the compact protocol: the cursor, edits, and what Parquet's footers and offset indexes are made of
 * it.
 *
 * Guards: every type is passed as long as it is, cut anywhere it is bad; nesting, counts and lengths that lie are bad,
 * and never read past the end; ids that do not ascend are refused; a struct that is edited is, byte by byte, the one
 * that would have been written so, in just the room that was asked for; crypto_metadata leaves a footer in every way
 * that it stands there; an offset index moves, and does not grow beyond its room; a footer takes no more memory than it
 * says.
 */
#include "pages.h"
#include "thrift.h"

/* ---------------------------------------------------------------- values */

static void check_numbers(void) {
    static const struct {
        const char *hex;
        uint64_t value;
        bool bad;
    } cases[] = {
        {"00", 0, false},
        {"7f", 127, false},
        {"8001", 128, false},
        {"ffffffffffffffffff01", UINT64_MAX, false},
        {"80808080808080808000", 0, false},
        {"ffffffffffffffffff02", 0, true},
        {"8080808080808080808000", 0, true},
        {"ff", 0, true},
        {"", 0, true},
    };

    for (size_t i = 0; i < COUNT(cases); i++) {
        guarded data = guarded_new(strlen(cases[i].hex) / 2, AT_END);
        agsf_cursor cursor = {data.data, data.data + data.nbytes, false};
        uint8_t back[10];
        checking("varint %s", cases[i].hex);
        from_hex(data.data, cases[i].hex);
        CHECK_EQUAL(agsf_thrift_varint(&cursor), cases[i].value);
        CHECK_EQUAL(cursor.bad, cases[i].bad);
        CHECK(cursor.at == cursor.end);
        CHECK_EQUAL(agsf_thrift_put_varint(back, cases[i].value) - back, agsf_thrift_varint_nbytes(cases[i].value));
        guarded_free(&data);
    }
    for (int bit = 0; bit < 64; bit++) {
        const int64_t values[] = {(int64_t)(UINT64_C(1) << bit), -(int64_t)(UINT64_C(1) << bit % 63),
                                  (INT64_C(1) << bit % 62) - 1};
        for (size_t i = 0; i < COUNT(values); i++) {
            uint8_t data[10];
            agsf_cursor cursor = {data, agsf_thrift_put_varint(data, agsf_thrift_zigzag(values[i])), false};
            CHECK(agsf_thrift_int(&cursor) == values[i] && !cursor.bad && cursor.at == cursor.end);
        }
    }
}

/* What is passed, and what is passed as an element of a list. */
static void check_skip(void) {
    static const struct {
        unsigned type;
        const char *hex;
        bool in_list;
    } cases[] = {
        {AGSF_THRIFT_TRUE, "", false},
        {AGSF_THRIFT_FALSE, "", false},
        {AGSF_THRIFT_TRUE, "02", true},
        {AGSF_THRIFT_FALSE, "01", true},
        {AGSF_THRIFT_I8, "80", false},
        {AGSF_THRIFT_I16, "8001", false},
        {AGSF_THRIFT_I32, "8080808001", false},
        {AGSF_THRIFT_I64, "ffffffffffffffffff01", false},
        {AGSF_THRIFT_DOUBLE, "0102030405060708", false},
        {AGSF_THRIFT_BINARY, "03616263", false},
        {AGSF_THRIFT_BINARY, "00", false},
        {AGSF_THRIFT_UUID, "000102030405060708090a0b0c0d0e0f", false},
        {AGSF_THRIFT_LIST, "00", false},
        {AGSF_THRIFT_LIST, "310102ff", false},
        {AGSF_THRIFT_SET, "25028001", false},
        {AGSF_THRIFT_LIST, "f11001020102010201020102010201020102", false}, /* 16 bools */
        {AGSF_THRIFT_LIST, "f61400020406080a0c0e10121416181a1c1e20222426", false},
        {AGSF_THRIFT_LIST,
         "29"
         "180161"
         "31010201",
         false}, /* of lists: one of a string, and one of bools */
        {AGSF_THRIFT_MAP, "00", false},
        {AGSF_THRIFT_MAP,
         "0285"
         "016102"
         "016204",
         true}, /* string to i32 */
        {AGSF_THRIFT_MAP, "01110102", false},
        {AGSF_THRIFT_MAP, "011d01000102030405060708090a0b0c0d0e0f", false},
        {AGSF_THRIFT_STRUCT, "00", false},
        {AGSF_THRIFT_STRUCT,
         "11"
         "158001"
         "0c0400"
         "1c00"
         "00",
         false},
        {AGSF_THRIFT_STRUCT,
         "1c1c1c1c00000000"
         "00",
         false},
    };

    for (size_t i = 0; i < COUNT(cases); i++) {
        uint8_t bytes[100];
        size_t nbytes = strlen(cases[i].hex) / 2;
        from_hex(bytes, cases[i].hex);
        for (size_t cut = 0; cut <= nbytes; cut++) {
            guarded data = guarded_copy(bytes, cut, AT_END);
            agsf_cursor cursor = {data.data, data.data + cut, false};
            checking("type %u, %s, cut to %zu", cases[i].type, cases[i].hex, cut);
            agsf_thrift_skip(&cursor, cases[i].type, cases[i].in_list);
            if (cut < nbytes) {
                CHECK(cursor.bad);
            } else {
                CHECK(!cursor.bad && cursor.at == cursor.end);
            }
            guarded_free(&data);
        }
    }
    checking("types that are none");
    for (unsigned type = 0; type < 16; type++) {
        uint8_t zeros[32] = {0};
        agsf_cursor cursor = {zeros, zeros + sizeof(zeros), false};
        agsf_thrift_skip(&cursor, type, false);
        CHECK_EQUAL(cursor.bad, type == AGSF_THRIFT_STOP || type > AGSF_THRIFT_UUID);
    }
}

static void check_lies(void) {
    static const struct {
        unsigned type;
        const char *hex;
    } cases[] = {
        {AGSF_THRIFT_BINARY, "0461"},
        {AGSF_THRIFT_BINARY, "ffffffffffffffffff0161"},
        {AGSF_THRIFT_LIST, "3101"},
        {AGSF_THRIFT_LIST, "f5ffffffff0f00"},
        {AGSF_THRIFT_LIST, "f3ffffffffffffffffff01"},
        {AGSF_THRIFT_LIST, "1000"},
        {AGSF_THRIFT_LIST, "1e00"},
        {AGSF_THRIFT_MAP, "01"},
        {AGSF_THRIFT_MAP, "ff0155"},
        {AGSF_THRIFT_MAP, "ffffffffffffffffff01550000"},
        {AGSF_THRIFT_MAP, "0250000000"},
        {AGSF_THRIFT_STRUCT, "1e00"},
        {AGSF_THRIFT_STRUCT, "05"},
        {AGSF_THRIFT_STRUCT, "15"},
    };
    uint8_t nested[300];

    for (size_t i = 0; i < COUNT(cases); i++) {
        guarded data = guarded_new(strlen(cases[i].hex) / 2, AT_END);
        agsf_cursor cursor = {data.data, data.data + data.nbytes, false};
        checking("a lie, %s", cases[i].hex);
        from_hex(data.data, cases[i].hex);
        agsf_thrift_skip(&cursor, cases[i].type, false);
        CHECK(cursor.bad && cursor.at == cursor.end);
        guarded_free(&data);
    }
    for (unsigned depth = 60; depth < 70; depth++) {
        for (unsigned kind = 0; kind < 3; kind++) { /* structs, lists, maps inside each other */
            uint8_t *out = nested;
            agsf_cursor cursor = {nested, nested, false};
            checking("nesting %u of kind %u", depth, kind);
            for (unsigned i = 1; i < depth; i++) {
                static const char *const heads[] = {"1c", "19", "013b"};
                from_hex(out, heads[kind]);
                out += strlen(heads[kind]) / 2;
                if (kind == 2) *out++ = 1; /* the key */
            }
            *out++ = 0;
            if (kind == 0) memset(out, 0, depth - 1), out += depth - 1;
            cursor.end = out;
            agsf_thrift_skip(&cursor,
                             kind == 0   ? AGSF_THRIFT_STRUCT
                             : kind == 1 ? AGSF_THRIFT_LIST
                                         : AGSF_THRIFT_MAP,
                             false);
            CHECK_EQUAL(cursor.bad, depth > 64);
        }
    }
}

static void check_fields(void) {
    static const struct {
        const char *hex;
        int16_t ids[3];
        bool bad;
    } cases[] = {
        {"00", {0}, false},
        {"1100", {1}, false},
        {"f100", {15}, false},
        {"01fcff0300", {32766}, false},
        {"01feff031100", {32767}, true},
        {"01feff030200", {32767}, true},
        {"11012001", {1, 16}, true},
        {"110120f100", {1, 16, 31}, false},
        {"110102", {1}, true},
        {"11010400", {1, 2}, false},
        {"11110102", {1, 2}, true},
        {"0100", {0}, true},
        {"0101", {0}, true},
        {"01ff01", {0}, true},
        {"0180800400", {0}, true},
        {"01ffffffffffffffffff0100", {0}, true},
        {"01", {0}, true},
        {"", {0}, true},
        {"31010400", {3}, true},
    };

    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *const hex = cases[i].hex;
        agsf_cursor cursor;
        int16_t id = 0;
        unsigned type, found = 0;
        guarded data;
        data = guarded_new(strlen(hex) / 2, AT_END);
        from_hex(data.data, hex);
        checking("fields %s", hex);
        cursor = (agsf_cursor){data.data, data.data + data.nbytes, false};
        while (agsf_thrift_field(&cursor, &id, &type)) {
            CHECK(type == AGSF_THRIFT_TRUE || type == AGSF_THRIFT_FALSE);
            CHECK(found < 3 && cases[i].ids[found++] == id);
        }
        CHECK_EQUAL(cursor.bad, cases[i].bad);
        CHECK(found == 3 || cases[i].ids[found] == 0);
        guarded_free(&data);
    }
}

/* ---------------------------------------------------------------- edits */

enum { FIELDS_MAX = 12, STRUCT_ROOM = 4000 };

struct field {
    int id;
    unsigned type;
    uint8_t value[40];
    size_t nbytes;
};

static size_t put_struct(uint8_t *out, const struct field *fields, size_t n) {
    uint8_t *const begin = out;
    int last = 0;

    for (size_t i = 0; i < n; i++) {
        out = put_field(out, &last, fields[i].id, fields[i].type, false);
        memcpy(out, fields[i].value, fields[i].nbytes);
        out += fields[i].nbytes;
    }
    *out++ = AGSF_THRIFT_STOP;
    return (size_t)(out - begin);
}

static void random_value(struct field *field, uint64_t *random) {
    static const struct {
        unsigned type;
        const char *hex;
    } values[] = {
        {AGSF_THRIFT_TRUE, ""},
        {AGSF_THRIFT_FALSE, ""},
        {AGSF_THRIFT_I32, "8001"},
        {AGSF_THRIFT_BINARY, "0568656c6c6f"},
        {AGSF_THRIFT_STRUCT, "150200"},
        {AGSF_THRIFT_STRUCT, "00"},
        {AGSF_THRIFT_LIST, "f110"
                           "01020102010201020102010201020102"},
        {AGSF_THRIFT_UUID, "000102030405060708090a0b0c0d0e0f"},
        {AGSF_THRIFT_MAP, "01110102"},
        {AGSF_THRIFT_I64, "00"},
    };
    const size_t i = (size_t)random_below(random, COUNT(values));

    field->type = values[i].type;
    from_hex(field->value, values[i].hex);
    field->nbytes = strlen(values[i].hex) / 2;
}

/* Fields in order; ids near each other, or far. */
static size_t random_fields(struct field *fields, uint64_t *random) {
    const size_t n = (size_t)random_below(random, FIELDS_MAX);
    int id = 0;

    for (size_t i = 0; i < n; i++) {
        id += 1 + (int)random_below(random, random_below(random, 4) ? 4 : random_below(random, 2) ? 20 : 2700);
        fields[i].id = id;
        random_value(&fields[i], random);
    }
    return n;
}

static void check_splices(void) {
    uint64_t random = 1;

    for (unsigned turn = 0; turn < 20000; turn++) {
        struct field fields[FIELDS_MAX], wanted[2 * FIELDS_MAX], changes[FIELDS_MAX];
        agsf_thrift_edit edits[FIELDS_MAX];
        uint8_t was[STRUCT_ROOM], is[STRUCT_ROOM];
        const size_t n = random_fields(fields, &random), was_nbytes = put_struct(was, fields, n);
        const size_t behind = (size_t)random_below(&random, 3); /* bytes that follow the struct */
        size_t nedits = 0, nwanted = 0, is_nbytes, written = 0, end = 0;
        guarded in, out;

        checking("splice %u", turn);
        /* Some fields that are there are replaced or removed; some that are missing are put in, or removed. */
        for (size_t i = 0, id = 1; i <= n; id = (size_t)(i < n ? fields[i].id : 0) + 1, i++) {
            const size_t next = i < n ? (size_t)fields[i].id : id + 30;
            if (id < next && random_below(&random, 3) == 0 && nedits < FIELDS_MAX - 1) {
                changes[nedits].id = (int)(id + random_below(&random, next - id));
                random_value(&changes[nedits], &random);
                if (random_below(&random, 4) == 0) {
                    changes[nedits].type = AGSF_THRIFT_STOP;
                } else {
                    wanted[nwanted++] = changes[nedits];
                }
                nedits++;
            }
            if (i == n) break;
            if (random_below(&random, 3) == 0 && nedits < FIELDS_MAX - 1) {
                changes[nedits].id = fields[i].id;
                random_value(&changes[nedits], &random);
                if (random_below(&random, 2) == 0) {
                    changes[nedits].type = AGSF_THRIFT_STOP;
                } else {
                    wanted[nwanted++] = changes[nedits];
                }
                nedits++;
            } else {
                wanted[nwanted++] = fields[i];
            }
        }
        for (size_t i = 0; i < nedits; i++) {
            edits[i] = (agsf_thrift_edit){(int16_t)changes[i].id, changes[i].type, changes[i].value,
                                          changes[i].type == AGSF_THRIFT_STOP ? 0 : changes[i].nbytes};
        }
        is_nbytes = put_struct(is, wanted, nwanted);
        memset(was + was_nbytes, 0xff, behind);
        in = guarded_copy(was, was_nbytes + behind, AT_END);
        out = guarded_new(agsf_thrift_splice_nbytes(was_nbytes, edits, nedits), AT_END);
        CHECK_EQUAL(agsf_thrift_splice(in.data, in.nbytes, edits, nedits, out.data, &written, &end), AGSF_OK);
        CHECK_EQUAL(end, was_nbytes);
        CHECK_EQUAL(written, is_nbytes);
        CHECK(memcmp(out.data, is, is_nbytes) == 0);
        guarded_free(&in);
        in = guarded_copy(was, was_nbytes - 1, AT_END); /* its end is missing */
        CHECK_EQUAL(agsf_thrift_splice(in.data, in.nbytes, edits, nedits, out.data, &written, &end), AGSF_BAD_FORMAT);
        guarded_free(&in);
        guarded_free(&out);
    }
}

static void check_splice_heads(void) {
    /* A long head that could be a short one stays, unless something before it changed. */
    static const uint8_t in[] = {0x05, 0x02, 0x0e, 0x05, 0x06, 0x10, 0x00};
    static const uint8_t removed[] = {0x35, 0x10, 0x00};
    const agsf_thrift_edit remove_1 = {.id = 1}, huge = {1, AGSF_THRIFT_BINARY, NULL, SIZE_MAX / 3};
    uint8_t out[32];
    size_t written, end;

    checking("heads of fields that are spliced");
    CHECK_EQUAL(agsf_thrift_splice(in, sizeof(in), NULL, 0, out, &written, &end), AGSF_OK);
    CHECK(written == sizeof(in) && memcmp(out, in, sizeof(in)) == 0);
    CHECK_EQUAL(agsf_thrift_splice(in, sizeof(in), &remove_1, 1, out, &written, &end), AGSF_OK);
    CHECK(written == sizeof(removed) && memcmp(out, removed, sizeof(removed)) == 0);
    CHECK_EQUAL(agsf_thrift_splice_nbytes(100, &huge, 1), 0);
}

/* ---------------------------------------------------------------- footers */

/* A footer of one schema element, and so many row groups of so many chunks, each of the given bytes. */
static size_t put_footer(uint8_t *out, unsigned groups, unsigned chunks, const uint8_t *chunk, size_t nbytes) {
    uint8_t *const begin = out;

    *out++ = 0x29; /* 2: list of one struct, with a name */
    *out++ = 0x1c;
    memcpy(out, "\x48\x01r\x00", 4);
    out += 4;
    *out++ = 0x29; /* 4 */
    *out++ = 0xfc;
    out = put_number(out, groups);
    for (unsigned g = 0; g < groups; g++) {
        *out++ = 0x19; /* 1 */
        *out++ = 0xfc;
        out = put_number(out, chunks);
        for (unsigned c = 0; c < chunks; c++, out += nbytes) memcpy(out, chunk, nbytes);
        memcpy(out, "\x16\x02\x16\x02\x00", 5); /* 2, 3 */
        out += 5;
    }
    memcpy(out, "\x28\x01z\x00", 4); /* 6: created_by */
    return (size_t)(out + 4 - begin);
}

static void check_plain_footers(void) {
    /* Column chunks, and what they are when encryption has left, with the meta_data that was sealed or without. */
    static const struct {
        const char *chunk, *plain, *with_meta;
    } cases[] = {
        {"260000", "260000", NULL}, /* never encrypted: stays, whatever is given */
        {"26001c150200"
         "5c1c0000"
         "00",
         "26001c150200"
         "00",
         "26001c1502180000"
         "00"}, /* footer key, nothing behind */
        {"26001c150200"
         "0c101c0000"
         "00",
         "26001c150200"
         "00",
         "26001c1502180000"
         "00"}, /* the same, with a long head */
        {"2600"
         "6c1c0000"
         "18027879"
         "00",
         "2600"
         "00",
         "26001c1502180000"
         "00"}, /* column key: no meta_data, 8 and 9 */
        {"2600"
         "1c150200"
         "5c1c0000"
         "68026162"
         "00",
         "2600"
         "1c150200"
         "b8026162"
         "00",
         "2600"
         "1c1502180000"
         "b8026162"
         "00"},
        {"2600"
         "1c150200"
         "5c1c0000"
         "f8026162"
         "00",
         "2600"
         "1c150200"
         "082e026162"
         "00",
         "2600"
         "1c1502180000"
         "082e026162"
         "00"},
        {"2600"
         "1c150200"
         "5100",
         "2600"
         "1c150200"
         "5100",
         NULL}, /* field 8 of another type is not crypto_metadata */
    };
    static const uint8_t meta[] = {0x15, 0x02, 0x18, 0x00, 0x00};

    for (size_t i = 0; i < COUNT(cases); i++) {
        for (unsigned with = 0; with < 2; with++) {
            const char *const want =
                with ? cases[i].with_meta != NULL ? cases[i].with_meta : cases[i].plain : cases[i].plain;
            uint8_t chunk[100], wanted[100], in[2000], expected[2000];
            const uint8_t *metas[6];
            size_t sizes[6], nbytes, expected_nbytes, written = 0;
            agsf_footer footer;
            guarded data, out;
            checking("footer of chunks %s, with metadata: %u", cases[i].chunk, with);
            from_hex(chunk, cases[i].chunk);
            from_hex(wanted, want);
            nbytes = put_footer(in, 2, 3, chunk, strlen(cases[i].chunk) / 2);
            expected_nbytes = put_footer(expected, 2, 3, wanted, strlen(want) / 2);
            memset(in + nbytes, 0, 7); /* padding */
            data = guarded_copy(in, nbytes + 7, AT_END);
            CHECK_EQUAL(agsf_footer_read(data.data, data.nbytes, &footer), AGSF_OK);
            CHECK(footer.end == nbytes && footer.nschema == 1 && footer.ngroups == 2 && footer.nchunks == 6);
            CHECK(footer.schema[0].name_nbytes == 1 && data.data[footer.schema[0].name] == 'r');
            for (size_t c = 0; c < 6; c++) {
                metas[c] = with ? meta : NULL;
                sizes[c] = with ? sizeof(meta) : 0;
            }
            out = guarded_new(nbytes + 6 * 8 + (with ? 6 * sizeof(meta) : 0), AT_END);
            CHECK_EQUAL(agsf_footer_plain(data.data, &footer, metas, sizes, out.data, &written), AGSF_OK);
            CHECK_EQUAL(written, expected_nbytes);
            CHECK(memcmp(out.data, expected, written) == 0);
            agsf_footer_clear(&footer);
            guarded_free(&data);
            for (size_t cut = 0; cut < nbytes; cut++) {
                data = guarded_copy(in, cut, AT_END);
                CHECK_EQUAL(agsf_footer_read(data.data, cut, &footer), AGSF_BAD_FORMAT);
                guarded_free(&data);
            }
            guarded_free(&out);
        }
    }
}

static void check_footer_memory(void) {
    static uint8_t in[1 << 20];
    const size_t room = sizeof(in);
    agsf_footer footer;
    uint8_t *out;

    /* Structs without a field would be bytes of 12 each; row groups have a limit of their own. */
    for (unsigned kind = 0; kind < 5; kind++) {
        agsf_status status;
        checking("hostile footer %u", kind);
        out = in;
        *out++ = 0x29;
        *out++ = kind == 0 || kind == 4 ? 0xfc : 0x1c;
        if (kind == 0) out = put_number(out, room - 10);
        if (kind == 4) out = put_number(out, room / 3 - 10);
        memset(out, 0, (size_t)(in + room - out));
        if (kind == 4) {
            for (; out + 3 <= in + room - 30; out += 3) memcpy(out, "\x48\x00\x00", 3);
        }
        if (kind > 0 && kind < 4) {
            memcpy(out, "\x48\x01r\x00\x29\xfc", 6);
            out = put_number(out + 6, kind == 1 ? room - 20 : kind == 2 ? 32769 : 32768);
            if (kind == 3) {
                for (unsigned i = 0; i < 30; i++) {
                    memcpy(out, "\x19\xfc", 2);
                    out = put_number(out + 2, 32768);
                    memset(out, 0, 32769);
                    out += 32769;
                }
            }
        }
        largest_array = 0;
        status = agsf_footer_read(in, room, &footer);
        CHECK_EQUAL(status, kind == 3 ? AGSF_BAD_FORMAT : AGSF_ORDINAL);
        CHECK(largest_array <= 6 * room + 4096);
    }
}

/* ---------------------------------------------------------------- offset indexes */

/* Pages from `offset` on, 100 apart. */
static size_t put_index(uint8_t *out, unsigned pages, uint64_t offset, uint64_t distance, uint64_t size) {
    uint8_t *const begin = out;

    *out++ = 0x19;
    *out++ = 0xfc;
    out = put_number(out, pages);
    for (unsigned i = 0; i < pages; i++) {
        *out++ = 0x16;
        out = put_number(out, zigzag((int64_t)(offset + i * distance)));
        *out++ = 0x15;
        out = put_number(out, zigzag((int64_t)(size + i)));
        *out++ = 0x16;
        out = put_number(out, zigzag(i));
        memcpy(out, "\x28\x01x\x00", 4); /* a field that nobody knows */
        out += 4;
    }
    memcpy(out, "\x19\x16\x80\x02\x00", 5);
    return (size_t)(out + 5 - begin);
}

static void check_offset_indexes(void) {
    static uint8_t in[40000], expected[60000];
    agsf_page table[300];
    size_t written, pages, nbytes, expected_nbytes;
    guarded data, out;

    checking("an offset index");
    for (unsigned i = 0; i < COUNT(table); i++) {
        table[i] = (agsf_page){4 + i * 100, UINT64_C(1) << 40 | i * UINT64_C(1000), 0, UINT64_C(3000000000) + i};
    }
    nbytes = put_index(in, 300, 1004, 100, 10);
    expected_nbytes = put_index(expected, 300, (UINT64_C(1) << 40) + 77, 1000, UINT64_C(3000000000));
    data = guarded_copy(in, nbytes, AT_END);
    CHECK_EQUAL(agsf_offset_index_pages(data.data, nbytes, &pages), AGSF_OK);
    CHECK_EQUAL(pages, 300);
    out = guarded_new(nbytes + 16 * pages, AT_END);
    CHECK_EQUAL(agsf_offset_index(data.data, nbytes, table, 300, 1000, 77, out.data, &written), AGSF_OK);
    CHECK(written == expected_nbytes && memcmp(out.data, expected, written) == 0);
    /* Moved as it is; and not at all. */
    expected_nbytes = put_index(expected, 300, 5000000004, 100, 10);
    CHECK_EQUAL(agsf_offset_index(data.data, nbytes, NULL, 0, 1000, 5000001000 - 1000, out.data, &written), AGSF_OK);
    CHECK(written == expected_nbytes && memcmp(out.data, expected, written) == 0);
    CHECK_EQUAL(agsf_offset_index(data.data, nbytes, NULL, 0, 1000, 1000, out.data, &written), AGSF_OK);
    CHECK(written == nbytes && memcmp(out.data, in, written) == 0);
    /* A page that the chunk does not have; a place that no file has. */
    CHECK_EQUAL(agsf_offset_index(data.data, nbytes, table, 299, 1000, 77, out.data, &written), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_offset_index(data.data, nbytes, table, 300, 1001, 77, out.data, &written), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_offset_index(data.data, nbytes, table, 300, 2000, 77, out.data, &written), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_offset_index(data.data, nbytes, NULL, 0, 1000, INT64_MAX, out.data, &written), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_offset_index(data.data, nbytes, NULL, 0, -1, 0, out.data, &written), AGSF_BAD_ARGUMENT);
    guarded_free(&out);
    guarded_free(&data);
    for (size_t cut = 0; cut < nbytes; cut += cut < 100 ? 1 : 97) {
        data = guarded_copy(in, cut, AT_END);
        CHECK_EQUAL(agsf_offset_index_pages(data.data, cut, &pages), AGSF_BAD_FORMAT);
        guarded_free(&data);
    }
    checking("a location that comes twice");
    nbytes = strlen("\x19\x1c\x16\x02\x06\x02\x02\x15\x02") + 2;
    CHECK_EQUAL(agsf_offset_index((const uint8_t *)"\x19\x1c\x16\x02\x06\x02\x02\x15\x02\x00", nbytes, NULL, 0, 0, 0,
                                  expected, &written),
                AGSF_BAD_FORMAT);
}

/* No bytes at NULL, as an empty buffer may be: to add 0 to that is undefined, which clang's sanitizer sees. */
static void check_nothing(void) {
    agsf_thrift_value value = {0};
    agsf_footer footer;
    agsf_chunk chunk;
    agsf_column_metadata metadata;
    uint8_t out[64];
    size_t one, other;

    checking("no bytes at all");
    CHECK_EQUAL(agsf_thrift_next(NULL, 0, false, &value), AGSF_BAD_FORMAT);
    CHECK_EQUAL(value.end, 0);
    CHECK_EQUAL(agsf_thrift_next(NULL, 0, true, &value), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_thrift_list_head(NULL, 0, &value, &one), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_thrift_splice(NULL, 0, NULL, 0, out, &one, &other), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_footer_read(NULL, 0, &footer), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_chunk_read(NULL, 0, 0, &chunk), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_column_metadata_read(NULL, 0, 0, &metadata), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_offset_index_pages(NULL, 0, &one), AGSF_BAD_FORMAT);
    CHECK_EQUAL(agsf_offset_index(NULL, 0, NULL, 0, 0, 0, out, &one), AGSF_BAD_FORMAT);
}

int main(void) {
    start();
    check_nothing();
    check_numbers();
    check_skip();
    check_lies();
    check_fields();
    check_splices();
    check_splice_heads();
    check_plain_footers();
    check_footer_memory();
    check_offset_indexes();
    return 0;
}
