/*
 * test_times.c - the time of a message does not depend on its secrets.
 *
 * Guards: the chosen kernel takes as long for a text of zeros as for a random one, for a key of zeros as for a random
 * one, and refuses a tag that is wrong in its first byte as late as one that is wrong in its last. Two kinds of
 * messages take turns in random order; Welch's t-test compares their times, without the slowest, which are the
 * machine's. (The method: Reparaz, Balasch, Verbauwhede, "Dude, is my code constant time?".) A difference must show in
 * each of three runs to count.
 *
 * For `run.sh times`.
 */
#include "support.h"

#include "vaes/vaes.h"

#if AGSF_HAS_VAES
#include <x86intrin.h>

enum { NBYTES = 300, MEASURED = 200000, KEPT_PERCENT = 90, RUNS = 3, T2_MAX = 100 };

struct sample {
    double time;
    unsigned kind;
};

/* What the two kinds of a case have for themselves. */
struct pair {
    const char *what;
    agsf_vaes_key keys[2];
    uint8_t texts[2][NBYTES], tags[2][AGSF_TAG_NBYTES];
};

static int compare(const void *a, const void *b) {
    const double x = ((const struct sample *)a)->time, y = ((const struct sample *)b)->time;

    return (x > y) - (x < y);
}

/* The square of t. */
static double t2_of(struct sample *samples, size_t n) {
    double sum[2] = {0}, squares[2] = {0}, count[2] = {0}, mean[2], error = 0;

    qsort(samples, n, sizeof(*samples), compare);
    n = n * KEPT_PERCENT / 100;
    for (size_t i = 0; i < n; i++) {
        sum[samples[i].kind] += samples[i].time;
        squares[samples[i].kind] += samples[i].time * samples[i].time;
        count[samples[i].kind]++;
    }
    for (int k = 0; k < 2; k++) {
        mean[k] = sum[k] / count[k];
        error += (squares[k] / count[k] - mean[k] * mean[k]) / count[k];
    }
    return (mean[0] - mean[1]) * (mean[0] - mean[1]) / error;
}

static double measure(const agsf_vaes *kernel, const struct pair *pair, struct sample *samples, uint64_t *state) {
    static uint8_t text[NBYTES], out[NBYTES];
    const uint8_t nonce[AGSF_NONCE_NBYTES] = {1};
    uint8_t tag[AGSF_TAG_NBYTES];
    agsf_vaes_key key;
    bool good = false;

    for (size_t i = 0; i < MEASURED; i++) {
        const unsigned kind = (unsigned)random_below(state, 2);
        uint64_t begin;
        memcpy(&key, &pair->keys[kind], sizeof(key)); /* both kinds at one place */
        memcpy(text, pair->texts[kind], NBYTES);
        memcpy(tag, pair->tags[kind], sizeof(tag));
        _mm_lfence();
        begin = __rdtsc();
        good |= kernel->open(&key, nonce, NULL, 0, text, NBYTES, out, tag);
        _mm_lfence();
        samples[i] = (struct sample){(double)(__rdtsc() - begin), kind};
    }
    CHECK(!good);
    return t2_of(samples, MEASURED);
}

static void check(const agsf_vaes *kernel, struct pair *pair) {
    struct sample *const samples = malloc(MEASURED * sizeof(*samples));
    uint64_t state = 1;
    double least = 1e9;

    CHECK(samples != NULL);
    checking("%s: %s", kernel->name, pair->what);
    for (int run = 0; run < RUNS && least > T2_MAX; run++) {
        const double t2 = measure(kernel, pair, samples, &state);
        if (t2 < least) least = t2;
    }
    printf("%s, %s: t^2 = %.1f\n", kernel->name, pair->what, least);
    CHECK(least <= T2_MAX);
    free(samples);
}

static void check_all(const agsf_vaes *kernel) {
    static const uint8_t zeros[16];
    const uint8_t nonce[AGSF_NONCE_NBYTES] = {1};
    uint8_t bytes[16], plain[NBYTES], sealed[NBYTES], tag[AGSF_TAG_NBYTES];
    struct pair base = {.what = ""}, pair;

    fill(bytes, sizeof(bytes), 1);
    fill(plain, sizeof(plain), 2);
    for (int k = 0; k < 2; k++) kernel->key_init(&base.keys[k], bytes, sizeof(bytes));
    for (int k = 0; k < 2; k++) fill(base.texts[k], NBYTES, 3);
    kernel->seal(&base.keys[0], nonce, NULL, 0, plain, NBYTES, sealed, tag);

    pair = base;
    pair.what = "texts";
    memset(pair.texts[1], 0, NBYTES);
    check(kernel, &pair);
    pair = base;
    pair.what = "keys";
    kernel->key_init(&pair.keys[1], zeros, sizeof(zeros));
    check(kernel, &pair);
    pair = base;
    pair.what = "tags";
    for (int k = 0; k < 2; k++) {
        memcpy(pair.texts[k], sealed, NBYTES);
        memcpy(pair.tags[k], tag, AGSF_TAG_NBYTES);
        pair.tags[k][k == 0 ? 0 : AGSF_TAG_NBYTES - 1] ^= 1;
    }
    check(kernel, &pair);
}
#endif

int main(void) {
    start();
#if AGSF_HAS_VAES
    if (agsf_vaes_widest() != NULL) {
        check_all(agsf_vaes_widest());
        return 0;
    }
#endif
    printf("skipped: this CPU, or this compiler, has no AES instructions\n");
    return 0;
}
