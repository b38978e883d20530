/*
 * choice.h - who does AES-GCM: libcrypto, or a kernel of vaes/ up to some size of a message. Private to csrc.
 */
#ifndef AGSF_CHOICE_H
#define AGSF_CHOICE_H

#include "vaes/vaes.h"

#define AGSF_MESSAGE_MAX_NBYTES ((UINT64_C(1) << 36) - 32) /* SP 800-38D, section 5.2.1.1 */

typedef struct agsf_choice {
    const agsf_vaes *kernel; /* NULL: libcrypto does everything, and max_nbytes is 0 */
    uint64_t max_nbytes;     /* of a message for the kernel */
    const char *complaint;   /* why this is not what it should be, or NULL */
} agsf_choice;

/* agsf_can_choose() is whether `wanted` is "auto", "openssl", "vaes" or NULL, which is "auto". */
bool agsf_can_choose(const char *wanted);

/* agsf_choose() tests the kernel that it chooses against libcrypto, which must be ready, with random bytes. */
enum { AGSF_CHOICE_RANDOM_NBYTES = 1071 };
agsf_choice agsf_choose(const char *wanted, const uint8_t random[AGSF_CHOICE_RANDOM_NBYTES]);

#endif
