/* choice.c - who does AES-GCM, by CPU and configuration, and the self-test of the kernel that is chosen. */
#include "choice.h"

#include <string.h>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/provider.h>

enum {
    CROSSING_NBYTES = 2048,
    NONCE = 12,
    TAG = 16,
    AAD = 27,
    TEXT_MAX_NBYTES = 1000,
    KNOWN_NBYTES = 16,
};

static const size_t key_sizes[] = {16, 24, 32};

/* What becomes of a block of zeros under a key and a nonce of zeros: test cases 2, 8 and 14 of the authors of GCM. */
static const uint8_t known_answers[3][KNOWN_NBYTES + TAG] = {
    {0x03, 0x88, 0xda, 0xce, 0x60, 0xb6, 0xa3, 0x92, 0xf3, 0x28, 0xc2, 0xb9, 0x71, 0xb2, 0xfe, 0x78,
     0xab, 0x6e, 0x47, 0xd4, 0x2c, 0xec, 0x13, 0xbd, 0xf5, 0x3a, 0x67, 0xb2, 0x12, 0x57, 0xbd, 0xdf},
    {0x98, 0xe7, 0x24, 0x7c, 0x07, 0xf0, 0xfe, 0x41, 0x1c, 0x26, 0x7e, 0x43, 0x84, 0xb0, 0xf6, 0x00,
     0x2f, 0xf5, 0x8d, 0x80, 0x03, 0x39, 0x27, 0xab, 0x8e, 0xf4, 0xd4, 0x58, 0x75, 0x14, 0xf0, 0xfb},
    {0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60, 0x6b, 0x6e, 0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18,
     0xd0, 0xd1, 0xc8, 0xa7, 0x99, 0x99, 0x6b, 0xf0, 0x26, 0x5b, 0x98, 0xb5, 0xd4, 0x8a, 0xb9, 0x19},
};

/* ---------------------------------------------------------------- the self-test */

/* A message for both. The key is long enough for all sizes. */
struct trial {
    uint8_t bytes[32], nonce[NONCE], aad[AAD], text[TEXT_MAX_NBYTES];
};

_Static_assert(sizeof(struct trial) == AGSF_CHOICE_RANDOM_NBYTES, "random bytes for all of a trial");

/* A kernel's key and libcrypto's, of the same bytes. */
struct pair {
    const agsf_vaes *kernel;
    agsf_vaes_key key;
    EVP_CIPHER_CTX *ctx;
};

static bool pair_init(struct pair *pair, const uint8_t *bytes, size_t nbytes) {
    const char *const name = nbytes == 16 ? "AES-128-GCM" : nbytes == 24 ? "AES-192-GCM" : "AES-256-GCM";
    EVP_CIPHER *const cipher = EVP_CIPHER_fetch(NULL, name, NULL);
    bool ok;

    pair->ctx = EVP_CIPHER_CTX_new();
    ok = cipher != NULL && pair->ctx != NULL && EVP_EncryptInit_ex2(pair->ctx, cipher, bytes, NULL, NULL) == 1;
    EVP_CIPHER_free(cipher);
    pair->kernel->key_init(&pair->key, bytes, nbytes);
    return ok;
}

static bool libcrypto_seals(const struct pair *pair, const struct trial *trial, size_t nbytes, uint8_t *out) {
    uint8_t none[TAG];
    int n;

    return EVP_EncryptInit_ex2(pair->ctx, NULL, NULL, trial->nonce, NULL) == 1 &&
           EVP_EncryptUpdate(pair->ctx, NULL, &n, trial->aad, AAD) == 1 &&
           EVP_EncryptUpdate(pair->ctx, out, &n, trial->text, (int)nbytes) == 1 &&
           EVP_EncryptFinal_ex(pair->ctx, none, &n) == 1 &&
           EVP_CIPHER_CTX_ctrl(pair->ctx, EVP_CTRL_AEAD_GET_TAG, TAG, out + nbytes) == 1;
}

static void kernel_seals_in_pieces(const struct pair *pair, const struct trial *trial, size_t nbytes, uint8_t *out) {
    const size_t first = nbytes / 3;
    agsf_vaes_message message;

    pair->kernel->begin(&message, &pair->key, trial->nonce, true);
    pair->kernel->aad(&message, trial->aad, AAD);
    pair->kernel->piece(&message, trial->text, first, out);
    pair->kernel->piece(&message, trial->text + first, nbytes - first, out + first);
    pair->kernel->finish_seal(&message, out + nbytes);
}

/* Both make the same of a message. The kernel opens that again, and refuses it once a bit has changed. */
static bool agree(const struct pair *pair, const struct trial *trial, size_t nbytes) {
    uint8_t theirs[TEXT_MAX_NBYTES + TAG], ours[sizeof(theirs)];
    const agsf_vaes *const kernel = pair->kernel;

    if (!libcrypto_seals(pair, trial, nbytes, theirs)) return false;
    kernel->seal(&pair->key, trial->nonce, trial->aad, AAD, trial->text, nbytes, ours, ours + nbytes);
    if (memcmp(ours, theirs, nbytes + TAG) != 0) return false;
    kernel_seals_in_pieces(pair, trial, nbytes, ours);
    if (memcmp(ours, theirs, nbytes + TAG) != 0) return false;
    if (!kernel->open(&pair->key, trial->nonce, trial->aad, AAD, theirs, nbytes, ours, theirs + nbytes)) return false;
    if (memcmp(ours, trial->text, nbytes) != 0) return false;
    theirs[nbytes + nbytes % TAG] ^= 1;
    return !kernel->open(&pair->key, trial->nonce, trial->aad, AAD, theirs, nbytes, ours, theirs + nbytes);
}

