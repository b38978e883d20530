/* ags1.c - a run of AGS1 blocks: layout and AADs, sealed or opened in parallel. */
#include <stdlib.h>
#include <string.h>

#include "batch.h"
#include "fileio.h"

enum {
    JOB_NBYTES = AGSF_SCRATCH_NBYTES, /* small blocks make one job together, up to this many sealed bytes */
    SLICE_MAX_BLOCKS = 1 << 16,       /* of one call: bounds what its nonces take */
};

static const uint64_t BLOCK_MAX_NBYTES = INT32_MAX;
static const uint64_t MAX_BLOCKS = UINT64_C(1) << 32;

/* What the jobs of one call share. A job is `per_job` consecutive blocks, the first of job 0 is run->done. */
struct slice {
    const agsf_run *run;
    uint64_t first, end; /* blocks of the run */
    uint64_t per_job;
    const uint8_t *nonces; /* of the slice's blocks, when sealing */
    agsf_lane **lanes;
    agsf_batch batch;
};

static bool fail(struct slice *slice, uint64_t block, agsf_status status, int os_error) {
    return agsf_batch_fail(&slice->batch, block, status, os_error);
}

/* ---------------------------------------------------------------- layout */

static uint64_t count_blocks(uint64_t plain_nbytes, uint64_t block_nbytes) {
    return plain_nbytes == 0 ? 1 : (plain_nbytes - 1) / block_nbytes + 1;
}

uint64_t agsf_sealed_nbytes(uint64_t plain_nbytes, uint64_t block_nbytes) {
    uint64_t overhead;

    if (block_nbytes < 1 || block_nbytes > BLOCK_MAX_NBYTES) return 0;
    if (count_blocks(plain_nbytes, block_nbytes) > UINT64_MAX / AGSF_OVERHEAD_NBYTES) return 0;
    overhead = count_blocks(plain_nbytes, block_nbytes) * AGSF_OVERHEAD_NBYTES;
    return plain_nbytes > UINT64_MAX - overhead ? 0 : plain_nbytes + overhead;
}

static size_t plain_offset(const agsf_run *run, uint64_t block) { return (size_t)block * run->block_nbytes; }

static uint8_t *plain_at(const agsf_run *run, uint64_t block) {
    return run->plain_nbytes > 0 ? run->plain + plain_offset(run, block) : NULL;
}

static uint64_t sealed_offset(const agsf_run *run, uint64_t block) {
    return block * (run->block_nbytes + AGSF_OVERHEAD_NBYTES);
}

/* Plaintext bytes of the blocks from first up to, not including, end. */
static size_t plain_between(const agsf_run *run, uint64_t first, uint64_t end) {
    const size_t left = run->plain_nbytes - plain_offset(run, first);
    const uint64_t full = (end - first) * run->block_nbytes;

    return left < full ? left : (size_t)full;
}

struct suffix {
    uint8_t bytes[4];
};

/* A block's place in its stream, as its AAD ends in it. */
static struct suffix aad_suffix(const agsf_run *run, uint64_t block) {
    const uint64_t index = run->first_block + block;

    return (struct suffix){{(uint8_t)index, (uint8_t)(index >> 8), (uint8_t)(index >> 16), (uint8_t)(index >> 24)}};
}

/* ---------------------------------------------------------------- jobs */

static agsf_message message_of(const agsf_run *run, const struct suffix *suffix, const uint8_t *nonce) {
    return (agsf_message){.nonce = nonce,
                          .prefix = run->aad_prefix,
                          .suffix = suffix->bytes,
                          .prefix_nbytes = run->aad_prefix_nbytes,
                          .suffix_nbytes = sizeof(suffix->bytes)};
}

static const uint8_t *nonce_of(const struct slice *slice, uint64_t block) {
    return slice->nonces + (block - slice->first) * AGSF_NONCE_NBYTES;
}

