/*
 * test_parquet.c - Parquet's modules, and the pages of column chunks from one side to another.
 *
 * Guards: every module is the frame and has the AAD that the specification says, in both directions, checked against
 * single messages sealed by hand; chains of random pages (V1, V2 in both layouts, dictionaries, CRCs, GCM and CTR,
 * unknown fields, padding) are what they must be on the other side, and come back byte by byte, however small the
 * pieces are in which input and room are handed out; a view and a same-size copy keep every page's size, with fillers
 * of every size; whatever is changed, cut, swapped or forged is refused, and leaves zeros; the limits of keys and
 * ordinals; thousands of runs and keys.
 */
#include "pages.h"

#include <openssl/evp.h>
#include <time.h>

#include "crc32.h"

/* ---------------------------------------------------------------- CRCs */

static uint32_t crc_by_bits(const uint8_t *data, size_t nbytes) {
    uint32_t crc = 0xffffffff;

    while (nbytes-- > 0) {
        crc ^= *data++;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0xedb88320) : 0);
    }
    return ~crc;
}

/* Both ways, against the definition: any length, from any address, with no byte readable on either side. */
static void check_crc(void) {
    static uint8_t bytes[100000];

    CHECK_EQUAL(agsf_crc32((const uint8_t *)"123456789", 9), 0xcbf43926);
    CHECK_EQUAL(agsf_crc32((const uint8_t *)"", 0), 0);
    CHECK_EQUAL(agsf_crc32_by_tables((const uint8_t *)"123456789", 9), 0xcbf43926);
    fill(bytes, sizeof(bytes), 1);
    for (size_t nbytes = 0; nbytes <= 4096; nbytes++) {
        const uint32_t wanted = crc_by_bits(bytes + nbytes, nbytes);
        for (enum side side = AT_END; side <= AT_START; side++) {
            guarded data = guarded_copy(bytes + nbytes, nbytes, side);
            checking("the CRC of %zu bytes", nbytes);
            CHECK_EQUAL(agsf_crc32(data.data, nbytes), wanted);
            CHECK_EQUAL(agsf_crc32_by_tables(data.data, nbytes), wanted);
            guarded_free(&data);
        }
    }
    for (size_t at = 0; at < 64; at++) {
        for (size_t nbytes = sizeof(bytes) - 2 * at; nbytes > 0; nbytes /= 3) {
            checking("the CRC of %zu bytes from %zu", nbytes, at);
            CHECK_EQUAL(agsf_crc32(bytes + at, nbytes), crc_by_bits(bytes + at, nbytes));
        }
    }
    memset(bytes, 0, sizeof(bytes));
    for (size_t bit = 0; bit < 8 * 200; bit++) { /* what one bit adds, at each distance from the end */
        bytes[bit / 8] = (uint8_t)(1u << bit % 8);
        CHECK_EQUAL(agsf_crc32(bytes, 200), crc_by_bits(bytes, 200));
        bytes[bit / 8] = 0;
    }
}

/* ---------------------------------------------------------------- modules by hand */

static const uint8_t PREFIX[] = {'p', 'r', 'e', 'f', 'i', 'x', 1, 2, 3, 4, 5, 6, 7, 8};

static agsf_modules modules_of(agsf_key *key, int16_t row_group, int16_t column, bool ctr) {
    return (agsf_modules){
        .key = key, .aad = PREFIX, .aad_nbytes = sizeof(PREFIX), .row_group = row_group, .column = column, .ctr = ctr};
}

/* What the specification says, table by table. */
static size_t aad_by_hand(const agsf_modules *modules, unsigned type, unsigned page, uint8_t *out) {
    uint8_t *const begin = out;

    if (modules->without_aad) return 0;
    memcpy(out, modules->aad, modules->aad_nbytes);
    out += modules->aad_nbytes;
    *out++ = (uint8_t)type;
    if (type == 0) return (size_t)(out - begin);
    *out++ = (uint8_t)(modules->row_group % 256);
    *out++ = (uint8_t)(modules->row_group / 256);
    *out++ = (uint8_t)(modules->column % 256);
    *out++ = (uint8_t)(modules->column / 256);
    if (type == 2 || type == 4) {
        *out++ = (uint8_t)(page % 256);
        *out++ = (uint8_t)(page / 256);
    }
    return (size_t)(out - begin);
}

static uint32_t length_at(const uint8_t *in) { return in[0] | in[1] << 8 | in[2] << 16 | (uint32_t)in[3] << 24; }

/* Opens the frame at the start of `in`, and returns how long it is. */
static size_t open_by_hand(const agsf_modules *modules, unsigned type, unsigned page, const uint8_t *in, size_t nbytes,
                           uint8_t *out, size_t *out_nbytes) {
    uint8_t aad[100];
    const size_t length = length_at(in);

    CHECK(nbytes >= 32 && length >= 28 && length + 4 <= nbytes);
    *out_nbytes = length - 28;
    CHECK_EQUAL(agsf_open(modules->key, in + 4, aad, aad_by_hand(modules, type, page, aad), in + 16, length - 28, out),
                AGSF_OK);
    return length + 4;
}

static size_t seal_by_hand(const agsf_modules *modules, unsigned type, unsigned page, const uint8_t *in, size_t nbytes,
                           uint8_t *out) {
    static uint64_t nonces;
    const size_t length = nbytes + 28;
    uint8_t aad[100];

    for (int i = 0; i < 4; i++) out[i] = (uint8_t)(length >> 8 * i);
    fill(out + 4, 12, ++nonces);
    CHECK_EQUAL(agsf_seal(modules->key, out + 4, aad, aad_by_hand(modules, type, page, aad), in, nbytes, out + 16),
                AGSF_OK);
    return length + 4;
}

