/* ags1.c - a run of AGS1 blocks: layout and AADs, sealed or opened in parallel. */
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "aead.h"
#include "fileio.h"
#include "pool.h"

enum {
    JOB_NBYTES = AGSF_SCRATCH_NBYTES, /* small blocks make one job together, up to so many sealed bytes */
    PARALLEL_MIN_NBYTES = 512 * 1024, /* a smaller run is over before a helper has woken up */
    SLICE_MAX_BLOCKS = 1 << 16,       /* of one call: bounds what its nonces take */
    BUDGET_MS = 100,                  /* of one call: bounds how long an interrupt waits */
};

static const uint64_t BLOCK_MAX_NBYTES = INT32_MAX;
static const uint64_t MAX_BLOCKS = UINT64_C(1) << 32;

/* What the jobs of one call share. A job is `per_job` consecutive blocks, the first of job 0 is run->done. */
struct slice {
    const agsf_run *run;
    uint64_t first, end; /* blocks of the run */
    uint64_t per_job;
    const uint8_t *nonces;      /* of the slice's blocks, when sealing */
    _Atomic uint64_t failure;   /* lowest failed block, status and system error, packed; or UINT64_MAX */
    agsf_lane *lanes[AGSF_MAX_THREADS];
};

/* Failures are packed so that the smallest number is the failure of the lowest block. */
static uint64_t pack_failure(uint64_t block, agsf_status status, int os_error) {
    return block << 24 | (uint64_t)status << 16 | (uint16_t)os_error;
}

