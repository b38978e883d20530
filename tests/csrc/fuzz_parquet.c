/*
 * fuzz_parquet.c - a libFuzzer target: Parquet's footers, indexes and pages as somebody else wrote them.
 *
 * The first byte of an input chooses what reads it, three more and a number choose how, the rest is what is read.
 * Sealed pages are sealed here, with the input's bytes as their headers, so that the fuzzer comes past the tags.
 * Whatever the input is: nothing is touched outside of the buffers (guard pages), which have just the room that agsf.h
 * asks for; memory stays below a few times the input; what was not changed is there byte by byte; what failed leaves
 * zeros.
 *
 * Without libFuzzer (-DFUZZ_ALONE) it is a test: it replays the inputs in the folder that CORPUS names, and changes of
 * them.
 */
#include "pages.h"

enum { RECIPE_NBYTES = 8, TARGETS = 6, BODY_MAX = 5000, PAGES_MAX = 40, VALUES_MAX = 20 };

struct recipe {
    uint8_t target, flags, a, b;
    uint32_t number;
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

static agsf_key *key_a, *key_b;

/* ---------------------------------------------------------------- Thrift */

/* Walks a struct; false if it is none. *value is of the field `id`, if it has one. */
static bool walk(const uint8_t *data, size_t nbytes, int16_t id, agsf_thrift_value *value, size_t *end) {
    agsf_thrift_value field = {0};
    bool found = false;

    for (;;) {
        const size_t before = field.end;
        const int16_t last = field.id;
        if (agsf_thrift_next(data, nbytes, false, &field) != AGSF_OK) return false;
        CHECK(field.end > before && field.end <= nbytes && field.begin <= field.end);
        if (field.type == AGSF_THRIFT_STOP) break;
        CHECK(field.id > last);
        if (field.id == id) *value = field, found = true;
    }
    *end = field.end;
    if (!found) *value = (agsf_thrift_value){.type = AGSF_THRIFT_STOP};
    return true;
}

static void fuzz_thrift(const struct recipe *recipe, const uint8_t *data, size_t nbytes) {
    static const uint8_t value[VALUES_MAX] = {0x15, 0x80, 0x01, 0};
    agsf_thrift_value field;
    agsf_thrift_edit edits[4] = {{0}};
    size_t end = 0, written = 0, end_too = 0, id = 0, nedits = recipe->a % (COUNT(edits) + 1);
    const bool good = walk(data, nbytes, 0, &field, &end);
    guarded out;

    for (size_t i = 0; i < nedits; i++) {
        const unsigned how = recipe->number >> (8 * i) & 0xff;
        id += 1 + (how & 15) * (recipe->b == 7 ? 500 : 1);
        edits[i] = (agsf_thrift_edit){.id = (int16_t)id,
                                      .type = how & 16 ? AGSF_THRIFT_STRUCT : AGSF_THRIFT_STOP,
                                      .value = value,
                                      .nbytes = how & 16 ? 4 : 0};
    }
    out = guarded_new(agsf_thrift_splice_nbytes(nbytes, edits, nedits), AT_END);
    CHECK_EQUAL(agsf_thrift_splice(data, nbytes, edits, nedits, out.data, &written, &end_too),
                good ? AGSF_OK : AGSF_BAD_FORMAT);
    if (good) {
        size_t at = 0, at_too = 0;
        agsf_thrift_value was = {0}, is = {0};
        CHECK_EQUAL(end_too, end);
        if (nedits == 0) CHECK(written == end && memcmp(out.data, data, end) == 0);
        /* Both side by side: the same fields, but for those that were edited. */
        for (size_t next = 0;;) {
            CHECK_EQUAL(agsf_thrift_next(data, nbytes, false, &was), AGSF_OK);
            for (; next < nedits && (was.type == AGSF_THRIFT_STOP || edits[next].id <= was.id); next++) {
                const bool there = was.type != AGSF_THRIFT_STOP && edits[next].id == was.id;
                if (edits[next].type != AGSF_THRIFT_STOP) {
                    CHECK_EQUAL(agsf_thrift_next(out.data, written, false, &is), AGSF_OK);
                    CHECK(is.id == edits[next].id && is.type == edits[next].type && is.end - is.begin == 4);
                }
                if (there) CHECK_EQUAL(agsf_thrift_next(data, nbytes, false, &was), AGSF_OK);
            }
            CHECK_EQUAL(agsf_thrift_next(out.data, written, false, &is), AGSF_OK);
            CHECK_EQUAL(is.type, was.type);
            if (was.type == AGSF_THRIFT_STOP) break;
            CHECK(is.id == was.id && is.end - is.begin == was.end - was.begin);
            CHECK(memcmp(data + was.begin, out.data + is.begin, was.end - was.begin) == 0);
            at = was.end, at_too = is.end;
        }
        CHECK(was.end == end && is.end == written && at <= end && at_too <= written);
    }
    guarded_free(&out);
    for (size_t begin = 0; begin <= nbytes && begin < 4; begin++) {
        agsf_thrift_value list = {.begin = begin};
        size_t count;
        if (agsf_thrift_list_head(data, nbytes, &list, &count) != AGSF_OK) continue;
        CHECK(count <= nbytes);
        while (count-- > 0 && agsf_thrift_next(data, nbytes, true, &list) == AGSF_OK) CHECK(list.end > list.begin);
    }
}

/* ---------------------------------------------------------------- footers */

static void check_chunk(const uint8_t *data, size_t nbytes, const agsf_chunk_span *span, const agsf_chunk *chunk) {
    const agsf_column_metadata *const inner = &chunk->metadata;
    agsf_column_metadata alone;

    CHECK(chunk->begin == span->begin && chunk->end == span->end && (chunk->crypto == 0) == (span->crypto == 0));
    CHECK(chunk->sealed_metadata + chunk->sealed_metadata_nbytes <= chunk->end);
    CHECK(chunk->key_metadata + chunk->key_metadata_nbytes <= chunk->end);
    CHECK(chunk->column_key || chunk->key_metadata == 0);
    if (inner->begin == 0) return;
    CHECK(inner->end <= chunk->end && inner->path < inner->end && inner->encodings < inner->end);
    CHECK_EQUAL(agsf_column_metadata_read(data, nbytes, inner->begin, &alone), AGSF_OK);
    CHECK(alone.end == inner->end && alone.num_values == inner->num_values);
}

static void fuzz_footer(const struct recipe *recipe, const uint8_t *data, size_t nbytes) {
    static const uint8_t meta[] = {0x15, 2, 0};
    agsf_footer footer, again;
    const agsf_status status = agsf_footer_read(data, nbytes, &footer);
    const uint8_t **metas;
    size_t *sizes, room, written = 0, crypto = 0;
    guarded out;

    CHECK(status == AGSF_OK || status == AGSF_BAD_FORMAT || status == AGSF_ORDINAL);
    CHECK(largest_array <= 10 * nbytes + 4096);
    if (status != AGSF_OK) return;
    CHECK(footer.end <= nbytes && footer.nschema > 0);
    metas = calloc(footer.nchunks + 1, sizeof(*metas));
    sizes = calloc(footer.nchunks + 1, sizeof(*sizes));
    CHECK(metas != NULL && sizes != NULL);
    room = footer.end + 8 * footer.nchunks;
    for (size_t i = 0; i < footer.nschema; i++) {
        CHECK(footer.schema[i].name + footer.schema[i].name_nbytes <= footer.end);
    }
    for (size_t i = 0; i < footer.ngroups; i++) {
        const agsf_row_group *const group = &footer.groups[i];
        CHECK(group->begin < group->end && group->end <= footer.end && group->first + group->count <= footer.nchunks);
    }
    for (size_t i = 0; i < footer.nchunks; i++) {
        const agsf_chunk_span *const span = &footer.chunks[i];
        agsf_chunk chunk;
        CHECK(span->begin < span->end && span->end <= footer.end && span->crypto < span->end);
        crypto += span->crypto != 0;
        /* Not if ids of fields do not ascend, in a struct that the walk has only passed. */
        if (agsf_chunk_read(data, nbytes, span->begin, &chunk) == AGSF_OK) check_chunk(data, nbytes, span, &chunk);
        if (i % 8 < 8 && recipe->a >> i % 8 & 1) {
            metas[i] = meta;
            sizes[i] = sizeof(meta);
            room += sizeof(meta);
        }
    }
    out = guarded_new(room, AT_END);
    CHECK_EQUAL(agsf_footer_plain(data, &footer, metas, sizes, out.data, &written), AGSF_OK);
    if (crypto == 0) CHECK(written == footer.end && memcmp(out.data, data, written) == 0);
    CHECK_EQUAL(agsf_footer_read(out.data, written, &again), AGSF_OK);
    CHECK(again.end == written && again.nchunks == footer.nchunks && again.ngroups == footer.ngroups);
    for (size_t i = 0; i < again.nchunks; i++) CHECK_EQUAL(again.chunks[i].crypto, 0);
    agsf_footer_clear(&again);
    agsf_footer_clear(&footer);
    guarded_free(&out);
    free(metas);
    free(sizes);
}

static void fuzz_offset_index(const struct recipe *recipe, const uint8_t *data, size_t nbytes) {
    agsf_page table[16];
    size_t pages = 0, pages_too = 0, written = 0;
    const agsf_status status = agsf_offset_index_pages(data, nbytes, &pages);
    const bool moves = recipe->flags & 1;
    const int64_t in_chunk = recipe->a, out_chunk = recipe->flags & 2 ? INT64_MAX - recipe->number : recipe->number;
    guarded out;
    agsf_status how;

    CHECK(status == AGSF_OK || status == AGSF_BAD_FORMAT);
    if (status != AGSF_OK) return;
    CHECK(pages <= nbytes);
    for (size_t i = 0; i < COUNT(table); i++) {
        table[i] = (agsf_page){
            .in_offset = i * recipe->b, .out_offset = i * UINT64_C(0x100000001), .out_nbytes = UINT32_MAX + i};
    }
    out = guarded_new(nbytes + 16 * pages, AT_END);
    how = agsf_offset_index(data, nbytes, moves ? NULL : table, COUNT(table), in_chunk, out_chunk, out.data, &written);
    CHECK(how == AGSF_OK || how == AGSF_BAD_FORMAT);
    if (how == AGSF_OK) {
        CHECK_EQUAL(agsf_offset_index_pages(out.data, written, &pages_too), AGSF_OK);
        CHECK_EQUAL(pages_too, pages);
    }
    guarded_free(&out);
}

/* ---------------------------------------------------------------- pages */

static agsf_modules modules_of(agsf_key *key, uint8_t how) {
    static const uint8_t aad[] = "a prefix and eight bytes";

    return (agsf_modules){.key = key,
                          .aad = aad,
                          .aad_nbytes = how & 4 ? sizeof(aad) : 0,
                          .row_group = how & 1,
                          .column = 300,
                          .without_aad = how & 2,
                          .ctr = how & 8};
}

static agsf_pages pages_of(const agsf_modules *from, const agsf_modules *to, agsf_pages_mode mode, size_t nbytes,
                           const struct recipe *recipe) {
    return (agsf_pages){.from = from,
                        .to = to,
                        .mode = mode,
                        .nbytes = nbytes,
                        .values_left = recipe->number >> 16,
                        .v2_layout = recipe->flags >> 1 & 3,
                        .keep_checksum = recipe->flags & 8,
                        .short_sizes = recipe->flags & 64 && mode != AGSF_PAGES_SAME_SIZE,
                        .table = malloc(1)};
}

static struct driven run_pages(agsf_pages *run, const uint8_t *in, size_t in_nbytes, guarded *out, struct steps steps) {
    const struct driven driven = drive(run, in, in_nbytes, out->data, out->nbytes, steps);

