/*
 * gcm.h - checks an AES-GCM kernel against libcrypto.
 *
 * Guards: for every size of text, of AAD and of key, however a message is aligned and cut into pieces, in place and
 * apart, the kernel makes libcrypto's bytes and tag and opens them again; it touches nothing beside its buffers; it
 * refuses what was changed, and then leaves zeros; the counter wraps around at 32 bits; a message leaves no state.
 */
#ifndef AGSF_TEST_GCM_H
#define AGSF_TEST_GCM_H

#include "support.h"

#include <openssl/evp.h>

#include "vaes/vaes.h"

enum { TAG = AGSF_TAG_NBYTES, NONCE = AGSF_NONCE_NBYTES, AAD_END = 300, TEXT_END = 5000 };

/* MemorySanitizer does not see what libcrypto, which is compiled without, writes. */
#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#include <sanitizer/msan_interface.h>
#define WRITTEN_BY_LIBCRYPTO(at, nbytes) __msan_unpoison(at, nbytes)
#endif
#endif
#ifndef WRITTEN_BY_LIBCRYPTO
#define WRITTEN_BY_LIBCRYPTO(at, nbytes) ((void)0)
#endif

/* A key for both, and libcrypto's answer to a message. */
struct both {
    const agsf_vaes *kernel;
    agsf_vaes_key key;
    EVP_CIPHER_CTX *ctx;
    uint8_t bytes[32];
    size_t nbytes;
};

static void both_init(struct both *both, const agsf_vaes *kernel, size_t key_nbytes) {
    const EVP_CIPHER *const cipher = key_nbytes == 16   ? EVP_aes_128_gcm()
                                     : key_nbytes == 24 ? EVP_aes_192_gcm()
                                                        : EVP_aes_256_gcm();

    both->kernel = kernel;
    both->nbytes = key_nbytes;
    fill(both->bytes, key_nbytes, 1000 + key_nbytes);
    memset(&both->key, SLACK, sizeof(both->key));
    kernel->key_init(&both->key, both->bytes, key_nbytes);
    both->ctx = EVP_CIPHER_CTX_new();
    CHECK(both->ctx != NULL);
    CHECK(EVP_EncryptInit_ex(both->ctx, cipher, NULL, both->bytes, NULL) == 1);
}

static void both_free(struct both *both) { EVP_CIPHER_CTX_free(both->ctx); }

/* Where nothing is, nothing need be pointed at. */
static const uint8_t *pointer(const guarded *buffer) { return buffer->nbytes == 0 ? NULL : buffer->data; }

static void expect(const struct both *both, const uint8_t *nonce, const guarded *aad, const guarded *plain,
                   uint8_t *sealed_ret, uint8_t *tag_ret) {
    uint8_t none[16];
    int n;

    CHECK(EVP_EncryptInit_ex(both->ctx, NULL, NULL, NULL, nonce) == 1);
    CHECK(EVP_EncryptUpdate(both->ctx, NULL, &n, aad->data, (int)aad->nbytes) == 1);
    CHECK(EVP_EncryptUpdate(both->ctx, sealed_ret, &n, plain->data, (int)plain->nbytes) == 1);
    CHECK(EVP_EncryptFinal_ex(both->ctx, none, &n) == 1);
    CHECK(EVP_CIPHER_CTX_ctrl(both->ctx, EVP_CTRL_GCM_GET_TAG, TAG, tag_ret) == 1);
    WRITTEN_BY_LIBCRYPTO(sealed_ret, plain->nbytes);
    WRITTEN_BY_LIBCRYPTO(tag_ret, TAG);
}

/* A message, with what libcrypto makes of it, between pages that may not be touched. */
struct message {
    uint8_t nonce[NONCE], tag[TAG];
    guarded aad, plain, sealed, out;
};

static struct message message_new(const struct both *both, size_t aad_nbytes, size_t nbytes, enum side side) {
    struct message made = {.aad = guarded_new(aad_nbytes, side),
                           .plain = guarded_new(nbytes, side),
                           .sealed = guarded_new(nbytes, side),
                           .out = guarded_new(nbytes, side)};

