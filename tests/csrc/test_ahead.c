/*
 * test_ahead.c - runs that helpers open or seal before anybody waits for them.
 *
 * Guards: a run that is begun ahead is what agsf_open_run() makes of it, from memory and from a descriptor, in its own
 * buffer or where its caller wants it; one that fails leaves zeros; one that is dropped is waited for, never freed in
 * use; helpers begin with the newest, and a caller that waits does what is left; a fork waits for them; a child takes
 * up what is done, does what nobody has begun, and never waits for a thread that it does not have.
 */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>

#include "pool.h"

static _Atomic int threads_to_have = -1; /* below 0: as many as the system gives */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg) {
    return threads_to_have == 0 ? EAGAIN : __real_pthread_create(thread, attr, main, arg);
}

/* ---------------------------------------------------------------- batches that nobody waits for */

static struct gated {
    sem_t begun, go_on;
    _Atomic bool done;
    struct gated *opens; /* the gate that this job opens */
    pthread_t by;
    agsf_pool_batch batch;
} gated[3];
static _Atomic unsigned order[3], norder; /* which job began when */

static bool gated_job(void *arg, unsigned lane, size_t number) {
    struct gated *mine = arg;

    CHECK(lane < 2);
    CHECK_EQUAL(number, 0);
    order[norder++] = (unsigned)(mine - gated);
    mine->by = pthread_self();
    sem_post(&mine->begun);
    if (mine->opens != NULL) sem_post(&mine->opens->go_on);
    sem_wait(&mine->go_on);
    mine->done = true;
    return true;
}

static void start_gated(unsigned i, struct gated *opens) {
    struct gated *mine = &gated[i];

    if (i == 0) norder = 0;
    mine->done = false;
    mine->opens = opens;
    CHECK(sem_init(&mine->begun, 0, 0) == 0 && sem_init(&mine->go_on, 0, 0) == 0);
    mine->batch = (agsf_pool_batch){.job = gated_job, .arg = mine, .njobs = 1, .nlanes = 2};
    agsf_pool_start(&mine->batch);
}

static void end_gated(unsigned i) {
    sem_post(&gated[i].go_on);
    CHECK(!agsf_pool_take(&gated[i].batch));
    CHECK(agsf_pool_wait(&gated[i].batch, false));
    CHECK(gated[i].done);
}

static void check_order(void) {
    checking("which job a helper begins with");
    start_gated(0, NULL);
    sem_wait(&gated[0].begun);
    start_gated(1, NULL);
    start_gated(2, NULL);
    end_gated(0);
    sem_wait(&gated[2].begun); /* the newest, which its caller would do last */
    CHECK(agsf_pool_take(&gated[1].batch));
    CHECK_EQUAL(agsf_pool_threads(), 1);
    end_gated(2);
    CHECK_EQUAL(norder, 2);
    CHECK(!gated[1].done);
}

/* The helper's job goes on only when the other job has begun, and only the waiting caller can begin that. */
static void check_help(void) {
    checking("a caller that waits");
    start_gated(0, NULL);
    sem_wait(&gated[0].begun);
    start_gated(1, &gated[0]);
    sem_post(&gated[1].go_on);
    CHECK(!agsf_pool_take(&gated[0].batch));
    CHECK(agsf_pool_wait(&gated[0].batch, true));
    CHECK(gated[0].done && gated[1].done);
    CHECK(pthread_equal(gated[1].by, pthread_self()));
    CHECK(!pthread_equal(gated[0].by, pthread_self()));
    CHECK(!agsf_pool_take(&gated[1].batch));
    CHECK(agsf_pool_wait(&gated[1].batch, false));
}

static void check_no_threads(void) {
    checking("no threads");
    agsf_end_idle_threads();
    threads_to_have = 0;
    start_gated(0, NULL);
    CHECK(agsf_pool_take(&gated[0].batch));
    threads_to_have = -1;
    gated[1].batch = (agsf_pool_batch){.job = gated_job, .arg = &gated[1], .njobs = 1, .nlanes = 1};
    agsf_pool_start(&gated[1].batch); /* no lane but the caller's */
    CHECK(agsf_pool_take(&gated[1].batch));
    CHECK_EQUAL(agsf_pool_threads(), 0);
}

static void *open_gate(void *gate) {
    usleep(1000); /* most likely, helpers are told to leave by now */
    sem_post(gate);
    return NULL;
}

