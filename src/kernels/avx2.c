/* AVX2 with FMA and F16C: 8 lanes, 16 registers. */
#include "kernels.h"

#if QKV_X86_64
#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

typedef __m256 vec;
#define VL 8
#define ROWS 6
#define VECS 2
#define SKINNY_ROWS 1
#define V_REGISTERS "x"
#define QKV_NAME "avx2"
#define QKV_TABLE qkv_avx2

static inline vec v_zero(void) { return _mm256_setzero_ps(); }
static inline vec v_set1(float x) { return _mm256_set1_ps(x); }
static inline vec v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, vec x) { _mm256_storeu_ps(p, x); }
static inline void v_stream(float *p, vec x) { /* lines are put together on their way */
    _mm_stream_ps(p, _mm256_castps256_ps128(x));
    _mm_stream_ps(p + 4, _mm256_extractf128_ps(x, 1));
}
static inline __m256i first(ptrdiff_t n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lanes);
}
static inline vec v_load_n(const float *p, ptrdiff_t n) { return _mm256_maskload_ps(p, first(n)); }
static inline void v_store_n(float *p, vec x, ptrdiff_t n) { _mm256_maskstore_ps(p, first(n), x); }
static inline vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec v_abs(vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vec v_minus_abs(vec a) { return _mm256_or_ps(_mm256_set1_ps(-0.0f), a); }
static inline vec v_select_lt(vec a, vec b, vec x, vec y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static inline vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec v_fnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
static inline vec v_fma_once(vec a, vec b, vec c) { return v_fma(a, b, c); }
static inline vec v_ldexp(vec p, vec t) {
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
static inline vec v_keep(vec s, const uint8_t *keep) {
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)keep));
    __m256i drop = _mm256_cmpeq_epi32(bytes, _mm256_setzero_si256());
    return _mm256_blendv_ps(s, v_set1(-INFINITY), _mm256_castsi256_ps(drop));
}
static inline vec v_bias(vec s, vec b) {
    return _mm256_blendv_ps(v_add(s, b), b, _mm256_cmp_ps(b, v_set1(-INFINITY), _CMP_EQ_OQ));
}
static inline float v_hsum(vec x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float v_hmax(vec x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline void v_transpose(vec *r) {
    vec t[8];
    for (int i = 0; i < 4; i++) { /* pairs of rows */
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) { /* fours */
        vec *u = t + 4 * i, *o = r + 4 * i;
        o[0] = _mm256_shuffle_ps(u[0], u[2], _MM_SHUFFLE(1, 0, 1, 0));
        o[1] = _mm256_shuffle_ps(u[0], u[2], _MM_SHUFFLE(3, 2, 3, 2));
        o[2] = _mm256_shuffle_ps(u[1], u[3], _MM_SHUFFLE(1, 0, 1, 0));
        o[3] = _mm256_shuffle_ps(u[1], u[3], _MM_SHUFFLE(3, 2, 3, 2));
    }
    for (int i = 0; i < 4; i++) { /* eights */
        vec low = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
        r[i] = low;
    }
}
#define IN_ORDER(x) /* pairs of lanes 0 2 1 3 */                                                   \
    _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8))
static inline void v_unzip(vec *x) {
    vec even = _mm256_shuffle_ps(x[0], x[1], 0x88), odd = _mm256_shuffle_ps(x[0], x[1], 0xdd);
    x[0] = IN_ORDER(even);
    x[1] = IN_ORDER(odd);
}
static inline void v_zip(vec *x) {
    vec even = _mm256_unpacklo_ps(x[0], x[1]), odd = _mm256_unpackhi_ps(x[0], x[1]);
    x[0] = _mm256_permute2f128_ps(even, odd, 0x20);
    x[1] = _mm256_permute2f128_ps(even, odd, 0x31);
}
static inline vec v_hsum_n(const vec *r) {
    vec low = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
    vec high = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
    return v_add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
static inline vec v_hmax_n(const vec *r) {
    vec t[4];
    for (int i = 0; i < 4; i++) /* pairs of lanes, then fours, then halves; the order is hadd's */
        t[i] = v_max(_mm256_shuffle_ps(r[2 * i], r[2 * i + 1], _MM_SHUFFLE(2, 0, 2, 0)),
                     _mm256_shuffle_ps(r[2 * i], r[2 * i + 1], _MM_SHUFFLE(3, 1, 3, 1)));
    for (int i = 0; i < 2; i++)
        t[i] = v_max(_mm256_shuffle_ps(t[2 * i], t[2 * i + 1], _MM_SHUFFLE(2, 0, 2, 0)),
                     _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], _MM_SHUFFLE(3, 1, 3, 1)));
    return v_max(_mm256_permute2f128_ps(t[0], t[1], 0x20),
                 _mm256_permute2f128_ps(t[0], t[1], 0x31));
}
static inline __m256i wide(const uint16_t *p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}
static inline vec v_from_half(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void v_to_half(uint16_t *p, vec x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
static inline vec v_from_int8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vec v_from_bfloat(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide(p), 16));
}
static inline void v_to_bfloat(uint16_t *p, vec x) { /* half a unit, or less one bit where even */
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16), rounded, quiet;
    rounded = _mm256_and_si256(high, _mm256_set1_epi32(1));
    rounded = _mm256_add_epi32(_mm256_add_epi32(bits, rounded), _mm256_set1_epi32(0x7fff));
    quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    rounded = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet,
                                 _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    rounded = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(rounded));
}

#include "template.h"

#if defined(__clang__)
#pragma clang attribute pop
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif
#else
typedef int qkv_no_avx2; /* an empty file is not C */
#endif
