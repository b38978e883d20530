/*
 * test_choice.c - who does AES-GCM: choice.h, and lanes that divide the messages between a kernel and libcrypto.
 *
 * Guards: a kernel that makes one wrong byte or takes one wrong tag is not used, whatever AGS_FAST_AES says; "openssl"
 * uses none, "vaes" the widest; a word that is none of these is refused; where long messages are libcrypto's, messages
 * of every size around that are the same bytes.
 */
#include "support.h"

#include <openssl/evp.h>

#include "aead.h"
#include "choice.h"

#if AGSF_HAS_VAES
static const agsf_vaes *true_kernel;
static agsf_vaes faulty;
static bool is_faulty;
static uint64_t crossing;

const agsf_vaes *__real_agsf_vaes_widest(void);
const agsf_vaes *__wrap_agsf_vaes_widest(void);
agsf_choice __real_agsf_choose(const char *wanted, const uint8_t *random);
agsf_choice __wrap_agsf_choose(const char *wanted, const uint8_t *random);

const agsf_vaes *__wrap_agsf_vaes_widest(void) { return is_faulty ? &faulty : __real_agsf_vaes_widest(); }

agsf_choice __wrap_agsf_choose(const char *wanted, const uint8_t *random) {
    const agsf_choice choice = __real_agsf_choose("vaes", random);

    (void)wanted;
    CHECK(choice.kernel == true_kernel && choice.complaint == NULL);
    return (agsf_choice){choice.kernel, crossing, NULL};
}

/* ---------------------------------------------------------------- kernels with a fault */

static void wrong_key(agsf_vaes_key *key, const uint8_t *bytes, size_t nbytes) {
    true_kernel->key_init(key, bytes, nbytes);
    if (nbytes == 24) key->rounds[12][15] ^= 1;
}

static void wrong_power(agsf_vaes_key *key, const uint8_t *bytes, size_t nbytes) {
    true_kernel->key_init(key, bytes, nbytes);
    key->powers[0][0] ^= 1;
}

static void wrong_byte(const agsf_vaes_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                       const uint8_t *in, size_t nbytes, uint8_t *out, uint8_t *tag_ret) {
    true_kernel->seal(key, nonce, aad, aad_nbytes, in, nbytes, out, tag_ret);
    if (nbytes >= 600) out[599] ^= 0x80;
}

static void wrong_tag(const agsf_vaes_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                      const uint8_t *in, size_t nbytes, uint8_t *out, uint8_t *tag_ret) {
    true_kernel->seal(key, nonce, aad, aad_nbytes, in, nbytes, out, tag_ret);
    if (aad_nbytes > 0) tag_ret[15] ^= 1;
}

static void wrong_piece(agsf_vaes_message *message, const uint8_t *in, size_t nbytes, uint8_t *out) {
    true_kernel->piece(message, in, nbytes, out);
    if (message->nbytes == 600) message->counter++;
    if (message->nbytes == 600) message->sum[3] ^= 1;
}

static bool takes_all(const agsf_vaes_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                      const uint8_t *in, size_t nbytes, uint8_t *out, const uint8_t *tag) {
    (void)true_kernel->open(key, nonce, aad, aad_nbytes, in, nbytes, out, tag);
    return true;
}

static bool takes_none(const agsf_vaes_key *key, const uint8_t *nonce, const uint8_t *aad, size_t aad_nbytes,
                       const uint8_t *in, size_t nbytes, uint8_t *out, const uint8_t *tag) {
    (void)true_kernel->open(key, nonce, aad, aad_nbytes, in, nbytes, out, tag);
    return false;
}

static void check_faults(const uint8_t *random) {
    agsf_vaes faults[7];

    for (size_t i = 0; i < COUNT(faults); i++) faults[i] = *true_kernel;
    faults[0].key_init = wrong_key;
    faults[1].key_init = wrong_power;
    faults[2].seal = wrong_byte;
    faults[3].seal = wrong_tag;
    faults[4].piece = wrong_piece;
    faults[5].open = takes_all;
    faults[6].open = takes_none;
    is_faulty = true;
    for (size_t i = 0; i < COUNT(faults); i++) {
        agsf_choice choice;
        checking("fault %zu", i);
        faulty = faults[i];
        choice = __real_agsf_choose("vaes", random);
        CHECK(choice.kernel == NULL && choice.max_nbytes == 0);
        CHECK(strstr(choice.complaint, "self-test") != NULL);
    }
    is_faulty = false;
}

