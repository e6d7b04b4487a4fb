/* AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers, tails by lane masks. */
#include "kernels.h"

#if QKV_X86_64 && !defined(_MSC_VER)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
        __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2"))),               \
        apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2")
#endif

typedef __m512 vec;
#define VL 16
#define ROWS 6
#define VECS 4
#define SKINNY_ROWS 2
#define V_REGISTERS "v"
#define QKV_NAME "avx512"
#define QKV_TABLE qkv_avx512

static inline vec v_zero(void) { return _mm512_setzero_ps(); }
static inline vec v_set1(float x) { return _mm512_set1_ps(x); }
static inline vec v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, vec x) { _mm512_storeu_ps(p, x); }
static inline void v_stream(float *p, vec x) { /* lines are put together on their way */
    _mm_stream_ps(p, _mm512_castps512_ps128(x));
    _mm_stream_ps(p + 4, _mm512_extractf32x4_ps(x, 1));
    _mm_stream_ps(p + 8, _mm512_extractf32x4_ps(x, 2));
    _mm_stream_ps(p + 12, _mm512_extractf32x4_ps(x, 3));
}
static inline __mmask16 first(ptrdiff_t n) { return (__mmask16)((1u << n) - 1); }
static inline vec v_load_n(const float *p, ptrdiff_t n) {
    return _mm512_maskz_loadu_ps(first(n), p);
}
static inline void v_store_n(float *p, vec x, ptrdiff_t n) {
    _mm512_mask_storeu_ps(p, first(n), x);
}
static inline vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec v_abs(vec a) { return _mm512_abs_ps(a); }
static inline vec v_minus_abs(vec a) { return _mm512_or_ps(_mm512_set1_ps(-0.0f), a); }
static inline vec v_select_lt(vec a, vec b, vec x, vec y) {
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
static inline vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec v_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
static inline vec v_fma_once(vec a, vec b, vec c) { return v_fma(a, b, c); }
static inline vec v_ldexp(vec p, vec t) {
    return _mm512_scalef_ps(p, _mm512_sub_ps(t, _mm512_set1_ps(0x1.8p23f + 127.0f)));
}
static inline vec v_keep(vec s, const uint8_t *keep) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)keep);
    return _mm512_mask_mov_ps(v_set1(-INFINITY), _mm_test_epi8_mask(bytes, bytes), s);
}
static inline vec v_bias(vec s, vec b) {
    __mmask16 drop = _mm512_cmp_ps_mask(b, v_set1(-INFINITY), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(v_add(s, b), drop, b);
}
static inline float v_hsum(vec x) { return _mm512_reduce_add_ps(x); }
static inline float v_hmax(vec x) { return _mm512_reduce_max_ps(x); }
static inline vec low_pairs(vec a, vec b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
static inline vec high_pairs(vec a, vec b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
#define EVEN_BLOCKS(a, b) _mm512_shuffle_f32x4(a, b, 0x88) /* of four lanes: 0 and 2 of each */
#define ODD_BLOCKS(a, b) _mm512_shuffle_f32x4(a, b, 0xdd)
static inline void v_transpose(vec *r) {
    vec t[16];
    for (int i = 0; i < 8; i++) { /* pairs of rows */
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* fours: column c of every block of four lanes in r[i + c] */
        r[i] = low_pairs(t[i], t[i + 2]);
        r[i + 1] = high_pairs(t[i], t[i + 2]);
        r[i + 2] = low_pairs(t[i + 1], t[i + 3]);
        r[i + 3] = high_pairs(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; c++) { /* blocks: a 4 x 4 transpose of blocks for each c */
        vec even_top = EVEN_BLOCKS(r[c], r[c + 4]), even_bottom = EVEN_BLOCKS(r[c + 8], r[c + 12]);
        vec odd_top = ODD_BLOCKS(r[c], r[c + 4]), odd_bottom = ODD_BLOCKS(r[c + 8], r[c + 12]);
        r[c] = EVEN_BLOCKS(even_top, even_bottom);
        r[c + 4] = EVEN_BLOCKS(odd_top, odd_bottom);
        r[c + 8] = ODD_BLOCKS(even_top, even_bottom);
        r[c + 12] = ODD_BLOCKS(odd_top, odd_bottom);
    }
}
static inline void v_unzip(vec *x) {
    const __m512i even =
            _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    vec odd = _mm512_permutex2var_ps(x[0], _mm512_add_epi32(even, _mm512_set1_epi32(1)), x[1]);
    x[0] = _mm512_permutex2var_ps(x[0], even, x[1]);
    x[1] = odd;
}
static inline void v_zip(vec *x) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    vec high = _mm512_permutex2var_ps(x[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), x[1]);
    x[0] = _mm512_permutex2var_ps(x[0], low, x[1]);
    x[1] = high;
}
/* Lane c of each block of u[i]: op over that block of r[4 i + c]; then over the four blocks. */
#define ACROSS_LANES(name, op)                                                                     \
    static inline vec name(const vec *r) {                                                         \
        vec u[4];                                                                                  \
        for (int i = 0; i < 4; i++) {                                                              \
            const vec *s = r + 4 * i;                                                              \
            vec even = op(_mm512_unpacklo_ps(s[0], s[2]), _mm512_unpackhi_ps(s[0], s[2]));         \
            vec odd = op(_mm512_unpacklo_ps(s[1], s[3]), _mm512_unpackhi_ps(s[1], s[3]));          \
            u[i] = op(_mm512_unpacklo_ps(even, odd), _mm512_unpackhi_ps(even, odd));               \
        }                                                                                          \
        vec low = op(EVEN_BLOCKS(u[0], u[1]), ODD_BLOCKS(u[0], u[1]));                             \
        vec high = op(EVEN_BLOCKS(u[2], u[3]), ODD_BLOCKS(u[2], u[3]));                            \
        return op(EVEN_BLOCKS(low, high), ODD_BLOCKS(low, high));                                  \
    }
ACROSS_LANES(v_hsum_n, v_add)
ACROSS_LANES(v_hmax_n, v_max)
static inline __m256i sixteen(const uint16_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline vec v_from_half(const uint16_t *p) { return _mm512_cvtph_ps(sixteen(p)); }
static inline void v_to_half(uint16_t *p, vec x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
static inline vec v_from_int8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vec v_from_bfloat(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(sixteen(p)), 16));
}
static inline void v_to_bfloat(uint16_t *p, vec x) { /* half a unit, or less one bit where even */
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16), rounded;
    rounded = _mm512_and_si512(high, _mm512_set1_epi32(1));
    rounded = _mm512_add_epi32(_mm512_add_epi32(bits, rounded), _mm512_set1_epi32(0x7fff));
    rounded = _mm512_mask_or_epi32(_mm512_srli_epi32(rounded, 16),
                                   _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high,
                                   _mm512_set1_epi32(0x40)); /* NaN, made quiet */
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
}

#include "template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
typedef int qkv_no_avx512; /* an empty file is not C */
#endif
