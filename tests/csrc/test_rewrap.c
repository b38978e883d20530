/*
 * test_rewrap.c - columns of wrapped keys, from one key to another.
 *
 * Guards: every row opens, by hand, to the key that it was, under the new key and none of its nonces comes twice; sizes
 * of keys, names and prefixes, offsets that begin anywhere, and rows around jobs and helpers; nothing is written beside
 * the rows. A row that cannot be is found before anything is done, whatever its offsets say, and also if they change
 * between calls. After a bad tag, which is the lowest with any number of threads, all rows are zeros. Rows count once,
 * before the first, however often a run pauses. No data key stays on a stack.
 */
#include "support.h"

#include <pthread.h>

#include "aead.h"
#include "clock.h"

enum {
    MARGIN = 13,
    DEK_MAX = AGSF_DEK_MAX_NBYTES,
    WRAPPED_MIN = AGSF_OVERHEAD_NBYTES + 1,
    WRAPPED_MAX = AGSF_OVERHEAD_NBYTES + DEK_MAX,
    JOB_ROWS = 512
};

/* ---------------------------------------------------------------- columns */

/* Both columns, in buffers that end where memory ends; rows begin MARGIN bytes into the data, and end MARGIN before its
 * end. */
struct column {
    agsf_key *from, *to;
    size_t nrows;
    guarded prefix, name_offsets, names, offsets, in, out;
};

static int32_t get(const guarded *offsets, size_t i) {
    int32_t offset;

    memcpy(&offset, offsets->data + i * sizeof(offset), sizeof(offset));
    return offset;
}

static void set(guarded *offsets, size_t i, int64_t value) {
    const int32_t offset = (int32_t)value;

    memcpy(offsets->data + i * sizeof(offset), &offset, sizeof(offset));
}

/* The i-th row's data key, of its size. */
static size_t dek_of(size_t i, uint8_t *dek) {
    const size_t nbytes = i % 3 ? (i % 3) * 16 : 1 + i / 3 % DEK_MAX;

    fill(dek, nbytes, i + 17);
    return nbytes;
}

static size_t aad_of(const struct column *c, size_t i, uint8_t *aad) {
    const size_t begin = (size_t)get(&c->name_offsets, i), nbytes = (size_t)get(&c->name_offsets, i + 1) - begin;

    if (c->prefix.nbytes > 0) memcpy(aad, c->prefix.data, c->prefix.nbytes);
    if (nbytes > 0) memcpy(aad + c->prefix.nbytes, c->names.data + begin, nbytes);
    return c->prefix.nbytes + nbytes;
}

/* nrows keys under a KEK of its own, with names of 0 to name_max bytes. */
static struct column column_new(size_t nrows, size_t prefix_nbytes, size_t name_max) {
    static uint64_t seed; /* a key value is counted for ever: each column has its own */
    struct column c = {.nrows = nrows, .from = key_of(16, seed + 1), .to = key_of(32, seed + 2)};
    uint8_t *aad = malloc(prefix_nbytes + name_max + 1), dek[DEK_MAX];
    size_t names = MARGIN, wrapped = MARGIN;

    CHECK(aad != NULL);
    seed += 2;
    c.prefix = guarded_new(prefix_nbytes, AT_END);
    fill(c.prefix.data, prefix_nbytes, 5);
    c.name_offsets = guarded_new((nrows + 1) * sizeof(int32_t), nrows % 2 ? AT_END : AT_START);
    c.offsets = guarded_new((nrows + 1) * sizeof(int32_t), nrows % 2 ? AT_START : AT_END);
    for (size_t i = 0; i <= nrows; i++) {
        set(&c.name_offsets, i, (int64_t)names);
        set(&c.offsets, i, (int64_t)wrapped);
        if (i == nrows) break;
        names += i * 7 % (name_max + 1);
        wrapped += AGSF_OVERHEAD_NBYTES + dek_of(i, dek);
    }
    c.names = guarded_new(names, AT_END);
    fill(c.names.data, names, 6);
    c.in = guarded_new(wrapped + MARGIN, AT_END);
    c.out = guarded_new(wrapped + MARGIN, AT_END);
    for (size_t i = 0; i < nrows; i++) {
        uint8_t *at = c.in.data + get(&c.offsets, i);
        fill(at, AGSF_NONCE_NBYTES, i);
        CHECK_EQUAL(agsf_seal(c.from, at, aad, aad_of(&c, i, aad), dek, dek_of(i, dek), at + AGSF_NONCE_NBYTES),
                    AGSF_OK);
    }
    free(aad);
    return c;
}

