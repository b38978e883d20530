/*
 * test_fork.c - fork() at any moment.
 *
 * Guards: parent, child and grandchild never share a nonce, not even where they have the same process id (namespaces,
 * or an id that comes round again), which is all that libcrypto looks at; a child that was forked while batches ran,
 * keys were made and threads came and went has a pool and a library that work, and so has its child. A child that the
 * system gives no entropy seals nothing. Two processes whose memory is the same, generator and all, as that of two
 * virtual machines is that are resumed from one snapshot, draw different nonces.
 *
 * The sanitizers' allocators may themselves be left locked by a fork beside other threads: under them the loop at the
 * end is left out. ThreadSanitizer starts no thread in a child of threads at all: run.sh leaves out all of this there.
 */
#include "support.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

#include "pool.h"

/* ---------------------------------------------------------------- what all processes share */

enum { NONCES_MAX = 1 << 20 };

static struct shared {
    _Atomic size_t nnonces;
    uint8_t nonces[NONCES_MAX][AGSF_NONCE_NBYTES];
} *shared;

static void keep_nonce(const uint8_t *nonce) {
    const size_t at = shared->nnonces++;

    if (at < NONCES_MAX) memcpy(shared->nonces[at], nonce, AGSF_NONCE_NBYTES);
}

static int compare_nonces(const void *a, const void *b) { return memcmp(a, b, AGSF_NONCE_NBYTES); }

static void check_nonces(void) {
    const size_t n = shared->nnonces < NONCES_MAX ? shared->nnonces : NONCES_MAX;

    qsort(shared->nonces, n, AGSF_NONCE_NBYTES, compare_nonces);
    for (size_t i = 1; i < n; i++) {
        if (compare_nonces(shared->nonces[i - 1], shared->nonces[i]) == 0) {
            failed(__FILE__, __LINE__, "two of %zu nonces are the same", n);
        }
    }
    shared->nnonces = 0;
}

/* The same process id for everybody, when this is set. */
static bool one_pid;

pid_t __real_getpid(void);
pid_t __wrap_getpid(void);

pid_t __wrap_getpid(void) { return one_pid ? 1 : __real_getpid(); }

/* ---------------------------------------------------------------- uses of the engine */

enum { BLOCK = 70000, BLOCKS = 10, PLAIN = BLOCK * BLOCKS, SEALED = PLAIN + BLOCKS * AGSF_OVERHEAD_NBYTES };

static agsf_key *key; /* the one that all threads and processes use */

/* Seals and opens a run that is large enough for helpers. */
static void use_runs(unsigned threads) {
    uint8_t *plain = malloc(PLAIN), *sealed = malloc(SEALED), *opened = malloc(PLAIN);
    agsf_run run = {
        .key = key, .block_nbytes = BLOCK, .plain = plain, .plain_nbytes = PLAIN, .sealed = sealed, .threads = threads};

    CHECK(plain != NULL && sealed != NULL && opened != NULL);
    fill(plain, PLAIN, 1);
    CHECK_EQUAL(finish(agsf_seal_run, &run, NULL), AGSF_OK);
    for (size_t i = 0; i < BLOCKS; i++) keep_nonce(sealed + i * (BLOCK + AGSF_OVERHEAD_NBYTES));
    run.plain = opened;
    run.done = 0;
    CHECK_EQUAL(finish(agsf_open_run, &run, NULL), AGSF_OK);
    CHECK(memcmp(plain, opened, PLAIN) == 0);
    free(plain);
    free(sealed);
    free(opened);
}

static void use_small(agsf_key *with) {
    uint8_t plain[10] = {1}, sealed[sizeof(plain) + AGSF_OVERHEAD_NBYTES];
    agsf_run run = {
        .key = with, .block_nbytes = 10, .plain = plain, .plain_nbytes = 10, .sealed = sealed, .threads = 1};

    CHECK_EQUAL(agsf_seal_run(&run), AGSF_OK);
    keep_nonce(sealed);
    run.done = 0;
    CHECK_EQUAL(agsf_open_run(&run), AGSF_OK);
}