    guarded_check(out);
    if (driven.status == AGSF_OK && run->from != NULL) CHECK_EQUAL(run->in_total, run->nbytes);
    if (driven.status != AGSF_OK && driven.status != AGSF_SHORT) {
        CHECK(all_are(out->data + driven.produced, run->out_nbytes, 0));
    }
    for (size_t i = 1; i < run->table_count; i++) CHECK(run->table[i].in_offset > run->table[i - 1].in_offset);
    free(run->table);
    run->table = NULL;
    return driven;
}

/* The most that the pages of an input become: two frames for each, and none has less than 8 bytes. */
static guarded room_of(size_t nbytes) { return guarded_new(nbytes * 12 + 4096, AT_END); }

static void fuzz_plain(const struct recipe *recipe, const uint8_t *data, size_t nbytes) {
    const struct steps all = {0}, steps = {.in = 1 + recipe->b % 64u * 7, .out = 1 + recipe->a % 64u * 31};
    const agsf_modules to = modules_of(key_a, recipe->a);
    const size_t declared = recipe->flags & 1 ? nbytes : recipe->number & 0xffff;
    agsf_pages list = pages_of(NULL, NULL, AGSF_PAGES_LIST, declared, recipe);
    agsf_pages check = pages_of(NULL, NULL, AGSF_PAGES_CHECK, declared, recipe);
    agsf_pages seal = pages_of(NULL, &to, AGSF_PAGES_COPY, declared, recipe);
    guarded none = guarded_new(0, AT_END), sealed = room_of(nbytes);
    const struct driven listed = run_pages(&list, data, nbytes, &none, steps);
    const struct driven checked = run_pages(&check, data, nbytes, &none, all);
    const struct driven driven = run_pages(&seal, data, nbytes, &sealed, recipe->flags & 16 ? steps : all);

    if (checked.status == AGSF_OK) {
        CHECK(listed.status == AGSF_OK && list.page == check.page && list.in_total == check.in_total);
        CHECK_EQUAL(driven.status, AGSF_OK);
    }
    CHECK(driven.status != AGSF_SHORT && driven.status != AGSF_BAD_TAG);
    if (driven.status == AGSF_OK) {
        agsf_pages open = pages_of(&to, NULL, AGSF_PAGES_COPY, driven.produced, recipe);
        guarded out = guarded_new(nbytes + 4096, AT_END);
        struct driven back;
        open.keep_checksum = seal.keep_checksum;
        open.short_sizes = false;
        CHECK(driven.consumed <= nbytes && seal.out_total == driven.produced && seal.in_total == driven.consumed);
        back = run_pages(&open, sealed.data, driven.produced, &out, steps);
        CHECK_EQUAL(back.status, AGSF_OK);
        CHECK_EQUAL(open.page, seal.page);
        /* The same bytes, unless an integer of a header was longer than it had to be. */
        CHECK(back.produced <= driven.consumed);
        if (back.produced == driven.consumed) {
            CHECK(memcmp(out.data, data, back.produced) == 0 || seal.checksums > 0 || recipe->flags & 32);
        }
        guarded_free(&out);
    }
    guarded_free(&sealed);
    guarded_free(&none);
}

/* The number in a header's i32 field, or 0. */
static int64_t number_of(const uint8_t *header, size_t nbytes, int16_t id) {
    agsf_thrift_value value;
    uint64_t number = 0;
    size_t end;

    if (!walk(header, nbytes, id, &value, &end) || value.type != AGSF_THRIFT_I32) return 0;
    for (size_t i = 0; i < value.end - value.begin && i < 9; i++)
        number |= (uint64_t)(header[value.begin + i] & 0x7f) << 7 * i;
    return (int64_t)(number >> 1) ^ -(int64_t)(number & 1);
}

static size_t seal_by_hand(const agsf_modules *modules, unsigned type, unsigned page, const uint8_t *in, size_t nbytes,
                           uint8_t *out) {
    const uint8_t suffix[] = {
        (uint8_t)type, (uint8_t)modules->row_group, 0, (uint8_t)modules->column, (uint8_t)(modules->column >> 8),
        (uint8_t)page, (uint8_t)(page >> 8)};
    uint8_t aad[64];
    const size_t prefix = modules->without_aad ? 0 : modules->aad_nbytes;
    const size_t length = nbytes + AGSF_OVERHEAD_NBYTES;
    const size_t last = modules->without_aad ? 0 : type == AGSF_DATA_PAGE || type == AGSF_DATA_PAGE_HEADER ? 7 : 5;

    memcpy(aad, modules->aad, prefix);
    memcpy(aad + prefix, suffix, last);
    for (int i = 0; i < 4; i++) out[i] = (uint8_t)(length >> 8 * i);
    memset(out + 4, (int)(type + page), 12);
    CHECK_EQUAL(agsf_seal(modules->key, out + 4, aad, prefix + last, in, nbytes, out + 16), AGSF_OK);
    return 4 + length;
}

/*
 * The input is pages: how, the header's length, the header; then, unless the body is to be made as the header says, the
 * body's length and the body. All is sealed as the AADs must be: what is wrong with it is what the parser has to find.
 */
static size_t build_sealed(const agsf_modules *from, const uint8_t *data, size_t nbytes, uint8_t *out) {
    static const uint8_t body[BODY_MAX] = {0};
    uint8_t *const begin = out;
    unsigned page = 0;

    for (unsigned i = 0; i < PAGES_MAX && nbytes >= 2; i++) {
        const uint8_t how = data[0];
        size_t header = data[1], plain, lead = 0;
        const uint8_t *header_data = data + 2;
        const bool dictionary = how & 1;
        if (header > nbytes - 2) header = nbytes - 2;
        data += 2 + header;
        nbytes -= 2 + header;
        out += seal_by_hand(from, dictionary ? AGSF_DICTIONARY_PAGE_HEADER : AGSF_DATA_PAGE_HEADER, page, header_data,
                            header, out);
        if (how & 2 && nbytes >= 1) { /* bytes of the input as they are */
            size_t raw = data[0];
            if (raw > nbytes - 1) raw = nbytes - 1;
            memcpy(out, data + 1, raw);
            out += raw;
            data += 1 + raw;
            nbytes -= 1 + raw;
        } else {
            const int64_t overhead = from->ctr ? 16 : 32, says = number_of(header_data, header, 3);
            plain = says > overhead && says - overhead <= BODY_MAX ? (size_t)(says - overhead) : how >> 3;
            if (how & 4) lead = plain < how >> 5 ? plain : how >> 5; /* levels in front */
            memset(out, 0, lead);
            out += lead;
            if (from->ctr) {
                const size_t length = plain - lead + 12;
                for (int b = 0; b < 4; b++) *out++ = (uint8_t)(length >> 8 * b);
                memset(out, 7, length);
                out += length;
            } else {
                out += seal_by_hand(from, dictionary ? AGSF_DICTIONARY_PAGE : AGSF_DATA_PAGE, page, body, plain - lead,
                                    out);
            }
        }
        page += !dictionary;
    }
    return (size_t)(out - begin);
}

static void fuzz_sealed(const struct recipe *recipe, const uint8_t *data, size_t nbytes) {
    static uint8_t made[PAGES_MAX * (BODY_MAX + 600)];
    const struct steps all = {0}, steps = {.in = 1 + recipe->b % 64u * 7, .out = 1 + recipe->number % 64u * 31};
    const agsf_modules from = modules_of(key_a, recipe->a);
    agsf_modules to = modules_of(key_b, recipe->b);
    const size_t size = build_sealed(&from, data, nbytes, made);
    guarded in = guarded_copy(made, size, AT_END), out = room_of(size), viewed = guarded_new(size + 4096, AT_END);
    guarded none = guarded_new(0, AT_END), scratch = guarded_new(BODY_MAX + 600, AT_END);
    agsf_pages open = pages_of(&from, NULL, AGSF_PAGES_COPY, size, recipe),
               check = pages_of(&from, NULL, AGSF_PAGES_CHECK, size, recipe);
    agsf_pages list = pages_of(&from, NULL, AGSF_PAGES_LIST, size, recipe),
               view = pages_of(&from, NULL, AGSF_PAGES_VIEW, size, recipe);
    agsf_pages again = pages_of(&from, &to, AGSF_PAGES_COPY, size, recipe);
    const struct driven opened = run_pages(&open, in.data, size, &out, recipe->flags & 16 ? steps : all);
    const struct driven checked = run_pages(&check, in.data, size, &scratch, all);
    const struct driven listed = run_pages(&list, in.data, size, &none, steps);
    struct driven driven;

    CHECK_EQUAL(checked.status, opened.status);
    if (checked.status == AGSF_OK) {
        CHECK(listed.status == AGSF_OK && list.page == open.page && list.values == open.values);
        /* It is plain pages now. */
        agsf_pages plain = pages_of(NULL, NULL, AGSF_PAGES_CHECK, opened.produced, recipe);
        plain.keep_checksum = true;
        plain.values_left = 0;
        CHECK_EQUAL(run_pages(&plain, out.data, opened.produced, &none, all).status, AGSF_OK);
        CHECK(plain.page == open.page && plain.values == open.values);
    }
    memset(out.data, SLACK, out.nbytes);
    driven = run_pages(&again, in.data, size, &out, all);
    CHECK_EQUAL(driven.status, opened.status);
    if (driven.status == AGSF_OK) {
        agsf_pages reopened = pages_of(&to, NULL, AGSF_PAGES_CHECK, driven.produced, recipe);
        reopened.short_sizes = false;
        CHECK_EQUAL(run_pages(&reopened, out.data, driven.produced, &scratch, all).status, AGSF_OK);
    }
    driven = run_pages(&view, in.data, size, &viewed, recipe->flags & 16 ? steps : all);
    CHECK(driven.status == opened.status || driven.status == AGSF_BAD_FORMAT);
    if (driven.status == AGSF_OK) {
        agsf_pages plain = pages_of(NULL, NULL, AGSF_PAGES_CHECK, size, recipe);
        CHECK_EQUAL(driven.produced, size);
        plain.keep_checksum = true;
        plain.values_left = 0;
        CHECK_EQUAL(run_pages(&plain, viewed.data, size, &none, all).status, AGSF_OK);
        CHECK_EQUAL(plain.page, view.page);
    }
    to.ctr = from.ctr;
    if (!(recipe->flags & 64)) {
        agsf_pages same = pages_of(&from, &to, AGSF_PAGES_SAME_SIZE, size, recipe);
        memset(viewed.data, SLACK, viewed.nbytes);
        driven = run_pages(&same, in.data, size, &viewed, all);
        CHECK_EQUAL(driven.status, opened.status);
        if (driven.status == AGSF_OK) {
            agsf_pages reopened = pages_of(&to, NULL, AGSF_PAGES_CHECK, size, recipe);
            CHECK_EQUAL(driven.produced, size);
            CHECK_EQUAL(run_pages(&reopened, viewed.data, size, &scratch, all).status, AGSF_OK);
        }
    }
    guarded_free(&in);
    guarded_free(&out);
    guarded_free(&viewed);
    guarded_free(&none);
    guarded_free(&scratch);
}

/* Bytes that nobody sealed. */
static void fuzz_unsealed(const struct recipe *recipe, const uint8_t *data, size_t nbytes) {
    const agsf_modules from = modules_of(key_a, recipe->a);
    agsf_pages open = pages_of(&from, NULL, AGSF_PAGES_COPY, recipe->flags & 1 ? nbytes : recipe->number, recipe);
    guarded out = guarded_new(nbytes, AT_END);
    size_t plain, frame;
    agsf_status status = agsf_module_open(&from, recipe->b % 10, data, nbytes, out.data, &plain, &frame);

    CHECK(status == AGSF_BAD_FORMAT || (status == AGSF_BAD_TAG && all_are(out.data, plain, 0)));
    status = run_pages(&open, data, nbytes, &out, (struct steps){.in = 1 + recipe->b}).status;
    CHECK(open.nbytes == 0 ? status == AGSF_OK : status == AGSF_BAD_FORMAT || status == AGSF_BAD_TAG);
    guarded_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    struct recipe recipe;

    if (nbytes < RECIPE_NBYTES) return 0;
    if (key_a == NULL) {
        CHECK_EQUAL(agsf_library_init(), AGSF_OK);
        key_a = key_of(16, 1);
        key_b = key_of(32, 2);
    }
    recipe = (struct recipe){data[0], data[1], data[2], data[3], 0};
    memcpy(&recipe.number, data + 4, sizeof(recipe.number));
    guarded copy = guarded_copy(data + RECIPE_NBYTES, nbytes - RECIPE_NBYTES, AT_END);
    largest_array = 0;
    switch (recipe.target % TARGETS) {
        case 0: fuzz_footer(&recipe, copy.data, copy.nbytes); break;
        case 1: fuzz_thrift(&recipe, copy.data, copy.nbytes); break;
        case 2: fuzz_plain(&recipe, copy.data, copy.nbytes); break;
        case 3: fuzz_sealed(&recipe, copy.data, copy.nbytes); break;
        case 4: fuzz_offset_index(&recipe, copy.data, copy.nbytes); break;
        case 5: fuzz_unsealed(&recipe, copy.data, copy.nbytes); break;
    }
    guarded_free(&copy);
    return 0;
}

/* ---------------------------------------------------------------- alone */

#ifdef FUZZ_ALONE
#include <dirent.h>

enum { INPUT_MAX = 1 << 16, CHANGES = 30 };

int main(void) {
    static uint8_t input[INPUT_MAX], changed[INPUT_MAX];
    const char *const folder = getenv("CORPUS");
    uint64_t random = 1;
    unsigned replayed = 0;
    DIR *directory;

    start();
    CHECK(folder != NULL && (directory = opendir(folder)) != NULL);
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        char path[4096];
        FILE *file;
        size_t nbytes;
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        file = fopen(path, "rb");
        CHECK(file != NULL);
        nbytes = fread(input, 1, sizeof(input), file);
        fclose(file);
        for (unsigned i = 0; i <= CHANGES && nbytes > RECIPE_NBYTES; i++) {
            checking("%s, change %u", entry->d_name, i);
            memcpy(changed, input, nbytes);
            for (uint64_t n = i == 0 ? 0 : 1 + random_below(&random, 4); n > 0; n--) {
                const size_t at = (size_t)random_below(&random, nbytes);
                changed[at] ^=
                    (uint8_t)(random_below(&random, 2) ? random_below(&random, 256) : 1U << random_below(&random, 8));
            }
            changed[0] = input[0];
            CHECK_EQUAL(LLVMFuzzerTestOneInput(changed, i % 5 == 4 ? (size_t)random_below(&random, nbytes) : nbytes),
                        0);
        }
        replayed++;
    }
    closedir(directory);
    CHECK(replayed > 20);
    agsf_key_free(key_a);
    agsf_key_free(key_b);
    return 0;
}
#endif
