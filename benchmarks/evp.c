/*
 * evp.c - the bare loop over EVP that ags_fast is measured against: what C can do with this libcrypto on this
 * machine, for the same blocks, modules of a Parquet file or wrapped keys, under the same AADs. Compiled and called by
 * evp.py.
 *
 * It is meant to be hard to beat. Key schedules, nonces, buffers and threads are ready before its clock starts, and
 * its threads spin instead of sleeping, so that none of that is in its time. What it leaves out is what makes an
 * engine of a loop: it counts no messages, checks no sizes, clears no output, answers no signal, draws no nonce.
 */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <openssl/core_names.h>
#include <openssl/evp.h>

enum {
    HEADER = 8,
    NONCE = 12,
    TAG = 16,
    OVERHEAD = NONCE + TAG,
    AAD_MAX = 128,
    SUFFIX_MAX = 7,
    LENGTH = 4, /* what a module's frame begins with */
    THREADS_MAX = 256,
};

/* A module of a Parquet file, as parquet.py lays it out: where it is in the plain file and its frame in the sealed one. */
struct module {
    uint64_t plain, sealed;
    uint32_t nbytes; /* of plaintext */
    uint8_t suffix[SUFFIX_MAX], suffix_nbytes; /* what its AAD ends in */
};

/* Its fields are evp.py's as well. Sizes are in bytes. */
struct loop {
    size_t piece_nbytes; /* what a thread takes at a time, and what goes between a system call and the cipher */
    size_t update_nbytes; /* what goes through the cipher in one call */
    const uint8_t *key;
    size_t key_nbytes;
    const uint8_t *prefix;
    size_t prefix_nbytes;
    size_t block_nbytes;
    uint8_t *plain;
    size_t plain_nbytes;
    size_t window_nbytes;  /* of plain; where it is less than plain_nbytes, each thread has one and goes round in it */
    uint8_t *sealed;       /* the stream, header and all; or NULL, then it is in fd */
    const uint8_t *nonces; /* of all blocks */
    const uint32_t *order; /* which blocks, one by one; or NULL, then it is all of them */
    size_t norder;
    const struct module *modules; /* these instead of blocks; or NULL. Opened ones of a file are only looked at */
    size_t nmodules;
    int fd;
    int source; /* with modules that are sealed to fd: where the plaintext is */
    int seal;
    unsigned threads;
};

struct race {
    const struct loop *loop;
    size_t nblocks, per_claim;
    _Atomic size_t next;
    _Atomic unsigned ready, done;
    atomic_bool go, failed;
};

struct lane {
    struct race *race;
    const struct loop *loop;
    EVP_CIPHER_CTX *ctx;
    OSSL_PARAM tag[2];
    uint8_t aad[AAD_MAX];
    uint8_t *window;
    uint8_t *text; /* of modules: the scratch's second half */
    uint8_t scratch[];
};

