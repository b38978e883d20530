/* rewrap.c - a column of wrapped keys, opened under one key and sealed under another, rows in parallel. */
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "aead.h"
#include "pool.h"

enum {
    JOB_ROWS = 512,           /* a job's nonces fit on a helper's stack, and what drawing them costs is shared by many */
    PARALLEL_MIN_ROWS = 4096, /* fewer are over before a helper has woken up */
    BUDGET_MS = 100,          /* of one call: bounds how long an interrupt waits */
};

/* What the jobs of one call share. The first row of job 0 is `first`. */
struct rows {
    const agsf_rewrap *run;
    size_t first;
    _Atomic uint64_t failure; /* lowest failed row and its status, packed; or UINT64_MAX */
    agsf_lane *from[AGSF_MAX_THREADS], *to[AGSF_MAX_THREADS];
};

/* Where a row's name and its wrapped key are. */
struct row {
    size_t name, name_nbytes;
    size_t wrapped, dek_nbytes;
};

static int64_t offset_at(const uint8_t *offsets, size_t i) {
    int32_t offset;

    memcpy(&offset, offsets + i * sizeof(offset), sizeof(offset)); /* a slice need not be aligned */
    return offset;
}

static bool inside(int64_t begin, int64_t end, size_t first, size_t last) {
    return begin >= 0 && begin <= end && (uint64_t)begin >= first && (uint64_t)end <= last;
}

/* A row, or false if it is impossible. Jobs ask again, too: offsets that change meanwhile must not lead elsewhere. */
static bool find_row(const agsf_rewrap *run, size_t i, struct row *row_ret) {
    const int64_t name = offset_at(run->name_offsets, i), name_end = offset_at(run->name_offsets, i + 1);
    const int64_t wrapped = offset_at(run->offsets, i), wrapped_end = offset_at(run->offsets, i + 1);

    if (!inside(name, name_end, 0, run->names_nbytes)) return false;
    if (!inside(wrapped, wrapped_end, run->begin, run->end)) return false;
    if (wrapped_end - wrapped < AGSF_OVERHEAD_NBYTES + 1) return false;
    if (wrapped_end - wrapped > AGSF_OVERHEAD_NBYTES + AGSF_DEK_MAX_NBYTES) return false;
    *row_ret = (struct row){(size_t)name, (size_t)(name_end - name), (size_t)wrapped,
                            (size_t)(wrapped_end - wrapped) - AGSF_OVERHEAD_NBYTES};
    return true;
}

/* All rows can be, or bad_row is the first that cannot. */
static bool check_rows(agsf_rewrap *run) {
    struct row row;

    run->begin = 0;
    run->end = run->in_nbytes < run->out_nbytes ? run->in_nbytes : run->out_nbytes;
    for (size_t i = 0; i < run->nrows; i++) {
        if (!find_row(run, i, &row)) {
            run->bad_row = i;
            return false;
        }
        if (i == 0) run->begin = row.wrapped;
        if (i == run->nrows - 1) run->end = row.wrapped + AGSF_OVERHEAD_NBYTES + row.dek_nbytes;
    }
    return true;
}

/* C lets nothing be added to NULL, which a column of empty names may have. */
static const uint8_t *name_of(const agsf_rewrap *run, const struct row *row) {
    return row->name_nbytes > 0 ? run->names + row->name : NULL;
}

static agsf_status open_row(const agsf_rewrap *run, agsf_lane *lane, const struct row *row, uint8_t *dek_ret) {
    const uint8_t *nonce = run->in + row->wrapped, *in = nonce + AGSF_NONCE_NBYTES;
    agsf_status status = agsf_lane_begin_open(lane, nonce, run->prefix, run->prefix_nbytes, name_of(run, row),
                                              row->name_nbytes);

    if (status == AGSF_OK) status = agsf_lane_update(lane, in, row->dek_nbytes, dek_ret);
    if (status == AGSF_OK) status = agsf_lane_finish_open(lane, in + row->dek_nbytes);
    return status;
}

static agsf_status seal_row(const agsf_rewrap *run, agsf_lane *lane, const struct row *row, const uint8_t *nonce,
                            const uint8_t *dek) {
    uint8_t *out = run->out + row->wrapped;
    agsf_status status = agsf_lane_begin_seal(lane, nonce, run->prefix, run->prefix_nbytes, name_of(run, row),
                                              row->name_nbytes);

    memcpy(out, nonce, AGSF_NONCE_NBYTES);
    out += AGSF_NONCE_NBYTES;
    if (status == AGSF_OK) status = agsf_lane_update(lane, dek, row->dek_nbytes, out);
    if (status == AGSF_OK) status = agsf_lane_finish_seal(lane, out + row->dek_nbytes);
    return status;
}

