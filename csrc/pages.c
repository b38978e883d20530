/* pages.c - the pages of column chunks, from one side to another. */
#include <stdlib.h>
#include <string.h>

#include "batch.h"
#include "crc32.h"
#include "entropy.h"
#include "modules.h"
#include "page_header.h"

enum {
    CTR_FRAME_NBYTES = AGSF_LENGTH_NBYTES + AGSF_NONCE_NBYTES, /* and what stands before any ciphertext */
    PAGE_NONCES = 2, /* drawn for a job's first page: many chunks of wide files have no other */
    NONCES = AGSF_ENTROPY_MAX_NBYTES / AGSF_NONCE_NBYTES, /* drawn at once later, and forgotten when the job ends */
    CRC_TRIES = 100, /* to seal a page until its CRC has a varint of four bytes: 1 page of 600 has none yet */
    CRC_OF_4_NBYTES = 0x07ffffff,
    HEADER_GROWTH_NBYTES = 16, /* the most that two longer varints, and a filler's head, add to a page header */
    HEADER_STEP_NBYTES = 4096,
    HEADER_MAX_NBYTES = 64 * 1024 *
        1024, /* of a plain one, whose end is only where its fields end; Arrow reads 16 MiB */
};

/* ---------------------------------------------------------------- one page */

/* What a thread works with on one run. */
struct worker {
    agsf_pages *run;
    agsf_lane *from, *to;
    uint8_t nonces[NONCES * AGSF_NONCE_NBYTES];
    size_t nonces_left, nonces_drawn;
};

/* A page as it was found. */
struct page {
    agsf_page_header header;
    const uint8_t *header_data; /* plain */
    size_t header_frame_nbytes; /* as it stands in the input */
    size_t header_room;         /* bytes of its plaintext, with padding */
    const uint8_t *body;        /* as it stands in the input */
    size_t body_nbytes;
    size_t lead_nbytes;      /* of the body, in front of its frame: levels in parquet-java's V2 pages */
    size_t plain_nbytes;     /* of the body */
    uint32_t crc_difference; /* 0, but for a wrong CRC that is to stay wrong */
};

static agsf_status take_nonce(struct worker *worker, const uint8_t **nonce_ret) {
    if (worker->nonces_left == 0) {
        const size_t count = worker->nonces_drawn == 0 ? PAGE_NONCES : NONCES;
        const agsf_status status = agsf_draw(worker->nonces, count * AGSF_NONCE_NBYTES);
        if (status != AGSF_OK) return status;
        worker->nonces_left = worker->nonces_drawn = count;
    }
    *nonce_ret = worker->nonces + --worker->nonces_left * AGSF_NONCE_NBYTES;
    return AGSF_OK;
}

static bool stop_for(agsf_pages *run, agsf_pages_stop stop, size_t wanted) {
    run->stop = stop;
    run->wanted = wanted;
    return false;
}

static bool fail(agsf_pages *run, agsf_status status, unsigned module) {
    run->stop = AGSF_STOP_FAILED;
    run->status = status;
    run->bad_module = module;
    return false;
}

static unsigned header_module(const struct page *page) {
    return page->header.type == AGSF_PAGE_DICTIONARY ? AGSF_DICTIONARY_PAGE_HEADER : AGSF_DATA_PAGE_HEADER;
}

/* What the next header ought to be, where it cannot be read. */
static unsigned next_header_module(const agsf_pages *run) {
    return run->dictionary && !run->began ? AGSF_DICTIONARY_PAGE_HEADER : AGSF_DATA_PAGE_HEADER;
}

static unsigned body_module(const struct page *page) {
    return page->header.type == AGSF_PAGE_DICTIONARY ? AGSF_DICTIONARY_PAGE : AGSF_DATA_PAGE;
}

/* The page ordinal of a module: dictionary pages have none. */
static uint32_t ordinal(const agsf_pages *run, const struct page *page) {
    return page->header.type == AGSF_PAGE_DICTIONARY ? 0 : run->page;
}

