/*
 * pool.h - threads that help callers with their batches. Private to csrc; knows nothing of cryptography.
 *
 * There is one pool in a process. It has no thread until a batch needs help, and its threads leave after some seconds
 * without work. They have small stacks and allocate nothing. If no thread can be started, the batch still ends: the
 * caller always works on its own batch.
 *
 * Batches of several callers share the helpers in turn, job by job.
 */
#ifndef AGSF_POOL_H
#define AGSF_POOL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "agsf.h"

/*
 * A batch is njobs numbered jobs. job() is called once for each number that is claimed, in any of the batch's
 * lanes, but never in one lane by two threads at once; lane 0 is the caller's. Numbers are claimed in order.
 * When job() returns false, no further number is claimed.
 *
 * The caller fills in the first group; the second belongs to the pool.
 */
typedef struct agsf_pool_batch {
    bool (*job)(void *arg, unsigned lane, size_t number);
    void *arg;
    size_t njobs;
    unsigned nlanes;    /* 1 to AGSF_MAX_THREADS: how many threads may work at once, the caller among them */
    unsigned budget_ms; /* after this many milliseconds, no further number is claimed */

    size_t next;      /* numbers below this are claimed */
    unsigned helping; /* helpers inside job() */
    unsigned nfree;
    unsigned char free_lanes[AGSF_MAX_THREADS];
    pthread_cond_t helped; /* helping has become 0 */
    struct agsf_pool_batch *link_next, *link_prev;
    bool linked;   /* helpers may come */
    bool ahead;    /* nobody waits for it: see agsf_pool_start() */
    unsigned life; /* of the process that has started it */
} agsf_pool_batch;

/*
 * agsf_pool_run() runs the batch and returns how many numbers were claimed; those jobs have all returned. It
 * is njobs unless a job returned false or the budget ran out. It cannot fail.
 */
size_t agsf_pool_run(agsf_pool_batch *batch);

/*
 * For a batch of one job that nobody waits for yet:
 *
 * agsf_pool_start() offers it to helpers and returns at once. Up to nlanes - 1 of them are there for all such batches;
 * they begin with the newest. A fork waits for such jobs, so that their helpers can leave before it. The batch must
 * stay where it is until agsf_pool_take() and agsf_pool_wait() have ended it, also in a child of the process.
 *
 * agsf_pool_take() keeps helpers from beginning it. True: none has; the caller may do the job.
 *
 * agsf_pool_wait() waits for the helper that has begun it, and with `helping` does other jobs of the pool meanwhile.
 * False: a fork without handlers has cut the job off, and what the job used is in no state to be used again.
 */
void agsf_pool_start(agsf_pool_batch *batch);
bool agsf_pool_take(agsf_pool_batch *batch);
bool agsf_pool_wait(agsf_pool_batch *batch, bool helping);

/* Whether its job has returned, and whether this process, not a parent, has started it. */
bool agsf_pool_done(const agsf_pool_batch *batch);
bool agsf_pool_is_here(const agsf_pool_batch *batch);

/* agsf_pool_threads() is how many helper threads exist now. */
unsigned agsf_pool_threads(void);

/*
 * For the fork handlers: the lock is never held while a job runs, so a fork waits for no job. The child calls
 * agsf_pool_forget() with the lock held, since its copy of the pool has no threads.
 */
void agsf_pool_lock(void);
void agsf_pool_unlock(void);
void agsf_pool_forget(void);

#endif
