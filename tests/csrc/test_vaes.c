/* test_vaes.c - the AES-GCM kernels that this CPU runs. What it guards: gcm.h. */
#include "support.h"

#include "gcm.h"

int main(void) {
    const agsf_vaes *const widest = agsf_vaes_widest();

    watch_for_hangs();
    if (widest == NULL) {
        printf("skipped: this CPU, or this compiler, has no AES instructions\n");
        return 0;
    }
#if AGSF_HAS_VAES
    check_kernel(&agsf_vaes128);
    if (widest == &agsf_vaes512) check_kernel(&agsf_vaes256);
    if (widest != &agsf_vaes128) check_kernel(widest);
#endif
    return 0;
}