/*
 * Opens the header's frame. Writers do not agree on how a footer names a dictionary as the first page, so the tag
 * decides: a header that opens under the AAD of a type has that type.
 */
static bool open_header(struct worker *worker, const uint8_t *in, size_t nbytes, struct page *page) {
    static const unsigned types[2] = {AGSF_DATA_PAGE_HEADER, AGSF_DICTIONARY_PAGE_HEADER};
    agsf_pages *const run = worker->run;
    agsf_status status = AGSF_BAD_TAG;
    unsigned type = AGSF_DATA_PAGE_HEADER;

    for (int i = 0; i < (run->began ? 1 : 2) && status == AGSF_BAD_TAG; i++) {
        type = types[i];
        status = agsf_open_frame(worker->from, run->from, type, i == 0 ? run->page : 0, in, nbytes, run->header);
    }
    if (status != AGSF_OK) {
        agsf_wipe(run->header, nbytes);
        return fail(run, status, next_header_module(run));
    }
    if (agsf_header_read(run->header, nbytes, &page->header) != AGSF_OK) return fail(run, AGSF_BAD_FORMAT, type);
    /* A header that was sealed as another type than it says could make the rest of the chunk count wrong. */
    if (!run->from->without_aad && header_module(page) != type) return fail(run, AGSF_BAD_FORMAT, type);
    return true;
}

static bool find_header(struct worker *worker, const uint8_t *in, size_t left, uint64_t chunk_left, struct page *page) {
    agsf_pages *const run = worker->run;

    if (run->from == NULL) {
        const agsf_status status = agsf_header_read(in, left, &page->header);
        if (status != AGSF_OK) {
            if (status == AGSF_BAD_FORMAT || run->in_is_all || left >= HEADER_MAX_NBYTES) {
                return fail(run, AGSF_BAD_FORMAT, next_header_module(run));
            }
            return stop_for(run, AGSF_STOP_INPUT, 2 * (left < HEADER_STEP_NBYTES ? (size_t)HEADER_STEP_NBYTES : left));
        }
        page->header_data = in;
        page->header_frame_nbytes = page->header_room = page->header.nbytes;
        return true;
    }
    page->header_frame_nbytes =
        left < AGSF_LENGTH_NBYTES ? AGSF_LENGTH_NBYTES : AGSF_LENGTH_NBYTES + (size_t)agsf_get_u32(in);
    if (page->header_frame_nbytes > chunk_left || (run->in_is_all && page->header_frame_nbytes > left) ||
        (left >= AGSF_LENGTH_NBYTES && page->header_frame_nbytes <= AGSF_FRAME_NBYTES)) { /* a struct has bytes */
        return fail(run, AGSF_BAD_FORMAT, next_header_module(run));
    }
    if (page->header_frame_nbytes > left) return stop_for(run, AGSF_STOP_INPUT, page->header_frame_nbytes);
    page->header_room = page->header_frame_nbytes - AGSF_FRAME_NBYTES;
    if (page->header_room > run->header_nbytes) return stop_for(run, AGSF_STOP_HEADER, page->header_room);
    page->header_data = run->header;
    return open_header(worker, in, page->header_room, page);
}

static size_t body_overhead(const agsf_modules *modules) {
    return modules == NULL ? 0 : modules->ctr ? CTR_FRAME_NBYTES : AGSF_FRAME_NBYTES;
}

/* Whether the frame is there, of those that the body has room for. */
static bool frame_fits(const struct page *page, size_t lead) {
    return agsf_get_u32(page->body + lead) == page->body_nbytes - lead - AGSF_LENGTH_NBYTES;
}