/* Seals blocks of the run to out, which is where the first of them begins. */
static bool seal_blocks(struct slice *slice, agsf_lane *lane, uint64_t first, uint64_t end, uint8_t *out) {
    for (uint64_t block = first; block < end; block++) {
        const size_t nbytes = plain_between(slice->run, block, block + 1);
        const struct suffix suffix = aad_suffix(slice->run, block);
        const agsf_message message = message_of(slice->run, &suffix, nonce_of(slice, block));
        agsf_status status;
        memcpy(out, message.nonce, AGSF_NONCE_NBYTES);
        out += AGSF_NONCE_NBYTES;
        status = agsf_lane_seal(lane, &message, plain_at(slice->run, block), nbytes, out);
        if (status != AGSF_OK) return fail(slice, block, status, 0);
        out += nbytes + AGSF_TAG_NBYTES;
    }
    return true;
}

/* Opens blocks of the run from in, which is where the first of them begins. */
static bool open_blocks(struct slice *slice, agsf_lane *lane, uint64_t first, uint64_t end, const uint8_t *in) {
    for (uint64_t block = first; block < end; block++) {
        const size_t nbytes = plain_between(slice->run, block, block + 1);
        const struct suffix suffix = aad_suffix(slice->run, block);
        const agsf_message message = message_of(slice->run, &suffix, in);
        agsf_status status;
        in += AGSF_NONCE_NBYTES;
        status = agsf_lane_open(lane, &message, in, nbytes, plain_at(slice->run, block));
        if (status != AGSF_OK) return fail(slice, block, status, 0);
        in += nbytes + AGSF_TAG_NBYTES;
    }
    return true;
}

/*
 * A block that is larger than a lane's scratch goes through it in pieces, so that what the system call copies
 * is still in the core's cache when the cipher wants it, and the other way round.
 */
enum { PIECE_NBYTES = AGSF_SCRATCH_NBYTES - 64 }; /* room for nonce and tag; whole cache lines */

static bool seal_large_block(struct slice *slice, agsf_lane *lane, uint64_t block) {
    const agsf_run *run = slice->run;
    uint8_t *const scratch = agsf_lane_scratch(lane);
    const uint8_t *plain = plain_at(run, block);
    uint64_t offset = run->fd_offset + sealed_offset(run, block);
    size_t left = plain_between(run, block, block + 1), filled = AGSF_NONCE_NBYTES;
    const struct suffix suffix = aad_suffix(run, block);
    const agsf_message message = message_of(run, &suffix, nonce_of(slice, block));
    int os_error = 0;
    agsf_status status = agsf_lane_begin_seal(lane, &message);

    memcpy(scratch, message.nonce, AGSF_NONCE_NBYTES);
    while (status == AGSF_OK) {
        const size_t piece = left < PIECE_NBYTES ? left : PIECE_NBYTES;
        status = agsf_lane_update(lane, plain, piece, scratch + filled);
        filled += piece;
        plain += piece;
        left -= piece;
        if (status == AGSF_OK && left == 0) {
            status = agsf_lane_finish_seal(lane, scratch + filled);
            filled += AGSF_TAG_NBYTES;
        }
        if (status == AGSF_OK) status = agsf_write_at(run->fd, offset, scratch, filled, &os_error);
        if (left == 0) break;
        offset += filled;
        filled = 0;
    }
    return status == AGSF_OK ? true : fail(slice, block, status, os_error);
}