static void column_free(struct column *c) {
    guarded *const buffers[] = {&c->prefix, &c->name_offsets, &c->names, &c->offsets, &c->in, &c->out};

    for (size_t i = 0; i < COUNT(buffers); i++) guarded_free(buffers[i]);
    agsf_key_free(c->from);
    agsf_key_free(c->to);
}

static agsf_rewrap run_of(struct column *c, unsigned threads) {
    memset(c->out.data, SLACK, c->out.nbytes);
    return (agsf_rewrap){.from = c->from,
                         .to = c->to,
                         .prefix = c->prefix.data,
                         .prefix_nbytes = c->prefix.nbytes,
                         .name_offsets = c->name_offsets.data,
                         .names = c->names.data,
                         .names_nbytes = c->names.nbytes,
                         .offsets = c->offsets.data,
                         .in = c->in.data,
                         .in_nbytes = c->in.nbytes,
                         .out = c->out.data,
                         .out_nbytes = c->out.nbytes,
                         .nrows = c->nrows,
                         .threads = threads};
}

static agsf_status finish_rows(agsf_rewrap *run) {
    agsf_status status;

    while ((status = agsf_rewrap_run(run)) == AGSF_PAUSED) continue;
    return status;
}

/* Every row is the key that it was, under `to`, with another nonce, and nothing else was written. */
static void check_rewrapped(const struct column *c) {
    uint8_t *aad = malloc(c->prefix.nbytes + c->names.nbytes), dek[DEK_MAX], opened[DEK_MAX];
    const size_t end = (size_t)get(&c->offsets, c->nrows);

    CHECK(aad != NULL);
    for (size_t i = 0; i < c->nrows; i++) {
        const size_t at = (size_t)get(&c->offsets, i), nbytes = dek_of(i, dek);
        const uint8_t *sealed = c->out.data + at;
        CHECK(memcmp(sealed, c->in.data + at, AGSF_NONCE_NBYTES) != 0);
        CHECK_EQUAL(agsf_open(c->to, sealed, aad, aad_of(c, i, aad), sealed + AGSF_NONCE_NBYTES, nbytes, opened),
                    AGSF_OK);
        CHECK(memcmp(opened, dek, nbytes) == 0);
    }
    CHECK(all_are(c->out.data, MARGIN, SLACK));
    CHECK(all_are(c->out.data + end, c->out.nbytes - end, SLACK));
    free(aad);
}

static void check_zeros(const struct column *c) {
    const size_t begin = (size_t)MARGIN, end = c->out.nbytes - MARGIN;

    CHECK(all_are(c->out.data, begin, SLACK));
    CHECK(all_are(c->out.data + begin, end - begin, 0));
    CHECK(all_are(c->out.data + end, MARGIN, SLACK));
}

/* ---------------------------------------------------------------- what succeeds */

static void check_sizes(void) {
    static const size_t rows[] = {1, 2, 70, JOB_ROWS - 1, JOB_ROWS, JOB_ROWS + 1, 4095, 4096, 9001};
    static const size_t prefixes[] = {0, 45, 1010, 1024, 3000}; /* and names: what is joined has 1024 bytes */

    for (size_t r = 0; r < COUNT(rows); r++) {
        for (size_t p = 0; p < (rows[r] < 1000 ? COUNT(prefixes) : 1); p++) {
            struct column c = column_new(rows[r], prefixes[(p + r) % COUNT(prefixes)], p % 2 ? 30 : 200);
            const uint64_t opened = agsf_key_sealed(c.from);
            for (unsigned threads = 1; threads <= 4; threads++) {
                agsf_rewrap run = run_of(&c, threads);
                checking("%zu rows, prefix %zu, %u threads", rows[r], c.prefix.nbytes, threads);
                CHECK_EQUAL(finish_rows(&run), AGSF_OK);
                CHECK_EQUAL(run.done, rows[r]);
                CHECK_EQUAL(agsf_key_sealed(c.to), rows[r] * threads);
                check_rewrapped(&c);
            }
            CHECK_EQUAL(agsf_key_sealed(c.from), opened);
            column_free(&c);
        }
    }
}

