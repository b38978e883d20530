/* vaes128.c - the kernel with vectors of one block. Only the functions of this file are for CPUs that have them. */
#include "vaes.h"

#if AGSF_HAS_VAES
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx,aes,pclmul"))), apply_to = function)
#else
#pragma GCC target("avx,aes,pclmul")
#endif

#include "vector128.h"

#define KERNEL_LINKAGE
#define KERNEL agsf_vaes128
#define KERNEL_NAME "vaes128"
#include "kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
