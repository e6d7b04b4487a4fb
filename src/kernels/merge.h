/* Parts of split keys merged: the weight of each part in a row, and the weighted sum.  Part of
   template.h. */

static void merge_weights(float *s, ptrdiff_t lds, ptrdiff_t m, ptrdiff_t n, float *lse) {
    const vec none = v_set1(-FLT_MAX); /* only -inf is below */
    for (ptrdiff_t j = 0; j < n; j += VL) {
        float logs[VL];
        vec max = v_set1(-INFINITY), sum = v_zero();
        for (ptrdiff_t i = 0; i < m; i++) max = v_max(max, v_load(s + i * lds + j));
        max = v_pick(max, none, v_zero(), max); /* -inf - (-inf) is no number */
        for (ptrdiff_t i = 0; i < m; i++) {
            vec log = v_load(s + i * lds + j), e = v_exp(v_sub(log, max));
            sum = v_add(sum, e); /* NaN where any of them is: max may have lost it */
            v_store(s + i * lds + j, v_pick(log, none, v_set1(-1.0f), e));
        }
        v_store(logs, sum);
        for (int i = 0; i < VL; i++) logs[i] = logf(logs[i]);
        v_store(lse + j, v_add(max, v_load(logs)));
        sum = v_pick(sum, v_set1(0.5f), v_set1(1.0f), sum); /* 0 where no part has a key */
        for (ptrdiff_t i = 0; i < m; i++) {
            vec e = v_load(s + i * lds + j);
            v_store(s + i * lds + j, v_pick(e, v_zero(), e, v_div(e, sum)));
        }
    }
}

static ALWAYS_INLINE vec v_number(const int kind, const void *x, ptrdiff_t i) {
    return kind == QKV_FLOAT32 ? v_load((const float *)x + i) : v_stored(kind, x, i);
}

/* The last numbers of a row, fewer than VL; size is that of one. */
static ALWAYS_INLINE vec v_numbers_left(const int kind, const size_t size, const void *x,
                                        ptrdiff_t i, ptrdiff_t n) {
    float edge[VL] = {0};
    memcpy(edge, (const char *)x + (size_t)i * size, (size_t)n * size);
    return v_number(kind, edge, 0);
}

static ALWAYS_INLINE void merge_row(const int kind, const size_t size, const void *const *x,
                                    const float *weight, ptrdiff_t m, float *y, ptrdiff_t n) {
    enum { AT_ONCE = 4 };
    ptrdiff_t j = 0;
    for (; j + AT_ONCE * VL <= n; j += AT_ONCE * VL) {
        vec sum[AT_ONCE];
    UNROLL for (int v = 0; v < AT_ONCE; v++) sum[v] = v_zero();
        for (ptrdiff_t i = 0; i < m; i++) {
            const vec by = v_set1(weight[i]);
            UNROLL for (int v = 0; v < AT_ONCE; v++)
                sum[v] = v_fma(by, v_number(kind, x[i], j + v * VL), sum[v]);
        }
        UNROLL for (int v = 0; v < AT_ONCE; v++) v_store(y + j + v * VL, sum[v]);
    }
    for (; j < n; j += VL) {
        const ptrdiff_t filled = MIN(VL, n - j);
        vec sum = v_zero();
        for (ptrdiff_t i = 0; i < m; i++)
            sum = v_fma(v_set1(weight[i]), v_numbers_left(kind, size, x[i], j, filled), sum);
        v_store_n(y + j, sum, filled);
    }
}

static void merge_rows(int kind, const void *const *x, const float *weight, ptrdiff_t m, float *y,
                       ptrdiff_t n) {
    if (kind == QKV_FLOAT32)
        merge_row(QKV_FLOAT32, 4, x, weight, m, y, n);
    else if (kind == QKV_FLOAT16)
        merge_row(QKV_FLOAT16, 2, x, weight, m, y, n);
    else
        merge_row(QKV_BFLOAT16, 2, x, weight, m, y, n);
}
