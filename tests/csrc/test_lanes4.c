/* test_lanes4.c - kernel.h with vectors of 4 blocks, by instructions that most CPUs have. What it guards: gcm.h. */
#define LANES_WANTED 4
#include "support.h"

#include "lanes.h"

#include "gcm.h"

int main(void) {
    start();
#if AGSF_HAS_VAES
    if (__builtin_cpu_supports("ssse3") && __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul")) {
        check_kernel(&KERNEL);
        return 0;
    }
#endif
    printf("skipped: this CPU, or this compiler, has no AES and PCLMULQDQ\n");
    return 0;
}
