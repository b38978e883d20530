/*
 * test_pool.c - the threads that help.
 *
 * Guards: each number once, each lane one thread at a time, also with many callers; after a `false` and after the
 * budget nothing more is claimed, but what was is finished; helpers go from batch to batch in turn, so that a short
 * batch does not wait for a long one; a system that gives no thread, or fewer, costs nothing but time; helpers have
 * small stacks, take no signals, and leave when idle.
 */
#include "support.h"

#include <dirent.h>

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/resource.h>

#include "clock.h"
#include "pool.h"

/* ---------------------------------------------------------------- between csrc and the system */

static _Atomic int threads_to_have = -1; /* below 0: as many as the system gives */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg) {
    if (threads_to_have == 0) return EAGAIN;
    if (threads_to_have > 0) threads_to_have--;
    return __real_pthread_create(thread, attr, main, arg);
}

/* The tests' own threads do not count. */
static pthread_t thread_of(void *(*main)(void *), void *arg) {
    pthread_t thread;

    CHECK(__real_pthread_create(&thread, NULL, main, arg) == 0);
    return thread;
}

/* ---------------------------------------------------------------- batches that keep a record */

enum { JOBS_MAX = 3000 };

struct record {
    _Atomic int lane_busy[AGSF_MAX_THREADS];
    _Atomic int begun[JOBS_MAX], ended[JOBS_MAX];
    _Atomic size_t nended;
    size_t stop_at; /* this number returns false; SIZE_MAX: none */
    unsigned spin;
    unsigned nlanes;
};

static bool recorded_job(void *arg, unsigned lane, size_t number) {
    struct record *record = arg;

    CHECK(lane < record->nlanes && number < JOBS_MAX);
    CHECK_EQUAL(record->lane_busy[lane]++, 0);
    CHECK_EQUAL(record->begun[number]++, 0);
    for (volatile unsigned i = 0; i < record->spin; i++) continue;
    record->lane_busy[lane]--;
    record->ended[number]++;
    record->nended++;
    return number != record->stop_at;
}

/* Runs a batch and checks what came of it; returns how many numbers were claimed. */
static size_t run_recorded(struct record *record, unsigned nlanes, size_t njobs, size_t stop_at, unsigned spin) {
    agsf_pool_batch batch = {
        .job = recorded_job, .arg = record, .njobs = njobs, .nlanes = nlanes, .budget_ms = 1000000};
    size_t claimed;

    memset(record, 0, sizeof(*record));
    record->stop_at = stop_at;
    record->spin = spin;
    record->nlanes = nlanes;
    claimed = agsf_pool_run(&batch);
    CHECK(claimed == njobs || (claimed <= njobs && claimed > stop_at));
    CHECK_EQUAL(record->nended, claimed);
    for (size_t i = 0; i < claimed; i++) CHECK_EQUAL(record->ended[i], 1); /* claimed in order, and all finished */
    for (size_t i = claimed; i < JOBS_MAX; i++) CHECK_EQUAL(record->begun[i], 0);
    return claimed;
}

static void *call_often(void *seed) {
    struct record *record = malloc(sizeof(*record));
    uint64_t random = (uintptr_t)seed;

    CHECK(record != NULL);
    for (unsigned i = 0; i < (SANITIZED ? 60 : 300); i++) {
        const unsigned nlanes = 1 + (unsigned)random_below(&random, 9);
        const size_t njobs = (size_t)random_below(&random, i % 20 ? 40 : JOBS_MAX);
        const size_t stop_at = i % 3 ? SIZE_MAX : (size_t)random_below(&random, njobs + 1);
        checking("batch %u: %u lanes, %zu jobs, stop at %zd", i, nlanes, njobs, (ssize_t)stop_at);
        run_recorded(record, nlanes, njobs, stop_at, (unsigned)random_below(&random, 2000));
    }
    free(record);
    return NULL;
}