static bool open_large_block(struct slice *slice, agsf_lane *lane, uint64_t block) {
    const agsf_run *run = slice->run;
    uint8_t *const scratch = agsf_lane_scratch(lane);
    uint8_t *plain = plain_at(run, block);
    uint64_t offset = run->fd_offset + sealed_offset(run, block);
    size_t left = plain_between(run, block, block + 1), begins = AGSF_NONCE_NBYTES;
    const struct suffix suffix = aad_suffix(run, block);
    const agsf_message message = message_of(run, &suffix, scratch);
    int os_error = 0;
    agsf_status status = AGSF_OK;

    for (;;) {
        const size_t piece = left < PIECE_NBYTES ? left : PIECE_NBYTES;
        const size_t nbytes = begins + piece + (piece == left ? AGSF_TAG_NBYTES : 0);
        size_t got;
        status = agsf_read_at(run->fd, offset, scratch, nbytes, &got, &os_error);
        if (status == AGSF_OK && begins > 0) status = agsf_lane_begin_open(lane, &message);
        if (status == AGSF_OK) status = agsf_lane_update(lane, scratch + begins, piece, plain);
        plain += piece;
        left -= piece;
        if (status == AGSF_OK && left == 0) status = agsf_lane_finish_open(lane, scratch + begins + piece);
        if (status != AGSF_OK || left == 0) break;
        offset += nbytes;
        begins = 0;
    }
    return status == AGSF_OK ? true : fail(slice, block, status, os_error);
}

/* The blocks of a job, and how many bytes they are sealed. */
struct part {
    uint64_t first, end;
    size_t sealed_nbytes;
};

static struct part part_of(const struct slice *slice, size_t number) {
    const uint64_t first = slice->first + number * slice->per_job;
    const uint64_t end = slice->end - first < slice->per_job ? slice->end : first + slice->per_job;
    const size_t overhead = (size_t)(end - first) * AGSF_OVERHEAD_NBYTES;

    return (struct part){first, end, plain_between(slice->run, first, end) + overhead};
}

static bool seal_job(void *arg, unsigned lane_number, size_t number) {
    struct slice *slice = arg;
    const agsf_run *run = slice->run;
    const struct part part = part_of(slice, number);
    agsf_lane *lane = slice->lanes[lane_number];
    uint8_t *const out = run->sealed != NULL ? run->sealed + sealed_offset(run, part.first) : agsf_lane_scratch(lane);
    agsf_status status;
    int os_error = 0;

    if (run->sealed == NULL && part.sealed_nbytes > AGSF_SCRATCH_NBYTES)
        return seal_large_block(slice, lane, part.first);
    if (!seal_blocks(slice, lane, part.first, part.end, out)) return false;
    if (run->sealed != NULL) return true;
    status =
        agsf_write_at(run->fd, run->fd_offset + sealed_offset(run, part.first), out, part.sealed_nbytes, &os_error);
    return status == AGSF_OK ? true : fail(slice, part.first, status, os_error);
}

static bool open_job(void *arg, unsigned lane_number, size_t number) {
    struct slice *slice = arg;
    const agsf_run *run = slice->run;
    const struct part part = part_of(slice, number);
    agsf_lane *lane = slice->lanes[lane_number];
    const uint64_t offset = sealed_offset(run, part.first);
    uint8_t *const scratch = agsf_lane_scratch(lane);
    uint64_t first_missing;
    size_t got;
    agsf_status status;
    int os_error = 0;

    if (run->sealed != NULL) return open_blocks(slice, lane, part.first, part.end, run->sealed + offset);
    if (part.sealed_nbytes > AGSF_SCRATCH_NBYTES) return open_large_block(slice, lane, part.first);
    status = agsf_read_at(run->fd, run->fd_offset + offset, scratch, part.sealed_nbytes, &got, &os_error);
    if (status == AGSF_OK) return open_blocks(slice, lane, part.first, part.end, scratch);
    /* The lowest bad block is the first that was not read, unless one before it is bad. */
    first_missing = part.first + got / (run->block_nbytes + AGSF_OVERHEAD_NBYTES);
    if (!open_blocks(slice, lane, part.first, first_missing, scratch)) return false;
    return fail(slice, first_missing, status, os_error);
}

/* ---------------------------------------------------------------- runs */

static uint64_t blocks_per_job(const agsf_run *run) {
    const uint64_t fitting = JOB_NBYTES / (run->block_nbytes + AGSF_OVERHEAD_NBYTES);

    return fitting > 0 ? fitting : 1;
}

