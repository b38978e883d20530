/* pool.c - threads that help callers with their batches. */
#define _POSIX_C_SOURCE 200809L
#include "pool.h"

#include <limits.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    STACK_NBYTES = 256 * 1024, /* under RLIMIT_AS the usual 8 MiB a thread are soon too many */
    IDLE_SECONDS = 5,
};

static pthread_mutex_t pool_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_waits = PTHREAD_COND_INITIALIZER; /* a batch was linked, or helpers are to leave */
static pthread_cond_t only_busy = PTHREAD_COND_INITIALIZER;  /* nthreads has become nbusy */

/* All guarded by pool_mutex. */
static agsf_pool_batch *ring;            /* batches that helpers may work on: a circle, next in turn first; or NULL */
static unsigned nthreads, nidle;         /* one that has just been started is not idle yet */
static unsigned nbusy;                   /* in a job that its caller waits for */
static unsigned enders;                  /* callers that wait for helpers to leave */
static pthread_t left[AGSF_MAX_THREADS]; /* helpers that have left for an ender, which is to join them */
static unsigned nleft;
static pid_t owner;   /* the process whose threads nthreads counts */
static unsigned life; /* another in each process, also where process ids come round again */

void agsf_pool_lock(void) { pthread_mutex_lock(&pool_mutex); }
void agsf_pool_unlock(void) { pthread_mutex_unlock(&pool_mutex); }

void agsf_pool_forget(void) {
    const pthread_cond_t fresh = PTHREAD_COND_INITIALIZER;

    memcpy(&work_waits, &fresh, sizeof(fresh)); /* the old one has waiters that do not exist here */
    memcpy(&only_busy, &fresh, sizeof(fresh));
    ring = NULL;
    nthreads = nidle = nbusy = enders = nleft = 0;
    owner = getpid();
    life++;
}

unsigned agsf_pool_threads(void) {
    unsigned n;

    agsf_pool_lock();
    n = owner == getpid() ? nthreads : 0;
    agsf_pool_unlock();
    return n;
}

static void link_batch(agsf_pool_batch *batch) {
    if (ring == NULL) {
        batch->link_next = batch->link_prev = batch;
        ring = batch;
    } else { /* last in turn; but next, if it is ahead, so that helpers begin where its caller comes last */
        batch->link_next = ring;
        batch->link_prev = ring->link_prev;
        ring->link_prev->link_next = batch;
        ring->link_prev = batch;
        if (batch->ahead) ring = batch;
    }
    batch->linked = true;
}

static void unlink_batch(agsf_pool_batch *batch) {
    if (!batch->linked) return;
    batch->linked = false;
    if (batch->link_next == batch) {
        ring = NULL;
        return;
    }
    batch->link_prev->link_next = batch->link_next;
    batch->link_next->link_prev = batch->link_prev;
    if (ring == batch) ring = batch->link_next;
}

/* Claims the batch's next number. The batch has one. */
static size_t claim(agsf_pool_batch *batch) {
    const size_t number = batch->next++;

    if (batch->next == batch->njobs) unlink_batch(batch);
    return number;
}

/* The next batch in turn that has a lane free, or NULL. What nobody waits for keeps no helper from leaving. */
static agsf_pool_batch *pick(void) {
    agsf_pool_batch *batch = ring;

    if (batch == NULL) return NULL;
    do {
        if (batch->nfree > 0 && !(batch->ahead && enders > 0)) return batch;
        batch = batch->link_next;
    } while (batch != ring);
    return NULL;
}

static void tell_enders(void) {
    if (enders > 0 && nthreads == nbusy) pthread_cond_broadcast(&only_busy);
}

/* Does a job of a batch that pick() has found. busy: 1 for a helper that agsf_end_idle_threads() is to let be, or 0. */
static void help(agsf_pool_batch *batch, unsigned busy) {
    const unsigned lane = batch->free_lanes[--batch->nfree];
    const size_t number = claim(batch);
    bool go_on;

    if (batch->linked) ring = batch->link_next; /* the others' turn */
    batch->helping++;
    nbusy += busy;
    tell_enders();
    agsf_pool_unlock();
    go_on = batch->job(batch->arg, lane, number);
    agsf_pool_lock();
    nbusy -= busy;
    batch->helping--;
    batch->free_lanes[batch->nfree++] = (unsigned char)lane;
    if (!go_on) unlink_batch(batch);
    if (batch->helping == 0 && !batch->linked) pthread_cond_signal(&batch->helped);
}

/* Waits for work. False if there was none for some seconds. */
static bool wait_for_work(void) {
    struct timespec until;
    bool called;

    clock_gettime(CLOCK_REALTIME, &until); /* a clock that jumps only makes a thread leave sooner or later */
    until.tv_sec += IDLE_SECONDS;
    nidle++;
    called = pthread_cond_timedwait(&work_waits, &pool_mutex, &until) == 0;
    nidle--;
    return called || ring != NULL;
}

static void *helper_main(void *unused) {
    (void)unused;
    agsf_pool_lock();
    for (;;) {
        agsf_pool_batch *batch = pick();
        if (batch != NULL) {
            help(batch, batch->ahead ? 0 : 1);
        } else if (enders > 0 || !wait_for_work()) {
            break;
        }
    }
    nthreads--;
    tell_enders();
    if (enders > 0 && nleft < AGSF_MAX_THREADS) {
        left[nleft++] = pthread_self();
    } else {
        (void)pthread_detach(pthread_self());
    }
    agsf_pool_unlock();
    return NULL;
}