    fill(made.nonce, NONCE, nbytes * 1000 + aad_nbytes);
    fill(made.aad.data, aad_nbytes, nbytes + 1);
    fill(made.plain.data, nbytes, nbytes + 2);
    expect(both, made.nonce, &made.aad, &made.plain, made.sealed.data, made.tag);
    return made;
}

static void message_free(struct message *message) {
    guarded_free(&message->aad);
    guarded_free(&message->plain);
    guarded_free(&message->sealed);
    guarded_free(&message->out);
}

static bool same(const guarded *a, const guarded *b) {
    return a->nbytes == 0 || memcmp(a->data, b->data, a->nbytes) == 0;
}

/* ---------------------------------------------------------------- in one call */

static void seal_once(const struct both *both, const struct message *m, const uint8_t *in, uint8_t *out) {
    uint8_t tag[TAG];

    both->kernel->seal(&both->key, m->nonce, pointer(&m->aad), m->aad.nbytes, in, m->plain.nbytes, out, tag);
    CHECK(same(&m->out, &m->sealed));
    CHECK(memcmp(tag, m->tag, TAG) == 0);
}

static bool open_once(const struct both *both, const struct message *m, const uint8_t *in, uint8_t *out,
                      const uint8_t *tag) {
    return both->kernel->open(&both->key, m->nonce, pointer(&m->aad), m->aad.nbytes, in, m->plain.nbytes, out, tag);
}

static void check_once(const struct both *both, struct message *m) {
    const size_t nbytes = m->plain.nbytes;
    uint8_t tag[TAG];

    seal_once(both, m, pointer(&m->plain), pointer(&m->out) == NULL ? NULL : m->out.data);
    CHECK(open_once(both, m, m->out.data, m->out.data, m->tag)); /* in place */
    CHECK(same(&m->out, &m->plain));
    seal_once(both, m, m->out.data, m->out.data);
    memset(m->out.data, SLACK, nbytes);
    CHECK(open_once(both, m, m->sealed.data, m->out.data, m->tag));
    CHECK(same(&m->out, &m->plain));

    memcpy(tag, m->tag, TAG);
    tag[nbytes % TAG] ^= (uint8_t)(1 << nbytes / TAG % 8);
    CHECK(!open_once(both, m, m->sealed.data, m->out.data, tag));
    CHECK(all_are(m->out.data, nbytes, 0));
    memcpy(m->out.data, m->sealed.data, nbytes);
    CHECK(!open_once(both, m, m->out.data, m->out.data, tag));
    CHECK(all_are(m->out.data, nbytes, 0));
}

/* ---------------------------------------------------------------- in pieces */

static void check_pieces(const struct both *both, struct message *m, size_t step, bool seal, bool in_place) {
    const guarded *const from = seal ? &m->plain : &m->sealed, *const to = seal ? &m->sealed : &m->plain;
    const uint8_t *const in = in_place ? m->out.data : from->data;
    const size_t cut = step < m->aad.nbytes ? step : m->aad.nbytes, nbytes = m->plain.nbytes;
    agsf_vaes_message state;
    uint8_t tag[TAG];

    if (in_place) memcpy(m->out.data, from->data, nbytes);
    memset(&state, SLACK, sizeof(state));
    both->kernel->begin(&state, &both->key, m->nonce, seal);
    both->kernel->aad(&state, m->aad.data, cut);
    both->kernel->aad(&state, m->aad.data + cut, m->aad.nbytes - cut);
    for (size_t at = 0; at < nbytes; at += step) {
        const size_t left = nbytes - at;
        both->kernel->piece(&state, NULL, 0, NULL);
        both->kernel->piece(&state, in + at, left < step ? left : step, m->out.data + at);
    }
    if (seal) {
        both->kernel->finish_seal(&state, tag);
        CHECK(memcmp(tag, m->tag, TAG) == 0);
    } else {
        memcpy(tag, m->tag, TAG);
        tag[3] ^= step % 2; /* every other time the tag is wrong */
        CHECK_EQUAL(both->kernel->finish_open(&state, tag), step % 2 == 0);
    }
    CHECK(same(&m->out, to));
    CHECK(all_are((const uint8_t *)&state, sizeof(state), 0));
}

