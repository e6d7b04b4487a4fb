/* The floating-point mode of a thread: rounding, what becomes of subnormals, and traps.

   Whoever calls may have changed it.  The kernels compute under the default one (to the nearest,
   subnormals kept, no traps), and leave the thread as they found it, flags of past exceptions
   included.  A control register is written only where it differs: that costs as much as it saves.

       qkv_float_mode found = qkv_enter_float_mode();
       ...
       qkv_leave_float_mode(found);

   So the modules enter it before a number of Python, such as a scale, becomes a float. */
#ifndef QKV_FLOAT_MODE_H
#define QKV_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__) || defined(_M_X64)

#include <xmmintrin.h>

typedef unsigned qkv_float_mode; /* MXCSR: its last six bits are the flags */

static inline qkv_float_mode qkv_enter_float_mode(void) {
    const unsigned plain = 0x1f80, flags = 0x3f;
    unsigned found = _mm_getcsr();
    if ((found & ~flags) != plain) _mm_setcsr(plain);
    return found;
}

static inline void qkv_leave_float_mode(qkv_float_mode found) {
    if (_mm_getcsr() != found) _mm_setcsr(found);
}

#elif defined(__aarch64__) && defined(__GNUC__)

typedef struct {
    uint64_t control, status; /* FPCR and FPSR */
} qkv_float_mode;

static inline qkv_float_mode qkv_enter_float_mode(void) {
    qkv_float_mode found;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(found.control), "=r"(found.status));
    if (found.control) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return found;
}

static inline void qkv_leave_float_mode(qkv_float_mode found) {
    uint64_t control, status;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control), "=r"(status));
    if (control != found.control) __asm__ volatile("msr fpcr, %0" : : "r"(found.control));
    if (status != found.status) __asm__ volatile("msr fpsr, %0" : : "r"(found.status));
}

#else /* what C itself knows: the rounding */

#include <fenv.h>

typedef int qkv_float_mode;

static inline qkv_float_mode qkv_enter_float_mode(void) {
    int found = fegetround();
    if (found > 0 && found != FE_TONEAREST) fesetround(FE_TONEAREST);
    return found;
}

static inline void qkv_leave_float_mode(qkv_float_mode found) {
    if (found > 0 && found != fegetround()) fesetround(found);
}

#endif

#endif
