/*
 * batch.h - one call's parallel run: lanes for its threads, its lowest failure, its time. Private to csrc.
 *
 * The engine comes back to its caller about every tenth of a second, so that the caller can answer an interrupt. A run
 * that is not finished then goes on with the next call.
 */
#ifndef AGSF_BATCH_H
#define AGSF_BATCH_H

#include <stdatomic.h>

#include "aead.h"
#include "pool.h"

/* Less work than this is over before a helper thread has woken up. Counted in bytes to seal or open. */
enum { AGSF_PARALLEL_MIN_NBYTES = 512 * 1024 };

/*
 * A key that jobs use. Thread i works in lanes[i]. When a key has fewer users than the run has threads, its lanes
 * belong to the users instead: user i works in lanes[i].
 */
typedef struct agsf_key_lanes {
    agsf_key *key;
    unsigned with;     /* what each lane needs: AGSF_WITH_SCRATCH, AGSF_WITH_CTR */
    size_t users;      /* at most this many jobs use the key at once */
    agsf_lane **lanes; /* room for one lane a user, or one a thread if there are fewer threads */
} agsf_key_lanes;

/* The caller fills in the first group and sets the second to zero. */
typedef struct agsf_batch {
    bool (*job)(void *arg, unsigned thread, size_t number); /* as in agsf_pool_batch */
    void *arg;
    size_t njobs;
    uint64_t nbytes;  /* how much work the jobs are: see AGSF_PARALLEL_MIN_NBYTES */
    unsigned threads; /* at most this many threads work, the caller among them */
    agsf_key_lanes *keys;
    size_t nkeys;

    unsigned nthreads;        /* the threads that have lanes */
    size_t done;              /* jobs that have returned */
    _Atomic uint64_t failure; /* the lowest, packed */
    uint64_t failed_at;       /* after a failed job: the lowest place that agsf_batch_fail() was told, below 2^40 */
    int os_error;             /* and the system's error number */
} agsf_batch;

/*
 * agsf_batch_run() lends lanes to as many threads as are of use and runs the jobs. AGSF_OK: all jobs have returned
 * true. AGSF_PAUSED: the time is over, and the first `done` jobs have returned true. If the first thread gets no lanes,
 * the status is agsf_lane_borrow()'s and `done` is 0. Any other status is that of the lowest failure.
 */
agsf_status agsf_batch_run(agsf_batch *batch) AGSF_MUST_CHECK;

/* agsf_batch_fail() notes a job's failure at a place, and returns false for the job to return. */
bool agsf_batch_fail(agsf_batch *batch, uint64_t place, agsf_status status, int os_error);

#endif
