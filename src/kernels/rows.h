/* What is done to rows beside products and softmax.  Part of template.h. */

static int scale_rows(const float *x, ptrdiff_t ldx, const float *factor, float *y, ptrdiff_t ldy,
                      ptrdiff_t m, ptrdiff_t n) {
    const ptrdiff_t whole = n / VL * VL, rest = n - whole;
    vec check = v_zero(), value;
    for (ptrdiff_t i = 0; i < m; i++, x += ldx, y += ldy) {
        vec f = v_set1(factor[i]);
        for (ptrdiff_t j = 0; j < whole; j += VL) {
            value = v_fma(v_load(x + j), f, v_zero());
            v_store(y + j, value);
            check = v_fma(value, v_zero(), check); /* 0 for a finite value, NaN for any other */
        }
        if (rest) {
            value = v_fma(v_load_n(x + whole, rest), f, v_zero());
            v_store_n(y + whole, value, rest);
            check = v_fma(value, v_zero(), check);
        }
    }
    return v_hsum(check) == 0.0f;
}

/* What of a value is finite. */
static ALWAYS_INLINE vec finite_part(vec value) {
    return v_select_lt(v_abs(value), v_set1(INFINITY), value, v_zero());
}

/* What it is otherwise. */
static ALWAYS_INLINE vec finite_code(vec value) {
    const vec plus = v_set1(QKV_PLUS), minus = v_set1(QKV_MINUS), both = v_add(plus, minus);
    vec what = v_select_lt(v_set1(FLT_MAX), value, plus, both);
    what = v_select_lt(value, v_set1(-FLT_MAX), minus, what);
    return v_select_lt(v_abs(value), v_set1(INFINITY), v_zero(), what);
}

/* One row; adds to check 0 for a finite value, and NaN for any other.  What is stored is constant in
   every caller. */
static ALWAYS_INLINE vec split_row(const float *x, float *finite, float *code, ptrdiff_t n,
                                   vec check, const int parts, const int codes) {
    ptrdiff_t j = 0;
    for (; j + 2 * VL <= n; j += 2 * VL) {
        vec even = v_load(x + j), odd = v_load(x + j + VL);
        check = v_fma(odd, v_zero(), v_fma(even, v_zero(), check));
        if (parts) v_store(finite + j, finite_part(even));
        if (parts) v_store(finite + j + VL, finite_part(odd));
        if (codes) v_store(code + j, finite_code(even));
        if (codes) v_store(code + j + VL, finite_code(odd));
    }
    for (; j < n; j += VL) {
        const ptrdiff_t filled = MIN(VL, n - j);
        vec value = v_load_n(x + j, filled);
        check = v_fma(value, v_zero(), check);
        if (parts) v_store_n(finite + j, finite_part(value), filled);
        if (codes) v_store_n(code + j, finite_code(value), filled);
    }
    return check;
}

static int split_finite(const float *x, ptrdiff_t ldx, float *finite, float *code, ptrdiff_t m,
                        ptrdiff_t n) {
    vec check = v_zero();
    for (ptrdiff_t i = 0; i < m; i++, x += ldx)
        if (code)
            check = split_row(x, finite + i * n, code + i * n, n, check, 1, 1);
        else if (finite)
            check = split_row(x, finite + i * n, NULL, n, check, 1, 0);
        else
            check = split_row(x, NULL, NULL, n, check, 0, 0);
    return v_hsum(check) == 0.0f;
}

static void weights(const float *x, float max, float factor, float *y, ptrdiff_t n) {
    vec top = v_set1(max), f = v_set1(factor);
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) v_store(y + j, v_mul(f, v_exp(v_sub(v_load(x + j), top))));
    if (j < n) v_store_n(y + j, v_mul(f, v_exp(v_sub(v_load_n(x + j, n - j), top))), n - j);
}

static ALWAYS_INLINE void widen_rows(const int kind, const int bits, const void *x, ptrdiff_t ldx,
                                     float *y, ptrdiff_t m, ptrdiff_t n) {
    const ptrdiff_t whole = n / VL * VL, rest = n - whole;
    for (ptrdiff_t i = 0; i < m; i++, y += n) {
        const char *row = (const char *)x + qkv_bytes_of(bits, i * ldx);
        for (ptrdiff_t j = 0; j < whole; j += VL) v_store(y + j, v_stored(kind, row, j));
        if (rest) {
            uint16_t edge[VL] = {0};
            memcpy(edge, row + qkv_bytes_of(bits, whole), (size_t)((rest * bits + 7) / 8));
            v_store_n(y + whole, v_stored(kind, edge, 0), rest);
        }
    }
}

static void widen(int kind, const void *x, ptrdiff_t ldx, float *y, ptrdiff_t m, ptrdiff_t n) {
#define STORAGE(NAME, name, bits, ...)                                                             \
    if (kind == QKV_##NAME) widen_rows(QKV_##NAME, bits, x, ldx, y, m, n);
#include "storage.def"
#undef STORAGE
}

static void scale_columns(float *s, ptrdiff_t lds, ptrdiff_t m, ptrdiff_t n, const float *factor) {
    for (ptrdiff_t i = 0; i < m; i++, s += lds)
        for (ptrdiff_t j = 0; j < n; j += VL)
            v_store(s + j, v_mul(v_load(s + j), v_load(factor + j)));
}

#define NARROW_0(kind_of, store)                                                                   \
    if (kind == (kind_of)) store(edge, value);
#define NARROW_1(...)
#define STORAGE(NAME, name, bits, scaled, load, store) NARROW_##scaled(QKV_##NAME, store)
static void narrow(int kind, const float *x, uint16_t *y, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; j += VL) {
        uint16_t edge[VL] = {0};
        vec value = v_load_n(x + j, MIN(VL, n - j));
#include "storage.def"
        memcpy(y + j, edge, (size_t)MIN(VL, n - j) * sizeof *y);
    }
}
#undef STORAGE

static float to_int8(const float *x, int8_t *y, ptrdiff_t n) {
    const float largest_scale = 0x1.020406p+121f; /* 127 of it are still finite */
    const float whole = 12582912.0f;               /* 3 2^22: its unit is 1 */
    const float top = qkv_magnitude(x, n);
    float scale = MIN(top / 127.0f, largest_scale), by;
    if (!(top <= FLT_MAX)) {
        memset(y, 0, (size_t)n);
        return NAN;
    }
    /* So small a scale is max / 127 to a whole unit only; one more keeps x / scale within 127. */
    if (top > 0.0f && scale < FLT_MIN) scale += 0x1p-149f;
    by = scale > 0.0f ? scale : 1.0f;
    for (ptrdiff_t j = 0; j < n; j++) y[j] = (int8_t)(x[j] / by + whole - whole);
    return scale;
}

static void tanh_each(const float *x, float *y, ptrdiff_t n) {
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) v_store(y + j, v_tanh(v_load(x + j)));
    if (j < n) v_store_n(y + j, v_tanh(v_load_n(x + j, n - j)), n - j);
}

static void exp_each(const float *x, float *y, ptrdiff_t n) {
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) v_store(y + j, v_exp(v_load(x + j)));
    if (j < n) v_store_n(y + j, v_exp(v_load_n(x + j, n - j)), n - j);
}
