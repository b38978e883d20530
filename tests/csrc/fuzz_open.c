/*
 * fuzz_open.c - a libFuzzer target: the path that opens what somebody else wrote.
 *
 * The input begins with a recipe: sizes, place in the stream, key, threads, memory or descriptor. What follows it is
 * either the sealed bytes themselves, or edits to a stream that is sealed here first, so that the fuzzer comes past
 * the tags. Whatever it does: AGSF_OK only if the output is what was sealed; bytes that are as they were must open;
 * the lowest block that was changed is the one that is named; zeros after any failure; nothing is touched outside of
 * the buffers (guard pages).
 *
 * Without libFuzzer (-DFUZZ_ALONE) it is a test: some thousand inputs of its own making. `fuzz_open seeds FOLDER`
 * writes what fuzzing begins with.
 */
#include "support.h"

enum {
    PLAIN_USUAL = 5000,
    PLAIN_MAX = 1 << 20, /* enough for two threads to be wanted */
    BLOCKS_MAX = 2000,   /* a block per byte takes long and shows nothing new */
    FAR_AWAY = 1 << 16,  /* beyond, the file is left as it was */
    PREFIX_MAX = 200,
    ALL_MODES = 0xff,
};
enum mode {
    FROM_FILE = 1,
    EDITED = 2,
    AT_THE_START = 4,
    OTHER_KEY = 8,
    OTHER_PREFIX = 16,
    MUCH = 32 + 64 + 128 /* rare */
};

struct recipe {
    uint8_t modes, key_size, threads, prefix_nbytes;
    uint32_t block_nbytes, plain_nbytes;
    uint32_t opened_block_nbytes; /* 0: as sealed */
    uint64_t first_block, fd_offset;
    uint32_t first_block_moved; /* how much further down the stream it is opened than sealed */
};