static void check_modules(void) {
    static const size_t sizes[] = {0, 1, 15, 16, 100, 4000};
    uint8_t plain[4000], back[4000];

    fill(plain, sizeof(plain), 3);
    for (unsigned type = 0; type < 10; type++) {
        for (unsigned how = 0; how < 6; how++) {
            agsf_key *key = key_of(16 + how % 3 * 8, how);
            agsf_modules modules =
                modules_of(key, (int16_t)(how == 5 ? 32767 : 258), (int16_t)(how == 5 ? 32767 : 5), how & 1);
            modules.without_aad = how == 4;
            for (size_t i = 0; i < COUNT(sizes); i++) {
                const size_t nbytes = sizes[i], frame = nbytes + AGSF_FRAME_NBYTES;
                guarded sealed = guarded_new(frame, AT_END), out = guarded_new(nbytes, AT_END), cut;
                size_t opened = 0, frame_too = 0;
                uint8_t first[12];
                checking("a module of type %u, %zu bytes, how %u", type, nbytes, how);
                CHECK_EQUAL(agsf_module_seal(&modules, type, plain, nbytes, sealed.data), AGSF_OK);
                CHECK_EQUAL(open_by_hand(&modules, type, 0, sealed.data, frame, back, &opened), frame);
                CHECK(opened == nbytes && memcmp(back, plain, nbytes) == 0);
                memcpy(first, sealed.data + 4, 12);
                CHECK_EQUAL(agsf_module_seal(&modules, type, plain, nbytes, sealed.data), AGSF_OK);
                CHECK(memcmp(first, sealed.data + 4, 12) != 0);
                seal_by_hand(&modules, type, 0, plain, nbytes, sealed.data);
                CHECK_EQUAL(agsf_module_open(&modules, type, sealed.data, frame, out.data, &opened, &frame_too),
                            AGSF_OK);
                CHECK(opened == nbytes && frame_too == frame && memcmp(out.data, plain, nbytes) == 0);
                for (size_t n = 0; n < frame; n += n < 33 ? 4 : 811) {
                    cut = guarded_copy(sealed.data, n, AT_END);
                    CHECK_EQUAL(agsf_module_open(&modules, type, cut.data, n, out.data, &opened, &frame_too),
                                AGSF_BAD_FORMAT);
                    guarded_free(&cut);
                }
                for (size_t at = 0; at < frame; at += at < 40 ? 1 : 101) {
                    agsf_status status;
                    sealed.data[at] ^= 1;
                    status = agsf_module_open(&modules, type, sealed.data, frame, out.data, &opened, &frame_too);
                    CHECK(status == AGSF_BAD_TAG || (at < 4 && status == AGSF_BAD_FORMAT));
                    if (status == AGSF_BAD_TAG) CHECK(all_are(out.data, opened, 0));
                    sealed.data[at] ^= 1;
                }
                if (how != 4 && type != 0) { /* another place */
                    modules.column++;
                    if (modules.column < 0) modules.column = 0;
                    CHECK_EQUAL(agsf_module_open(&modules, type, sealed.data, frame, out.data, &opened, &frame_too),
                                AGSF_BAD_TAG);
                    modules.column = (int16_t)(how == 5 ? 32767 : 5);
                }
                if (how != 4) {
                    CHECK_EQUAL(
                        agsf_module_open(&modules, (type + 1) % 10, sealed.data, frame, out.data, &opened, &frame_too),
                        AGSF_BAD_TAG);
                    CHECK(all_are(out.data, nbytes, 0));
                }
                guarded_free(&sealed);
                guarded_free(&out);
            }
            agsf_key_free(key);
        }
    }
    CHECK_EQUAL(agsf_module_seal(&(agsf_modules){.key = NULL}, 1, plain, (size_t)INT32_MAX - 31, back),
                AGSF_BAD_ARGUMENT);
}

/* ---------------------------------------------------------------- chains of pages */

enum { PAGES_MAX = 12, BODY_MAX = 3000, CHAIN_MAX = PAGES_MAX * (BODY_MAX + HEADER_ROOM) };
enum layout { WHOLE, LEVELS_APART };

/* Pages, and how each side would have them. */
struct chain {
    size_t npages, ndata;
    struct plan plans[PAGES_MAX]; /* as they are in plaintext */
    uint8_t bodies[PAGES_MAX][BODY_MAX];
    uint64_t values;
};

static void random_chain(struct chain *chain, uint64_t *random, bool v2) {
    *chain = (struct chain){.npages = 1 + (size_t)random_below(random, PAGES_MAX)};
    for (size_t i = 0; i < chain->npages; i++) {
        struct plan *const plan = &chain->plans[i];
        const size_t body = (size_t)random_below(random, random_below(random, 3) ? BODY_MAX : 20);
        plan->type = i == 0 && random_below(random, 2) ? DICTIONARY : v2 ? V2 : V1;
        plan->compressed = (int32_t)body;
        plan->uncompressed = (int32_t)random_below(random, 100000);
        plan->values = (int32_t)random_below(random, 200);
        if (plan->type == V2 && body > 0) {
            plan->levels[0] = (int32_t)random_below(random, body);
            plan->levels[1] = (int32_t)random_below(random, body - (size_t)plan->levels[0] + 1);
        }
        plan->has_crc = random_below(random, 2);
        plan->long_heads = random_below(random, 8) == 0;
        plan->unknown =
            random_below(random, 3) ? 0 : 9 + (int)random_below(random, random_below(random, 2) ? 10 : 30000);
        fill(chain->bodies[i], body, *random);
        plan->crc = agsf_crc32(chain->bodies[i], body);
        if (plan->type != DICTIONARY) {
            chain->ndata++;
            chain->values += (uint64_t)plan->values;
        }
    }
}

static size_t levels_of(const struct plan *plan) { return (size_t)plan->levels[0] + (size_t)plan->levels[1]; }

static size_t put_plain(const struct chain *chain, uint8_t *out) {
    uint8_t *const begin = out;

    for (size_t i = 0; i < chain->npages; i++) {
        out += put_plan(out, &chain->plans[i]);
        memcpy(out, chain->bodies[i], (size_t)chain->plans[i].compressed);
        out += chain->plans[i].compressed;
    }
    return (size_t)(out - begin);
}

static unsigned header_type(const struct plan *plan) { return plan->type == DICTIONARY ? 5 : 4; }
static unsigned body_type(const struct plan *plan) { return plan->type == DICTIONARY ? 3 : 2; }
static size_t overhead_of(const agsf_modules *modules) { return modules->ctr ? 16 : 32; }

/* AES-CTR as libcrypto has it, with the counter that the specification says: key_of(key_nbytes, seed)'s bytes,
 * nonce, 1. */
static void ctr_by_hand(size_t key_nbytes, uint64_t seed, const uint8_t *nonce, const uint8_t *in, size_t nbytes,
                        uint8_t *out) {
    EVP_CIPHER_CTX *const ctx = EVP_CIPHER_CTX_new();
    uint8_t key[32], iv[16] = {0};
    int written;

    fill(key, sizeof(key), seed);
    memcpy(iv, nonce, 12);
    iv[15] = 1;
    CHECK(EVP_DecryptInit_ex2(ctx,
                              key_nbytes == 16   ? EVP_aes_128_ctr()
                              : key_nbytes == 24 ? EVP_aes_192_ctr()
                                                 : EVP_aes_256_ctr(),
                              key, iv, NULL) == 1);
    CHECK(EVP_DecryptUpdate(ctx, out, &written, in, (int)nbytes) == 1 && (size_t)written == nbytes);
    EVP_CIPHER_CTX_free(ctx);
}

