/* What this CPU and this operating system can run, and the tables made of isa.def. */
#include "kernels.h"

#include <string.h>

#define ISA(name) extern const qkv_kernels qkv_##name;
#include "isa.def"
#undef ISA

#define ISA(name) &qkv_##name,
const qkv_kernels *const qkv_tables[] = {
#include "isa.def"
};
#undef ISA
const int qkv_table_count = (int)(sizeof qkv_tables / sizeof *qkv_tables);

#define TEXT_OF(...) #__VA_ARGS__
#define TEXT(...) TEXT_OF(__VA_ARGS__)

#if defined(__clang__)
const char qkv_compiler[] = "clang " __clang_version__;
#elif defined(__GNUC__)
const char qkv_compiler[] = "gcc " __VERSION__;
#elif defined(_MSC_VER)
const char qkv_compiler[] = "msvc " TEXT(_MSC_VER);
#else
const char qkv_compiler[] = "unknown";
#endif

/* For tests, CFLAGS=-DQKV_HIDDEN=avx2,avx512: sets that are compiled as if the CPU lacked them. */
#ifndef QKV_HIDDEN
#define QKV_HIDDEN
#endif
static const char hidden[] = TEXT(QKV_HIDDEN);

#if QKV_X86_64
#if defined(_MSC_VER)
#include <intrin.h>
static void cpuid(uint32_t leaf, uint32_t r[4]) { __cpuidex((int *)r, (int)leaf, 0); }
static uint64_t xgetbv(void) { return _xgetbv(0); }
#else
#include <cpuid.h>
static void cpuid(uint32_t leaf, uint32_t r[4]) { __cpuid_count(leaf, 0, r[0], r[1], r[2], r[3]); }
static uint64_t xgetbv(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}
#endif

/* The CPU may know instructions whose registers the operating system does not save, so both are
   asked: CPUID for the instructions, XGETBV for the registers. */
int qkv_runnable(const char *name) {
    enum { XMM_YMM = 0x6, OPMASK_ZMM = 0xe0 };
    uint32_t r[4], most, fma_f16c, avx2, avx512;
    uint64_t saved;
    if (!strcmp(name, "scalar")) return 1;
    if (strstr(hidden, name)) return 0;
    cpuid(0, r);
    most = r[0];
    cpuid(1, r);
    if (most < 7 || !(r[2] & (1u << 27))) return 0; /* no leaf 7, or XGETBV not enabled */
    fma_f16c = (r[2] & (1u << 12)) && (r[2] & (1u << 29));
    saved = xgetbv();
    cpuid(7, r);
    avx2 = fma_f16c && (r[1] & (1u << 5)) && (saved & XMM_YMM) == XMM_YMM;
    avx512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31) | (1u << 8); /* F DQ BW VL, BMI2 */
    if (!strcmp(name, "avx2")) return avx2 != 0;
    if (!strcmp(name, "avx512"))
        return avx2 && (r[1] & avx512) == avx512 && (saved & OPMASK_ZMM) == OPMASK_ZMM;
    return 0;
}
#else
int qkv_runnable(const char *name) {
    /* NEON is part of the 64-bit Arm baseline: where it was compiled, it runs. */
    return !strcmp(name, "scalar") || (!strcmp(name, "neon") && !strstr(hidden, name));
}
#endif
