/* One float at a time: for CPUs that no other file knows, and the reference for those. */
#include <math.h>
#include <string.h>

#include "kernels.h"

typedef float vec;
#define VL 1
#define ROWS 6
#define VECS 4
#define QKV_NAME "scalar"
#define QKV_TABLE qkv_scalar

static inline vec v_zero(void) { return 0.0f; }
static inline vec v_set1(float x) { return x; }
static inline vec v_load(const float *p) { return *p; }
static inline vec v_load_n(const float *p, ptrdiff_t n) { return n ? *p : 0.0f; }
static inline void v_store(float *p, vec x) { *p = x; }
static inline void v_store_n(float *p, vec x, ptrdiff_t n) {
    if (n) *p = x;
}
static inline vec v_add(vec a, vec b) { return a + b; }
static inline vec v_sub(vec a, vec b) { return a - b; }
static inline vec v_mul(vec a, vec b) { return a * b; }
static inline vec v_max(vec a, vec b) { return a > b ? a : b; }
static inline vec v_fma(vec a, vec b, vec c) { return a * b + c; }
static inline vec v_fnma(vec a, vec b, vec c) { return c - a * b; }
static inline vec v_round(vec x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
static inline float power_of_two(int32_t n) {
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline vec v_ldexp(vec p, vec n) { /* in two steps: 2^n alone may be out of range */
    int32_t all = n > -200.0f && n < 200.0f ? (int32_t)n : 0, half = all >> 1;
    return p * power_of_two(half) * power_of_two(all - half);
}
static inline vec v_keep(vec s, const uint8_t *keep) { return *keep ? s : -INFINITY; }
static inline vec v_bias(vec s, vec b) { return b == -INFINITY ? b : s + b; }
static inline float v_sum(vec x) { return x; }
static inline float v_largest(vec x) { return x; }
static inline void v_transpose(vec *rows) { (void)rows; }
static inline vec v_sums(const vec *rows) { return *rows; }

#include "template.h"