/* Checks that `in` is the chain, sealed with the key of that seed; returns how long it is. */
static size_t check_sealed(const struct chain *chain, const agsf_modules *modules, unsigned seed, enum layout layout,
                           const uint8_t *in, size_t nbytes, const agsf_page *table) {
    static uint8_t opened[BODY_MAX + HEADER_ROOM], expected[HEADER_ROOM];
    size_t at = 0, page = 0, plain_at = 0;

    for (size_t i = 0; i < chain->npages; i++) {
        struct plan plan = chain->plans[i];
        const size_t begin = at, plain_header = put_plan(expected, &plan);
        size_t header, body, lead = layout == LEVELS_APART ? levels_of(&plan) : 0;
        const uint8_t *stored;
        at += open_by_hand(modules, header_type(&plan), (unsigned)page, in + at, nbytes - at, opened, &header);
        stored = in + at;
        plan.compressed += (int32_t)overhead_of(modules);
        plan.crc = agsf_crc32(stored, (size_t)plan.compressed);
        CHECK_EQUAL(put_plan(expected, &plan), header);
        CHECK(memcmp(expected, opened, header) == 0);
        CHECK(memcmp(stored, chain->bodies[i], lead) == 0);
        if (modules->ctr) {
            body = (size_t)chain->plans[i].compressed - lead;
            CHECK_EQUAL(length_at(stored + lead), body + 12);
            ctr_by_hand(8 + seed * 8, seed, stored + lead + 4, stored + lead + 16, body, opened);
            at += lead + 16 + body;
        } else {
            at += lead + open_by_hand(modules, body_type(&plan), (unsigned)page, in + at + lead, nbytes - at - lead,
                                      opened, &body);
        }
        CHECK_EQUAL(body + lead, (size_t)chain->plans[i].compressed);
        CHECK(memcmp(opened, chain->bodies[i] + lead, body) == 0);
        if (plan.type != DICTIONARY) {
            CHECK_EQUAL(table[page].in_offset, plain_at);
            CHECK_EQUAL(table[page].in_nbytes, plain_header + (size_t)chain->plans[i].compressed);
            CHECK_EQUAL(table[page].out_offset, begin);
            CHECK_EQUAL(table[page].out_nbytes, at - begin);
            page++;
        }
        plain_at += plain_header + (size_t)chain->plans[i].compressed;
    }
    return at;
}

static agsf_pages run_of(const agsf_modules *from, const agsf_modules *to, agsf_pages_mode mode, size_t nbytes) {
    return (agsf_pages){
        .from = from, .to = to, .mode = mode, .nbytes = nbytes, .keep_checksum = true, .table = malloc(1)};
}

static struct driven go(agsf_pages *run, const guarded *in, guarded *out, struct steps steps) {
    const struct driven driven =
        drive(run, in->data, in->nbytes, out == NULL ? NULL : out->data, out == NULL ? 0 : out->nbytes, steps);

    free(run->table);
    run->table = NULL;
    return driven;
}

