/*
 * test_pause.c - runs that come back before they are done.
 *
 * Guards: a run of many blocks comes back every 65,536 blocks, and after a tenth of a second; called again it goes on
 * where it was; its messages are counted once, before the first, however often it pauses; a bad block of a later
 * part takes the parts before it along.
 */
#include "support.h"

#include "clock.h"

enum { CALL_MAX_BLOCKS = 1 << 16, BUDGET_MS = 100 };

static void check_many_blocks(unsigned threads, bool use_file) {
    enum { BLOCK = 3, BLOCKS = 3 * CALL_MAX_BLOCKS + 100, PLAIN = BLOCKS * BLOCK - 1, BAD = 2 * CALL_MAX_BLOCKS + 7 };
    enum { SEALED_BLOCK = BLOCK + AGSF_OVERHEAD_NBYTES, SEALED = PLAIN + BLOCKS * AGSF_OVERHEAD_NBYTES };
    guarded plain = guarded_new(PLAIN, AT_END), sealed = guarded_new(SEALED, AT_END), out = guarded_new(PLAIN, AT_END);
    const int fd = memfd_create("run", MFD_CLOEXEC);
    agsf_key *key = key_of(16, threads + 10 * use_file);
    agsf_run run = {.key = key,
                    .block_nbytes = BLOCK,
                    .plain = plain.data,
                    .plain_nbytes = PLAIN,
                    .fd = fd,
                    .sealed = use_file ? NULL : sealed.data,
                    .threads = threads};
    unsigned pauses = 0;

    checking("%d blocks, %u threads, in a %s", BLOCKS, threads, use_file ? "file" : "buffer");
    step_ms = 0;
    fill(plain.data, PLAIN, threads);
    CHECK_EQUAL(agsf_key_carry(key, AGSF_KEY_LIMIT - BLOCKS), AGSF_OK); /* just enough, if each is counted once */
    for (uint64_t done = CALL_MAX_BLOCKS; done < BLOCKS; done += CALL_MAX_BLOCKS) {
        CHECK_EQUAL(agsf_seal_run(&run), AGSF_PAUSED);
        CHECK_EQUAL(run.done, done);
        CHECK_EQUAL(agsf_key_sealed(key), BLOCKS);
    }
    CHECK_EQUAL(agsf_seal_run(&run), AGSF_OK);
    CHECK_EQUAL(agsf_key_sealed(key), BLOCKS);
    if (use_file) CHECK(pread(fd, sealed.data, SEALED, 0) == SEALED);
    CHECK(is_sealed_run(&run, sealed.data, plain.data));

    run.plain = out.data;
    run.done = 0;
    CHECK_EQUAL(finish(agsf_open_run, &run, &pauses), AGSF_OK);
    CHECK_EQUAL(pauses, BLOCKS / CALL_MAX_BLOCKS);
    CHECK(memcmp(out.data, plain.data, PLAIN) == 0);

    sealed.data[(size_t)BAD * SEALED_BLOCK + 5] ^= 4;
    if (use_file) CHECK(pwrite(fd, sealed.data, SEALED, 0) == SEALED);
    pauses = 0;
    run.done = 0;
    CHECK_EQUAL(finish(agsf_open_run, &run, &pauses), AGSF_BAD_TAG);
    CHECK_EQUAL(pauses, BAD / CALL_MAX_BLOCKS);
    CHECK_EQUAL(run.bad_block, BAD);
    CHECK(all_are(out.data, PLAIN, 0));

    close(fd);
    agsf_key_free(key);
    guarded_free(&plain);
    guarded_free(&sealed);
    guarded_free(&out);
}

/* Blocks that are a job each: `step` milliseconds a job. */
static void check_budget(unsigned threads, int step) {
    enum { BLOCK = 300000, BLOCKS = 40, PLAIN = BLOCK * BLOCKS };
    uint8_t *plain = malloc(PLAIN), *sealed = malloc(PLAIN + BLOCKS * AGSF_OVERHEAD_NBYTES), *out = malloc(PLAIN);
    const uint64_t jobs = (uint64_t)((BUDGET_MS + step - 1) / step); /* that one thread does in a call */
    agsf_key *key = key_of(32, threads * 10000 + (unsigned)step);
    agsf_run run = {
        .key = key, .block_nbytes = BLOCK, .plain = plain, .plain_nbytes = PLAIN, .sealed = sealed, .threads = threads};
    unsigned pauses = 0;
    uint64_t before;
    agsf_status status;

    checking("%d ms a job, %u threads", step, threads);
    step_ms = step;
    CHECK(plain != NULL && sealed != NULL && out != NULL);
    fill(plain, PLAIN, threads);
    do {
        before = run.done;
        status = agsf_seal_run(&run);
        CHECK(run.done > before);
        if (threads == 1) CHECK_EQUAL(run.done, before + jobs < BLOCKS ? before + jobs : BLOCKS);
    } while (status == AGSF_PAUSED);
    CHECK_EQUAL(status, AGSF_OK);
    CHECK_EQUAL(run.done, BLOCKS);
    CHECK_EQUAL(agsf_key_sealed(key), BLOCKS);
    CHECK(is_sealed_run(&run, sealed, plain));
    run.plain = out;
    run.done = 0;
    CHECK_EQUAL(finish(agsf_open_run, &run, &pauses), AGSF_OK);
    if (threads == 1) CHECK_EQUAL(pauses, (BLOCKS - 1) / jobs);
    CHECK(memcmp(out, plain, PLAIN) == 0);
    agsf_key_free(key);
    free(plain);
    free(sealed);
    free(out);
}

int main(void) {
    start();
    step_ms = 0; /* no run pauses unless a test lets time pass */
    check_many_blocks(1, false);
    check_many_blocks(3, false);
    check_many_blocks(2, true);
    check_budget(1, 40);
    check_budget(1, 1000); /* one job at a time, but one */
    check_budget(3, 1000);
    check_budget(3, 10);
    return 0;
}