/* Draws more nonces at once than the system is asked for. */
static void use_many(agsf_key *with) {
    uint8_t plain[300] = {1}, sealed[sizeof(plain) + 30 * AGSF_OVERHEAD_NBYTES];
    agsf_run run = {
        .key = with, .block_nbytes = 10, .plain = plain, .plain_nbytes = sizeof(plain), .sealed = sealed, .threads = 1};

    CHECK_EQUAL(agsf_seal_run(&run), AGSF_OK);
    keep_nonce(sealed);
}

static void *use_and_end(void *unused) {
    use_small(key);
    return unused;
}

static void use_in_new_thread(void) {
    pthread_t thread;

    CHECK(pthread_create(&thread, NULL, use_and_end, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static void use_new_key(void) {
    static _Atomic unsigned seed;
    agsf_key *mine = key_of(16, 100000 * (uint64_t)__real_getpid() + seed++);

    use_small(mine);
    agsf_key_free(mine);
}

/* A job that ends once all lanes are in one: the pool has started helpers. */
static bool meeting_job(void *barrier, unsigned lane, size_t number) {
    (void)lane, (void)number;
    pthread_barrier_wait(barrier);
    return true;
}

static void use_pool(void) {
    pthread_barrier_t barrier;
    agsf_pool_batch batch = {.job = meeting_job, .arg = &barrier, .njobs = 3, .nlanes = 3, .budget_ms = 1000000};

    CHECK(pthread_barrier_init(&barrier, NULL, 3) == 0);
    CHECK_EQUAL(agsf_pool_run(&batch), 3);
    CHECK(pthread_barrier_destroy(&barrier) == 0);
}

static void use_all(void) {
    use_in_new_thread();
    use_new_key();
    use_runs(3);
    use_pool();
    use_small(key);
}

/* A child, and `generations` more below it, each of which finds everything as it should be. */
static void fork_and_use(unsigned generations, void (*use)(void)) {
    const pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        watch_for_hangs();
        CHECK_EQUAL(agsf_pool_threads(), 0);
        use();
        if (generations > 0) fork_and_use(generations - 1, use);
        _exit(0);
    }
    CHECK_CHILD(child);
}

/* ---------------------------------------------------------------- the tests */

static void draw_some(void) {
    for (unsigned i = 0; i < 20; i++) use_small(key);
}

/* Forks beside no other thread. Whoever drew before the fork, and whoever had not, must both be alone afterwards. */
static void check_nonces_after_fork(void) {
    checking("nonces after a fork%s", one_pid ? " that keeps the process id" : "");
    for (unsigned i = 0; i < 3; i++) {
        fork_and_use(2, draw_some);
        draw_some();
    }
    check_nonces();
}

/* Seals in a process for which the system has no random bytes any more. */
static void seal_without_entropy(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getrandom, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EIO),
    };
    const struct sock_fprog program = {COUNT(filter), filter};
    uint8_t plain[10] = {1}, sealed[sizeof(plain) + AGSF_OVERHEAD_NBYTES];
    agsf_run run = {.key = key, .block_nbytes = 10, .plain = plain, .plain_nbytes = 10, .sealed = sealed, .threads = 1};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        return;
    for (unsigned i = 0; i < 3; i++) CHECK_EQUAL(agsf_seal_run(&run), AGSF_NO_RANDOM);
}

/* What the kernel gives, or, if this is set, always the same. */
static bool kernel_is_cloned;

bool __real_agsf_entropy(uint8_t *out, size_t nbytes);
bool __wrap_agsf_entropy(uint8_t *out, size_t nbytes);

bool __wrap_agsf_entropy(uint8_t *out, size_t nbytes) {
    if (!kernel_is_cloned) return __real_agsf_entropy(out, nbytes);
    memset(out, 7, nbytes);
    return true;
}

/*
 * Forks so that neither our handlers run nor libcrypto sees another process id. That the two then have one generator
 * shows where the kernel gives both the same: so do they. (A shared libcrypto has its own getpid(), and sees the fork.)
 */
static void check_clones(bool cloned_kernel, void (*use)(agsf_key *)) {
    pid_t child;

    checking("two clones of one state, %s the kernel's", cloned_kernel ? "and of" : "but not of");
    kernel_is_cloned = cloned_kernel;
    shared->nnonces = 0;
    child = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    CHECK(child >= 0);
    if (child == 0) {
        use(key);
        _exit(0);
    }
    CHECK_CHILD(child);
    use(key);
    kernel_is_cloned = false;
    CHECK_EQUAL(shared->nnonces, 2);
    if (!cloned_kernel || AGSF_LIBCRYPTO_BUNDLED) {
        CHECK_EQUAL(compare_nonces(shared->nonces[0], shared->nonces[1]) == 0, cloned_kernel);
    }
    shared->nnonces = 0;
}