/* Finds the frame inside a sealed body, whose bytes are all there. */
static bool find_frame(agsf_pages *run, struct page *page) {
    const size_t overhead = body_overhead(run->from);
    const size_t levels = page->header.type == AGSF_PAGE_DATA_V2 ? (size_t)page->header.levels : 0;

    /* Levels and a frame have room in every layout: Arrow's holds the levels, parquet-java's stands behind them. */
    if (page->body_nbytes < overhead + levels) return fail(run, AGSF_BAD_FORMAT, body_module(page));
    page->lead_nbytes = frame_fits(page, 0) ? 0 : levels;
    if (!frame_fits(page, page->lead_nbytes)) return fail(run, AGSF_BAD_FORMAT, body_module(page));
    page->plain_nbytes = page->body_nbytes - overhead;
    return true;
}

/* Finds the next page in the input. */
static bool find_page(struct worker *worker, struct page *page) {
    agsf_pages *const run = worker->run;
    const uint8_t *const in = run->in + run->in_done;
    const size_t left = run->in_nbytes - run->in_done;
    const uint64_t declared = run->nbytes > run->in_total ? run->nbytes - run->in_total : 0;
    /* A plain chunk may be longer than its footer says: then the caller tells where it must end by what it hands in. */
    const uint64_t chunk_left = run->from == NULL ? UINT64_MAX : declared;
    const bool short_size = run->short_sizes && run->from != NULL;
    uint64_t whole;

    if (!find_header(worker, in, left, chunk_left, page)) return false;
    if (page->header.type == AGSF_PAGE_DICTIONARY && run->began)
        return fail(run, AGSF_BAD_FORMAT, AGSF_DICTIONARY_PAGE_HEADER);
    if (page->header.type != AGSF_PAGE_DICTIONARY && run->page > AGSF_ORDINAL_MAX &&
        (run->from != NULL || run->to != NULL)) {
        return fail(run, AGSF_ORDINAL, AGSF_DATA_PAGE_HEADER);
    }
    page->body = in + page->header_frame_nbytes;
    page->body_nbytes = (size_t)page->header.compressed + (short_size ? body_overhead(run->from) : 0);
    page->plain_nbytes = page->body_nbytes;
    whole = (uint64_t)page->header_frame_nbytes + page->body_nbytes;
    if (whole > chunk_left || (run->in_is_all && run->mode != AGSF_PAGES_LIST && whole > left)) {
        return fail(run, AGSF_BAD_FORMAT, header_module(page));
    }
    if (run->to != NULL && page->body_nbytes + body_overhead(run->to) > (size_t)INT32_MAX + body_overhead(run->from)) {
        return fail(run, AGSF_BAD_ARGUMENT, body_module(page)); /* before 2 GiB of it are read */
    }
    if (run->mode == AGSF_PAGES_LIST) return true;
    if (whole > left) return stop_for(run, AGSF_STOP_INPUT, (size_t)whole);
    return run->from == NULL || find_frame(run, page);
}

static agsf_status open_behind_lead(struct worker *worker, const struct page *page, uint8_t *out) {
    const agsf_pages *const run = worker->run;
    const uint8_t *const frame = page->body + page->lead_nbytes;
    const size_t nbytes = page->plain_nbytes - page->lead_nbytes;

    if (page->lead_nbytes > 0) { /* out may be NULL, for a page without bytes */
        memcpy(out, page->body, page->lead_nbytes);
        out += page->lead_nbytes;
    }
    if (run->from->ctr) {
        return agsf_lane_ctr(worker->from, frame + AGSF_LENGTH_NBYTES, frame + CTR_FRAME_NBYTES, nbytes, out);
    }
    return agsf_open_frame(worker->from, run->from, body_module(page), ordinal(run, page), frame, nbytes, out);
}