static void check_chains(void) {
    static const struct steps windows[] = {{0, 0, 1}, {1, 1, 1},    {0, 1, 1},      {1, 0, 1},
                                           {7, 0, 1}, {100, 33, 1}, {4096, 4096, 1}};
    static struct chain chain;
    static uint8_t plain[CHAIN_MAX];
    uint64_t random = 7;
    agsf_key *keys[3] = {key_of(16, 1), key_of(24, 2), key_of(32, 3)};

    for (unsigned turn = 0; turn < (SANITIZED ? 60 : 200); turn++) {
        const bool v2 = random_below(&random, 2);
        const enum layout layout = v2 && random_below(&random, 2) ? LEVELS_APART : WHOLE;
        const agsf_modules a = modules_of(keys[turn % 3], (int16_t)(turn * 81), (int16_t)(turn % 5), turn % 4 == 0);
        const agsf_modules b = modules_of(keys[turn / 3 % 3], 1, 2, turn % 7 < 2);
        const struct steps steps = turn % 3 > 0 ? windows[0] : windows[random_below(&random, COUNT(windows))];
        guarded in, sealed, back, other;
        agsf_pages run;
        struct driven driven;
        size_t nbytes, size, headers = 0, checksums = 0;
        uint64_t uncompressed = 0;

        random_chain(&chain, &random, v2);
        nbytes = put_plain(&chain, plain);
        for (size_t i = 0; i < chain.npages; i++) {
            uint8_t header[HEADER_ROOM];
            struct plan plan = chain.plans[i];
            plan.compressed += (int32_t)overhead_of(&a);
            plan.has_crc = false;
            headers += put_plan(header, &plan) + 32;
            uncompressed += (uint64_t)plan.uncompressed;
            checksums += chain.plans[i].has_crc;
        }
        in = guarded_copy(plain, nbytes, AT_END);
        sealed = guarded_new(nbytes + chain.npages * 100, AT_END);
        back = guarded_new(nbytes + 200, AT_END);
        other = guarded_new(nbytes + chain.npages * 100 + 200, AT_END);

        checking("chain %u: sealed", turn);
        run = run_of(NULL, &a, AGSF_PAGES_COPY, nbytes);
        run.v2_layout = layout == LEVELS_APART ? 2 : (int)(turn % 2);
        run.values_left = chain.values;
        driven = drive(&run, in.data, nbytes, sealed.data, sealed.nbytes, steps);
        CHECK_EQUAL(driven.status, AGSF_OK);
        CHECK(driven.consumed == nbytes && run.in_total == nbytes && run.out_total == driven.produced);
        CHECK(run.page == chain.ndata && run.table_count == chain.ndata && run.values == chain.values);
        CHECK(run.checksums == checksums && run.wrong_checksums == 0 &&
              run.dictionary_pages == chain.npages - chain.ndata);
        if (checksums == 0) CHECK_EQUAL(run.uncompressed, uncompressed + headers);
        size = driven.produced;
        CHECK_EQUAL(check_sealed(&chain, &a, turn % 3 + 1, layout, sealed.data, size, run.table), size);
        free(run.table);

        const guarded frames = {.data = sealed.data, .nbytes = size};
        for (size_t w = 0; w < COUNT(windows); w++) {
            if (w > 0 && turn % 8 > 0) continue;
            checking("chain %u: opened by steps of %zu and %zu", turn, windows[w].in, windows[w].out);
            memset(back.data, SLACK, back.nbytes);
            run = run_of(&a, NULL, AGSF_PAGES_COPY, size);
            driven = go(&run, &frames, &back, windows[w]);
            CHECK_EQUAL(driven.status, AGSF_OK);
            CHECK(driven.consumed == size && driven.produced == nbytes && memcmp(back.data, plain, nbytes) == 0);
            CHECK(run.page == chain.ndata && run.v2_levels <= run.v2_pages);
            CHECK_EQUAL(run.outside_levels, layout == LEVELS_APART ? run.v2_levels : 0);
            const bool outside = run.outside_levels > 0;
            for (int mode = AGSF_PAGES_COPY; mode <= AGSF_PAGES_CHECK; mode++) {
                if (mode == AGSF_PAGES_SAME_SIZE) continue;
                run = run_of(&a, NULL, (agsf_pages_mode)mode, size);
                run.refuse_levels = true;
                CHECK_EQUAL(go(&run, &frames, &other, windows[w]).status, outside ? AGSF_LEVELS : AGSF_OK);
            }

            checking("chain %u: listed and checked by steps of %zu", turn, windows[w].in);
            run = run_of(&a, NULL, AGSF_PAGES_LIST, size);
            CHECK_EQUAL(go(&run, &frames, NULL, windows[w]).status, AGSF_OK);
            CHECK(run.page == chain.ndata && run.values == chain.values && run.in_total == size);
            run = run_of(&a, NULL, AGSF_PAGES_CHECK, size);
            run.keep_checksum = false;
            CHECK_EQUAL(go(&run, &frames, &back, windows[w]).status, AGSF_OK);
            CHECK_EQUAL(run.checksums, checksums);
            run = run_of(NULL, NULL, AGSF_PAGES_CHECK, nbytes);
            run.values_left = chain.values;
            CHECK_EQUAL(go(&run, &in, NULL, windows[w]).status, AGSF_OK);
            run = run_of(NULL, NULL, AGSF_PAGES_LIST, nbytes);
            run.values_left = chain.values;
            CHECK_EQUAL(go(&run, &in, NULL, windows[w]).status, AGSF_OK);
            CHECK(run.page == chain.ndata && run.in_total == nbytes);

            checking("chain %u: viewed by steps of %zu and %zu", turn, windows[w].in, windows[w].out);
            run = run_of(&a, NULL, AGSF_PAGES_VIEW, size);
            driven = go(&run, &frames, &other, windows[w]);
            CHECK_EQUAL(driven.status, AGSF_OK);
            CHECK_EQUAL(driven.produced, size);
            for (size_t at = 0, i = 0; i < chain.npages; i++) {
                /* A header, then a body as in plaintext, together as long as the two frames. */
                uint8_t header[HEADER_ROOM];
                struct plan plan = chain.plans[i];
                const size_t body = (size_t)plan.compressed, known = put_plan(header, &plan) - 1;
                struct plan in_frame = plan;
                size_t header_frame;
                agsf_thrift_value field = {.end = at};
                in_frame.compressed += (int32_t)overhead_of(&a);
                header_frame = length_at(sealed.data + at) + 4;
                CHECK(memcmp(other.data + at, header, known) == 0);
                do {
                    CHECK_EQUAL(agsf_thrift_next(other.data, size, false, &field), AGSF_OK);
                } while (field.type != AGSF_THRIFT_STOP);
                CHECK_EQUAL(field.end + body, at + header_frame + (size_t)in_frame.compressed);
                CHECK(memcmp(other.data + field.end, chain.bodies[i], body) == 0);
                at = field.end + body;
            }
        }

        checking("chain %u: sealed again, of the same size", turn);
        {
            agsf_modules same = b;
            same.ctr = a.ctr;
            run = run_of(&a, &same, AGSF_PAGES_SAME_SIZE, size);
            driven = go(&run, &frames, &other, steps);
            CHECK(driven.status == AGSF_OK && driven.produced == size);
            const guarded again = {.data = other.data, .nbytes = size};
            const uint32_t dropped = run.dropped_checksums;
            run = run_of(&same, NULL, AGSF_PAGES_COPY, size);
            run.keep_checksum = false;
            driven = go(&run, &again, &back, steps);
            CHECK_EQUAL(driven.status, AGSF_OK);
            CHECK(dropped > 0 || (driven.produced == nbytes && memcmp(back.data, plain, nbytes) == 0));
            CHECK_EQUAL(run.checksums + dropped, checksums);
        }
        checking("chain %u: sealed again", turn);
        run = run_of(&a, &b, AGSF_PAGES_COPY, size);
        run.v2_layout = (int)(turn / 2 % 3);
        driven = go(&run, &frames, &other, steps);
        CHECK_EQUAL(driven.status, AGSF_OK);
        const guarded again = {.data = other.data, .nbytes = driven.produced};
        run = run_of(&b, NULL, AGSF_PAGES_COPY, again.nbytes);
        run.keep_checksum = false;
        driven = go(&run, &again, &back, steps);
        CHECK_EQUAL(driven.status, AGSF_OK);
        CHECK(driven.produced == nbytes && memcmp(back.data, plain, nbytes) == 0);

        guarded_free(&in);
        guarded_free(&sealed);
        guarded_free(&back);
        guarded_free(&other);
    }
    for (size_t i = 0; i < 3; i++) agsf_key_free(keys[i]);
}

/* ---------------------------------------------------------------- pages sealed by hand */

enum { HAND_MAX = 20000 };

/* A page, sealed by hand: its plan says what stands in it, also if that is a lie. */
static size_t put_sealed_page(const agsf_modules *modules, const struct plan *plan, unsigned page, size_t lead,
                              const uint8_t *body, size_t nbytes, uint8_t *out) {
    uint8_t header[HEADER_ROOM];
    const size_t header_nbytes = put_plan(header, plan);
    uint8_t *const begin = out;

    out += seal_by_hand(modules, header_type(plan), page, header, header_nbytes, out);
    memcpy(out, body, lead);
    out += lead;
    out += seal_by_hand(modules, body_type(plan), page, body + lead, nbytes - lead, out);
    return (size_t)(out - begin);
}

