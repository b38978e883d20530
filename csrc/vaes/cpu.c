/* cpu.c - which kernel this CPU and its operating system run. */
#include "vaes.h"

#if AGSF_HAS_VAES
#include <cpuid.h>

/* Bits of CPUID's answers, and of XCR0: which registers the operating system keeps when it switches threads. */
enum {
    LEAF1_ECX_PCLMULQDQ = 1 << 1,
    LEAF1_ECX_SSSE3 = 1 << 9,
    LEAF1_ECX_AES = 1 << 25,
    LEAF1_ECX_OSXSAVE = 1 << 27,
    LEAF1_ECX_AVX = 1 << 28,
    LEAF7_EBX_AVX2 = 1 << 5,
    LEAF7_EBX_AVX512F = 1 << 16,
    LEAF7_EBX_AVX512BW = 1 << 30,
    LEAF7_ECX_VAES = 1 << 9,
    LEAF7_ECX_VPCLMULQDQ = 1 << 10,
    XCR0_YMM = 0x06,
    XCR0_ZMM = 0xe6,
};

static bool all(uint32_t bits, uint32_t wanted) { return (bits & wanted) == wanted; }

/* XGETBV by hand: its intrinsic wants a compiler's flag, and some compilers' own lists lack VAES. */
static uint32_t xcr0(void) {
    uint32_t low, high;

    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

const agsf_vaes *agsf_vaes_widest(void) {
    uint32_t eax, ebx, ecx, edx, kept;

    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return NULL;
    if (!all(ecx, LEAF1_ECX_PCLMULQDQ | LEAF1_ECX_SSSE3 | LEAF1_ECX_AES | LEAF1_ECX_OSXSAVE | LEAF1_ECX_AVX))
        return NULL;
    kept = xcr0();
    if (!all(kept, XCR0_YMM)) return NULL;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return &agsf_vaes128;
    if (!all(ebx, LEAF7_EBX_AVX2) || !all(ecx, LEAF7_ECX_VAES | LEAF7_ECX_VPCLMULQDQ)) return &agsf_vaes128;
    return all(kept, XCR0_ZMM) && all(ebx, LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512BW) ? &agsf_vaes512 : &agsf_vaes256;
}
#else
const agsf_vaes *agsf_vaes_widest(void) { return NULL; }
#endif