/* No rows: no pointer need lead anywhere, and an offset may be anything. */
static void check_nothing(void) {
    const uint8_t offset[4] = {0xff, 0xff, 0xff, 0xff};
    agsf_key *key = key_of(16, 1000000);
    agsf_rewrap run = {.from = key, .to = key, .name_offsets = offset, .offsets = offset, .threads = 2};

    checking("no rows");
    CHECK_EQUAL(agsf_rewrap_run(&run), AGSF_OK);
    CHECK_EQUAL(agsf_key_sealed(key), 0);
    agsf_key_free(key);
}

/* From a key to itself: new nonces, which is what a run under the same key amounts to. */
static void check_same_key(void) {
    struct column c = column_new(5000, 10, 10);
    agsf_key *const to = c.to;
    agsf_rewrap run;

    checking("from a key to itself");
    c.to = c.from;
    run = run_of(&c, 2);
    CHECK_EQUAL(finish_rows(&run), AGSF_OK);
    check_rewrapped(&c);
    c.to = to;
    column_free(&c);
}

static int compare_nonces(const void *a, const void *b) { return memcmp(a, b, AGSF_NONCE_NBYTES); }

static void check_nonces(void) {
    enum { ROWS = 50000 };
    struct column c = column_new(ROWS, 0, 5);
    uint8_t *nonces = malloc((size_t)2 * ROWS * AGSF_NONCE_NBYTES), *end = nonces;

    checking("nonces");
    CHECK(nonces != NULL);
    for (unsigned threads = 1; threads <= 2; threads++) {
        agsf_rewrap run = run_of(&c, threads);
        CHECK_EQUAL(finish_rows(&run), AGSF_OK);
        for (size_t i = 0; i < ROWS; i++, end += AGSF_NONCE_NBYTES) {
            memcpy(end, c.out.data + get(&c.offsets, i), AGSF_NONCE_NBYTES);
        }
    }
    qsort(nonces, (size_t)2 * ROWS, AGSF_NONCE_NBYTES, compare_nonces);
    for (uint8_t *next = nonces + AGSF_NONCE_NBYTES; next < end; next += AGSF_NONCE_NBYTES) {
        CHECK(compare_nonces(next - AGSF_NONCE_NBYTES, next) != 0);
    }
    free(nonces);
    column_free(&c);
}

/* ---------------------------------------------------------------- what fails */

/* Any bit of a row, or another's name, key or place: that row is bad, and nothing is left of the others. */
static void check_tampering(void) {
    enum { ROWS = 6000 };
    struct column c = column_new(ROWS, 45, 20);
    static const size_t bad[] = {0, 1, JOB_ROWS - 1, JOB_ROWS, 3000, ROWS - 1};

    for (size_t b = 0; b < COUNT(bad); b++) {
        const size_t begin = (size_t)get(&c.offsets, bad[b]), end = (size_t)get(&c.offsets, bad[b] + 1);
        const size_t places[] = {begin, begin + 11, begin + 12, end - 17, end - 16, end - 1};
        for (size_t p = 0; p < COUNT(places); p++) {
            agsf_rewrap run = run_of(&c, 1 + (unsigned)(b + p) % 4);
            checking("row %zu, byte %zu, %u threads", bad[b], places[p] - begin, run.threads);
            c.in.data[places[p]] ^= (uint8_t)(1 << p);
            c.in.data[get(&c.offsets, ROWS - 1)] ^= (uint8_t)(p * 3); /* a later one, too */
            CHECK_EQUAL(finish_rows(&run), AGSF_BAD_TAG);
            CHECK_EQUAL(run.bad_row, bad[b]);
            check_zeros(&c);
            CHECK_EQUAL(agsf_rewrap_run(&run), AGSF_BAD_ARGUMENT); /* it is over */
            c.in.data[places[p]] ^= (uint8_t)(1 << p);
            c.in.data[get(&c.offsets, ROWS - 1)] ^= (uint8_t)(p * 3);
        }
    }
    for (unsigned what = 0; what < 3; what++) {
        agsf_rewrap run = run_of(&c, 1 + what);
        checking("another %s", what == 0 ? "key" : what == 1 ? "prefix" : "name");
        if (what == 0) run.from = c.to;
        if (what == 1) run.prefix_nbytes--;
        if (what == 2) c.names.data[get(&c.name_offsets, 4000)] ^= 1;
        CHECK_EQUAL(finish_rows(&run), AGSF_BAD_TAG);
        if (what < 2) CHECK_EQUAL(run.bad_row, 0);
        check_zeros(&c);
    }
    column_free(&c);
}