/* Opens the body to out. If a V2 page with levels fails in Arrow's layout, tries parquet-java's. */
static bool open_body(struct worker *worker, struct page *page, uint8_t *out) {
    agsf_pages *const run = worker->run;
    agsf_status status = open_behind_lead(worker, page, out);

    if (status == AGSF_BAD_TAG && page->lead_nbytes == 0 && page->header.type == AGSF_PAGE_DATA_V2 &&
        page->header.levels > 0 && frame_fits(page, (size_t)page->header.levels)) {
        page->lead_nbytes = (size_t)page->header.levels; /* both lengths fitted by chance */
        status = open_behind_lead(worker, page, out);
    }
    if (status == AGSF_OK && page->lead_nbytes > 0 && run->refuse_levels) status = AGSF_LEVELS;
    return status == AGSF_OK ? true : fail(run, status, body_module(page));
}

/* Seals a plain body to out. in is the body: elsewhere, or, in its place there, what open_body() has put. */
static bool seal_body(struct worker *worker, const struct page *page, const uint8_t *in, size_t lead, uint8_t *out) {
    agsf_pages *const run = worker->run;
    const size_t nbytes = page->plain_nbytes - lead;
    const uint8_t *nonce;
    agsf_status status = take_nonce(worker, &nonce);

    if (lead > 0) memmove(out, in, lead);
    out += lead;
    if (status == AGSF_OK && run->to->ctr) {
        status = agsf_lane_ctr(worker->to, nonce, in + lead, nbytes, out + CTR_FRAME_NBYTES);
        agsf_put_u32(out, (uint32_t)(nbytes + AGSF_NONCE_NBYTES));
        memcpy(out + AGSF_LENGTH_NBYTES, nonce, AGSF_NONCE_NBYTES);
    } else if (status == AGSF_OK) {
        status =
            agsf_seal_frame(worker->to, run->to, body_module(page), ordinal(run, page), nonce, in + lead, nbytes, out);
    }
    return status == AGSF_OK ? true : fail(run, status, body_module(page));
}

/* How many bytes at the start of a body stay in plaintext when the body is sealed. */
static size_t lead_of(const agsf_pages *run, const struct page *page) {
    if (page->header.type != AGSF_PAGE_DATA_V2 || run->v2_layout == 1) return 0;
    return run->v2_layout == 2 ? (size_t)page->header.levels : page->lead_nbytes;
}

/* A CRC covers the stored body. A wrong CRC stays wrong by the same bits, so that no damage is hidden or added. */
static bool check_crc(agsf_pages *run, struct page *page) {
    page->crc_difference = 0;
    if (!page->header.has_crc) return true;
    run->checksums++;
    page->crc_difference = (uint32_t)page->header.crc ^ agsf_crc32(page->body, page->body_nbytes);
    if (page->crc_difference == 0) return true;
    run->wrong_checksums++;
    return run->keep_checksum ? true : fail(run, AGSF_CHECKSUM, body_module(page));
}

/* Puts the body to where it stands in the output, opened, sealed, or both. */
static bool put_body(struct worker *worker, struct page *page, size_t lead, uint8_t *body) {
    const agsf_pages *const run = worker->run;

    if (run->to == NULL) return open_body(worker, page, body);
    if (run->from == NULL) return seal_body(worker, page, page->body, lead, body);
    /* Opened where it will be sealed, behind the length and the nonce. */
    return open_body(worker, page, body + CTR_FRAME_NBYTES) &&
           seal_body(worker, page, body + CTR_FRAME_NBYTES, lead, body);
}

/*
 * Puts the page to the output. The header stands in front of the body but holds the CRC of the stored body. So the body
 * is put first, behind as much room as the header can need.
 */