static void check_fillers(void) {
    static const int unknown[] = {0, 9, 13, 14, 15, 16, 29, 30, 32000, 32764, 32765, 32766, 32767};
    static const uint8_t body[100] = {1, 2, 3};
    static uint8_t sealed[HAND_MAX];
    agsf_key *key = key_of(16, 1);
    const agsf_modules modules = modules_of(key, 0, 0, false);

    for (size_t u = 0; u < COUNT(unknown); u++) {
        for (size_t padding = 0; padding <= 400; padding += u == 0 ? 1 : 23) {
            struct plan plan = {.type = V1,
                                .uncompressed = 100,
                                .compressed = 132,
                                .values = 5,
                                .unknown = unknown[u],
                                .padding = padding};
            const size_t nbytes = put_sealed_page(&modules, &plan, 0, 0, body, sizeof(body), sealed);
            guarded in = guarded_copy(sealed, nbytes, AT_END), out = guarded_new(nbytes + 300, AT_END);
            agsf_pages run = run_of(&modules, NULL, AGSF_PAGES_VIEW, nbytes);
            const struct driven driven = go(&run, &in, &out, (struct steps){0});
            checking("a filler behind field %d, %zu of padding", unknown[u], padding);
            if (unknown[u] > INT16_MAX - 2) {
                CHECK_EQUAL(driven.status, AGSF_BAD_FORMAT);
                CHECK(all_are(out.data, out.nbytes, 0));
            } else {
                agsf_thrift_value field = {0};
                int16_t last = 0;
                unsigned after = 0;
                CHECK(driven.status == AGSF_OK && driven.produced == nbytes);
                for (;; last = field.id) {
                    const size_t begin = field.end;
                    CHECK_EQUAL(agsf_thrift_next(out.data, nbytes, false, &field), AGSF_OK);
                    if (field.type == AGSF_THRIFT_STOP) break;
                    if (field.id <= 5 || field.id == unknown[u]) continue;
                    /* The filler: at most a bool and bytes, with heads of one byte. */
                    CHECK(out.data[begin] >> 4 == field.id - last && ++after <= 2 && field.id >= 14);
                    CHECK(field.type == AGSF_THRIFT_BINARY || (field.type == AGSF_THRIFT_TRUE && after == 1));
                }
                CHECK(after > 0 && field.end + sizeof(body) == nbytes);
                CHECK(memcmp(out.data + field.end, body, sizeof(body)) == 0);
            }
            guarded_free(&in);
            guarded_free(&out);
        }
    }
    agsf_key_free(key);
}

/* A header that a same-size copy cannot keep a longer CRC in loses it; with padding, it keeps it. */
static void check_dropped_crc(void) {
    static const uint8_t body[50] = {9};
    static uint8_t sealed[HAND_MAX];
    agsf_key *key = key_of(16, 1), *other = key_of(16, 2);
    const agsf_modules from = modules_of(key, 0, 0, false), to = modules_of(other, 0, 0, false);

    for (int unknown = 0; unknown < 21; unknown += 10) {
        for (size_t padding = 0; padding < 8; padding++) {
            /* The CRC 0 takes one byte; it is wrong, which is kept. One of five bytes comes out, most of the time. */
            struct plan plan = {.type = V1,
                                .uncompressed = 50,
                                .compressed = 82,
                                .values = 5,
                                .has_crc = true,
                                .unknown = unknown,
                                .padding = padding};
            const size_t nbytes = put_sealed_page(&from, &plan, 0, 0, body, sizeof(body), sealed);
            guarded in = guarded_copy(sealed, nbytes, AT_END), out = guarded_new(nbytes + 300, AT_END);
            agsf_pages run = run_of(&from, &to, AGSF_PAGES_SAME_SIZE, nbytes);
            uint8_t opened[HEADER_ROOM], expected[HEADER_ROOM];
            size_t header, length;
            uint32_t wrong;
            checking("a CRC that does not fit, %zu of padding", padding);
            CHECK_EQUAL(go(&run, &in, &out, (struct steps){0}).status, AGSF_OK);
            CHECK(run.out_total == nbytes && run.wrong_checksums == 1 && run.dropped_checksums <= 1);
            CHECK(padding < 4 || run.dropped_checksums == 0);
            open_by_hand(&to, 4, 0, out.data, nbytes, opened, &header);
            length = length_at(in.data) + 4;
            wrong = agsf_crc32(in.data + length, 82);
            plan.crc = wrong ^ agsf_crc32(out.data + length, 82);
            plan.has_crc = run.dropped_checksums == 0;
            plan.padding = 0;
            length = put_plan(expected, &plan);
            CHECK(memcmp(opened, expected, length) == 0 && all_are(opened + length, header - length, 0));
            guarded_free(&in);
            guarded_free(&out);
        }
    }
    agsf_key_free(key);
    agsf_key_free(other);
}

/* Headers that are sealed as they must be, and lie. */
static void check_hostile_headers(void) {
    static const uint8_t body[200] = {1};
    static uint8_t sealed[HAND_MAX], levels[300];
    agsf_key *key = key_of(16, 1), *other = key_of(32, 2);
    const agsf_modules from = modules_of(key, 0, 0, false), to = modules_of(other, 0, 0, false);

    for (int value = -1; value <= 300; value += value < 25 || (value > 194 && value < 235) ? 1 : 17) {
        for (unsigned kind = 0; kind < 8; kind++) {
            struct plan plan = {.type = kind < 3 ? V2 : V1, .uncompressed = 200, .compressed = 232, .values = 5};
            const size_t lead = kind == 2 ? 20 : 0;
            bool good = true;
            size_t nbytes;
            if (kind == 0) plan.levels[0] = value, good = value >= 0 && value <= 200;
            if (kind == 1) plan.levels[0] = INT32_MAX, plan.levels[1] = value, good = false;
            if (kind == 2) plan.levels[1] = value, good = value == 20;
            if (kind == 3) plan.compressed = value, good = value == 232;
            if (kind == 4) plan.uncompressed = value, good = value >= 0;
            if (kind == 5) plan.values = value, good = value >= 0;
            if (kind == 6) plan.type = value & 3, good = plan.type != 1, plan.compressed = 232;
            if (kind == 7) plan.compressed = value < 0 ? value : INT32_MAX - value, good = false;
            checking("hostile header %u, %d", kind, value);
            if (kind == 2) { /* the levels are said where a length stands that fits by chance */
                memset(levels, 0, sizeof(levels));
                levels[0] = 228; /* as if it were one frame: 232 - 4 */
                nbytes = put_sealed_page(&from, &plan, 0, lead, levels, 200, sealed);
            } else {
                nbytes = put_sealed_page(&from, &plan, 0, 0, body, 200, sealed);
            }
            for (unsigned mode = AGSF_PAGES_COPY; mode <= AGSF_PAGES_CHECK; mode++) {
                for (unsigned reseal = 0; reseal < 2; reseal++) {
                    guarded in = guarded_copy(sealed, nbytes, AT_END), out = guarded_new(nbytes + 300, AT_END);
                    agsf_pages run = run_of(&from, reseal ? &to : NULL, (agsf_pages_mode)mode, nbytes);
                    struct driven driven;
                    if ((mode == AGSF_PAGES_VIEW && reseal) || (mode == AGSF_PAGES_SAME_SIZE && !reseal)) {
                        CHECK_EQUAL(go(&run, &in, &out, (struct steps){0}).status, AGSF_BAD_ARGUMENT);
                    } else {
                        run.v2_layout = value % 3 < 0 ? 0 : value % 3;
                        driven = go(&run, &in, &out, (struct steps){0});
                        if (good) {
                            CHECK_EQUAL(driven.status, AGSF_OK);
                        } else {
                            CHECK(driven.status == AGSF_BAD_FORMAT || (kind == 2 && driven.status == AGSF_BAD_TAG));
                            CHECK(all_are(out.data, out.nbytes, 0));
                        }
                    }
                    guarded_free(&in);
                    guarded_free(&out);
                }
            }
        }
    }
    agsf_key_free(key);
    agsf_key_free(other);
}