void agsf_end_idle_threads(void) {
    pthread_t leaving[AGSF_MAX_THREADS];
    unsigned n;

    agsf_pool_lock();
    if (owner != getpid()) agsf_pool_forget(); /* a fork that ran no handlers */
    enders++;
    pthread_cond_broadcast(&work_waits);
    while (nthreads > nbusy) pthread_cond_wait(&only_busy, &pool_mutex);
    enders--;
    n = nleft;
    memcpy(leaving, left, sizeof(leaving));
    nleft = 0;
    agsf_pool_unlock();
    while (n > 0) (void)pthread_join(leaving[--n], NULL); /* to a system a thread is there until it has ended */
}

/* Starts one helper; false if the system gives no thread now. */
static bool start_helper(void) {
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, before;
    bool started;

    if (pthread_attr_init(&attr) != 0) return false;
    nthreads++; /* before it runs, so that its own -1 finds it */
    (void)pthread_attr_setstacksize(&attr, STACK_NBYTES);
    sigfillset(&all); /* signals are for the program's own threads */
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    started = pthread_create(&thread, &attr, helper_main, NULL) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attr);
    if (!started) nthreads--;
    return started;
}

/* Offers a batch to helpers. */
static void begin(agsf_pool_batch *batch) {
    batch->next = 0;
    batch->helping = 0;
    batch->nfree = 0;
    for (unsigned lane = batch->nlanes - 1; lane > 0; lane--) batch->free_lanes[batch->nfree++] = (unsigned char)lane;
    pthread_cond_init(&batch->helped, NULL);
    if (owner != getpid()) agsf_pool_forget(); /* a fork that ran no handlers */
    batch->life = life;
    link_batch(batch);
}

static void call_helpers(const agsf_pool_batch *batch) {
    const size_t others = batch->njobs - 1;
    const unsigned wanted = others < batch->nlanes - 1 ? (unsigned)others : batch->nlanes - 1;

    for (unsigned i = 0; i < wanted && i < nidle; i++) pthread_cond_signal(&work_waits);
    while (nthreads < wanted && start_helper()) continue;
}

static unsigned ms_since(const struct timespec *start) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned)((now.tv_sec - start->tv_sec) * 1000 + (now.tv_nsec - start->tv_nsec) / 1000000);
}

/* What agsf_pool_run() is without helpers: no lock, nothing shared. */
static size_t run_alone(agsf_pool_batch *batch, const struct timespec *start) {
    size_t number = 0;

    while (number < batch->njobs) {
        if (!batch->job(batch->arg, 0, number++)) break;
        if (ms_since(start) >= batch->budget_ms) break;
    }
    return number;
}

size_t agsf_pool_run(agsf_pool_batch *batch) {
    struct timespec start;
    bool go_on = true;

    clock_gettime(CLOCK_MONOTONIC, &start);
    if (batch->nlanes <= 1 || batch->njobs <= 1) return run_alone(batch, &start);

    agsf_pool_lock();
    begin(batch);
    call_helpers(batch);
    while (batch->linked && go_on) {
        const size_t number = claim(batch);
        agsf_pool_unlock();
        go_on = batch->job(batch->arg, 0, number) && ms_since(&start) < batch->budget_ms;
        agsf_pool_lock();
    }
    unlink_batch(batch);
    while (batch->helping > 0) pthread_cond_wait(&batch->helped, &pool_mutex);
    agsf_pool_unlock();
    pthread_cond_destroy(&batch->helped);
    return batch->next;
}

void agsf_pool_start(agsf_pool_batch *batch) {
    batch->ahead = true;
    agsf_pool_lock();
    begin(batch);
    if (nidle > 0) {
        pthread_cond_signal(&work_waits);
    } else if (nthreads + 1 < batch->nlanes) {
        (void)start_helper();
    }
    agsf_pool_unlock();
}

/* Whether it was started here, and not before a fork. */
static bool started_here(const agsf_pool_batch *batch) {
    if (owner != getpid()) agsf_pool_forget(); /* a fork that ran no handlers */
    return batch->life == life;
}

bool agsf_pool_take(agsf_pool_batch *batch) {
    bool mine;

    agsf_pool_lock();
    if (started_here(batch)) unlink_batch(batch);
    mine = batch->next == 0;
    batch->next = 1;
    agsf_pool_unlock();
    return mine;
}

bool agsf_pool_is_here(const agsf_pool_batch *batch) {
    bool here;

    agsf_pool_lock();
    here = started_here(batch);
    agsf_pool_unlock();
    return here;
}

bool agsf_pool_done(const agsf_pool_batch *batch) {
    bool done;

    agsf_pool_lock();
    done = batch->next > 0 && batch->helping == 0;
    agsf_pool_unlock();
    return done;
}

bool agsf_pool_wait(agsf_pool_batch *batch, bool helping) {
    bool here, ended;

    agsf_pool_lock();
    here = started_here(batch);
    while (here && batch->helping > 0) {
        agsf_pool_batch *const other = helping ? pick() : NULL;
        if (other != NULL) {
            help(other, 0);
        } else {
            pthread_cond_wait(&batch->helped, &pool_mutex);
        }
    }
    ended = batch->helping == 0;
    if (here) pthread_cond_destroy(&batch->helped);
    agsf_pool_unlock();
    return ended;
}
