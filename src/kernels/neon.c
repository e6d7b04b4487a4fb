/* NEON on 64-bit Arm, where it is part of the baseline: 4 lanes, 32 registers. */
#include "kernels.h"

#if QKV_ARM64
#include <arm_neon.h>
#include <math.h>
#include <string.h>

typedef float32x4_t vec;
#define VL 4
#define ROWS 6
#define VECS 4
#define SKINNY_ROWS 2
#define V_REGISTERS "w"
#define QKV_NAME "neon"
#define QKV_TABLE qkv_neon

static inline vec v_zero(void) { return vdupq_n_f32(0.0f); }
static inline vec v_set1(float x) { return vdupq_n_f32(x); }
static inline vec v_load(const float *p) { return vld1q_f32(p); }
static inline void v_store(float *p, vec x) { vst1q_f32(p, x); }
static inline void v_stream(float *p, vec x) { vst1q_f32(p, x); }
static inline vec v_load_n(const float *p, ptrdiff_t n) {
    float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (ptrdiff_t i = 0; i < n; i++) lanes[i] = p[i];
    return vld1q_f32(lanes);
}
static inline void v_store_n(float *p, vec x, ptrdiff_t n) {
    float lanes[4];
    vst1q_f32(lanes, x);
    for (ptrdiff_t i = 0; i < n; i++) p[i] = lanes[i];
}
static inline vec v_add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec v_sub(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec v_mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec v_div(vec a, vec b) { return vdivq_f32(a, b); }
static inline vec v_abs(vec a) { return vabsq_f32(a); }
static inline vec v_minus_abs(vec a) { return vnegq_f32(vabsq_f32(a)); }
static inline vec v_select_lt(vec a, vec b, vec x, vec y) {
    return vbslq_f32(vcltq_f32(a, b), x, y);
}
static inline vec v_max(vec a, vec b) { return vmaxq_f32(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
static inline vec v_fnma(vec a, vec b, vec c) { return vfmsq_f32(c, a, b); }
static inline vec v_fma_once(vec a, vec b, vec c) { return v_fma(a, b, c); }
static inline vec v_ldexp(vec p, vec t) {
    return vmulq_f32(p, vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(t), 23)));
}
static inline vec v_keep(vec s, const uint8_t *keep) {
    uint32_t lanes[4] = {keep[0], keep[1], keep[2], keep[3]};
    uint32x4_t drop = vceqzq_u32(vld1q_u32(lanes));
    return vbslq_f32(drop, v_set1(-INFINITY), s);
}
static inline vec v_bias(vec s, vec b) {
    return vbslq_f32(vceqq_f32(b, v_set1(-INFINITY)), b, v_add(s, b));
}
static inline float v_hsum(vec x) { return vaddvq_f32(x); }
static inline float v_hmax(vec x) { return vmaxvq_f32(x); }
static inline void v_transpose(vec *r) {
    float32x4x2_t top = vtrnq_f32(r[0], r[1]), bottom = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(top.val[0]), vget_low_f32(bottom.val[0]));
    r[1] = vcombine_f32(vget_low_f32(top.val[1]), vget_low_f32(bottom.val[1]));
    r[2] = vcombine_f32(vget_high_f32(top.val[0]), vget_high_f32(bottom.val[0]));
    r[3] = vcombine_f32(vget_high_f32(top.val[1]), vget_high_f32(bottom.val[1]));
}
static inline void v_unzip(vec *x) {
    vec odd = vuzp2q_f32(x[0], x[1]);
    x[0] = vuzp1q_f32(x[0], x[1]);
    x[1] = odd;
}
static inline void v_zip(vec *x) {
    vec high = vzip2q_f32(x[0], x[1]);
    x[0] = vzip1q_f32(x[0], x[1]);
    x[1] = high;
}
static inline vec v_hsum_n(const vec *r) {
    return vpaddq_f32(vpaddq_f32(r[0], r[1]), vpaddq_f32(r[2], r[3]));
}
static inline vec v_hmax_n(const vec *r) {
    return vpmaxq_f32(vpmaxq_f32(r[0], r[1]), vpmaxq_f32(r[2], r[3]));
}
static inline vec v_from_half(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline void v_to_half(uint16_t *p, vec x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
static inline vec v_from_int8(const int8_t *p) {
    int32_t lanes[4] = {p[0], p[1], p[2], p[3]};
    return vcvtq_f32_s32(vld1q_s32(lanes));
}
static inline vec v_from_bfloat(const uint16_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline void v_to_bfloat(uint16_t *p, vec x) { /* half a unit, or less one bit where even */
    uint32x4_t bits = vreinterpretq_u32_f32(x), high = vshrq_n_u32(bits, 16), rounded;
    rounded = vaddq_u32(vaddq_u32(bits, vandq_u32(high, vdupq_n_u32(1))), vdupq_n_u32(0x7fff));
    rounded = vbslq_u32(vceqq_f32(x, x), vshrq_n_u32(rounded, 16),
                        vorrq_u32(high, vdupq_n_u32(0x40))); /* NaN, made quiet */
    vst1_u16(p, vmovn_u32(rounded));
}

#include "template.h"
#else
typedef int qkv_no_neon; /* an empty file is not C */
#endif
