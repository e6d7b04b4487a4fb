/* What this CPU and this operating system can run, and the tables made of isa.def. */
#include "kernels.h"

#include <string.h>

#define ISA(name, ...) extern const qkv_kernels qkv_##name;
#include "isa.def"
#undef ISA

#define ISA(name, ...) &qkv_##name,
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

/* What the CPU has by CPUID, and the registers that the operating system saves by XGETBV. */
typedef struct {
    uint32_t leaf1_ecx, leaf7_ebx;
    uint64_t saved;
} features;
enum { FMA = 1 << 12, F16C = 1 << 29 };                             /* leaf1_ecx */
enum { AVX2 = 1 << 5, BMI2 = 1 << 8 };                              /* leaf7_ebx */
#define AVX512_F_DQ_BW_VL (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) /* too */
enum { XMM_YMM = 0x6, OPMASK_ZMM = 0xe0 };                          /* saved */
#define HAS(where, bits) ((cpu.where & (bits)) == (bits))

static features ask(void) {
    features cpu = {0};
    uint32_t r[4], most;
    cpuid(0, r);
    most = r[0];
    cpuid(1, r);
    if (most < 7 || !(r[2] & (1u << 27))) return cpu; /* no leaf 7, or XGETBV not enabled */
    cpu.leaf1_ecx = r[2];
    cpu.saved = xgetbv();
    cpuid(7, r);
    cpu.leaf7_ebx = r[1];
    return cpu;
}
#endif

int qkv_runnable(const char *name) {
#if QKV_X86_64
    const features cpu = ask();
#endif
    if (strcmp(name, "scalar") && strstr(hidden, name)) return 0;
#define ISA(set, runs)                                                                             \
    if (!strcmp(name, #set)) return runs;
#include "isa.def"
#undef ISA
    return 0;
}
