/*
 * test_provider.c - libcrypto's configuration names another provider than libcrypto's own.
 *
 * Guards: such a provider does all of AES-GCM, with AGS_FAST_AES=vaes as well, which then complains; so it is where the
 * configuration asks for FIPS algorithms only, and that is told; a configuration that names libcrypto's own provider
 * changes nothing.
 *
 * Another provider is hard to come by, and the bundled libcrypto loads none from a file. So one is built in: it lends
 * the algorithms of libcrypto's own, under its own name and as FIPS algorithms. Its messages are counted.
 */
#include "support.h"

#include <openssl/conf.h>
#include <openssl/core_dispatch.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/provider.h>

#include "vaes/vaes.h"

enum { ALGORITHMS_MAX = 200, FUNCTIONS_MAX = 40, OPERATIONS_MAX = 30 };

static OSSL_PROVIDER *lender; /* libcrypto's own, in a library context where nothing else is */
static size_t messages;       /* that the provider has finished */
static OSSL_FUNC_cipher_final_fn *real_final;

static int counting_final(void *context, unsigned char *out, size_t *nbytes_ret, size_t room) {
    messages++;
    return real_final(context, out, nbytes_ret, room);
}

/* The functions of AES-128-GCM, with that one. */
static const OSSL_DISPATCH *counting(const OSSL_DISPATCH *functions) {
    static OSSL_DISPATCH made[FUNCTIONS_MAX];

    for (size_t i = 0; functions[i].function_id != 0; i++) {
        CHECK(i + 1 < FUNCTIONS_MAX);
        made[i] = functions[i];
        if (functions[i].function_id != OSSL_FUNC_CIPHER_FINAL) continue;
        real_final = OSSL_FUNC_cipher_final(&functions[i]);
        made[i].function = (void (*)(void))counting_final;
    }
    return made;
}

static const OSSL_ALGORITHM *query(void *context, int operation, int *no_cache) {
    static OSSL_ALGORITHM lent[OPERATIONS_MAX][ALGORITHMS_MAX];
    const OSSL_ALGORITHM *const own = OSSL_PROVIDER_query_operation(lender, operation, no_cache);

    (void)context;
    CHECK(operation < OPERATIONS_MAX);
    for (size_t i = 0; own != NULL && own[i].algorithm_names != NULL; i++) {
        OSSL_ALGORITHM *const one = &lent[operation][i];
        CHECK(i + 1 < ALGORITHMS_MAX);
        *one = own[i];
        one->property_definition = "provider=lent,fips=yes";
        if (strncmp(one->algorithm_names, "AES-128-GCM", 11) == 0) one->implementation = counting(one->implementation);
    }
    return lent[operation];
}

static int provider_init(const OSSL_CORE_HANDLE *handle, const OSSL_DISPATCH *in, const OSSL_DISPATCH **out_ret,
                         void **context_ret) {
    static const OSSL_DISPATCH functions[] = {{OSSL_FUNC_PROVIDER_QUERY_OPERATION, (void (*)(void))query}, {0, NULL}};

    (void)handle;
    (void)in;
    *out_ret = functions;
    *context_ret = OSSL_PROVIDER_get0_provider_ctx(lender);
    return 1;
}

/* What a machine's openssl.cnf says. */
static void configure(const char *properties) {
    static const char path[] = "openssl.cnf";
    FILE *const file = fopen(path, "w");

    CHECK(file != NULL);
    CHECK(fprintf(file,
                  "openssl_conf = all\n[all]\nproviders = providers\nalg_section = algorithms\n"
                  "[providers]\nlent = on\ndefault = on\n[on]\nactivate = 1\n"
                  "[algorithms]\ndefault_properties = %s\n",
                  properties) > 0);
    CHECK(fclose(file) == 0);
    lender = OSSL_PROVIDER_load(OSSL_LIB_CTX_new(), "default");
    CHECK(lender != NULL);
    CHECK(OSSL_PROVIDER_add_builtin(NULL, "lent", provider_init) == 1);
    CHECK(OSSL_LIB_CTX_load_config(NULL, path) == 1);
}

/* Messages of all sizes are right, whoever makes them. Returns how many there were. */
static size_t check_messages(void) {
    uint8_t bytes[16], nonce[AGSF_NONCE_NBYTES] = {1}, plain[3000], sealed[sizeof(plain) + AGSF_TAG_NBYTES];
    agsf_key *key;
    size_t n = 0;

    fill(bytes, sizeof(bytes), 1);
    fill(plain, sizeof(plain), 2);
    CHECK_EQUAL(agsf_key_new(bytes, sizeof(bytes), &key), AGSF_OK);
    for (size_t nbytes = 0; nbytes < sizeof(plain); nbytes += 97, n += 2) {
        uint8_t opened[sizeof(plain)];
        CHECK_EQUAL(agsf_seal(key, nonce, NULL, 0, plain, nbytes, sealed), AGSF_OK);
        CHECK_EQUAL(agsf_open(key, nonce, NULL, 0, sealed, nbytes, opened), AGSF_OK);
        CHECK(memcmp(opened, plain, nbytes) == 0);
    }
    agsf_key_free(key);
    return n;
}

/* In a process of its own, since libcrypto is configured once. */
static void check(const char *properties, const char *wanted, bool lent, bool fips) {
    const pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        const agsf_vaes *const widest = agsf_vaes_widest();
        const bool insists = strcmp(wanted, "vaes") == 0;
        size_t n;
        checking("default_properties = %s, AGS_FAST_AES=%s", properties, wanted);
        CHECK(setenv("AGS_FAST_AES", wanted, 1) == 0);
        configure(properties);
        start();
        n = check_messages();
        CHECK(agsf_fips() == fips);
        CHECK_EQUAL(messages, lent ? n : 0);
        if (lent) CHECK(strcmp(agsf_aes_kernel(), "openssl") == 0);
        if (!lent && insists && widest != NULL) CHECK(strcmp(agsf_aes_kernel(), widest->name) == 0);
        CHECK((agsf_aes_complaint() != NULL) == (insists && (lent || widest == NULL)));
        if (insists && lent) CHECK(strstr(agsf_aes_complaint(), "another provider") != NULL);
        exit(0);
    }
    CHECK_CHILD(child);
}

int main(void) {
    static const char *const words[] = {"auto", "openssl", "vaes"};

    watch_for_hangs();
    for (size_t i = 0; i < COUNT(words); i++) {
        check("?provider=default", words[i], false, false);
        check("?provider=lent", words[i], true, false);
        check("?fips=yes", words[i], true, false);
        check("fips=yes", words[i], true, true);
    }
    return 0;
}