static void check_many_callers(void) {
    pthread_t callers[12];

    for (size_t i = 0; i < COUNT(callers); i++) callers[i] = thread_of(call_often, (void *)(uintptr_t)(i + 1));
    for (size_t i = 0; i < COUNT(callers); i++) CHECK(pthread_join(callers[i], NULL) == 0);
    CHECK(agsf_pool_threads() <= 8); /* as many as the largest batch wanted, not their sum */
}

/* ---------------------------------------------------------------- budget */

static void check_budget(void) {
    static struct record record;
    agsf_pool_batch batch = {.job = recorded_job, .arg = &record, .njobs = JOBS_MAX, .budget_ms = 100};

    checking("the budget");
    for (unsigned nlanes = 1; nlanes <= 3; nlanes += 2) {
        size_t claimed;
        memset(&record, 0, sizeof(record));
        record.stop_at = SIZE_MAX;
        record.spin = 20000;
        record.nlanes = batch.nlanes = nlanes;
        step_ms = 30; /* so that the caller has time for 4 jobs */
        claimed = agsf_pool_run(&batch);
        step_ms = -1;
        CHECK(nlanes == 1 ? claimed == 4 : claimed >= 4 && claimed < JOBS_MAX);
        CHECK_EQUAL(record.nended, claimed);
    }
}

/* ---------------------------------------------------------------- turns */

/* Two batches whose jobs wait until the test lets them go on. Lane 0 is the caller's, lane 1 the one helper's. */
static struct gated {
    sem_t caller_begun, go_on[2];
    _Atomic bool stop; /* jobs return false */
    agsf_pool_batch batch;
    size_t claimed;
} gated[2];
static sem_t helper_begun;
static _Atomic unsigned helped; /* the batch that the helper is in */

static bool gated_job(void *arg, unsigned lane, size_t number) {
    struct gated *mine = arg;

    (void)number;
    if (lane != 0) helped = (unsigned)(mine - gated);
    sem_post(lane != 0 ? &helper_begun : &mine->caller_begun);
    sem_wait(&mine->go_on[lane]);
    return !mine->stop;
}

static void *run_gated(void *arg) {
    struct gated *mine = arg;

    mine->batch = (agsf_pool_batch){.job = gated_job, .arg = mine, .njobs = 100, .nlanes = 2, .budget_ms = 1000000};
    mine->claimed = agsf_pool_run(&mine->batch);
    return NULL;
}

/* Starts both batches: then each caller is in its first job, and the helper in one of the first batch. */
static void start_gated(pthread_t callers[2]) {
    CHECK(sem_init(&helper_begun, 0, 0) == 0);
    for (unsigned i = 0; i < 2; i++) {
        gated[i].stop = false;
        CHECK(sem_init(&gated[i].caller_begun, 0, 0) == 0);
        CHECK(sem_init(&gated[i].go_on[0], 0, 0) == 0 && sem_init(&gated[i].go_on[1], 0, 0) == 0);
        callers[i] = thread_of(run_gated, &gated[i]);
        sem_wait(&gated[i].caller_begun);
        if (i == 0) sem_wait(&helper_begun);
    }
    CHECK_EQUAL(agsf_pool_threads(), 1);
}

static void end_gated(struct gated *batch, pthread_t caller, size_t claimed) {
    for (unsigned job = 0; job < 100; job++) {
        sem_post(&batch->go_on[0]);
        sem_post(&batch->go_on[1]);
    }
    CHECK(pthread_join(caller, NULL) == 0);
    CHECK_EQUAL(batch->claimed, claimed);
}

static void check_turns(void) {
    pthread_t callers[2];
    unsigned turns[2] = {0}, in_a_row = 1;

    checking("the turns of two batches");
    start_gated(callers);
    for (unsigned turn = 0; turn < 20; turn++) {
        const unsigned before = helped;
        sem_post(&gated[before].go_on[1]);
        sem_wait(&helper_begun);
        turns[helped]++;
        in_a_row = helped == before ? in_a_row + 1 : 1;
        CHECK(in_a_row <= 2);
    }
    CHECK(turns[0] >= 9 && turns[1] >= 9);
    end_gated(&gated[1], callers[1], 100); /* while the first one's jobs wait */
    end_gated(&gated[0], callers[0], 100);
}

