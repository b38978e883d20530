/* batch.c - one call's parallel run: lanes for its threads, its lowest failure, and how long it may take. */
#include "batch.h"

enum { BUDGET_MS = 100 }; /* of one call: bounds how long an interrupt waits */

static unsigned count_threads(const agsf_parallel *run) {
    const unsigned nthreads = run->threads < AGSF_MAX_THREADS ? run->threads : AGSF_MAX_THREADS;

    if (nthreads == 0 || run->nbytes < AGSF_PARALLEL_MIN_NBYTES) return 1;
    return run->njobs < nthreads ? (unsigned)run->njobs : nthreads;
}

/* Returns one thread's lanes of the first nkeys keys. */
static void return_lanes(const agsf_parallel *run, unsigned thread, size_t nkeys) {
    for (size_t i = 0; i < nkeys; i++) {
        const agsf_key_lanes *const key = &run->keys[i];
        if (thread < key->users) agsf_lane_return(key->key, key->lanes[thread]);
    }
}

/* Borrows lanes for one thread: of all keys or of none. */
static agsf_status borrow_lanes(const agsf_parallel *run, unsigned thread) {
    for (size_t i = 0; i < run->nkeys; i++) {
        const agsf_key_lanes *const key = &run->keys[i];
        agsf_status status;
        if (thread >= key->users) continue;
        status = agsf_lane_borrow(key->key, key->with, &key->lanes[thread]);
        if (status != AGSF_OK) {
            return_lanes(run, thread, i);
            return status;
        }
    }
    return AGSF_OK;
}

bool agsf_parallel_fail(agsf_parallel *run, uint64_t place, agsf_status status, int os_error) {
    const uint64_t failure = place << 24 | (uint64_t)status << 16 | (uint16_t)os_error; /* the lowest is the smallest */
    uint64_t lowest = atomic_load(&run->failure);

    while (failure < lowest && !atomic_compare_exchange_weak(&run->failure, &lowest, failure)) continue;
    return false;
}

agsf_status agsf_parallel_run(agsf_parallel *run) {
    const unsigned wanted = count_threads(run);
    agsf_batch batch = {.job = run->job, .arg = run->arg, .njobs = run->njobs, .budget_ms = BUDGET_MS};
    agsf_status status = AGSF_OK;
    uint64_t failure;

    /* The other threads are done without if they get no lanes; helpers then allocate nothing. */
    while (run->nthreads < wanted && status == AGSF_OK) {
        status = borrow_lanes(run, run->nthreads);
        if (status == AGSF_OK) run->nthreads++;
    }
    if (run->nthreads == 0) return status;
    batch.nlanes = run->nthreads;
    atomic_init(&run->failure, UINT64_MAX);
    run->done = agsf_pool_run(&batch);
    for (unsigned thread = 0; thread < run->nthreads; thread++) return_lanes(run, thread, run->nkeys);

    failure = atomic_load(&run->failure);
    if (failure == UINT64_MAX) return run->done == run->njobs ? AGSF_OK : AGSF_PAUSED;
    run->failed_at = failure >> 24;
    run->os_error = (uint16_t)failure;
    return (agsf_status)(failure >> 16 & 0xff);
}