/* As before a fork: what a helper is in is waited for, and then it leaves, if it has been told by then. */
static void check_ending(void) {
    unsigned left = 0;

    checking("the end of helpers");
    for (unsigned turn = 0; turn < 50; turn++) {
        pthread_t other;
        start_gated(0, NULL);
        sem_wait(&gated[0].begun);
        start_gated(1, NULL);
        sem_post(&gated[1].go_on);
        CHECK(__real_pthread_create(&other, NULL, open_gate, &gated[0].go_on) == 0);
        agsf_end_idle_threads();
        CHECK(gated[0].done);
        CHECK_EQUAL(agsf_pool_threads(), 0);
        CHECK(pthread_join(other, NULL) == 0);
        CHECK(!agsf_pool_take(&gated[0].batch) && agsf_pool_wait(&gated[0].batch, false));
        left += norder == 1;
        CHECK(agsf_pool_take(&gated[1].batch) == (norder == 1));
        CHECK(agsf_pool_wait(&gated[1].batch, false));
    }
    CHECK(left > 0);
}

static void check_fork(void) {
    pid_t child;

    checking("a fork in the middle");
    start_gated(0, NULL);
    sem_wait(&gated[0].begun);
    start_gated(1, NULL);
    child = fork();
    if (child == 0) {
        watch_for_hangs();
        CHECK(!agsf_pool_take(&gated[0].batch));
        CHECK(!agsf_pool_wait(&gated[0].batch, true)); /* lost, and not waited for */
        CHECK(agsf_pool_take(&gated[1].batch));
        _exit(0);
    }
    CHECK_CHILD(child);
    CHECK(agsf_pool_take(&gated[1].batch));
    end_gated(0);
    child = fork();
    if (child == 0) {
        watch_for_hangs();
        CHECK(agsf_pool_wait(&gated[0].batch, true)); /* it was done before */
        _exit(0);
    }
    CHECK_CHILD(child);
}

/* ---------------------------------------------------------------- runs */

enum { BLOCK = 100000, NBYTES = 10 * BLOCK + 7, SEALED = NBYTES + 11 * AGSF_OVERHEAD_NBYTES };

static uint8_t expected[NBYTES], sealed[SEALED];

static agsf_run run_of(agsf_key *key, uint8_t *out, int fd) {
    return (agsf_run){.key = key,
                      .aad_prefix = (const uint8_t *)"prefix",
                      .aad_prefix_nbytes = 6,
                      .block_nbytes = BLOCK,
                      .first_block = 3,
                      .plain = out,
                      .plain_nbytes = NBYTES,
                      .sealed = fd < 0 ? sealed : NULL,
                      .fd = fd,
                      .threads = 3};
}

/* Begins the run, and ends it in one of several ways. `good`: whether it can be opened. */
static void check_run(agsf_key *key, int fd, bool good) {
    uint8_t *const out = malloc(NBYTES), *const into = malloc(NBYTES);

    CHECK(out != NULL && into != NULL);
    for (unsigned how = 0; how < 40; how++) {
        const agsf_run run = run_of(key, out, fd);
        const bool wanted = how % 4 != 0, somewhere = how % 2 == 1;
        agsf_ahead *ahead;
        agsf_ahead_end end;
        memset(out, SLACK, NBYTES);
        memset(into, SLACK, NBYTES);
        threads_to_have = how < 8 ? 0 : -1;
        CHECK_EQUAL(agsf_open_ahead(&run, &ahead), AGSF_OK);
        if (how % 3 == 0) usleep(200 * how); /* wherever the helper is, the outcome is right */
        end = agsf_ahead_finish(ahead, wanted, somewhere ? into : NULL);
        if (!good) CHECK_EQUAL(end, AGSF_AHEAD_FAILED);
        if (good && wanted) CHECK(end == AGSF_AHEAD_GOOD || (end == AGSF_AHEAD_INTO && somewhere));
        if (how < 8 && good && somewhere) CHECK_EQUAL(end, AGSF_AHEAD_INTO);
        if (end == AGSF_AHEAD_GOOD) CHECK(memcmp(out, expected, NBYTES) == 0);
        if (end == AGSF_AHEAD_INTO) CHECK(memcmp(into, expected, NBYTES) == 0);
        if (end == AGSF_AHEAD_FAILED) CHECK(all_are(out, NBYTES, 0) || (somewhere && all_are(into, NBYTES, 0)));
        if (how < 8) agsf_end_idle_threads();
    }
    threads_to_have = -1;
    free(into);
    free(out);
}