struct edit {
    uint8_t kind; /* xor, cut, copy */
    uint8_t value;
    uint16_t nbytes;
    uint32_t at, from;
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

/* Changes sealed bytes; returns how many of them are left. */
static size_t edit(uint8_t *sealed, size_t sealed_nbytes, const uint8_t *edits, size_t edits_nbytes, bool may_cut) {
    size_t length = sealed_nbytes;

    for (; edits_nbytes >= sizeof(struct edit); edits += sizeof(struct edit), edits_nbytes -= sizeof(struct edit)) {
        struct edit e;
        memcpy(&e, edits, sizeof(e));
        const size_t at = e.at % sealed_nbytes, from = e.from % sealed_nbytes;
        const size_t room = sealed_nbytes - (at > from ? at : from);
        if (e.kind % 3 == 0) sealed[at] ^= e.value;
        if (e.kind % 3 == 1 && may_cut && at < length) length = at;
        if (e.kind % 3 == 2) memmove(sealed + at, sealed + from, e.nbytes < room ? e.nbytes : room);
    }
    return length;
}

/* The block in which `now` first differs from what it was, or in which it ends; UINT64_MAX if it is the same. */
static uint64_t first_difference(const uint8_t *was, const uint8_t *now, size_t nbytes, size_t length,
                                 size_t sealed_block) {
    for (size_t at = 0; at < nbytes; at += sealed_block) {
        const size_t here = nbytes - at < sealed_block ? nbytes - at : sealed_block;
        if (at + here > length || memcmp(was + at, now + at, here) != 0) return at / sealed_block;
    }
    return UINT64_MAX;
}

/* What is opened, and what is known of it. */
struct trial {
    struct recipe recipe;
    agsf_run run;
    agsf_key *sealing_key;
    guarded sealed;       /* all of it, with no byte behind */
    size_t length;        /* so much of it is in the file */
    const uint8_t *plain; /* what it holds; NULL: nobody knows */
    uint64_t bad;         /* the lowest block that is not as it was sealed; UINT64_MAX: none */
};

/* Seals and edits. Returns false if the recipe is impossible, which the engine must have said too. */
static bool seal_and_edit(struct trial *trial, const uint8_t *edits, size_t edits_nbytes, enum side side) {
    static uint8_t plain[PLAIN_MAX], was[PLAIN_MAX + (BLOCKS_MAX + 1) * AGSF_OVERHEAD_NBYTES];
    agsf_run *run = &trial->run;
    const size_t nbytes = (size_t)agsf_sealed_nbytes(run->plain_nbytes, run->block_nbytes);
    const bool possible = nbytes > 0 && run->first_block <= UINT32_MAX &&
                          run->first_block + blocks_of(run->plain_nbytes, run->block_nbytes) <= UINT64_C(1) << 32;
    agsf_status status;

    trial->sealed = guarded_new(nbytes, side);
    fill(plain, run->plain_nbytes, run->plain_nbytes);
    trial->plain = run->plain = plain;
    run->sealed = trial->sealed.data;
    status = finish(agsf_seal_run, run, NULL);
    CHECK_EQUAL(status, possible ? AGSF_OK : AGSF_BAD_ARGUMENT);
    if (possible) {
        memcpy(was, run->sealed, nbytes);
        trial->length = edit(run->sealed, nbytes, edits, edits_nbytes, trial->recipe.modes & FROM_FILE);
        trial->bad =
            first_difference(was, run->sealed, nbytes, trial->length, run->block_nbytes + AGSF_OVERHEAD_NBYTES);
    }
    return possible;
}

/* Takes the input as it is. In memory, the caller must have a run's bytes: as many as these can be. */
static void take(struct trial *trial, const uint8_t *sealed, size_t nbytes, enum side side) {
    static const uint8_t least[AGSF_OVERHEAD_NBYTES] = {0};
    agsf_run *run = &trial->run;
    const size_t sealed_block = run->block_nbytes + AGSF_OVERHEAD_NBYTES, rest = nbytes % sealed_block;

    if (!(trial->recipe.modes & FROM_FILE)) {
        if (nbytes < sizeof(least)) sealed = least, nbytes = sizeof(least);
        run->plain_nbytes = nbytes / sealed_block * run->block_nbytes;
        if (rest > AGSF_OVERHEAD_NBYTES) run->plain_nbytes += rest - AGSF_OVERHEAD_NBYTES;
    }
    trial->sealed = guarded_copy(sealed, nbytes, side);
    trial->length = nbytes;
}

/* Opens something else than was sealed, or from somewhere else, if the recipe says so. */
static void change_run(struct trial *trial, uint8_t *prefix, int fd) {
    const struct recipe *recipe = &trial->recipe;
    agsf_run *run = &trial->run;
    uint32_t block_nbytes = recipe->opened_block_nbytes;

    if (recipe->modes & OTHER_KEY) run->key = key_of(16 + recipe->key_size % 3 * 8, 1000);
    if (recipe->modes & OTHER_PREFIX) prefix[0] ^= 1;
    run->first_block += recipe->first_block_moved;
    if (recipe->modes & FROM_FILE) {
        run->sealed = NULL;
        if (recipe->fd_offset < FAR_AWAY) {
            CHECK(ftruncate(fd, 0) == 0);
            CHECK(pwrite(fd, trial->sealed.data, trial->length, (off_t)recipe->fd_offset) == (ssize_t)trial->length);
        }
        if (block_nbytes > 0) run->block_nbytes = block_nbytes + run->plain_nbytes / BLOCKS_MAX;
    } else {
        run->sealed = trial->sealed.data;
        if (block_nbytes > run->block_nbytes) run->block_nbytes = block_nbytes; /* smaller ones would take more bytes */
    }
}

static void check_opened(const struct trial *trial, agsf_status status) {
    const struct recipe *recipe = &trial->recipe;
    const agsf_run *run = &trial->run;
    const bool known = trial->plain != NULL && (run->sealed != NULL || recipe->fd_offset < FAR_AWAY);
    const bool same = run->key == trial->sealing_key && recipe->first_block_moved == 0 &&
                      (!(recipe->modes & OTHER_PREFIX) || run->aad_prefix_nbytes == 0);

    CHECK(status == AGSF_OK || status == AGSF_BAD_TAG || status == AGSF_BAD_ARGUMENT || status == AGSF_SHORT);
    if (status == AGSF_OK) {
        CHECK(known && same && trial->bad == UINT64_MAX);
        CHECK(run->plain_nbytes == 0 || memcmp(run->plain, trial->plain, run->plain_nbytes) == 0);
    } else {
        CHECK(all_are(run->plain, run->plain_nbytes, 0));
    }
    if (known && same && run->block_nbytes == recipe->block_nbytes) {
        CHECK((status == AGSF_OK) == (trial->bad == UINT64_MAX));
        if (status != AGSF_OK) CHECK_EQUAL(run->bad_block, trial->bad);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    static int fd = -1;
    uint8_t prefix[PREFIX_MAX];
    struct trial trial = {.bad = 0};
    struct recipe *const recipe = &trial.recipe;
    agsf_run *const run = &trial.run;
    enum side side;

    if (nbytes < sizeof(*recipe)) return 0;
    memcpy(recipe, data, sizeof(*recipe));
    data += sizeof(*recipe);
    nbytes -= sizeof(*recipe);
    if (fd < 0) {
        CHECK_EQUAL(agsf_library_init(), AGSF_OK);
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        CHECK(fd >= 0);
    }
    fill(prefix, sizeof(prefix), 1);
    trial.sealing_key = key_of(16 + recipe->key_size % 3 * 8, recipe->key_size);
    *run = (agsf_run){.key = trial.sealing_key,
                      .aad_prefix = prefix,
                      .aad_prefix_nbytes = recipe->prefix_nbytes % (PREFIX_MAX + 1),
                      .block_nbytes = recipe->block_nbytes,
                      .first_block = recipe->first_block,
                      .plain_nbytes =
                          recipe->plain_nbytes % ((recipe->modes & MUCH) == MUCH ? PLAIN_MAX + 1 : PLAIN_USUAL + 1),
                      .fd = fd,
                      .fd_offset = recipe->fd_offset,
                      .threads = recipe->threads % 5};
    if (run->plain_nbytes / BLOCKS_MAX > run->block_nbytes) run->plain_nbytes = run->block_nbytes * BLOCKS_MAX;

    side = recipe->modes & AT_THE_START ? AT_START : AT_END;
    if (!(recipe->modes & EDITED)) take(&trial, data, nbytes, side);
    if (!(recipe->modes & EDITED) || seal_and_edit(&trial, data, nbytes, side)) {
        guarded out = guarded_new(run->plain_nbytes, side);
        change_run(&trial, prefix, fd);
        run->plain = run->plain_nbytes > 0 ? out.data : NULL;
        run->done = 0;
        check_opened(&trial, finish(agsf_open_run, run, NULL));
        guarded_free(&out);
    }
    guarded_free(&trial.sealed);
    if (run->key != trial.sealing_key) agsf_key_free(run->key);
    agsf_key_free(trial.sealing_key);
    return 0;
}

/* ---------------------------------------------------------------- alone */

#ifdef FUZZ_ALONE
enum { EDITS_MAX = 4, INPUT_MAX = sizeof(struct recipe) + 4096 };

/* An input that is likely to get somewhere, by number. */
static size_t input_of(uint64_t number, uint8_t *input) {
    static const uint32_t blocks[] = {1, 2, 16, 100, 1000, 4096, 70000, 262116, 262117, 300000, 1 << 20, 0, 0x80000000};
    uint64_t random = number * 7919 + 1;
    struct recipe recipe = {
        .modes = (uint8_t)random_below(&random, ALL_MODES + 1),
        .key_size = (uint8_t)random_below(&random, 3),
        .threads = (uint8_t)random_below(&random, 5),
        .prefix_nbytes = (uint8_t)random_below(&random, PREFIX_MAX + 1),
        .block_nbytes = blocks[random_below(&random, COUNT(blocks))],
        .plain_nbytes = (uint32_t)random_below(&random, PLAIN_MAX),
        .first_block = random_below(&random, 10) ? random_below(&random, 100) : UINT32_MAX - random_below(&random, 100),
        .fd_offset = random_below(&random, 20) ? random_below(&random, 100) : INT64_MAX - random_below(&random, 100000),
    };
    size_t nbytes = sizeof(recipe);

    if (number % 4 != 0) recipe.modes = (uint8_t)((recipe.modes & ~(OTHER_KEY | OTHER_PREFIX)) | EDITED);
    if (number % 8 == 3) recipe.modes |= MUCH;
    if (number % 16 == 1) recipe.first_block_moved = 1;
    if (number % 16 == 2) recipe.opened_block_nbytes = blocks[random_below(&random, COUNT(blocks))];
    memcpy(input, &recipe, sizeof(recipe));
    if (recipe.modes & EDITED) {
        for (uint64_t n = random_below(&random, EDITS_MAX + 1); n > 0; n--, nbytes += sizeof(struct edit)) {
            const struct edit e = {.kind = (uint8_t)random_below(&random, 3),
                                   .value = (uint8_t)(1 + random_below(&random, 255)),
                                   .nbytes = (uint16_t)random_below(&random, 100),
                                   .at = (uint32_t)random_below(&random, 1 << 20),
                                   .from = (uint32_t)random_below(&random, 1 << 20)};
            memcpy(input + nbytes, &e, sizeof(e));
        }
    } else {
        const size_t more = (size_t)random_below(&random, INPUT_MAX - sizeof(recipe));
        fill(input + nbytes, more, number);
        nbytes += more;
    }
    return nbytes;
}

int main(int argc, char **argv) {
    static uint8_t input[INPUT_MAX];
    const bool seeds = argc == 3 && strcmp(argv[1], "seeds") == 0;

    start();
    CHECK(!seeds || chdir(argv[2]) == 0);
    for (uint64_t number = 0; number < (seeds ? 60 : 4000); number++) {
        const size_t nbytes = input_of(number, input);
        checking("input %" PRIu64, number);
        if (seeds) {
            char name[20];
            FILE *file;
            snprintf(name, sizeof(name), "%03" PRIu64, number);
            file = fopen(name, "w");
            CHECK(file != NULL && fwrite(input, 1, nbytes, file) == nbytes && fclose(file) == 0);
        } else {
            /* At the end of its memory, as libFuzzer has it: reading on is seen. */
            guarded copy = guarded_copy(input, nbytes, AT_END);
            CHECK_EQUAL(LLVMFuzzerTestOneInput(copy.data, nbytes), 0);
            guarded_free(&copy);
        }
    }
    return 0;
}
#endif