/* A header that says another type than it is sealed as: all tags pass. */
static void check_headers_of_another_type(void) {
    static const uint8_t body[100] = {3};
    static uint8_t header[HEADER_ROOM], sealed[HAND_MAX];
    static const int types[] = {V1, V2, DICTIONARY};
    agsf_key *key = key_of(16, 1);
    const agsf_modules from = modules_of(key, 0, 0, false);

    for (size_t t = 0; t < COUNT(types); t++) {
        const struct plan plan = {.type = types[t], .uncompressed = 100, .compressed = 132, .values = 5};
        const size_t nbytes = put_plan(header, &plan);
        for (unsigned other = 0; other < 2; other++) {
            const unsigned as = other ? 9 - header_type(&plan) : header_type(&plan); /* 4 and 5 */
            size_t all = seal_by_hand(&from, as, 0, header, nbytes, sealed);
            all += seal_by_hand(&from, body_type(&plan), 0, body, sizeof(body), sealed + all);
            guarded in = guarded_copy(sealed, all, AT_END), out = guarded_new(all + 300, AT_END);
            agsf_pages run = run_of(&from, NULL, AGSF_PAGES_COPY, all);
            checking("a header of type %d, sealed as module %u", types[t], as);
            CHECK_EQUAL(go(&run, &in, &out, (struct steps){0}).status, other ? AGSF_BAD_FORMAT : AGSF_OK);
            if (other) CHECK(run.bad_module == as && all_are(out.data, out.nbytes, 0));
            guarded_free(&in);
            guarded_free(&out);
        }
    }
    agsf_key_free(key);
}

static void check_wrong_modes(void) {
    agsf_key *key = key_of(16, 1);
    const agsf_modules gcm = modules_of(key, 0, 0, false), ctr = modules_of(key, 0, 0, true);
    const struct {
        const agsf_modules *from, *to;
        unsigned mode;
        bool short_sizes;
    } cases[] = {
        {NULL, NULL, AGSF_PAGES_COPY, false},      {NULL, &gcm, AGSF_PAGES_SAME_SIZE, false},
        {&gcm, NULL, AGSF_PAGES_SAME_SIZE, false}, {&gcm, &ctr, AGSF_PAGES_SAME_SIZE, false},
        {&gcm, &gcm, AGSF_PAGES_SAME_SIZE, true},  {&gcm, &gcm, AGSF_PAGES_VIEW, false},
        {NULL, NULL, AGSF_PAGES_VIEW, false},      {&gcm, NULL, 5, false},
    };
    uint8_t in[10] = {0}, out[100];

    for (size_t i = 0; i < COUNT(cases); i++) {
        agsf_pages run = {.from = cases[i].from,
                          .to = cases[i].to,
                          .mode = (agsf_pages_mode)cases[i].mode,
                          .nbytes = 10,
                          .in = in,
                          .in_nbytes = 10,
                          .in_is_all = true,
                          .out = out,
                          .out_nbytes = sizeof(out),
                          .short_sizes = cases[i].short_sizes};
        agsf_pages *runs = &run;
        memset(out, SLACK, sizeof(out));
        CHECK_EQUAL(agsf_pages_run(&runs, 1, 1), AGSF_BAD_ARGUMENT);
        CHECK(run.stop == AGSF_STOP_NOT && all_are(out, sizeof(out), 0));
    }
    agsf_key_free(key);
}

/* ---------------------------------------------------------------- damage */

static void check_damage(void) {
    static struct chain chain;
    static uint8_t plain[CHAIN_MAX];
    uint64_t random = 99;
    agsf_key *key = key_of(16, 1), *other = key_of(16, 2);

    for (unsigned turn = 0; turn < 8; turn += SANITIZED ? 3 : 1) {
        const agsf_modules a = modules_of(key, 3, 4, turn & 1);
        agsf_modules b = a;
        guarded in, sealed, out;
        agsf_pages run;
        struct driven driven;
        size_t nbytes, frame, first;

        do {
            random_chain(&chain, &random, turn & 2);
            for (size_t i = 0; i < chain.npages; i++) { /* small ones: every byte is to be changed */
                if (chain.plans[i].compressed > 60) chain.plans[i].compressed = 60;
                chain.plans[i].levels[0] = chain.plans[i].levels[1] = 0;
                chain.plans[i].has_crc = turn & 4;
                chain.plans[i].crc = agsf_crc32(chain.bodies[i], (size_t)chain.plans[i].compressed);
                chain.plans[i].padding = 0;
            }
        } while (chain.ndata < 3);
        nbytes = put_plain(&chain, plain);
        in = guarded_copy(plain, nbytes, AT_END);
        sealed = guarded_new(nbytes + chain.npages * 100, AT_END);
        run = run_of(NULL, &a, AGSF_PAGES_COPY, nbytes);
        run.values_left = chain.values;
        driven = go(&run, &in, &sealed, (struct steps){0});
        CHECK_EQUAL(driven.status, AGSF_OK);
        frame = length_at(sealed.data) + 4;
        out = guarded_new(driven.produced + 500, AT_END);
        const guarded frames = {.data = sealed.data, .nbytes = driven.produced};
        for (unsigned mode = AGSF_PAGES_COPY; mode <= AGSF_PAGES_VIEW; mode++) {
            for (size_t at = 0; at < frames.nbytes; at++) {
                struct driven now;
                agsf_status expected = AGSF_BAD_TAG;
                checking("turn %u, mode %u, byte %zu changed", turn, mode, at);
                memset(out.data, SLACK, out.nbytes);
                sealed.data[at] ^= 0x40;
                run = run_of(&a, mode == AGSF_PAGES_SAME_SIZE ? &a : NULL, (agsf_pages_mode)mode, frames.nbytes);
                run.keep_checksum = false;
                run.dictionary = chain.plans[0].type == DICTIONARY;
                now = go(&run, &frames, &out, (struct steps){0});
                sealed.data[at] ^= 0x40;
                if (now.status == AGSF_OK) { /* a page's bytes under CTR, without a CRC: nobody can know */
                    CHECK(a.ctr && !(turn & 4));
                    continue;
                }
                CHECK(now.status == expected || now.status == AGSF_BAD_FORMAT ||
                      (turn & 4 && now.status == AGSF_CHECKSUM));
                CHECK(all_are(out.data + now.produced, out.nbytes - now.produced, 0));
                if (at < frame) CHECK_EQUAL(run.bad_module, header_type(&chain.plans[0]));
                if (at >= frame && run.page == 0 && !run.began) CHECK_EQUAL(run.bad_module, body_type(&chain.plans[0]));
            }
        }
        for (size_t cut = 0; cut < frames.nbytes; cut++) {
            guarded copy = guarded_copy(sealed.data, cut, AT_END);
            checking("turn %u, cut to %zu", turn, cut);
            run = run_of(&a, NULL, AGSF_PAGES_COPY, frames.nbytes);
            driven = go(&run, &copy, &out, (struct steps){0});
            CHECK_EQUAL(driven.status, AGSF_BAD_FORMAT);
            CHECK(all_are(out.data + driven.produced, out.nbytes - driven.produced, 0));
            guarded_free(&copy);
        }
        for (size_t cut = 0; cut < nbytes; cut++) {
            guarded copy = guarded_copy(plain, cut, AT_END);
            checking("turn %u, plaintext cut to %zu", turn, cut);
            run = run_of(NULL, NULL, AGSF_PAGES_CHECK, nbytes);
            CHECK_EQUAL(go(&run, &copy, NULL, (struct steps){0}).status, AGSF_BAD_FORMAT);
            guarded_free(&copy);
        }
        /* Another column, row group, prefix, key; and the second page for the first. */
        for (unsigned how = 0; how < 6; how++) {
            checking("turn %u, another place, %u", turn, how);
            b = a;
            if (how == 0) b.column = 5;
            if (how == 1) b.row_group = 2;
            if (how == 2) b.aad_nbytes--;
            if (how == 3) b.key = other;
            if (how == 4) b.without_aad = true;
            run = run_of(&b, NULL, AGSF_PAGES_COPY, frames.nbytes);
            if (how == 5) run.page = 1, run.began = true;
            driven = go(&run, &frames, &out, (struct steps){0});
            CHECK(driven.status == AGSF_BAD_TAG && driven.produced == 0 && all_are(out.data, out.nbytes, 0));
            CHECK_EQUAL(run.bad_module, AGSF_DATA_PAGE_HEADER);
        }
        /* Without its first page. */
        first = frame + (size_t)chain.plans[0].compressed + overhead_of(&a);
        const guarded rest = {.data = sealed.data + first, .nbytes = frames.nbytes - first};
        run = run_of(&a, NULL, AGSF_PAGES_COPY, rest.nbytes);
        CHECK_EQUAL(go(&run, &rest, &out, (struct steps){0}).status,
                    chain.plans[0].type == DICTIONARY ? AGSF_OK : AGSF_BAD_TAG);
        guarded_free(&in);
        guarded_free(&sealed);
        guarded_free(&out);
    }
    agsf_key_free(key);
    agsf_key_free(other);
}