static bool fail(struct slice *slice, uint64_t block, agsf_status status, int os_error) {
    const uint64_t failure = pack_failure(block, status, os_error);
    uint64_t lowest = atomic_load(&slice->failure);

    while (failure < lowest && !atomic_compare_exchange_weak(&slice->failure, &lowest, failure)) continue;
    return false;
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

static agsf_status begin_seal(const struct slice *slice, agsf_lane *lane, uint64_t block, uint8_t *nonce_ret) {
    const agsf_run *run = slice->run;
    const struct suffix suffix = aad_suffix(run, block);
    const uint8_t *nonce = slice->nonces + (block - slice->first) * AGSF_NONCE_NBYTES;

    memcpy(nonce_ret, nonce, AGSF_NONCE_NBYTES);
    return agsf_lane_begin_seal(lane, nonce, run->aad_prefix, run->aad_prefix_nbytes, suffix.bytes, sizeof(suffix));
}

static agsf_status begin_open(const struct slice *slice, agsf_lane *lane, uint64_t block, const uint8_t *nonce) {
    const agsf_run *run = slice->run;
    const struct suffix suffix = aad_suffix(run, block);

    return agsf_lane_begin_open(lane, nonce, run->aad_prefix, run->aad_prefix_nbytes, suffix.bytes, sizeof(suffix));
}

/* Seals blocks of the run to out, which is where the first of them begins. */
static bool seal_blocks(struct slice *slice, agsf_lane *lane, uint64_t first, uint64_t end, uint8_t *out) {
    for (uint64_t block = first; block < end; block++) {
        const size_t nbytes = plain_between(slice->run, block, block + 1);
        agsf_status status = begin_seal(slice, lane, block, out);
        out += AGSF_NONCE_NBYTES;
        if (status == AGSF_OK) {
            status = agsf_lane_update(lane, plain_at(slice->run, block), nbytes, out);
        }
        if (status == AGSF_OK) status = agsf_lane_finish_seal(lane, out + nbytes);
        if (status != AGSF_OK) return fail(slice, block, status, 0);
        out += nbytes + AGSF_TAG_NBYTES;
    }
    return true;
}

/* Opens blocks of the run from in, which is where the first of them begins. */
static bool open_blocks(struct slice *slice, agsf_lane *lane, uint64_t first, uint64_t end, const uint8_t *in) {
    for (uint64_t block = first; block < end; block++) {
        const size_t nbytes = plain_between(slice->run, block, block + 1);
        agsf_status status = begin_open(slice, lane, block, in);
        in += AGSF_NONCE_NBYTES;
        if (status == AGSF_OK) {
            status = agsf_lane_update(lane, in, nbytes, plain_at(slice->run, block));
        }
        if (status == AGSF_OK) status = agsf_lane_finish_open(lane, in + nbytes);
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
    int os_error = 0;
    agsf_status status = begin_seal(slice, lane, block, scratch);

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
    int os_error = 0;
    agsf_status status = AGSF_OK;

    for (;;) {
        const size_t piece = left < PIECE_NBYTES ? left : PIECE_NBYTES;
        const size_t nbytes = begins + piece + (piece == left ? AGSF_TAG_NBYTES : 0);
        size_t got;
        status = agsf_read_at(run->fd, offset, scratch, nbytes, &got, &os_error);
        if (status == AGSF_OK && begins > 0) status = begin_open(slice, lane, block, scratch);
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

    if (run->sealed == NULL && part.sealed_nbytes > AGSF_SCRATCH_NBYTES) return seal_large_block(slice, lane, part.first);
    if (!seal_blocks(slice, lane, part.first, part.end, out)) return false;
    if (run->sealed != NULL) return true;
    status = agsf_write_at(run->fd, run->fd_offset + sealed_offset(run, part.first), out, part.sealed_nbytes, &os_error);
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

static unsigned count_lanes(const agsf_run *run, size_t njobs, size_t nbytes) {
    unsigned nlanes = run->threads < AGSF_MAX_THREADS ? run->threads : AGSF_MAX_THREADS;

    if (nbytes < PARALLEL_MIN_NBYTES || nlanes == 0) nlanes = 1;
    return njobs < nlanes ? (unsigned)njobs : nlanes;
}

/* Borrows lanes; fewer than wanted will do, none will not. */
static agsf_status borrow_lanes(struct slice *slice, unsigned wanted, unsigned *nlanes_ret) {
    const unsigned with = slice->run->sealed == NULL ? AGSF_WITH_SCRATCH : 0;
    agsf_status status = AGSF_OK;

    *nlanes_ret = 0;
    while (*nlanes_ret < wanted && status == AGSF_OK) {
        status = agsf_lane_borrow(slice->run->key, with, &slice->lanes[*nlanes_ret]);
        if (status == AGSF_OK) ++*nlanes_ret;
    }
    return *nlanes_ret > 0 ? AGSF_OK : status;
}

/* Runs the next slice: at most nblocks blocks, as many as the time allows. */
static agsf_status run_slice(agsf_run *run, uint64_t nblocks, const uint8_t *nonces,
                             bool (*job)(void *, unsigned, size_t)) {
    const uint64_t per_job = JOB_NBYTES / (run->block_nbytes + AGSF_OVERHEAD_NBYTES);
    struct slice slice = {.run = run, .first = run->done, .end = run->done + nblocks, .nonces = nonces};
    agsf_batch batch = {.job = job, .arg = &slice, .budget_ms = BUDGET_MS};
    uint64_t failure;
    agsf_status status;

    slice.per_job = per_job > 0 ? per_job : 1;
    atomic_init(&slice.failure, UINT64_MAX);
    batch.njobs = (size_t)((nblocks - 1) / slice.per_job + 1);
    status = borrow_lanes(&slice, count_lanes(run, batch.njobs, plain_between(run, slice.first, slice.end)), &batch.nlanes);
    if (status != AGSF_OK) return status;
    run->done += agsf_pool_run(&batch) * slice.per_job;
    if (run->done > slice.end) run->done = slice.end;
    while (batch.nlanes > 0) agsf_lane_return(run->key, slice.lanes[--batch.nlanes]);

    failure = atomic_load(&slice.failure);
    if (failure != UINT64_MAX) {
        run->bad_block = failure >> 24;
        run->os_error = (uint16_t)failure;
        run->done = count_blocks(run->plain_nbytes, run->block_nbytes); /* a failed run is over: it cannot go on */
        return (agsf_status)(failure >> 16 & 0xff);
    }
    return run->done == count_blocks(run->plain_nbytes, run->block_nbytes) ? AGSF_OK : AGSF_PAUSED;
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

    if (run->plain_nbytes > PTRDIFF_MAX) return status; /* no buffer has so many bytes: none to be cleared */
    if (possible(run)) status = run_slice(run, next_blocks(run), NULL, open_job);
    if (status != AGSF_OK && status != AGSF_PAUSED && run->plain_nbytes > 0) memset(run->plain, 0, run->plain_nbytes);
    return status;
}