/* Runs the next slice: at most nblocks blocks, as many as the time allows. */
static agsf_status run_slice(agsf_run *run, uint64_t nblocks, const uint8_t *nonces,
                             bool (*job)(void *, unsigned, size_t)) {
    const uint64_t per_job = blocks_per_job(run);
    const uint64_t end = run->done + nblocks, all = count_blocks(run->plain_nbytes, run->block_nbytes);
    agsf_lane *lanes[AGSF_MAX_THREADS];
    agsf_key_lanes key = {.key = run->key, .users = AGSF_MAX_THREADS, .lanes = lanes};
    struct slice slice = {
        .run = run, .first = run->done, .end = end, .per_job = per_job, .nonces = nonces, .lanes = lanes};
    agsf_batch *const batch = &slice.batch;
    agsf_status status;

    if (run->sealed == NULL) key.with = AGSF_WITH_SCRATCH;
    *batch = (agsf_batch){.job = job, .arg = &slice, .threads = run->threads, .keys = &key, .nkeys = 1};
    batch->njobs = (size_t)((nblocks - 1) / per_job + 1);
    batch->nbytes = plain_between(run, slice.first, end);
    status = agsf_batch_run(batch);
    if (batch->done == 0) return status; /* no thread has a lane: nothing was done */
    run->done = batch->done < batch->njobs ? run->done + batch->done * per_job : end;
    if (status == AGSF_OK) return run->done == all ? AGSF_OK : AGSF_PAUSED;
    if (status != AGSF_PAUSED) {
        run->bad_block = batch->failed_at;
        run->os_error = batch->os_error;
        run->done = all; /* a failed run is over: it cannot go on */
    }
    return status;
}

static bool possible(const agsf_run *run) {
    const uint64_t sealed = agsf_sealed_nbytes(run->plain_nbytes, run->block_nbytes);
    uint64_t nblocks;

    if (sealed == 0) return false;
    nblocks = count_blocks(run->plain_nbytes, run->block_nbytes);
    if (run->first_block >= MAX_BLOCKS || nblocks > MAX_BLOCKS - run->first_block || run->done >= nblocks) return false;
    return run->sealed != NULL ? sealed <= SIZE_MAX : sealed <= INT64_MAX && run->fd_offset <= INT64_MAX - sealed;
}

static uint64_t next_blocks(const agsf_run *run) {
    const uint64_t left = count_blocks(run->plain_nbytes, run->block_nbytes) - run->done;

    return left < SLICE_MAX_BLOCKS ? left : SLICE_MAX_BLOCKS;
}

agsf_status agsf_seal_run(agsf_run *run) {
    uint8_t few[32 * AGSF_NONCE_NBYTES], *nonces = few;
    uint64_t nblocks;
    agsf_status status = AGSF_OK;

    if (!possible(run)) return AGSF_BAD_ARGUMENT;
    nblocks = next_blocks(run);
    if (nblocks * AGSF_NONCE_NBYTES > sizeof(few)) {
        nonces = malloc((size_t)nblocks * AGSF_NONCE_NBYTES);
        if (nonces == NULL) return AGSF_NO_MEMORY;
    }
    if (run->done == 0) status = agsf_key_reserve(run->key, count_blocks(run->plain_nbytes, run->block_nbytes));
    if (status == AGSF_OK) status = agsf_draw(nonces, (size_t)nblocks * AGSF_NONCE_NBYTES);
    if (status == AGSF_OK) status = run_slice(run, nblocks, nonces, seal_job);
    if (nonces != few) free(nonces);
    return status;
}

agsf_status agsf_open_run(agsf_run *run) {
    agsf_status status = AGSF_BAD_ARGUMENT;

    if (run->plain_nbytes > PTRDIFF_MAX) return status; /* no buffer is that large: there is nothing to clear */
    if (possible(run)) status = run_slice(run, next_blocks(run), NULL, open_job);
    if (status != AGSF_OK && status != AGSF_PAUSED && run->plain_nbytes > 0) memset(run->plain, 0, run->plain_nbytes);
    return status;
}

/* ---------------------------------------------------------------- runs that nobody waits for yet */