/* A header that fails its tag is nowhere in the room for headers. */
static void check_header_is_wiped(void) {
    static const uint8_t body[10] = {0};
    static uint8_t sealed[HAND_MAX];
    agsf_key *key = key_of(16, 1);
    const agsf_modules modules = modules_of(key, 0, 0, false);
    const struct plan plan = {.type = V1, .uncompressed = 10, .compressed = 42, .values = 1, .unknown = 100};
    const size_t nbytes = put_sealed_page(&modules, &plan, 0, 0, body, sizeof(body), sealed);
    uint8_t header[200], out[500];
    agsf_pages run = {.from = &modules,
                      .nbytes = nbytes,
                      .in = sealed,
                      .in_nbytes = nbytes,
                      .in_is_all = true,
                      .out = out,
                      .out_nbytes = sizeof(out),
                      .header = header,
                      .header_nbytes = sizeof(header)};
    agsf_pages *runs = &run;

    checking("what is left of a header");
    sealed[30] ^= 1;
    memset(header, SLACK, sizeof(header));
    CHECK_EQUAL(agsf_pages_run(&runs, 1, 1), AGSF_OK);
    CHECK(run.stop == AGSF_STOP_FAILED && run.status == AGSF_BAD_TAG);
    CHECK(all_are(header, length_at(sealed) - 28, 0) &&
          all_are(header + length_at(sealed) - 28, sizeof(header) + 28 - length_at(sealed), SLACK));
    agsf_key_free(key);
}

/* A page without a byte needs no room to be checked in: then its output may be NULL. */
static void check_empty_page(void) {
    static const uint8_t in[] = {0x15, 0, 0x15, 0, 0x15, 0, 0x2c, 0x15, 2, 0x15, 0, 0, 0};
    static uint8_t sealed[HAND_MAX];
    agsf_key *key = key_of(16, 1);
    const agsf_modules modules = modules_of(key, 0, 0, false);
    agsf_pages run = {.to = &modules, .nbytes = sizeof(in), .values_left = 1};
    struct driven driven;

    checking("a page without a byte");
    driven = drive(&run, in, sizeof(in), sealed, sizeof(sealed), (struct steps){0});
    CHECK_EQUAL(driven.status, AGSF_OK);
    run = (agsf_pages){.from = &modules, .mode = AGSF_PAGES_CHECK, .nbytes = driven.produced, .values_left = 1};
    CHECK_EQUAL(drive(&run, sealed, driven.produced, NULL, 0, (struct steps){0}).status, AGSF_OK);
    CHECK_EQUAL(run.page, 1);
    agsf_key_free(key);
}

/* ---------------------------------------------------------------- limits */