/* A helper's `false` is as good as the caller's. */
static void check_helper_stops(void) {
    pthread_t callers[2];

    checking("a helper whose job returns false");
    start_gated(callers);
    gated[0].stop = true;
    sem_post(&gated[0].go_on[1]);
    sem_wait(&helper_begun); /* in the other batch: it has left the first one */
    CHECK_EQUAL(helped, 1);
    end_gated(&gated[0], callers[0], 2);
    end_gated(&gated[1], callers[1], 100);
}

/* ---------------------------------------------------------------- threads */

/* A job that returns once all lanes are in one: only with so many threads does the batch end. */
static bool meeting_job(void *barrier, unsigned lane, size_t number) {
    pthread_attr_t attr;
    size_t stack_nbytes;
    sigset_t blocked;

    (void)number;
    if (lane != 0) {
        CHECK(pthread_getattr_np(pthread_self(), &attr) == 0);
        CHECK(pthread_attr_getstacksize(&attr, &stack_nbytes) == 0);
        CHECK(pthread_attr_destroy(&attr) == 0);
        CHECK(stack_nbytes <= 256 * 1024 || (SANITIZED && stack_nbytes < 1024 * 1024));
        CHECK(pthread_sigmask(SIG_BLOCK, NULL, &blocked) == 0);
        CHECK(sigismember(&blocked, SIGINT) == 1 && sigismember(&blocked, SIGALRM) == 1);
    }
    pthread_barrier_wait(barrier);
    return true;
}

static void meet(unsigned nthreads) {
    pthread_barrier_t barrier;
    agsf_pool_batch batch = {
        .job = meeting_job, .arg = &barrier, .njobs = nthreads, .nlanes = nthreads, .budget_ms = 1000000};
    sigset_t before, after;

    CHECK(pthread_barrier_init(&barrier, NULL, nthreads) == 0);
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &before) == 0);
    CHECK_EQUAL(agsf_pool_run(&batch), nthreads);
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &after) == 0);
    CHECK(sigismember(&before, SIGINT) == sigismember(&after, SIGINT));
    CHECK(pthread_barrier_destroy(&barrier) == 0);
}

static void wait_until_all_left(void) {
    while (agsf_pool_threads() > 0) usleep(1000); /* watch_for_hangs() ends the wait */
}

static void check_threads(void) {
    checking("helpers");
    meet(4);
    CHECK_EQUAL(agsf_pool_threads(), 3);
    meet(2);
    CHECK_EQUAL(agsf_pool_threads(), 3); /* kept for a while */
    realtime_ahead_s = 5;
    meet(4); /* now the five seconds are over at once */
    wait_until_all_left();
    realtime_ahead_s = 0;
    meet(AGSF_MAX_THREADS);
    CHECK_EQUAL(agsf_pool_threads(), AGSF_MAX_THREADS - 1);
    realtime_ahead_s = 5;
    meet(AGSF_MAX_THREADS);
    wait_until_all_left();
    realtime_ahead_s = 0;
}

/* How many threads the system has of this process. */
static unsigned count_tasks(void) {
    DIR *const tasks = opendir("/proc/self/task");
    unsigned n = 0;

    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) n += task->d_name[0] != '.';
    closedir(tasks);
    return n;
}

static bool nothing_job(void *arg, unsigned lane, size_t number) {
    (void)arg, (void)lane, (void)number;
    return true;
}

static void *end_often(void *unused) {
    for (unsigned i = 0; i < 200; i++) agsf_end_idle_threads();
    return unused;
}

static void *meet_often(void *unused) {
    for (unsigned i = 0; i < 200; i++) meet(3);
    return unused;
}

