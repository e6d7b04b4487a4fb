/* What the parts of this program share: random numbers, arrays against guard pages, comparison. */
#ifndef CHECK_H
#define CHECK_H

#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

/* What is being checked, for the message of a failure or a fault. */
extern struct context {
    const char *what, *of;
    long trial;
} context;

/* Says what went wrong, where, and with which seed, and ends the program. */
#if defined(__GNUC__)
__attribute__((noreturn, format(printf, 1, 2)))
#endif
void fail(const char *format, ...);

/* ---- random numbers -------------------------------------------------------------------------- */

extern uint64_t seed;
uint32_t random_bits(void);
ptrdiff_t between(ptrdiff_t low, ptrdiff_t high);      /* low <= n <= high */
ptrdiff_t size_between(ptrdiff_t low, ptrdiff_t high); /* mostly small, or around 16 n */
int one_in(int n);
float uniform(float low, float high);
float any_float(void); /* of any bits: subnormals, infinities and NaNs too */

/* ---- arrays ---------------------------------------------------------------------------------- */

/* Lets go of all arrays, having looked for writes before and after them, for the trial count. */
void next_trial(long count);

/* Bytes that all are 0xff, so that floats and 16-bit numbers are NaN, right before a page that must
   not be touched, or right after one. */
void *array(size_t bytes);
float *floats(ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t ld); /* [rows, cols] ld */

enum kind {
    PLAIN, /* -2 .. 2 */
    INTEGERS, /* -8 .. 8, whose sums and products are exact */
    SPECIAL, /* integers, with zeros of both signs, infinities and NaNs among them */
    TINY, /* around the smallest normal number */
    KINDS
};
void fill(float *x, ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t ld, enum kind kind);

/* ---- comparison ------------------------------------------------------------------------------ */

#define UNIT 0x1p-24 /* half the distance from 1 to the next float */
#define EPS 0x1p-23 /* that distance */
#define LEAST 0x1p-149 /* the smallest subnormal */

uint32_t bits_of(float x);
int same(float x, float y); /* bits, or both a NaN */
int close_to(float x, float y, double by); /* no farther than that, or the same inf or NaN */

ptrdiff_t lanes_up(ptrdiff_t n); /* the next multiple of LANES */
float *copy_of(const float *x, ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t ld);

/* x[rows, ld] is y, to the last bit, in the columns from .. ld of every row but the last. */
void check_gaps(const float *x, const float *y, ptrdiff_t rows, ptrdiff_t from, ptrdiff_t ld);

/* ---- checks ---------------------------------------------------------------------------------- */

typedef const qkv_kernels isa;
enum { ULPS_EXP = 7 /* 2.3 fused and 4 not, see exp.h */, ULPS_TANH = 6 };
void check_adjust(isa *ops, isa *scalar);
void check_look_at_mask(isa *ops, isa *scalar);
void check_softmax_tile(isa *ops, isa *scalar);

/* The parts of the program. */
void check_kernels(long trials);
void check_pool(long trials);
void check_forks(long trials);

#endif