/* Every kind of piece of a message of some batches. */
static void check_all_pieces(const struct both *both) {
    enum { NBYTES = 1700, STEP = SANITIZED ? 29 : 1 };

    for (size_t step = 1; step <= NBYTES; step += step < 35 ? 1 : STEP) {
        struct message m = message_new(both, step % (AAD_END + 1), NBYTES - step % 37, step % 2 ? AT_END : AT_START);
        checking("%s, pieces of %zu bytes", both->kernel->name, step);
        for (unsigned way = 0; way < 4; way++) check_pieces(both, &m, step, way % 2, way / 2);
        message_free(&m);
    }
}

/* ---------------------------------------------------------------- sizes and places */

static void check_size(const struct both *both, size_t aad_nbytes, size_t nbytes, enum side side) {
    struct message m = message_new(both, aad_nbytes, nbytes, side);
    uint64_t state = nbytes + aad_nbytes;

    checking("%s, a key of %zu bytes, %zu bytes of AAD, %zu of text", both->kernel->name, both->nbytes, aad_nbytes,
             nbytes);
    check_once(both, &m);
    for (unsigned way = 0; way < 2; way++)
        check_pieces(both, &m, 1 + random_below(&state, nbytes + 1), way, nbytes % 2);
    message_free(&m);
}

static void check_sizes(const struct both *both) {
    static const size_t texts[] = {0, 1, 16, 100, 206, 207, 208, 209, 400, 700},
                        large[] = {65536, 262144 - 64, 1 << 20};
    const size_t few = SANITIZED ? 3 : 1, step = SANITIZED ? 31 : 3,
                 skip = both->nbytes / 8 - 2; /* the three keys share the sizes */

    for (size_t n = 0; n <= TEXT_END; n += n < 600 ? few : step) {
        const size_t here = n < 600 ? n : n + skip;
        check_size(both, here * 7 % (AAD_END + 1), here, AT_END);
        if (here % 5 == 0) check_size(both, here * 3 % 40, here, AT_START);
    }
    for (size_t n = 0; n <= AAD_END; n += SANITIZED ? 3 : 1)
        check_size(both, n, texts[n % COUNT(texts)], n % 3 ? AT_END : AT_START);
    check_size(both, 70000, 3, AT_END);
    for (size_t i = 0; i < COUNT(large); i++) check_size(both, 20, large[i] + skip, AT_END);
}

/* Text and output at all places of a cache line, which differ. */
static void check_alignments(const struct both *both) {
    for (size_t place = 0; place < 64; place++) {
        struct message m = message_new(both, place, 300 + place * 11, AT_END);
        uint8_t *const in = malloc(m.plain.nbytes + 128), *const out = malloc(m.plain.nbytes + 128), tag[TAG];
        const size_t other = place * 29 % 64;

        checking("%s, place %zu", both->kernel->name, place);
        CHECK(in != NULL && out != NULL);
        memcpy(in + place, m.plain.data, m.plain.nbytes);
        both->kernel->seal(&both->key, m.nonce, m.aad.data, place, in + place, m.plain.nbytes, out + other, tag);
        CHECK(memcmp(out + other, m.sealed.data, m.plain.nbytes) == 0 && memcmp(tag, m.tag, TAG) == 0);
        CHECK(open_once(both, &m, out + other, in + place, tag));
        CHECK(memcmp(in + place, m.plain.data, m.plain.nbytes) == 0);
        free(in);
        free(out);
        message_free(&m);
    }
}

/* ---------------------------------------------------------------- what was changed */

