/* One float at a time: for CPUs that no other file knows, and the reference for those. */
#include <math.h>
#include <string.h>

#include "kernels.h"

typedef float vec;
#define VL 1
#define ROWS 6
#define VECS 4
#define SKINNY_ROWS 1
#define QKV_NAME "scalar"
#define QKV_TABLE qkv_scalar

static inline vec v_zero(void) { return 0.0f; }
static inline vec v_set1(float x) { return x; }
static inline vec v_load(const float *p) { return *p; }
static inline vec v_load_n(const float *p, ptrdiff_t n) { return n ? *p : 0.0f; }
static inline void v_store(float *p, vec x) { *p = x; }
static inline void v_stream(float *p, vec x) { *p = x; }
static inline void v_store_n(float *p, vec x, ptrdiff_t n) {
    if (n) *p = x;
}
static inline vec v_add(vec a, vec b) { return a + b; }
static inline vec v_sub(vec a, vec b) { return a - b; }
static inline vec v_mul(vec a, vec b) { return a * b; }
static inline vec v_div(vec a, vec b) { return a / b; }
static inline vec v_abs(vec a) { return fabsf(a); }
static inline vec v_minus_abs(vec a) { return -fabsf(a); }
static inline vec v_select_lt(vec a, vec b, vec x, vec y) { return a < b ? x : y; }
static inline vec v_max(vec a, vec b) { return a > b ? a : b; }
static inline vec v_fma(vec a, vec b, vec c) { return a * b + c; }
static inline vec v_fnma(vec a, vec b, vec c) { return c - a * b; }
static inline vec v_fma_once(vec a, vec b, vec c) { return (float)((double)a * b + c); }
static inline vec v_keep(vec s, const uint8_t *keep) { return *keep ? s : -INFINITY; }
static inline vec v_bias(vec s, vec b) { return b == -INFINITY ? b : s + b; }
static inline float v_hsum(vec x) { return x; }
static inline float v_hmax(vec x) { return x; }
static inline void v_transpose(vec *rows) { (void)rows; }
static inline void v_unzip(vec *x) { (void)x; }
static inline void v_zip(vec *x) { (void)x; }
static inline vec v_hsum_n(const vec *rows) { return *rows; }
static inline vec v_hmax_n(const vec *rows) { return *rows; }
static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline vec v_ldexp(vec p, vec t) { return p * float_of(bits_of(t) << 23); }
static inline vec v_from_int8(const int8_t *p) { return *p; }
static inline vec v_from_bfloat(const uint16_t *p) { return float_of((uint32_t)*p << 16); }
static inline void v_to_bfloat(uint16_t *p, vec x) {
    uint32_t bits = bits_of(x);
    *p = (uint16_t)(x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
/* 2^112 moves the exponent of a half to that of a float; the product is exact, subnormals too. */
static inline vec v_from_half(const uint16_t *p) {
    uint32_t sign = (uint32_t)(*p & 0x8000) << 16, rest = (uint32_t)(*p & 0x7fff) << 13;
    if (rest >= 0x0f800000) return float_of(sign | 0x70000000 | rest); /* inf and NaN */
    return float_of(sign | bits_of(float_of(rest) * 0x1p112f));
}
static inline void v_to_half(uint16_t *p, vec x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        rest = 0x7e00 | (rest >> 13 & 0x3ff); /* NaN, made quiet */
    else if (rest >= 0x477ff000)
        rest = 0x7c00; /* 65520 and more round to infinity */
    else if (rest < 0x38800000)
        rest = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f); /* subnormal: units of 2^-24 */
    else
        rest = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    *p = (uint16_t)(sign | rest);
}

#include "template.h"
