/* Parts of split keys merged: the weight of each part in a row, and the weighted sum.  Part of
   template.h. */

static void merge_weights(float *s, ptrdiff_t lds, ptrdiff_t m, ptrdiff_t n, float *lse) {
    const vec none = v_set1(-FLT_MAX); /* only -inf is below */
    for (ptrdiff_t j = 0; j < n; j += VL) {
        float logs[VL];
        vec max = v_set1(-INFINITY), sum = v_zero();
        for (ptrdiff_t i = 0; i < m; i++) max = v_max(max, v_load(s + i * lds + j));
        max = v_select_lt(max, none, v_zero(), max); /* -inf - (-inf) is no number */
        for (ptrdiff_t i = 0; i < m; i++) {
            vec log = v_load(s + i * lds + j), e = v_exp(v_sub(log, max));
            sum = v_add(sum, e); /* NaN where any of them is: max may have lost it */
            v_store(s + i * lds + j, v_select_lt(log, none, v_set1(-1.0f), e));
        }
        v_store(logs, sum);
        for (int i = 0; i < VL; i++) logs[i] = logf(logs[i]);
        v_store(lse + j, v_add(max, v_load(logs)));
        sum = v_select_lt(sum, v_set1(0.5f), v_set1(1.0f), sum); /* 0 where no part has a key */
        for (ptrdiff_t i = 0; i < m; i++) {
            vec e = v_load(s + i * lds + j);
            v_store(s + i * lds + j, v_select_lt(e, v_zero(), e, v_div(e, sum)));
        }
    }
}

enum { AHEAD = 4 /* rows from what is added up to what is asked for */ };

/* What is added up for a row: those of the parts, times their weights. */
typedef struct {
    const char *const *x;
    const ptrdiff_t *ldx;
    const float *weight;
    ptrdiff_t ldw, m, row;
} merged_row;

static ALWAYS_INLINE const char *row_of(const merged_row *of, ptrdiff_t i) {
    return of->x[i] + of->row * of->ldx[i];
}

/* count vectors of a row, from place j on. */
static ALWAYS_INLINE void merge_columns(const int kind, const int large, const int count,
                                        const merged_row *of, void *y, ptrdiff_t j) {
    vec sum[8];
    UNROLL for (int v = 0; v < count; v++) sum[v] = v_zero();
    for (ptrdiff_t i = 0; i < of->m; i++) {
        const float weight = of->weight[i * of->ldw];
        const char *x = row_of(of, i);
        if (weight < 0.0f) continue; /* whatever an empty part holds */
        if (large)                   /* the rows that follow come from memory */
            for (int v = 0; v < count * VL; v += LANES)
                QKV_PREFETCH((const float *)(x + AHEAD * of->ldx[i]) + j + v, 3);
        UNROLL for (int v = 0; v < count; v++)
            sum[v] = v_fma(v_set1(weight), v_get(kind, x, j + v * VL), sum[v]);
    }
    UNROLL for (int v = 0; v < count; v++) v_put(kind, y, j + v * VL, sum[v], 0);
}

static ALWAYS_INLINE void merge_row(const int kind, const int large, const merged_row *of,
                                    void *y, ptrdiff_t n) {
    ptrdiff_t j = 0;
    for (; j + 8 * VL <= n; j += 8 * VL) merge_columns(kind, large, 8, of, y, j);
    for (; j + 4 * VL <= n; j += 4 * VL) merge_columns(kind, large, 4, of, y, j);
    for (; j + VL <= n; j += VL) merge_columns(kind, large, 1, of, y, j);
    if (j < n) {
        vec sum = v_zero();
        for (ptrdiff_t i = 0; i < of->m; i++) {
            const float weight = of->weight[i * of->ldw];
            if (!(weight < 0.0f))
                sum = v_fma(v_set1(weight), v_get_n(kind, row_of(of, i), j, n - j), sum);
        }
        v_put_n(kind, y, j, sum, n - j);
    }
}

static void merge_rows(int kind, const char *const *x, const ptrdiff_t *ldx, const float *weight,
                       ptrdiff_t ldw, ptrdiff_t m, char *y, ptrdiff_t ldy, ptrdiff_t rows,
                       ptrdiff_t n, int large) {
    for (ptrdiff_t r = 0; r < rows; r++) {
        const merged_row of = {x, ldx, weight + r, ldw, m, r};
        FOR_KIND(merge_row, kind, large, &of, y + r * ldy, n);
    }
}