static void check_words(const uint8_t *random) {
    static const char *const words[] = {NULL, "auto", "openssl", "vaes"}, *const others[] = {"", "VAES", "aesni",
                                                                                             "vaes "};
    agsf_choice choice;

    for (size_t i = 0; i < COUNT(words); i++) CHECK(agsf_can_choose(words[i]));
    for (size_t i = 0; i < COUNT(others); i++) CHECK(!agsf_can_choose(others[i]));
    choice = __real_agsf_choose("vaes", random);
    CHECK(choice.kernel == true_kernel && choice.max_nbytes == AGSF_MESSAGE_MAX_NBYTES && choice.complaint == NULL);
    choice = __real_agsf_choose("openssl", random);
    CHECK(choice.kernel == NULL && choice.max_nbytes == 0 && choice.complaint == NULL);
    choice = __real_agsf_choose(NULL, random);
    CHECK(choice.complaint == NULL);
    CHECK((choice.kernel == NULL) == (true_kernel == &agsf_vaes128));
    is_faulty = true;
    faulty = *true_kernel; /* its address is none that anybody knows */
    CHECK(__real_agsf_choose("auto", random).kernel == NULL);
    is_faulty = false;
}

/* ---------------------------------------------------------------- the crossing */

static void expect(const uint8_t *bytes, const uint8_t *nonce, const uint8_t *in, size_t nbytes, uint8_t *out) {
    EVP_CIPHER_CTX *const ctx = EVP_CIPHER_CTX_new();
    uint8_t none[16];
    int n;

    CHECK(ctx != NULL && EVP_EncryptInit_ex(ctx, EVP_aes_128_gcm(), NULL, bytes, nonce) == 1);
    CHECK(EVP_EncryptUpdate(ctx, out, &n, in, (int)nbytes) == 1 && EVP_EncryptFinal_ex(ctx, none, &n) == 1);
    CHECK(EVP_CIPHER_CTX_ctrl(ctx, EVP_CTRL_AEAD_GET_TAG, AGSF_TAG_NBYTES, out + nbytes) == 1);
    EVP_CIPHER_CTX_free(ctx);
}

static void check_crossing(void) {
    enum { MAX = 5000 };
    static uint8_t plain[MAX], want[MAX + AGSF_TAG_NBYTES], got[MAX + AGSF_TAG_NBYTES];
    uint8_t bytes[16], nonce[AGSF_NONCE_NBYTES];
    agsf_key *key;

    fill(bytes, sizeof(bytes), 1);
    fill(nonce, sizeof(nonce), 2);
    fill(plain, sizeof(plain), 3);
    CHECK_EQUAL(agsf_key_new(bytes, sizeof(bytes), &key), AGSF_OK);
    for (size_t nbytes = 0; nbytes <= MAX; nbytes += nbytes < 2000 || nbytes > 2100 ? 37 : 1) {
        checking("a message of %zu bytes", nbytes);
        expect(bytes, nonce, plain, nbytes, want);
        memset(got, SLACK, sizeof(got));
        CHECK_EQUAL(agsf_seal(key, nonce, NULL, 0, plain, nbytes, got), AGSF_OK);
        CHECK(memcmp(got, want, nbytes + AGSF_TAG_NBYTES) == 0);
        CHECK_EQUAL(agsf_open(key, nonce, NULL, 0, want, nbytes, got), AGSF_OK);
        CHECK(memcmp(got, plain, nbytes) == 0);
        want[nbytes + 5] ^= 1;
        CHECK_EQUAL(agsf_open(key, nonce, NULL, 0, want, nbytes, got), AGSF_BAD_TAG);
        CHECK(all_are(got, nbytes, 0));
    }
    agsf_key_free(key);
}
#endif

int main(void) {
#if AGSF_HAS_VAES
    uint8_t random[AGSF_CHOICE_RANDOM_NBYTES];

    fill(random, sizeof(random), 4);
    true_kernel = __real_agsf_vaes_widest();
    if (true_kernel != NULL) {
        crossing = 2048;
        start();
        CHECK(strcmp(agsf_aes_kernel(), true_kernel->name) == 0 && agsf_aes_complaint() == NULL);
        check_crossing();
        check_words(random);
        check_faults(random);
        return 0;
    }
#endif
    printf("skipped: this CPU, or this compiler, has no AES instructions\n");
    return 0;
}