static double now(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---------------------------------------------------------------- one message */

static void put_u32(uint8_t *out, size_t value) {
    for (int i = 0; i < 4; i++) out[i] = (uint8_t)(value >> 8 * i);
}

/* The suffix, behind the prefix in the lane's AAD, is in its place already. */
static bool begin_message(struct lane *lane, size_t suffix_nbytes, const uint8_t *nonce) {
    int n;

    return EVP_CipherInit_ex2(lane->ctx, NULL, NULL, nonce, -1, NULL) == 1 &&
           EVP_CipherUpdate(lane->ctx, NULL, &n, lane->aad, (int)(lane->loop->prefix_nbytes + suffix_nbytes)) == 1;
}

static bool begin(struct lane *lane, size_t block, const uint8_t *nonce) {
    put_u32(lane->aad + lane->loop->prefix_nbytes, block);
    return begin_message(lane, 4, nonce);
}

/*
 * A message in one call is slower than in two or more with OpenSSL 3.5 on an AMD EPYC (Zen 5) when the data comes from
 * memory and not from a cache: 64 KiB took twice the time to open. No reason was found; the fastest step is tried out.
 */
static bool update(struct lane *lane, uint8_t *out, const uint8_t *in, size_t nbytes) {
    const size_t step = lane->loop->update_nbytes;
    int n;

    for (; nbytes > step; nbytes -= step, in += step, out += step) {
        if (EVP_CipherUpdate(lane->ctx, out, &n, in, (int)step) != 1) return false;
    }
    return EVP_CipherUpdate(lane->ctx, out, &n, in, (int)nbytes) == 1;
}

static bool finish(struct lane *lane, uint8_t *tag) {
    uint8_t none[16];
    int n;

    lane->tag[0].data = tag;
    if (!lane->loop->seal) {
        return EVP_CIPHER_CTX_set_params(lane->ctx, lane->tag) == 1 && EVP_CipherFinal_ex(lane->ctx, none, &n) == 1;
    }
    return EVP_CipherFinal_ex(lane->ctx, none, &n) == 1 && EVP_CIPHER_CTX_get_params(lane->ctx, lane->tag) == 1;
}

/* ---------------------------------------------------------------- one block */

static size_t plain_of(const struct loop *loop, size_t block) {
    const size_t left = loop->plain_nbytes - block * loop->block_nbytes;

    return left < loop->block_nbytes ? left : loop->block_nbytes;
}

static uint8_t *window_of(const struct lane *lane, size_t block) {
    return lane->window + block * lane->loop->block_nbytes % lane->loop->window_nbytes;
}

/* Block in memory, at its sealed side. */
static bool whole_block(struct lane *lane, size_t block, uint8_t *sealed) {
    const struct loop *loop = lane->loop;
    const size_t nbytes = plain_of(loop, block);
    uint8_t *text = sealed + NONCE, *plain = window_of(lane, block);

    if (!loop->seal) return begin(lane, block, sealed) && update(lane, plain, text, nbytes) && finish(lane, text + nbytes);
    memcpy(sealed, loop->nonces + NONCE * block, NONCE);
    return begin(lane, block, sealed) && update(lane, text, plain, nbytes) && finish(lane, text + nbytes);
}

/* Block in the file, at offset, too large for the scratch: piece by piece. */
static bool large_block(struct lane *lane, size_t block, off_t offset) {
    const struct loop *loop = lane->loop;
    uint8_t *plain = window_of(lane, block);
    size_t left = plain_of(loop, block), head = NONCE;

    if (loop->seal) {
        memcpy(lane->scratch, loop->nonces + NONCE * block, NONCE);
        if (!begin(lane, block, lane->scratch)) return false;
    }
    while (left > 0) {
        const size_t piece = left < loop->piece_nbytes ? left : loop->piece_nbytes;
        const size_t nbytes = head + piece + (piece == left ? TAG : 0);
        uint8_t *text = lane->scratch + head;
        if (loop->seal) {
            if (!update(lane, text, plain, piece) || (piece == left && !finish(lane, text + piece))) return false;
            if (pwrite(loop->fd, lane->scratch, nbytes, offset) != (ssize_t)nbytes) return false;
        } else {
            if (pread(loop->fd, lane->scratch, nbytes, offset) != (ssize_t)nbytes) return false;
            if (head > 0 && !begin(lane, block, lane->scratch)) return false;
            if (!update(lane, plain, text, piece) || (piece == left && !finish(lane, text + piece))) return false;
        }
        plain += piece;
        left -= piece;
        offset += (off_t)nbytes;
        head = 0;
    }
    return true;
}

/* ---------------------------------------------------------------- modules */

/* One module between its plaintext and its frame. */
static bool one_module(struct lane *lane, size_t number, uint8_t *plain, uint8_t *frame) {
    const struct module *const module = &lane->loop->modules[number];
    uint8_t *const nonce = frame + LENGTH, *const text = nonce + NONCE;
    const bool seal = lane->loop->seal;

    if (seal) {
        put_u32(frame, module->nbytes + OVERHEAD);
        memcpy(nonce, lane->loop->nonces + NONCE * number, NONCE);
    }
    memcpy(lane->aad + lane->loop->prefix_nbytes, module->suffix, SUFFIX_MAX);
    return begin_message(lane, module->suffix_nbytes, nonce) &&
           update(lane, seal ? text : plain, seal ? plain : text, module->nbytes) && finish(lane, text + module->nbytes);
}

/* How many of them, from first on, follow each other and are a piece together; and how many bytes that is. */
static size_t piece_of(const struct loop *loop, size_t first, size_t end, size_t *plain_ret, size_t *sealed_ret) {
    const struct module *const modules = loop->modules;
    size_t last = first, plain = 0, sealed = 0, next;

    do {
        plain += modules[last].nbytes;
        sealed += modules[last].nbytes + LENGTH + OVERHEAD;
        last++;
        next = last < end ? modules[last].nbytes + LENGTH + OVERHEAD : 0;
    } while (last < end && modules[last].sealed == modules[first].sealed + sealed && sealed + next <= loop->piece_nbytes);
    *plain_ret = plain;
    *sealed_ret = sealed;
    return last;
}

static bool some_modules(struct lane *lane, size_t first, size_t end) {
    const struct loop *const loop = lane->loop;
    const struct module *const modules = loop->modules;
    const bool memory = loop->sealed != NULL;
    bool ok = true;

    while (ok && first < end) {
        const struct module *const head = &modules[first];
        size_t plain, sealed;
        const size_t last = piece_of(loop, first, end, &plain, &sealed);
        uint8_t *const frames = memory ? loop->sealed + head->sealed : lane->scratch;
        uint8_t *const text = memory ? loop->plain + head->plain : lane->text;
        if (!memory && loop->seal) ok = pread(loop->source, text, plain, (off_t)head->plain) == (ssize_t)plain;
        if (!memory && !loop->seal) ok = pread(loop->fd, frames, sealed, (off_t)head->sealed) == (ssize_t)sealed;
        for (size_t i = first; ok && i < last; i++) {
            const size_t at = memory || loop->seal ? modules[i].plain - head->plain : 0;
            ok = one_module(lane, i, text + at, frames + (modules[i].sealed - head->sealed));
        }
        if (ok && !memory && loop->seal) ok = pwrite(loop->fd, frames, sealed, (off_t)head->sealed) == (ssize_t)sealed;
        first = last;
    }
    return ok;
}

/* The largest part of the file that is handled at once. */
static size_t room_of(const struct loop *loop) {
    size_t room = loop->piece_nbytes;

    for (size_t i = 0; i < loop->nmodules; i++) {
        const size_t nbytes = loop->modules[i].nbytes + LENGTH;
        if (nbytes > room) room = nbytes;
    }
    return room + OVERHEAD;
}

/* ---------------------------------------------------------------- many blocks */

static bool some_blocks(struct lane *lane, size_t first, size_t end) {
    const struct loop *loop = lane->loop;
    const size_t step = loop->block_nbytes + OVERHEAD;
    const size_t nbytes = (end - first - 1) * step + plain_of(loop, end - 1) + OVERHEAD;
    const off_t offset = (off_t)(HEADER + first * step);
    uint8_t *sealed = loop->sealed != NULL ? loop->sealed + offset : lane->scratch;

    if (loop->sealed == NULL && nbytes > loop->piece_nbytes + OVERHEAD) return large_block(lane, first, offset);
    if (loop->sealed == NULL && !loop->seal && pread(loop->fd, sealed, nbytes, offset) != (ssize_t)nbytes) return false;
    for (size_t block = first; block < end; block++, sealed += step) {
        if (!whole_block(lane, block, sealed)) return false;
    }
    return loop->sealed != NULL || !loop->seal || pwrite(loop->fd, lane->scratch, nbytes, offset) == (ssize_t)nbytes;
}

static void work(struct lane *lane) {
    struct race *race = lane->race;
    const uint32_t *order = lane->loop->order;
    bool ok = true;

    while (ok) {
        const size_t first = atomic_fetch_add(&race->next, race->per_claim);
        const size_t end = first + race->per_claim < race->nblocks ? first + race->per_claim : race->nblocks;
        if (first >= race->nblocks) return;
        if (lane->loop->modules != NULL) {
            ok = some_modules(lane, first, end);
        } else {
            ok = order == NULL ? some_blocks(lane, first, end) : some_blocks(lane, order[first], (size_t)order[first] + 1);
        }
    }
    race->failed = true;
}

static void *thread_main(void *arg) {
    struct lane *lane = arg;

    atomic_fetch_add(&lane->race->ready, 1);
    while (!lane->race->go) sched_yield();
    work(lane);
    atomic_fetch_add(&lane->race->done, 1);
    return NULL;
}

static EVP_CIPHER *fetch(const struct loop *loop) {
    return EVP_CIPHER_fetch(NULL, loop->key_nbytes == 16 ? "AES-128-GCM" : loop->key_nbytes == 24 ? "AES-192-GCM" : "AES-256-GCM", NULL);
}

static struct lane *lane_new(struct race *race, unsigned number) {
    const struct loop *loop = race->loop;
    EVP_CIPHER *cipher = fetch(loop);
    const size_t room = room_of(loop), size = sizeof(struct lane) + 2 * room;
    struct lane *lane = malloc(size);
    const bool round = loop->window_nbytes < loop->plain_nbytes;

    if (lane == NULL) return NULL;
    memset(lane, 1, size);
    lane->race = race;
    lane->loop = loop;
    lane->window = loop->plain + (round ? number * loop->window_nbytes : 0);
    lane->text = lane->scratch + room;
    lane->tag[0] = OSSL_PARAM_construct_octet_string(OSSL_CIPHER_PARAM_AEAD_TAG, lane->aad, TAG);
    lane->tag[1] = OSSL_PARAM_construct_end();
    memcpy(lane->aad, loop->prefix, loop->prefix_nbytes);
    lane->ctx = EVP_CIPHER_CTX_new();
    if (cipher == NULL || EVP_CipherInit_ex2(lane->ctx, cipher, loop->key, NULL, loop->seal, NULL) != 1) race->failed = true;
    EVP_CIPHER_free(cipher);
    return lane;
}

static void lane_free(struct lane *lane) {
    if (lane == NULL) return;
    EVP_CIPHER_CTX_free(lane->ctx);
    free(lane);
}

double evp_run(const struct loop *loop);
double evp_small(const struct loop *loop, const char *path, unsigned times);
double evp_rewrap(const struct loop *from, const struct loop *to, const uint8_t *names, size_t name_nbytes, uint8_t *in,
                    uint8_t *out, size_t nrows);
double evp_copy(uint8_t *out, const uint8_t *in, size_t nbytes);

/* evp_run() goes through the loop once, and returns the seconds that took, or -1. */
double evp_run(const struct loop *loop) {
    const size_t per_claim = loop->piece_nbytes / (loop->block_nbytes + OVERHEAD);
    struct race race = {.loop = loop};
    struct lane *lanes[THREADS_MAX] = {NULL};
    pthread_t threads[THREADS_MAX];
    unsigned started = 0;
    double start, seconds;

    if (loop->threads < 1 || loop->threads > THREADS_MAX || loop->prefix_nbytes + SUFFIX_MAX > AAD_MAX) return -1;
    race.nblocks = loop->order != NULL ? loop->norder : (loop->plain_nbytes - 1) / loop->block_nbytes + 1;
    race.per_claim = loop->order != NULL || per_claim == 0 ? 1 : per_claim;
    if (loop->modules != NULL) {
        race.nblocks = loop->nmodules;
        race.per_claim = 2 + loop->piece_nbytes / (loop->plain_nbytes / loop->nmodules + 1);
    }
    for (unsigned i = 0; i < loop->threads; i++) {
        lanes[i] = lane_new(&race, i);
        if (lanes[i] == NULL) race.failed = true;
    }
    for (unsigned i = 1; i < loop->threads && !race.failed; i++) {
        if (pthread_create(&threads[started], NULL, thread_main, lanes[i]) != 0) break;
        started++;
    }
    while (race.ready < started) sched_yield();
    start = now();
    race.go = true;
    if (!race.failed) work(lanes[0]);
    while (race.done < started) sched_yield();
    seconds = now() - start;
    for (unsigned i = 0; i < started; i++) pthread_join(threads[i], NULL);
    for (unsigned i = 0; i < loop->threads; i++) lane_free(lanes[i]);
    return race.failed || started + 1 < loop->threads ? -1 : seconds;
}

/* evp_small() opens, reads and closes a file of one block, times over; returns the seconds, or -1. */
double evp_small(const struct loop *loop, const char *path, unsigned times) {
    struct race race = {.loop = loop};
    struct lane *lane = lane_new(&race, 0);
    EVP_CIPHER *cipher = fetch(loop);
    const double start = now();
    const size_t nbytes = HEADER + loop->plain_nbytes + OVERHEAD;
    bool ok = lane != NULL && !race.failed && nbytes <= loop->piece_nbytes;

    for (unsigned i = 0; ok && i < times; i++) {
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        ok = fd >= 0 && pread(fd, lane->scratch, nbytes, 0) == (ssize_t)nbytes &&
             EVP_CipherInit_ex2(lane->ctx, cipher, loop->key, NULL, 0, NULL) == 1 &&
             whole_block(lane, 0, lane->scratch + HEADER);
        close(fd);
    }
    lane_free(lane);
    EVP_CIPHER_free(cipher);
    return ok ? now() - start : -1;
}

/* A wrapped key: a nonce, loop->plain_nbytes sealed under the AAD that both lanes have now, and a tag. */
static bool one_wrap(struct lane *from, struct lane *to, size_t name_nbytes, uint8_t *in, const uint8_t *nonce, uint8_t *out) {
    const size_t nbytes = from->loop->plain_nbytes;
    uint8_t *const dek = from->scratch;

    memcpy(out, nonce, NONCE);
    return begin_message(from, name_nbytes, in) && update(from, dek, in + NONCE, nbytes) &&
           finish(from, in + NONCE + nbytes) && begin_message(to, name_nbytes, nonce) &&
           update(to, out + NONCE, dek, nbytes) && finish(to, out + NONCE + nbytes);
}

/*
 * evp_rewrap() opens nrows wrapped keys under one key and seals each under another, with the nonces of `to`; returns
 * the seconds, or -1. All have the same size, and so have their names, which their AADs end in.
 */
double evp_rewrap(const struct loop *from, const struct loop *to, const uint8_t *names, size_t name_nbytes, uint8_t *in,
                    uint8_t *out, size_t nrows) {
    struct race races[2] = {{.loop = from}, {.loop = to}};
    struct lane *old = lane_new(&races[0], 0), *new = lane_new(&races[1], 0);
    const size_t step = from->plain_nbytes + OVERHEAD, prefix_nbytes = from->prefix_nbytes;
    const double start = now();
    double seconds;
    bool ok = old != NULL && new != NULL && !races[0].failed && !races[1].failed && prefix_nbytes + name_nbytes <= AAD_MAX;

    for (size_t i = 0; ok && i < nrows; i++) {
        memcpy(old->aad + prefix_nbytes, names + i * name_nbytes, name_nbytes);
        memcpy(new->aad + prefix_nbytes, names + i * name_nbytes, name_nbytes);
        ok = one_wrap(old, new, name_nbytes, in + i * step, to->nonces + i * NONCE, out + i * step);
    }
    seconds = now() - start;
    lane_free(old);
    lane_free(new);
    return ok ? seconds : -1;
}

/* evp_copy() is memcpy(): the seconds that it takes. */
double evp_copy(uint8_t *out, const uint8_t *in, size_t nbytes) {
    const double start = now();

    memcpy(out, in, nbytes);
    return now() - start;
}