static bool knows(const agsf_vaes *kernel, const uint8_t *answer, size_t key_nbytes) {
    static const uint8_t zeros[32];
    uint8_t sealed[KNOWN_NBYTES + TAG];
    agsf_vaes_key key;

    kernel->key_init(&key, zeros, key_nbytes);
    kernel->seal(&key, zeros, NULL, 0, zeros, KNOWN_NBYTES, sealed, sealed + KNOWN_NBYTES);
    return memcmp(sealed, answer, sizeof(sealed)) == 0;
}

static bool is_right(const agsf_vaes *kernel, const struct trial *trial) {
    static const size_t sizes[] = {0, 16, 100, 600, TEXT_MAX_NBYTES};
    bool right = true;

    for (size_t i = 0; right && i < sizeof(key_sizes) / sizeof(*key_sizes); i++) {
        struct pair pair = {.kernel = kernel};
        right = pair_init(&pair, trial->bytes, key_sizes[i]) && knows(kernel, known_answers[i], key_sizes[i]);
        for (size_t j = 0; right && j < sizeof(sizes) / sizeof(*sizes); j++) right = agree(&pair, trial, sizes[j]);
        EVP_CIPHER_CTX_free(pair.ctx);
    }
    return right;
}

/* ---------------------------------------------------------------- the choice */

/* Whether AES is libcrypto's own. Another provider, FIPS or a machine's own hardware, is there for a reason. */
static bool is_default(void) {
    EVP_CIPHER *const cipher = EVP_CIPHER_fetch(NULL, "AES-128-GCM", NULL);
    const OSSL_PROVIDER *const provider = cipher == NULL ? NULL : EVP_CIPHER_get0_provider(cipher);
    const bool is = provider != NULL && strcmp(OSSL_PROVIDER_get0_name(provider), "default") == 0 &&
                    EVP_default_properties_is_fips_enabled(NULL) == 0;

    EVP_CIPHER_free(cipher);
    return is;
}

/*
 * The kernel for a CPU, where one is faster than libcrypto, and up to what size. Measured against the bare calls of
 * EVP:
 *
 *   512-bit vectors   The kernel with 256-bit ones is 3.4 times as fast at 64 bytes and 1.4 times at 1 KiB. At 4 KiB
 *                     libcrypto 3.5 is 1.2 times as fast (AMD Zen 5). Before 3.1 libcrypto has no code for such
 * vectors. The kernel with 512-bit ones was not measured, so only AGS_FAST_AES=vaes chooses it. 256-bit vectors   The
 * kernel is 3.2 times as fast at 64 bytes and 2.1 times at 1 MiB (AMD Zen 3). 128-bit vectors   The kernel is 3.4 times
 * as fast at 64 bytes and 1.2 times at 1 KiB, libcrypto 1.1 times as fast at 1 MiB (AMD Zen 1). Only AGS_FAST_AES=vaes
 * chooses the kernel.
 */
static agsf_choice fastest(void) {
    const agsf_vaes *const widest = agsf_vaes_widest();
    agsf_choice choice = {0};

#if AGSF_HAS_VAES
    if (widest == &agsf_vaes512 || widest == &agsf_vaes256) {
        const bool wide = widest == &agsf_vaes512 && OpenSSL_version_num() >= 0x30100000;
        choice = (agsf_choice){&agsf_vaes256, wide ? CROSSING_NBYTES : AGSF_MESSAGE_MAX_NBYTES, NULL};
    }
#else
    (void)widest;
#endif
    return choice;
}

bool agsf_can_choose(const char *wanted) {
    return wanted == NULL || strcmp(wanted, "auto") == 0 || strcmp(wanted, "openssl") == 0 ||
           strcmp(wanted, "vaes") == 0;
}

agsf_choice agsf_choose(const char *wanted, const uint8_t random[AGSF_CHOICE_RANDOM_NBYTES]) {
    const bool asked = wanted != NULL && strcmp(wanted, "vaes") == 0;
    agsf_choice choice = {0};
    struct trial trial;

    if (wanted != NULL && strcmp(wanted, "openssl") == 0) return choice;
    choice = asked ? (agsf_choice){agsf_vaes_widest(), AGSF_MESSAGE_MAX_NBYTES, NULL} : fastest();
    if (choice.kernel == NULL || !is_default()) {
        return (agsf_choice){.complaint =
                                 asked ? "AGS_FAST_AES=vaes: this CPU or this build has no kernel of ags_fast's, "
                                         "or another provider than libcrypto's default one does AES, so "
                                         "AES-GCM goes through libcrypto"
                                       : NULL};
    }
    memcpy(&trial, random, sizeof(trial));
    if (!is_right(choice.kernel, &trial)) {
        return (agsf_choice){.complaint =
                                 "ags_fast's own AES-GCM failed its self-test on this CPU, so libcrypto's is used: "
                                 "please report that. AGS_FAST_AES=openssl turns this warning off"};
    }
    return choice;
}