static bool put_page(struct worker *worker, struct page *page, size_t *nbytes_ret) {
    agsf_pages *const run = worker->run;
    uint8_t *const out = run->out + run->out_done;
    const size_t frame = run->to != NULL ? AGSF_FRAME_NBYTES : 0, before = run->to != NULL ? CTR_FRAME_NBYTES : 0;
    const size_t lead = run->to != NULL ? lead_of(run, page) : 0;
    const size_t body_nbytes = page->plain_nbytes + body_overhead(run->to);
    const size_t fixed = run->mode == AGSF_PAGES_VIEW ? page->header_frame_nbytes + page->body_nbytes - body_nbytes
                         : run->mode == AGSF_PAGES_SAME_SIZE ? page->header_frame_nbytes
                                                             : 0;
    const size_t room =
        fixed > 0 ? fixed : agsf_header_nbytes(&page->header, body_nbytes, UINT32_C(0x80000000)) + frame;
    agsf_header_edit edit = {.compressed = body_nbytes};
    uint8_t *const body = out + room;
    size_t header, written;
    const uint8_t *nonce;
    agsf_status status;

    if (body_nbytes > INT32_MAX) return fail(run, AGSF_BAD_ARGUMENT, body_module(page));
    for (unsigned tries = 1;; tries++) {
        if (!put_body(worker, page, lead, body)) return false;
        if (page->header.has_crc) edit.crc = agsf_crc32(body, body_nbytes) ^ page->crc_difference;
        header = agsf_header_nbytes(&page->header, body_nbytes, edit.crc) + frame;
        if (run->mode != AGSF_PAGES_SAME_SIZE || run->to == NULL || header <= fixed) break;
        /*
         * The varint of the new CRC is longer than the varint of the old CRC, and the header has no padding. Another
         * nonce makes another CRC: one in 16 takes at most four bytes, one in 2048 at most three.
         */
        if (tries == CRC_TRIES || agsf_header_nbytes(&page->header, body_nbytes, CRC_OF_4_NBYTES) + frame > fixed) {
            edit.drop_crc = true; /* all else is as it was */
            run->dropped_checksums++;
            break;
        }
        status = agsf_key_reserve(run->to->key, 1);
        if (status != AGSF_OK) return fail(run, status, body_module(page));
    }
    if (run->mode == AGSF_PAGES_VIEW) {
        /* There is room: a frame that is gone leaves more than a varint of a CRC takes. */
        if (page->header.last_id > INT16_MAX - 2) return fail(run, AGSF_BAD_FORMAT, header_module(page));
        edit.filler = fixed - header;
    }
    written = agsf_header_write(page->header_data, &page->header, &edit, out + before);
    if (run->mode == AGSF_PAGES_SAME_SIZE) {
        memset(out + before + written, 0, fixed - frame - written); /* as parquet-java pads, and all readers take */
        written = fixed - frame;
    }
    if (run->to != NULL) {
        status = take_nonce(worker, &nonce);
        if (status == AGSF_OK) {
            status = agsf_seal_frame(worker->to, run->to, header_module(page), ordinal(run, page), nonce, out + before,
                                     written, out);
        }
        if (status != AGSF_OK) return fail(run, status, header_module(page));
    }
    if (written + frame < room) memmove(out + written + frame, body, body_nbytes);
    run->uncompressed += written + frame + (uint64_t)page->header.uncompressed;
    *nbytes_ret = written + frame + body_nbytes;
    return true;
}

/* The most that put_page() may write, also in between. */
static uint64_t room_for(const agsf_pages *run, const struct page *page) {
    if (run->mode == AGSF_PAGES_VIEW) return (uint64_t)page->header_frame_nbytes + page->body_nbytes; /* as it was */
    return (uint64_t)page->header_frame_nbytes + page->plain_nbytes + UINT64_C(2) * AGSF_FRAME_NBYTES +
           HEADER_GROWTH_NBYTES;
}

static void count_page(agsf_pages *run, const struct page *page, uint64_t in_nbytes, uint64_t out_nbytes) {
    const bool data = page->header.type != AGSF_PAGE_DICTIONARY;

    if (data && run->table != NULL) {
        run->table[run->table_count++] = (agsf_page){run->in_total, run->out_total, in_nbytes, out_nbytes};
    }
    if (page->header.encoding >= 0 && page->header.encoding < AGSF_ENCODINGS) {
        run->encodings[page->header.type][page->header.encoding]++;
    }
    if (page->header.type == AGSF_PAGE_DATA_V2) {
        run->v2_pages++;
        run->v2_levels += page->header.levels > 0;
    }
    run->outside_levels += page->lead_nbytes > 0;
    run->began = true;
    run->in_total += in_nbytes;
    run->out_total += out_nbytes;
    run->in_done += (size_t)in_nbytes;
    if (data) {
        run->page++;
        run->values += (uint64_t)page->header.values;
        run->values_left -=
            run->values_left < (uint64_t)page->header.values ? run->values_left : (uint64_t)page->header.values;
    } else {
        run->dictionary_pages++;
    }
}

