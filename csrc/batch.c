/* batch.c - one call's parallel run: lanes for its threads, its lowest failure, and how long it may take. */
#include "batch.h"

enum { BUDGET_MS = 100 }; /* of one call: bounds how long an interrupt waits */

static unsigned count_threads(const agsf_batch *batch) {
    const unsigned nthreads = batch->threads < AGSF_MAX_THREADS ? batch->threads : AGSF_MAX_THREADS;

    if (nthreads == 0 || batch->nbytes < AGSF_PARALLEL_MIN_NBYTES) return 1;
    return batch->njobs < nthreads ? (unsigned)batch->njobs : nthreads;
}

/* Returns one thread's lanes of the first nkeys keys. */
static void return_lanes(const agsf_batch *batch, unsigned thread, size_t nkeys) {
    for (size_t i = 0; i < nkeys; i++) {
        const agsf_key_lanes *const key = &batch->keys[i];
        if (thread < key->users) agsf_lane_return(key->key, key->lanes[thread]);
    }
}

/* Borrows lanes for one thread: of all keys or of none. */
static agsf_status borrow_lanes(const agsf_batch *batch, unsigned thread) {
    for (size_t i = 0; i < batch->nkeys; i++) {
        const agsf_key_lanes *const key = &batch->keys[i];
        agsf_status status;
        if (thread >= key->users) continue;
        status = agsf_lane_borrow(key->key, key->with, &key->lanes[thread]);
        if (status != AGSF_OK) {
            return_lanes(batch, thread, i);
            return status;
        }
    }
    return AGSF_OK;
}

bool agsf_batch_fail(agsf_batch *batch, uint64_t place, agsf_status status, int os_error) {
    const uint64_t failure = place << 24 | (uint64_t)status << 16 | (uint16_t)os_error; /* the lowest is the smallest */
    uint64_t lowest = atomic_load(&batch->failure);

    while (failure < lowest && !atomic_compare_exchange_weak(&batch->failure, &lowest, failure)) continue;
    return false;
}

agsf_status agsf_batch_run(agsf_batch *batch) {
    const unsigned wanted = count_threads(batch);
    agsf_pool_batch jobs = {.job = batch->job, .arg = batch->arg, .njobs = batch->njobs, .budget_ms = BUDGET_MS};
    agsf_status status = AGSF_OK;
    uint64_t failure;

    /* All lanes are borrowed here, since helpers allocate nothing. The run does without the threads that get none. */
    while (batch->nthreads < wanted && status == AGSF_OK) {
        status = borrow_lanes(batch, batch->nthreads);
        if (status == AGSF_OK) batch->nthreads++;
    }
    if (batch->nthreads == 0) return status;
    jobs.nlanes = batch->nthreads;
    atomic_init(&batch->failure, UINT64_MAX);
    batch->done = agsf_pool_run(&jobs);
    for (unsigned thread = 0; thread < batch->nthreads; thread++) return_lanes(batch, thread, batch->nkeys);

    failure = atomic_load(&batch->failure);
    if (failure == UINT64_MAX) return batch->done == batch->njobs ? AGSF_OK : AGSF_PAUSED;
    batch->failed_at = failure >> 24;
    batch->os_error = (uint16_t)failure;
    return (agsf_status)(failure >> 16 & 0xff);
}