struct agsf_ahead {
    agsf_run run;
    agsf_lane *lane; /* of whoever does the job */
    uint8_t *nonces; /* NULL: to be opened */
    struct slice slice;
    agsf_pool_batch batch;
    bool good;
};

static bool do_all(void *arg, unsigned lane_number, size_t number) {
    agsf_ahead *const ahead = arg;
    bool (*const job)(void *, unsigned, size_t) = ahead->nonces != NULL ? seal_job : open_job;

    (void)lane_number;
    for (ahead->good = true; ahead->good && number * ahead->slice.per_job < ahead->slice.end; number++) {
        ahead->good = job(&ahead->slice, 0, number);
    }
    return true;
}

/* Takes the nonces over, also if it fails. */
static agsf_status begin_ahead(const agsf_run *run, uint8_t *nonces, agsf_ahead **ahead_ret) {
    agsf_ahead *const ahead = calloc(1, sizeof(*ahead));
    agsf_status status = AGSF_NO_MEMORY;

    if (ahead != NULL) status = agsf_lane_borrow(run->key, run->sealed == NULL ? AGSF_WITH_SCRATCH : 0, &ahead->lane);
    if (status != AGSF_OK) {
        free(nonces);
        free(ahead);
        return status;
    }
    ahead->run = *run;
    ahead->nonces = nonces;
    ahead->slice = (struct slice){.run = &ahead->run,
                                  .end = count_blocks(run->plain_nbytes, run->block_nbytes),
                                  .per_job = blocks_per_job(run),
                                  .nonces = nonces,
                                  .lanes = &ahead->lane};
    ahead->batch = (agsf_pool_batch){.job = do_all, .arg = ahead, .njobs = 1, .nlanes = run->threads};
    agsf_pool_start(&ahead->batch);
    *ahead_ret = ahead;
    return AGSF_OK;
}

agsf_status agsf_open_ahead(const agsf_run *run, agsf_ahead **ahead_ret) {
    return possible(run) ? begin_ahead(run, NULL, ahead_ret) : AGSF_BAD_ARGUMENT;
}

agsf_status agsf_seal_ahead(const agsf_run *run, agsf_ahead **ahead_ret) {
    uint64_t nblocks;
    uint8_t *nonces;
    agsf_status status;

    if (!possible(run) || next_blocks(run) == SLICE_MAX_BLOCKS) return AGSF_BAD_ARGUMENT;
    nblocks = next_blocks(run);
    nonces = malloc((size_t)nblocks * AGSF_NONCE_NBYTES);
    if (nonces == NULL) return AGSF_NO_MEMORY;
    status = agsf_key_reserve(run->key, nblocks);
    if (status == AGSF_OK) status = agsf_draw(nonces, (size_t)nblocks * AGSF_NONCE_NBYTES);
    if (status == AGSF_OK) return begin_ahead(run, nonces, ahead_ret);
    free(nonces);
    return status;
}

bool agsf_ahead_done(agsf_ahead *ahead) { return agsf_pool_done(&ahead->batch); }

agsf_ahead_end agsf_ahead_finish(agsf_ahead *ahead, bool wanted, uint8_t *into) {
    agsf_ahead_end end = AGSF_AHEAD_GOOD;
    bool ended = true;

    if (!agsf_pool_take(&ahead->batch)) {
        ended = agsf_pool_wait(&ahead->batch, wanted);
    } else if (wanted && (ahead->nonces == NULL || agsf_pool_is_here(&ahead->batch))) {
        if (into != NULL) {
            ahead->run.plain = into;
            end = AGSF_AHEAD_INTO;
        }
        (void)do_all(ahead, 0, 0);
    }
    if (!ended || !ahead->good) {
        end = AGSF_AHEAD_FAILED;
        if (ahead->nonces == NULL) memset(ahead->run.plain, 0, ahead->run.plain_nbytes);
    }
    if (ended) agsf_lane_return(ahead->run.key, ahead->lane);
    free(ahead->nonces);
    free(ahead);
    return end;
}