static bool one_page(struct worker *worker) {
    agsf_pages *const run = worker->run;
    struct page page = {0};
    size_t out_nbytes = 0;
    const bool writes = run->mode < AGSF_PAGES_CHECK;

    if (run->in_total >= run->nbytes && (run->from != NULL || run->values_left == 0)) {
        run->stop = AGSF_STOP_DONE;
        return false;
    }
    if (run->in_done >= run->in_nbytes) {
        if (run->in_is_all) return fail(run, AGSF_BAD_FORMAT, next_header_module(run));
        return stop_for(run, AGSF_STOP_INPUT, run->from != NULL ? AGSF_LENGTH_NBYTES : 1);
    }
    if (!find_page(worker, &page)) return false;
    if (run->table != NULL && run->table_count == run->table_room) return stop_for(run, AGSF_STOP_TABLE, 0);
    if (writes) {
        const uint64_t room = room_for(run, &page);
        if (room > run->out_nbytes - run->out_done) return stop_for(run, AGSF_STOP_OUTPUT, (size_t)room);
        if (run->to != NULL) {
            const agsf_status status = agsf_key_reserve(run->to->key, 2);
            if (status != AGSF_OK) return fail(run, status, body_module(&page));
        }
        if (!check_crc(run, &page) || !put_page(worker, &page, &out_nbytes)) return false;
        run->out_done += out_nbytes;
    } else if (run->mode == AGSF_PAGES_CHECK) {
        if (run->from != NULL && page.plain_nbytes > run->out_nbytes) {
            return stop_for(run, AGSF_STOP_OUTPUT, page.plain_nbytes);
        }
        if (!check_crc(run, &page)) return false;
        if (run->from != NULL && !open_body(worker, &page, run->out)) return false;
    }
    count_page(run, &page, (uint64_t)page.header_frame_nbytes + page.body_nbytes, out_nbytes);
    return true;
}

/* ---------------------------------------------------------------- runs */

/* One side of a run: which key, and this side's index among the key's users. */
struct user {
    size_t key, number;
};

struct task {
    agsf_pages *run;
    struct user from, to;
};

/* Of five thousand columns with a key each, no thread borrows more lanes than the columns' own: see agsf_key_lanes. */
struct job {
    struct task *tasks;
    size_t ntasks;
    agsf_key_lanes *keys;
    size_t nkeys;
    size_t *slots; /* a hash table of keys: 0, or a key's number and 1 more */
    size_t nslots; /* a power of two, more than there can be keys */
    agsf_lane **lanes;
    agsf_batch batch;
};

static bool possible(const agsf_pages *run) {
    switch (run->mode) {
        case AGSF_PAGES_COPY: return run->from != NULL || run->to != NULL;
        case AGSF_PAGES_SAME_SIZE:
            return run->from != NULL && run->to != NULL && run->from->ctr == run->to->ctr && !run->short_sizes;
        case AGSF_PAGES_VIEW: return run->from != NULL && run->to == NULL;
        case AGSF_PAGES_CHECK:
        case AGSF_PAGES_LIST: return true;
        default: return false;
    }
}

static void clear_output(const agsf_pages *run) {
    if (run->out_nbytes > 0) memset(run->out, 0, run->out_nbytes);
}

static struct user add_user(struct job *job, const agsf_modules *modules) {
    size_t slot;
    agsf_key_lanes *key;