/* Jobs that fail at the same time, the lowest row's before or after the others'. */
static void check_lowest(void) {
    struct column c = column_new(5000, 45, 20);

    for (size_t i = 500; i < 3000; i += JOB_ROWS + 10) c.in.data[get(&c.offsets, i)] ^= 1;
    for (unsigned n = 0; n < 300; n++) {
        agsf_rewrap run = run_of(&c, 2 + n % 2);
        checking("jobs that fail together, turn %u", n);
        CHECK_EQUAL(finish_rows(&run), AGSF_BAD_TAG);
        CHECK_EQUAL(run.bad_row, 500);
        check_zeros(&c);
    }
    column_free(&c);
}

/* Offsets that cannot be: found before anything is done. */
static void check_impossible(void) {
    enum { ROWS = 5000 };
    struct column c = column_new(ROWS, 45, 20);
    const struct {
        size_t at; /* the offset that is changed */
        bool of_names;
        int64_t value;
        size_t bad_row; /* SIZE_MAX: it is a good one */
    } cases[] = {
        {0, false, -1, 0},
        {0, false, INT32_MIN, 0},
        {0, false, INT32_MAX, 0},
        {0, false, get(&c.offsets, 1) - WRAPPED_MIN + 1, 0},
        {1, false, get(&c.offsets, 0) + WRAPPED_MIN - 1, 0},
        {1, false, get(&c.offsets, 0) + WRAPPED_MAX + 1, 0},
        {1, false, get(&c.offsets, 0) - 5, 0},
        {7, false, INT32_MIN, 6},
        {7, false, -1, 6},
        {7, false, INT32_MAX, 6},
        {4000, false, get(&c.offsets, 3999), 3999},
        {ROWS, false, (int64_t)c.in.nbytes + 1, ROWS - 1},
        {ROWS, false, get(&c.offsets, ROWS - 1), ROWS - 1},
        {0, true, -1, 0},
        {0, true, INT32_MIN, 0},
        {0, true, get(&c.name_offsets, 1) + 1, 0},
        {7, true, get(&c.name_offsets, 6) - 1, 6},
        {7, true, INT32_MAX, 6},
        {ROWS, true, (int64_t)c.names.nbytes + 1, ROWS - 1},
        {ROWS, true, INT32_MIN, ROWS - 1},
    };

    for (size_t i = 0; i < COUNT(cases); i++) {
        guarded *offsets = cases[i].of_names ? &c.name_offsets : &c.offsets;
        const int32_t good = get(offsets, cases[i].at);
        agsf_rewrap run = run_of(&c, 2);
        checking("offset %zu of %s: %" PRId64, cases[i].at, cases[i].of_names ? "names" : "keys", cases[i].value);
        set(offsets, cases[i].at, cases[i].value);
        CHECK_EQUAL(agsf_rewrap_run(&run), AGSF_BAD_ARGUMENT);
        CHECK_EQUAL(run.bad_row, cases[i].bad_row);
        CHECK(all_are(c.out.data, c.out.nbytes, SLACK));
        CHECK_EQUAL(agsf_key_sealed(c.to), 0);
        set(offsets, cases[i].at, good);
    }
    {
        agsf_rewrap run = run_of(&c, 2);
        checking("an output that is too small");
        run.out_nbytes = (size_t)get(&c.offsets, ROWS) - 1;
        CHECK_EQUAL(agsf_rewrap_run(&run), AGSF_BAD_ARGUMENT);
        CHECK_EQUAL(run.bad_row, ROWS - 1);
        run = run_of(&c, 2);
        run.out_nbytes = (size_t)get(&c.offsets, ROWS);
        CHECK_EQUAL(finish_rows(&run), AGSF_OK);
        check_rewrapped(&c);
    }
    column_free(&c);
}