static void check_ending(unsigned alone) {
    pthread_t callers[2], others[4];

    checking("the end of idle helpers");
    while (!SANITIZED && count_tasks() > alone) usleep(1000); /* nobody joins those that left by themselves */
    agsf_end_idle_threads();                                  /* none */
    for (unsigned turn = 0; turn < 200; turn++) {             /* also of those that were too late to get a job */
        agsf_pool_batch batch = {.job = nothing_job, .njobs = 2, .nlanes = 8, .budget_ms = 1000000};
        CHECK_EQUAL(agsf_pool_run(&batch), 2);
        agsf_end_idle_threads();
        CHECK_EQUAL(agsf_pool_threads(), 0);
    }
    for (unsigned nhelpers = 1; nhelpers < AGSF_MAX_THREADS; nhelpers *= 3) {
        meet(nhelpers + 1);
        CHECK_EQUAL(agsf_pool_threads(), nhelpers);
        agsf_end_idle_threads();
        CHECK_EQUAL(agsf_pool_threads(), 0);
        if (!SANITIZED) CHECK_EQUAL(count_tasks(), alone);
    }
    checking("the end of helpers that are in a job, which is not waited for");
    start_gated(callers);
    agsf_end_idle_threads();
    CHECK_EQUAL(agsf_pool_threads(), 1);
    end_gated(&gated[1], callers[1], 100);
    end_gated(&gated[0], callers[0], 100);
    agsf_end_idle_threads();
    while (agsf_pool_threads() > 0) agsf_end_idle_threads(); /* the last one was perhaps on its way out of its job */
    checking("the end of helpers again and again, by several threads, while a batch wants them");
    for (unsigned i = 0; i < 4; i++) others[i] = thread_of(i > 0 ? end_often : meet_often, NULL);
    for (unsigned i = 0; i < 4; i++) CHECK(pthread_join(others[i], NULL) == 0);
    while (agsf_pool_threads() > 0) agsf_end_idle_threads();
}

static void check_few_threads(void) {
    static struct record record;

    for (int have = 0; have <= 2; have++) {
        checking("a system that gives %d threads", have);
        threads_to_have = have;
        CHECK_EQUAL(run_recorded(&record, 8, 500, SIZE_MAX, 100), 500);
        CHECK(agsf_pool_threads() <= (unsigned)have);
        CHECK_EQUAL(run_recorded(&record, 8, 500, SIZE_MAX, 100), 500);
        realtime_ahead_s = 5;
        run_recorded(&record, 8, 500, SIZE_MAX, 100);
        wait_until_all_left();
        realtime_ahead_s = 0;
    }
    threads_to_have = -1;
}

/* The same, but the system itself refuses. Root has no such limit: a child becomes somebody else. */
static void check_thread_limit(void) {
    const pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        static struct record record;
        pthread_t thread;
        checking("RLIMIT_NPROC");
        watch_for_hangs();
        CHECK(setrlimit(RLIMIT_NPROC, &(struct rlimit){0, 0}) == 0);
        CHECK(getuid() != 0 || setuid(65534) == 0);
        CHECK(__real_pthread_create(&thread, NULL, call_often, NULL) == EAGAIN);
        CHECK_EQUAL(run_recorded(&record, 8, 500, SIZE_MAX, 100), 500);
        CHECK_EQUAL(agsf_pool_threads(), 0);
        _exit(0);
    }
    CHECK_CHILD(child);
}

int main(void) {
    unsigned alone;

    start();
    alone = count_tasks();               /* ThreadSanitizer starts a thread of its own, at some time */
    CHECK_EQUAL(agsf_pool_threads(), 0); /* none before one is wanted */
    check_thread_limit();
    CHECK_EQUAL(agsf_pool_threads(), 0);
    check_turns();
    check_helper_stops();
    check_threads();
    check_ending(alone);
    check_few_threads();
    check_budget();
    check_many_callers();
    return 0;
}