static void check_limits(void) {
    static const uint8_t body[10] = {0};
    uint8_t plain[300], sealed[HAND_MAX];
    struct plan plan = {.type = V1, .uncompressed = 10, .compressed = 10, .values = 1};
    const size_t header = put_plan(plain, &plan), nbytes = header + 10;
    const guarded in = {.data = plain, .nbytes = 3 * nbytes};
    guarded out = guarded_new(3 * nbytes + 300, AT_END);

    for (unsigned left = 0; left < 8; left++) {
        agsf_key *key = key_of(16, 5000 + left);
        const agsf_modules modules = modules_of(key, 0, 0, false);
        agsf_pages run = run_of(NULL, &modules, AGSF_PAGES_COPY, 3 * nbytes);
        checking("a key that has %u messages left", left);
        for (int i = 0; i < 3; i++) {
            memcpy(plain + (size_t)i * nbytes, plain, header);
            memcpy(plain + (size_t)i * nbytes + header, body, 10);
        }
        CHECK_EQUAL(agsf_key_carry(key, AGSF_KEY_LIMIT - left), AGSF_OK);
        free(run.table);
        run.table = NULL; /* all in one call */
        memset(out.data, SLACK, out.nbytes);
        CHECK_EQUAL(go(&run, &in, &out, (struct steps){0}).status, left < 6 ? AGSF_LIMIT : AGSF_OK);
        if (left < 6) CHECK(all_are(out.data, out.nbytes, 0));
        CHECK_EQUAL(agsf_key_sealed(key), left / 2 * 2 < 6 ? left / 2 * 2 : 6);
        agsf_key_free(key);
    }
    for (unsigned page = 32765; page <= 32768; page++) {
        agsf_key *key = key_of(16, 1);
        const agsf_modules modules = modules_of(key, 0, 0, false);
        agsf_pages run = run_of(NULL, &modules, AGSF_PAGES_COPY, 3 * nbytes),
                   list = run_of(NULL, &modules, AGSF_PAGES_LIST, 3 * nbytes);
        size_t length;
        checking("three pages from %u on", page);
        run.page = list.page = page;
        free(run.table);
        run.table = NULL;
        memset(out.data, SLACK, out.nbytes);
        CHECK_EQUAL(go(&list, &in, NULL, (struct steps){0}).status, page == 32765 ? AGSF_OK : AGSF_ORDINAL);
        CHECK_EQUAL(go(&run, &in, &out, (struct steps){0}).status, page == 32765 ? AGSF_OK : AGSF_ORDINAL);
        if (page == 32765) {
            for (unsigned i = 0, at = 0; i < 3; i++) {
                at += (unsigned)open_by_hand(&modules, 4, page + i, out.data + at, out.nbytes - at, sealed, &length);
                at += (unsigned)open_by_hand(&modules, 2, page + i, out.data + at, out.nbytes - at, sealed, &length);
            }
        } else {
            CHECK(all_are(out.data, out.nbytes, 0));
        }
        agsf_key_free(key);
    }
    checking("a body that is too large");
    {
        agsf_key *key = key_of(16, 1);
        const agsf_modules modules = modules_of(key, 0, 0, false);
        uint8_t huge[300];
        struct plan large = {.type = V1, .uncompressed = 1, .compressed = INT32_MAX - 31, .values = 1};
        agsf_pages run = {.to = &modules, .nbytes = UINT32_MAX, .in = huge, .in_nbytes = put_plan(huge, &large)};
        agsf_pages *runs = &run;
        CHECK_EQUAL(agsf_pages_run(&runs, 1, 1), AGSF_OK);
        CHECK_EQUAL(run.stop, AGSF_STOP_FAILED); /* before 2 GiB of it are asked for */
        CHECK_EQUAL(run.status, AGSF_BAD_ARGUMENT);
        large.compressed--;
        run = (agsf_pages){.to = &modules, .nbytes = UINT32_MAX, .in = huge, .in_nbytes = put_plan(huge, &large)};
        CHECK_EQUAL(agsf_pages_run(&runs, 1, 1), AGSF_OK);
        CHECK_EQUAL(run.stop, AGSF_STOP_INPUT);
        CHECK_EQUAL(run.wanted, run.in_nbytes + (size_t)INT32_MAX - 32);
        agsf_key_free(key);
    }
    guarded_free(&out);
}

/* ---------------------------------------------------------------- many runs */

enum { RUNS = 4096, RUN_ROOM = 1000 };

static int64_t now_ns(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void check_many_runs(unsigned nkeys, unsigned threads, bool ctr) {
    static uint8_t plain[RUN_ROOM], sealed[RUNS][RUN_ROOM], back[RUNS][RUN_ROOM], header[RUNS][RUN_ROOM];
    static agsf_pages runs[RUNS];
    static agsf_pages *pointers[RUNS];
    static agsf_modules modules[RUNS];
    static agsf_key *keys[RUNS];
    static const uint8_t body[300] = {5};
    struct plan plan = {.type = V1, .uncompressed = 10, .compressed = 300, .values = 1};
    const size_t nbytes = put_plan(plain, &plan) + 300;
    unsigned bad = 1000;

    memcpy(plain + nbytes - 300, body, 300);
    for (unsigned i = 0; i < nkeys; i++) keys[i] = key_of(16, i);
    for (unsigned turn = 0; turn < 3; turn++) { /* seal, open, open with damage */
        agsf_status status;
        const int64_t begin = now_ns();
        checking("%u keys, %u threads, turn %u", nkeys, threads, turn);
        for (unsigned i = 0; i < RUNS; i++) {
            modules[i] = modules_of(keys[i % nkeys], (int16_t)(i % 7), (int16_t)i, ctr);
            const agsf_pages made = runs[i];
            runs[i] = (agsf_pages){.from = turn > 0 ? &modules[i] : NULL,
                                   .to = turn > 0 ? NULL : &modules[i],
                                   .values_left = 1,
                                   .nbytes = turn > 0 ? turn == 1 ? made.out_total : made.nbytes : nbytes,
                                   .in = turn > 0 ? sealed[i] : plain,
                                   .in_is_all = true,
                                   .out = turn > 0 ? back[i] : sealed[i],
                                   .out_nbytes = RUN_ROOM,
                                   .header = header[i],
                                   .header_nbytes = RUN_ROOM};
            runs[i].in_nbytes = (size_t)runs[i].nbytes;
            pointers[i] = &runs[i];
        }
        if (turn == 2) sealed[bad][20] ^= 1;
        while ((status = agsf_pages_run(pointers, RUNS, threads)) == AGSF_PAUSED) continue;
        CHECK_EQUAL(status, AGSF_OK);
        for (unsigned i = 0; i < RUNS; i++) {
            if (turn == 2 && i == bad) {
                CHECK(runs[i].stop == AGSF_STOP_FAILED && runs[i].status == AGSF_BAD_TAG &&
                      all_are(back[i], RUN_ROOM, 0));
                continue;
            }
            CHECK_EQUAL(runs[i].stop, AGSF_STOP_DONE);
            if (turn > 0) CHECK(runs[i].out_total == nbytes && memcmp(back[i], plain, nbytes) == 0);
        }
        /* Not a clock test: comparing every run with every key would take a hundred times as long. */
        CHECK(now_ns() - begin < INT64_C(20000000000));
    }
    for (unsigned i = 0; i < RUNS && nkeys == 1; i += 97) { /* nonces are all others */
        for (unsigned j = 0; j < i; j++) CHECK(memcmp(sealed[i] + 4, sealed[j] + 4, 12) != 0);
    }
    for (unsigned i = 0; i < nkeys; i++) agsf_key_free(keys[i]);
}

int main(void) {
    start();
    check_crc();
    check_modules();
    check_chains();
    check_fillers();
    check_dropped_crc();
    check_hostile_headers();
    check_headers_of_another_type();
    check_wrong_modes();
    check_damage();
    check_header_is_wiped();
    check_empty_page();
    check_limits();
    for (unsigned threads = 1; threads <= 4; threads += 3) {
        check_many_runs(1, threads, false);
        check_many_runs(3, threads, true);
        check_many_runs(RUNS, threads, threads == 1);
    }
    return 0;
}
