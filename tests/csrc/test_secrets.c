/*
 * test_secrets.c - no branch and no address depends on a secret. For `run.sh secrets`.
 *
 * Guards: kernel.h takes the same path and touches the same memory whatever the key, the text and the tag are. Memcheck
 * is told that these are undefined; it then reports each branch and each address that depends on them. Whether a tag
 * was right is no secret. Other widths are the same source, but Memcheck does not know their instructions.
 */
#include "support.h"

#include <valgrind/memcheck.h>

#define PUBLIC(a) (void)VALGRIND_MAKE_MEM_DEFINED(&(a), sizeof(a))
#define agsf_vaes128 kernel_with_secrets /* besides the one in csrc, which tells nobody what is public */
#include "vaes/vaes128.c"                /* NOLINT(bugprone-suspicious-include) */

#if AGSF_HAS_VAES
static void hide(void *memory, size_t nbytes) { (void)VALGRIND_MAKE_MEM_UNDEFINED(memory, nbytes); }
static void show(void *memory, size_t nbytes) { (void)VALGRIND_MAKE_MEM_DEFINED(memory, nbytes); }

static void check_message(size_t key_nbytes, size_t aad_nbytes, size_t nbytes, size_t step) {
    uint8_t bytes[32], nonce[AGSF_NONCE_NBYTES] = {1}, aad[64] = {2}, tag[AGSF_TAG_NBYTES], text[3000], out[3000];
    agsf_vaes_message message;
    agsf_vaes_key key;
    bool good;

    fill(bytes, sizeof(bytes), 1);
    fill(text, sizeof(text), 2);
    hide(bytes, sizeof(bytes));
    hide(text, sizeof(text));
    KERNEL.key_init(&key, bytes, key_nbytes);
    KERNEL.seal(&key, nonce, aad, aad_nbytes, text, nbytes, out, tag);
    good = KERNEL.open(&key, nonce, aad, aad_nbytes, out, nbytes, out, tag);
    CHECK(good);
    tag[3] ^= 1;
    good = KERNEL.open(&key, nonce, aad, aad_nbytes, text, nbytes, out, tag);
    CHECK(!good);
    for (int seal = 0; seal < 2; seal++) {
        KERNEL.begin(&message, &key, nonce, seal);
        KERNEL.aad(&message, aad, aad_nbytes);
        for (size_t at = 0; at < nbytes; at += step)
            KERNEL.piece(&message, text + at, nbytes - at < step ? nbytes - at : step, out + at);
        if (seal) KERNEL.finish_seal(&message, tag);
        if (!seal) CHECK(!KERNEL.finish_open(&message, tag));
    }
    show(out, sizeof(out));
    show(tag, sizeof(tag));
    CHECK(!all_are(out, nbytes, 0) || nbytes == 0);
}

/* That Memcheck sees a branch at all. */
static void branch(void) {
    uint8_t secret = 1;

    hide(&secret, 1);
    if (secret == 1) __asm__ volatile("" ::: "memory");
}
#endif

int main(void) {
    start();
#if AGSF_HAS_VAES
    CHECK(RUNNING_ON_VALGRIND && agsf_vaes_widest() != NULL);
    for (size_t key_nbytes = 16; key_nbytes <= 32; key_nbytes += 8) {
        for (size_t nbytes = 0; nbytes < 3000; nbytes += nbytes < 80 ? 1 : 97) {
            check_message(key_nbytes, nbytes % 64, nbytes, 1 + nbytes % 300);
        }
    }
    CHECK_EQUAL(VALGRIND_COUNT_ERRORS, 0);
    branch();
    CHECK_EQUAL(VALGRIND_COUNT_ERRORS, 1);
#endif
    return 0;
}
