/* rewrap.c - a column of wrapped keys, opened under one key and sealed under another, rows in parallel. */
#include <string.h>

#include "batch.h"

enum {
    JOB_ROWS = 512,      /* a job's nonces fit on a helper's stack, and the cost of a draw is shared by many */
    ROW_AS_NBYTES = 128, /* a row takes about as long as this many bytes of one long message */
};

/* What the jobs of one call share. The first row of job 0 is `first`. */
struct rows {
    const agsf_rewrap *run;
    size_t first;
    agsf_lane **from, **to; /* one a thread */
    agsf_batch batch;
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

static agsf_message message_of(const agsf_rewrap *run, const struct row *row, const uint8_t *nonce) {
    return (agsf_message){.nonce = nonce,
                          .prefix = run->prefix,
                          .suffix = name_of(run, row),
                          .prefix_nbytes = run->prefix_nbytes,
                          .suffix_nbytes = row->name_nbytes,
                          .cached = true};
}

static agsf_status open_row(const agsf_rewrap *run, agsf_lane *lane, const struct row *row, uint8_t *dek_ret) {
    const uint8_t *nonce = run->in + row->wrapped;
    const agsf_message message = message_of(run, row, nonce);

    return agsf_lane_open(lane, &message, nonce + AGSF_NONCE_NBYTES, row->dek_nbytes, dek_ret);
}

static agsf_status seal_row(const agsf_rewrap *run, agsf_lane *lane, const struct row *row, const uint8_t *nonce,
                            const uint8_t *dek) {
    const agsf_message message = message_of(run, row, nonce);
    uint8_t *out = run->out + row->wrapped;

    memcpy(out, nonce, AGSF_NONCE_NBYTES);
    return agsf_lane_seal(lane, &message, dek, row->dek_nbytes, out + AGSF_NONCE_NBYTES);
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
        if (status == AGSF_OK)
            status = seal_row(run, rows->to[lane], &row, nonces + (i - first) * AGSF_NONCE_NBYTES, dek);
        if (status != AGSF_OK) break;
    }
    agsf_wipe(dek, sizeof(dek));
    return status == AGSF_OK || agsf_batch_fail(&rows->batch, i, status, 0);
}

/* Goes on from `done`, as far as the time allows. */
static agsf_status run_rows(agsf_rewrap *run) {
    agsf_lane *from[AGSF_MAX_THREADS], *to[AGSF_MAX_THREADS];
    agsf_key_lanes keys[2] = {{.key = run->from, .users = AGSF_MAX_THREADS, .lanes = from},
                              {.key = run->to, .users = AGSF_MAX_THREADS, .lanes = to}};
    struct rows rows = {.run = run, .first = run->done, .from = from, .to = to};
    agsf_batch *const batch = &rows.batch;
    const size_t left = run->nrows - run->done;
    agsf_status status;

    *batch = (agsf_batch){.job = rewrap_job, .arg = &rows, .threads = run->threads, .keys = keys, .nkeys = 2};
    batch->njobs = (left - 1) / JOB_ROWS + 1;
    batch->nbytes = (uint64_t)left * ROW_AS_NBYTES;
    status = agsf_batch_run(batch);
    run->done = batch->done < batch->njobs ? run->done + batch->done * JOB_ROWS : run->nrows;
    if (status != AGSF_OK && status != AGSF_PAUSED) run->bad_row = (size_t)batch->failed_at;
    return status;
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
