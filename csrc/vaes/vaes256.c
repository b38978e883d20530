/* vaes256.c - the kernel with vectors of 2 blocks. Only the functions of this file are for CPUs that have them. */
#include "vaes.h"

#if AGSF_HAS_VAES
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,aes,pclmul,vaes,vpclmulqdq"))), apply_to = function)
#else
#pragma GCC target("avx2,aes,pclmul,vaes,vpclmulqdq")
#endif

#include "vector256.h"

#define KERNEL_LINKAGE
#define KERNEL agsf_vaes256
#define KERNEL_NAME "vaes256"
#include "kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