/* A batch whose jobs last until the test lets them go. */
static sem_t begun, go_on;

static bool waiting_job(void *arg, unsigned lane, size_t number) {
    (void)arg, (void)lane, (void)number;
    sem_post(&begun);
    sem_wait(&go_on);
    return true;
}

static void *run_waiting(void *unused) {
    agsf_pool_batch batch = {.job = waiting_job, .njobs = 6, .nlanes = 3, .budget_ms = 1000000};

    CHECK_EQUAL(agsf_pool_run(&batch), 6);
    return unused;
}

static void check_fork_during_batches(void) {
    pthread_t callers[2];

    checking("a fork while batches run%s", one_pid ? ", that keeps the process id" : "");
    CHECK(sem_init(&begun, 0, 0) == 0 && sem_init(&go_on, 0, 0) == 0);
    for (size_t i = 0; i < COUNT(callers); i++) CHECK(pthread_create(&callers[i], NULL, run_waiting, NULL) == 0);
    for (unsigned i = 0; i < 4; i++) sem_wait(&begun); /* two callers and two helpers */
    CHECK_EQUAL(agsf_pool_threads(), 2);
    fork_and_use(2, use_all);
    CHECK_EQUAL(agsf_pool_threads(), 2); /* the parent has them still */
    for (unsigned i = 0; i < 12; i++) sem_post(&go_on);
    for (size_t i = 0; i < COUNT(callers); i++) CHECK(pthread_join(callers[i], NULL) == 0);
    use_all();
    check_nonces();
}

#if !SANITIZED
static _Atomic bool ending;

static void *keep_running(void *unused) {
    while (!ending) use_runs(3);
    return unused;
}

static void *keep_drawing(void *unused) {
    while (!ending) use_small(key);
    return unused;
}

static void *keep_making_keys(void *unused) {
    while (!ending) use_new_key();
    return unused;
}

static void *keep_ending_threads(void *unused) {
    while (!ending) use_in_new_thread();
    return unused;
}

static int64_t now_ms(void) {
    struct timespec now;

    CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void use_quickly(void) {
    use_in_new_thread();
    use_new_key();
    use_runs(2);
}

static void check_fork_loop(int64_t for_ms) {
    void *(*const loops[])(void *) = {keep_running,     keep_running,        keep_drawing,
                                      keep_making_keys, keep_ending_threads, keep_ending_threads};
    pthread_t threads[COUNT(loops)];
    const int64_t end = now_ms() + for_ms;
    unsigned forks = 0;

    checking("forks beside busy threads");
    for (size_t i = 0; i < COUNT(loops); i++) CHECK(pthread_create(&threads[i], NULL, loops[i], NULL) == 0);
    for (; forks < 4 || now_ms() < end; forks++) fork_and_use(forks % 8 == 0, use_quickly);
    ending = true;
    for (size_t i = 0; i < COUNT(loops); i++) CHECK(pthread_join(threads[i], NULL) == 0);
    check_nonces();
}
#endif

static void check_all_quiet(void) {
    draw_some();
    checking("a child without entropy%s", one_pid ? " that has its parent's process id" : "");
    fork_and_use(0, seal_without_entropy);
    check_nonces_after_fork();
    check_fork_during_batches();
    check_nonces_after_fork();
}

static void check_all_with_one_pid(void) {
    one_pid = true;
    draw_some();
    for (unsigned i = 0; i < 3; i++) {
        check_clones(false, use_small);
        check_clones(true, use_small);
        check_clones(false, use_many);
        check_clones(true, use_many);
    }
    check_all_quiet();
}

int main(void) {
    start();
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(shared != MAP_FAILED);
    key = key_of(32, 1);
    fork_and_use(1, use_all); /* before anything has been used */
    fork_and_use(0, check_all_with_one_pid);
    check_all_quiet();
#if !SANITIZED
    check_fork_loop(2500);
#endif
    agsf_key_free(key);
    return 0;
}