static void fail(struct rows *rows, size_t i, agsf_status status) {
    const uint64_t failure = (uint64_t)i << 8 | status; /* the smallest number is the lowest row's */
    uint64_t lowest = atomic_load(&rows->failure);

    while (failure < lowest && !atomic_compare_exchange_weak(&rows->failure, &lowest, failure)) continue;
}

static bool rewrap_job(void *arg, unsigned lane, size_t number) {
    struct rows *rows = arg;
    const agsf_rewrap *run = rows->run;
    const size_t first = rows->first + number * JOB_ROWS;
    const size_t end = run->nrows - first < JOB_ROWS ? run->nrows : first + JOB_ROWS;
    uint8_t nonces[JOB_ROWS * AGSF_NONCE_NBYTES], dek[AGSF_DEK_MAX_NBYTES];
    size_t i = first;
    agsf_status status = agsf_draw(nonces, (end - first) * AGSF_NONCE_NBYTES);

    for (; status == AGSF_OK && i < end; i++) {
        struct row row;
        status = find_row(run, i, &row) ? open_row(run, rows->from[lane], &row, dek) : AGSF_BAD_ARGUMENT;
        if (status == AGSF_OK) status = seal_row(run, rows->to[lane], &row, nonces + (i - first) * AGSF_NONCE_NBYTES, dek);
        if (status != AGSF_OK) break;
    }
    agsf_wipe(dek, sizeof(dek));
    if (status != AGSF_OK) fail(rows, i, status);
    return status == AGSF_OK;
}

/* Borrows a lane of either key for each thread; fewer pairs than wanted will do, none will not. */
static agsf_status borrow_lanes(struct rows *rows, unsigned wanted, unsigned *nlanes_ret) {
    agsf_status status = AGSF_OK;
    unsigned n = 0;

    while (n < wanted) {
        status = agsf_lane_borrow(rows->run->from, 0, &rows->from[n]);
        if (status != AGSF_OK) break;
        status = agsf_lane_borrow(rows->run->to, 0, &rows->to[n]);
        if (status != AGSF_OK) {
            agsf_lane_return(rows->run->from, rows->from[n]);
            break;
        }
        n++;
    }
    *nlanes_ret = n;
    return n > 0 ? AGSF_OK : status;
}

static unsigned count_lanes(const agsf_rewrap *run, size_t njobs) {
    const unsigned nlanes = run->threads < AGSF_MAX_THREADS ? run->threads : AGSF_MAX_THREADS;

    if (nlanes == 0 || run->nrows - run->done < PARALLEL_MIN_ROWS) return 1;
    return njobs < nlanes ? (unsigned)njobs : nlanes;
}

/* Goes on from `done`, as far as the time allows. */
static agsf_status run_rows(agsf_rewrap *run) {
    struct rows rows = {.run = run, .first = run->done};
    agsf_batch batch = {.job = rewrap_job, .arg = &rows, .budget_ms = BUDGET_MS};
    uint64_t failure;
    agsf_status status;

    atomic_init(&rows.failure, UINT64_MAX);
    batch.njobs = (run->nrows - run->done - 1) / JOB_ROWS + 1;
    status = borrow_lanes(&rows, count_lanes(run, batch.njobs), &batch.nlanes);
    if (status != AGSF_OK) return status;
    run->done += agsf_pool_run(&batch) * JOB_ROWS;
    if (run->done > run->nrows) run->done = run->nrows;
    while (batch.nlanes-- > 0) {
        agsf_lane_return(run->from, rows.from[batch.nlanes]);
        agsf_lane_return(run->to, rows.to[batch.nlanes]);
    }

    failure = atomic_load(&rows.failure);
    if (failure != UINT64_MAX) {
        run->bad_row = (size_t)(failure >> 8);
        return (agsf_status)(failure & 0xff);
    }
    return run->done == run->nrows ? AGSF_OK : AGSF_PAUSED;
}

agsf_status agsf_rewrap_run(agsf_rewrap *run) {
    agsf_status status = AGSF_OK;

    if (run->done == 0) {
        if (!check_rows(run)) return AGSF_BAD_ARGUMENT;
        if (run->nrows == 0) return AGSF_OK;
        status = agsf_key_reserve(run->to, run->nrows);
        if (status == AGSF_LIMIT) return status;
    }
    if (run->done >= run->nrows) return AGSF_BAD_ARGUMENT;
    if (status == AGSF_OK) status = run_rows(run);
    if (status != AGSF_OK && status != AGSF_PAUSED) {
        memset(run->out + run->begin, 0, run->end - run->begin);
        run->done = run->nrows; /* a failed run is over: it cannot go on */
    }
    return status;
}