/* Offsets of all kinds, in buffers that end where memory ends. */
static void check_hostile(void) {
    enum { ROWS = 5, DATA = 4 * WRAPPED_MAX };
    static const int64_t odd[] = {INT32_MIN,   INT32_MIN + 1, -1,   0,        1,        WRAPPED_MIN,
                                  WRAPPED_MAX, DATA - 1,      DATA, DATA + 1, INT32_MAX};
    guarded names = guarded_new(DATA, AT_END), in = guarded_new(DATA, AT_END), out = guarded_new(DATA, AT_END);
    guarded offsets[2] = {guarded_new((ROWS + 1) * sizeof(int32_t), AT_END),
                          guarded_new((ROWS + 1) * sizeof(int32_t), AT_END)};
    agsf_key *from = key_of(16, 1), *to = key_of(16, 2);
    uint64_t state = 1;
    unsigned bad_tags = 0;

    for (unsigned n = 0; n < 20000; n++) {
        agsf_rewrap run = {.from = from,
                           .to = to,
                           .name_offsets = offsets[0].data,
                           .names = names.data,
                           .names_nbytes = DATA,
                           .offsets = offsets[1].data,
                           .in = in.data,
                           .in_nbytes = DATA,
                           .out = out.data,
                           .out_nbytes = DATA,
                           .nrows = 1 + (size_t)random_below(&state, ROWS),
                           .threads = 1};
        agsf_status status;
        checking("hostile offsets, turn %u", n);
        for (unsigned which = 0; which < 2; which++) {
            int64_t at = (int64_t)random_below(&state, 5);
            for (size_t i = 0; i <= ROWS; i++, at += WRAPPED_MIN + (int64_t)random_below(&state, 40))
                set(&offsets[which], i, at);
            if (n % 4 == which)
                set(&offsets[which], (size_t)random_below(&state, ROWS + 1), odd[random_below(&state, COUNT(odd))]);
        }
        status = agsf_rewrap_run(&run);
        CHECK(status == AGSF_BAD_TAG || status == AGSF_BAD_ARGUMENT);
        CHECK(run.bad_row < run.nrows);
        bad_tags += status == AGSF_BAD_TAG;
    }
    CHECK(bad_tags > 1000);
    guarded_free(&names);
    guarded_free(&in);
    guarded_free(&out);
    for (unsigned which = 0; which < 2; which++) guarded_free(&offsets[which]);
    agsf_key_free(from);
    agsf_key_free(to);
}

static void check_limit(void) {
    enum { ROWS = 1000 };
    struct column c = column_new(ROWS, 45, 20);
    agsf_rewrap run = run_of(&c, 2);

    checking("the limit of the new key");
    CHECK_EQUAL(agsf_key_carry(c.to, AGSF_KEY_LIMIT - ROWS), AGSF_OK);
    CHECK_EQUAL(finish_rows(&run), AGSF_OK); /* just enough */
    check_rewrapped(&c);
    run = run_of(&c, 2);
    CHECK_EQUAL(agsf_rewrap_run(&run), AGSF_LIMIT);
    CHECK(all_are(c.out.data, c.out.nbytes, SLACK));
    CHECK_EQUAL(agsf_key_sealed(c.to), ROWS);
    column_free(&c);
}

/* ---------------------------------------------------------------- pauses */

static void check_pauses(unsigned threads) {
    enum { ROWS = 10 * JOB_ROWS + 7 };
    struct column c = column_new(ROWS, 45, 20);
    agsf_rewrap run = run_of(&c, threads);
    unsigned pauses = 0;
    agsf_status status;

    checking("pauses, %u threads", threads);
    step_ms = 150;
    CHECK_EQUAL(agsf_key_carry(c.to, AGSF_KEY_LIMIT - ROWS), AGSF_OK); /* just enough, if each is counted once */
    for (size_t done = 0; (status = agsf_rewrap_run(&run)) == AGSF_PAUSED; pauses++, done = run.done) {
        CHECK(run.done > done && run.done < ROWS);
        CHECK_EQUAL(agsf_key_sealed(c.to), ROWS);
    }
    CHECK_EQUAL(status, AGSF_OK);
    if (threads == 1) CHECK_EQUAL(pauses, ROWS / JOB_ROWS); /* a job a call; helpers may do any number of the others */
    check_rewrapped(&c);
    step_ms = 0;
    column_free(&c);
}