static void check_flips(const struct both *both, struct message *m, uint8_t *flipped, size_t nbytes) {
    for (size_t bit = 0; bit < nbytes * 8; bit += 1 + nbytes / 50) {
        flipped[bit / 8] ^= (uint8_t)(1 << bit % 8);
        memset(m->out.data, SLACK, m->out.nbytes);
        CHECK(!open_once(both, m, m->sealed.data, m->out.data, m->tag));
        CHECK(all_are(m->out.data, m->out.nbytes, 0));
        flipped[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

static void check_changed(const struct both *both) {
    static const size_t sizes[] = {1, 15, 64, 100, 257, 1000};

    for (size_t i = 0; i < COUNT(sizes); i++) {
        struct message m = message_new(both, 19, sizes[i], AT_END);
        checking("%s, changed messages of %zu bytes", both->kernel->name, sizes[i]);
        check_flips(both, &m, m.nonce, NONCE);
        check_flips(both, &m, m.tag, TAG);
        check_flips(both, &m, m.aad.data, m.aad.nbytes);
        check_flips(both, &m, m.sealed.data, m.sealed.nbytes);
        message_free(&m);
    }
}

/* ---------------------------------------------------------------- the counter */

/* libcrypto's key stream of a nonce, block by block, from a counter on: in ECB, so that nothing but this code counts.
 */
static void add_stream(const struct both *both, const uint8_t *nonce, uint32_t counter, uint8_t *text, size_t nbytes) {
    const EVP_CIPHER *const cipher = both->nbytes == 16   ? EVP_aes_128_ecb()
                                     : both->nbytes == 24 ? EVP_aes_192_ecb()
                                                          : EVP_aes_256_ecb();
    EVP_CIPHER_CTX *const ctx = EVP_CIPHER_CTX_new();
    int n;

    CHECK(ctx != NULL && EVP_EncryptInit_ex(ctx, cipher, NULL, both->bytes, NULL) == 1);
    for (size_t at = 0; at < nbytes; at += 16, counter++) {
        uint8_t block[16], stream[16];
        memcpy(block, nonce, NONCE);
        for (int i = 0; i < 4; i++) block[NONCE + i] = (uint8_t)(counter >> (24 - 8 * i));
        CHECK(EVP_EncryptUpdate(ctx, stream, &n, block, 16) == 1);
        WRITTEN_BY_LIBCRYPTO(stream, sizeof(stream));
        for (size_t i = 0; i < 16 && at + i < nbytes; i++) text[at + i] ^= stream[i];
    }
    EVP_CIPHER_CTX_free(ctx);
}

/* No text is long enough to wrap the counter around here, so it begins just before. */
static void check_wrap(const struct both *both) {
    enum { NBYTES = 1500 };
    static uint8_t plain[NBYTES], want[NBYTES], got[NBYTES];
    uint8_t nonce[NONCE], tag[TAG];

    memset(nonce, 0xff, NONCE); /* a carry into it would go all the way */
    fill(plain, NBYTES, 9);
    for (uint32_t before = 0; before < 100; before++) {
        const size_t step = 1 + before * 37 % NBYTES;
        agsf_vaes_message state;
        checking("%s, a counter that wraps around %u blocks later", both->kernel->name, before);
        memcpy(want, plain, NBYTES);
        add_stream(both, nonce, 0 - before, want, NBYTES);
        for (int seal = 0; seal < 2; seal++) {
            both->kernel->begin(&state, &both->key, nonce, seal);
            state.counter = 0 - before;
            for (size_t at = 0; at < NBYTES; at += step) {
                const size_t here = NBYTES - at < step ? NBYTES - at : step;
                both->kernel->piece(&state, (seal ? plain : want) + at, here, got + at);
            }
            CHECK(memcmp(got, seal ? want : plain, NBYTES) == 0);
            if (seal) {
                both->kernel->finish_seal(&state, tag);
            }
        }
        CHECK(state.key == NULL);
    }
}

static void check_kernel(const agsf_vaes *kernel) {
    for (size_t key_nbytes = 16; key_nbytes <= 32; key_nbytes += 8) {
        struct both both;
        both_init(&both, kernel, key_nbytes);
        check_sizes(&both);
        check_all_pieces(&both);
        check_alignments(&both);
        check_changed(&both);
        check_wrap(&both);
        both_free(&both);
    }
}

#endif