    if (modules == NULL) return (struct user){0};
    slot = (size_t)(((uint64_t)(uintptr_t)modules->key * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & (job->nslots - 1);
    while (job->slots[slot] != 0 && job->keys[job->slots[slot] - 1].key != modules->key)
        slot = (slot + 1) & (job->nslots - 1);
    if (job->slots[slot] == 0) {
        job->keys[job->nkeys].key = modules->key;
        job->slots[slot] = ++job->nkeys;
    }
    key = &job->keys[job->slots[slot] - 1];
    if (modules->ctr) key->with = AGSF_WITH_CTR;
    return (struct user){job->slots[slot] - 1, key->users++};
}

static agsf_lane *lane_of(const struct job *job, unsigned thread, const agsf_modules *modules, struct user user) {
    const agsf_key_lanes *const key = &job->keys[user.key];

    if (modules == NULL) return NULL;
    return key->lanes[key->users < job->batch.nthreads ? user.number : thread];
}

static bool run_job(void *arg, unsigned thread, size_t number) {
    const struct job *const job = arg;
    const struct task *const task = &job->tasks[number];
    agsf_pages *const run = task->run;
    struct worker worker = {
        .run = run, .from = lane_of(job, thread, run->from, task->from), .to = lane_of(job, thread, run->to, task->to)};

    while (one_page(&worker)) continue;
    if (run->stop == AGSF_STOP_FAILED) clear_output(run);
    return true; /* the others go on: the lowest failure is to be found, whatever the threads */
}

static agsf_status plan(struct job *job, agsf_pages **runs, size_t nruns) {
    agsf_lane **lanes;

    for (job->nslots = 4; job->nslots / 4 < nruns; job->nslots *= 2) continue;
    job->tasks = calloc(nruns, sizeof(*job->tasks));
    job->keys = calloc(nruns, 2 * sizeof(*job->keys));
    job->slots = calloc(job->nslots, sizeof(*job->slots));
    job->lanes = lanes = calloc(nruns, 2 * sizeof(*job->lanes));
    if (job->tasks == NULL || job->keys == NULL || job->slots == NULL || lanes == NULL) return AGSF_NO_MEMORY;
    for (size_t i = 0; i < nruns; i++) {
        agsf_pages *const run = runs[i];
        if (run->stop != AGSF_STOP_NOT) continue;
        if (!possible(run)) return AGSF_BAD_ARGUMENT;
        run->in_done = run->out_done = 0;
        /* A key's counter is made here: helpers allocate nothing. (libcrypto does, when its generator takes a new
         * seed.) */
        if (run->to != NULL) {
            const agsf_status status = agsf_key_reserve(run->to->key, 0);
            if (status != AGSF_OK) return status;
        }
        job->tasks[job->ntasks++] = (struct task){run, add_user(job, run->from), add_user(job, run->to)};
        job->batch.nbytes += run->in_nbytes;
    }
    for (size_t i = 0; i < job->nkeys; lanes += job->keys[i++].users) job->keys[i].lanes = lanes;
    return AGSF_OK;
}

agsf_status agsf_pages_run(agsf_pages **runs, size_t nruns, unsigned threads) {
    struct job job = {.batch = {.job = run_job, .arg = &job, .threads = threads}};
    agsf_status status;

    if (nruns == 0) return AGSF_OK;
    if (nruns > SIZE_MAX / 1024) return AGSF_BAD_ARGUMENT;
    status = plan(&job, runs, nruns);
    if (status == AGSF_OK && job.ntasks > 0) {
        job.batch.njobs = job.ntasks;
        job.batch.keys = job.keys;
        job.batch.nkeys = job.nkeys;
        status = agsf_batch_run(&job.batch);
    }
    if (status != AGSF_OK && status != AGSF_PAUSED) {
        for (size_t i = 0; i < nruns; i++) clear_output(runs[i]);
    }
    free(job.tasks);
    free(job.keys);
    free(job.slots);
    free(job.lanes);
    return status;
}