static void check_later_parts(void) {
    enum { ROWS = 3 * JOB_ROWS };
    struct column c = column_new(ROWS, 45, 20);
    agsf_rewrap run = run_of(&c, 1);
    const int32_t good_next = get(&c.offsets, JOB_ROWS + 1);
    int32_t good;

    checking("a bad row in a later part");
    step_ms = 150;
    CHECK_EQUAL(agsf_rewrap_run(&run), AGSF_PAUSED);
    c.in.data[get(&c.offsets, ROWS - 3)] ^= 1;
    CHECK_EQUAL(finish_rows(&run), AGSF_BAD_TAG);
    CHECK_EQUAL(run.bad_row, ROWS - 3);
    check_zeros(&c);
    c.in.data[get(&c.offsets, ROWS - 3)] ^= 1;

    /* Who changes offsets gets garbage or an error, but nothing is read or written elsewhere. */
    for (unsigned which = 0; which < 4; which++) {
        guarded *offsets = which % 2 ? &c.name_offsets : &c.offsets;
        checking("offsets that change meanwhile, %u", which);
        run = run_of(&c, 1);
        CHECK_EQUAL(agsf_rewrap_run(&run), AGSF_PAUSED);
        good = get(offsets, ROWS - 2);
        set(offsets, ROWS - 2, which < 2 ? INT32_MAX : -7);
        CHECK_EQUAL(finish_rows(&run), AGSF_BAD_ARGUMENT);
        CHECK_EQUAL(run.bad_row, ROWS - 3);
        check_zeros(&c);
        set(offsets, ROWS - 2, good);
    }
    for (unsigned which = 0; which < 2;
         which++) { /* a row that would be good, but is outside of those that were checked */
        const int64_t end = which == 0 ? MARGIN - 1 + WRAPPED_MIN : get(&c.offsets, ROWS) + 1;
        checking("a row that moves out %s", which == 0 ? "at the front" : "at the end");
        run = run_of(&c, 1);
        CHECK_EQUAL(agsf_rewrap_run(&run), AGSF_PAUSED);
        CHECK_EQUAL(run.done, JOB_ROWS);
        good = get(&c.offsets, JOB_ROWS);
        set(&c.offsets, JOB_ROWS, end - WRAPPED_MIN);
        set(&c.offsets, JOB_ROWS + 1, end);
        CHECK_EQUAL(finish_rows(&run), AGSF_BAD_ARGUMENT);
        CHECK_EQUAL(run.bad_row, JOB_ROWS);
        check_zeros(&c);
        set(&c.offsets, JOB_ROWS, good);
        set(&c.offsets, JOB_ROWS + 1, good_next);
    }
    step_ms = 0;
    column_free(&c);
}

/* ---------------------------------------------------------------- stacks */

#if !SANITIZED
enum { STACK = 1 << 20 };

static agsf_status wanted;

static void *rewrap_on_this_stack(void *column) {
    agsf_rewrap run = run_of(column, 1);

    CHECK_EQUAL(finish_rows(&run), wanted);
    return NULL;
}

/* Looks for the data keys on the stack of a thread that had them. The second time its last row is bad. */
static void check_stack(void) {
    enum { ROWS = 39 }; /* the last one's key is not a short one, behind which the one before would be seen */
    struct column c = column_new(ROWS, 45, 20);
    uint8_t *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), dek[DEK_MAX];
    pthread_attr_t attributes;
    pthread_t thread;

    CHECK(stack != MAP_FAILED);
    for (wanted = AGSF_OK; wanted <= AGSF_BAD_TAG; wanted += AGSF_BAD_TAG - AGSF_OK) {
        checking("what stays on the stack, status %d", (int)wanted);
        if (wanted != AGSF_OK) c.in.data[get(&c.offsets, ROWS) - 1] ^= 1;
        CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, STACK) == 0);
        CHECK(pthread_create(&thread, &attributes, rewrap_on_this_stack, &c) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(pthread_attr_destroy(&attributes) == 0);
        for (size_t i = 0; i < ROWS; i++) {
            const size_t nbytes = dek_of(i, dek);
            if (nbytes >= 16) CHECK(memmem(stack, STACK, dek, 16) == NULL);
        }
    }
    CHECK(munmap(stack, STACK) == 0);
    column_free(&c);
}
#endif

int main(void) {
    start();
    step_ms = 0; /* no run pauses unless a test lets time pass */
    check_sizes();
    check_nothing();
    check_same_key();
    check_nonces();
    check_tampering();
    check_lowest();
    check_impossible();
    check_hostile();
    check_limit();
    check_pauses(1);
    check_pauses(3);
    check_later_parts();
#if !SANITIZED
    check_stack();
#endif
    return 0;
}