static void check_runs(void) {
    agsf_key *const key = key_of(16, 1);
    const int fd = memfd_create("stream", MFD_CLOEXEC);
    agsf_run run = run_of(key, expected, -1);
    agsf_ahead *many[50], *none;
    uint8_t *outs = malloc(sizeof(many) / sizeof(*many) * (size_t)NBYTES);

    CHECK(fd >= 0 && outs != NULL);
    fill(expected, NBYTES, 1);
    CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_OK);
    CHECK(write(fd, sealed, SEALED) == SEALED);
    checking("runs that can be opened");
    check_run(key, -1, true);
    check_run(key, fd, true);
    checking("many at once");
    for (size_t i = 0; i < COUNT(many); i++) {
        run = run_of(key, outs + i * NBYTES, i % 2 ? fd : -1);
        CHECK_EQUAL(agsf_open_ahead(&run, &many[i]), AGSF_OK);
    }
    CHECK(agsf_pool_threads() <= 2);
    for (size_t i = 0; i < COUNT(many); i++) {
        CHECK_EQUAL(agsf_ahead_finish(many[i], i % 3 != 0, NULL) == AGSF_AHEAD_FAILED && i % 3 != 0, 0);
        if (i % 3 != 0) CHECK(memcmp(outs + i * NBYTES, expected, NBYTES) == 0);
    }
    checking("runs that cannot be opened");
    sealed[5 * (BLOCK + AGSF_OVERHEAD_NBYTES) + 50] ^= 1;
    check_run(key, -1, false);
    CHECK(ftruncate(fd, SEALED - 1) == 0);
    check_run(key, fd, false);
    run = run_of(key, outs, -1);
    run.block_nbytes = 0;
    CHECK_EQUAL(agsf_open_ahead(&run, &none), AGSF_BAD_ARGUMENT);
    free(outs);
    close(fd);
    agsf_key_free(key);
}

/* What is sealed ahead opens, counts once, and repeats no nonce; a child seals nothing under nonces that are drawn. */
static void check_seals(void) {
    agsf_key *const key = key_of(32, 2);
    const uint64_t before = agsf_key_sealed(key);
    const int fd = memfd_create("stream", MFD_CLOEXEC);
    uint8_t *const opened = malloc(NBYTES), *const first = malloc(SEALED);
    agsf_ahead *ahead;
    agsf_run run;
    pid_t child;

    CHECK(fd >= 0 && opened != NULL && first != NULL);
    fill(expected, NBYTES, 2);
    agsf_end_idle_threads();
    for (unsigned how = 0; how < 30; how++) {
        const bool to_file = how % 2 == 1;
        checking("a run that is sealed ahead, %u", how);
        run = run_of(key, expected, to_file ? fd : -1);
        memset(sealed, 0, SEALED);
        threads_to_have = how < 8 ? 0 : -1;
        CHECK_EQUAL(agsf_seal_ahead(&run, &ahead), AGSF_OK);
        if (how < 8) CHECK(!agsf_ahead_done(ahead));
        while (how >= 20 && !agsf_ahead_done(ahead)) usleep(100);
        CHECK_EQUAL(agsf_ahead_finish(ahead, true, NULL), AGSF_AHEAD_GOOD);
        CHECK_EQUAL(agsf_key_sealed(key) - before, 11 * (how + 1));
        if (to_file) CHECK(pread(fd, sealed, SEALED, 0) == SEALED);
        CHECK(memcmp(sealed, first, AGSF_NONCE_NBYTES) != 0);
        memcpy(first, sealed, SEALED);
        run = run_of(key, opened, -1);
        CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_OK);
        CHECK(memcmp(opened, expected, NBYTES) == 0);
        if (how < 8) agsf_end_idle_threads();
    }
    checking("what cannot be sealed ahead");
    run = run_of(key, expected, fd);
    run.fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    CHECK_EQUAL(agsf_seal_ahead(&run, &ahead), AGSF_OK);
    CHECK_EQUAL(agsf_ahead_finish(ahead, true, NULL), AGSF_AHEAD_FAILED);
    fill(opened, NBYTES, 2);
    CHECK(memcmp(opened, expected, NBYTES) == 0); /* the plaintext is its caller's */
    close(run.fd);
    CHECK_EQUAL(agsf_key_carry(key, AGSF_KEY_LIMIT - 400), AGSF_OK);
    run = run_of(key, expected, -1);
    run.block_nbytes = 1000;
    CHECK_EQUAL(agsf_seal_ahead(&run, &ahead), AGSF_LIMIT);
    run.block_nbytes = 1;
    CHECK_EQUAL(agsf_seal_ahead(&run, &ahead), AGSF_BAD_ARGUMENT);
    if (!SANITIZED) {
        checking("a fork");
        agsf_end_idle_threads();
        threads_to_have = 0;
        run = run_of(key, expected, -1);
        memset(sealed, SLACK, SEALED);
        CHECK_EQUAL(agsf_seal_ahead(&run, &ahead), AGSF_OK);
        child = fork();
        if (child == 0) {
            watch_for_hangs();
            CHECK_EQUAL(agsf_ahead_finish(ahead, true, NULL), AGSF_AHEAD_FAILED);
            CHECK(all_are(sealed, SEALED, SLACK));
            _exit(0);
        }
        CHECK_CHILD(child);
        CHECK_EQUAL(agsf_ahead_finish(ahead, true, NULL), AGSF_AHEAD_GOOD);
        threads_to_have = -1;
    }
    free(first);
    free(opened);
    close(fd);
    agsf_key_free(key);
}

int main(void) {
    start();
    check_no_threads();
    check_order();
    check_help();
    check_ending();
    if (!SANITIZED) check_fork();
    check_runs();
    check_seals();
    return 0;
}
