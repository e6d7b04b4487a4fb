/* Layer and RMS normalization of rows.  Part of template.h.

   Two passes over a row that is in the cache by then: the mean, and the squares around it.  Sums run
   over blocks of NORM_BLOCK numbers in chains side by side, and blocks are added up in double.  The
   second pass finds what the rounded mean is off by, too, which qkv_norm_factor corrects. */

enum { NORM_CHAINS = VL < 8 ? 16 / VL : 4 /* 16 numbers side by side, or more */ };

/* The sums of a block: of x scale - mean, and of the squares, where they are wanted. */
static ALWAYS_INLINE void block_sums(const int kind, const int squares, const void *x,
                                     ptrdiff_t first, ptrdiff_t n, vec scale, vec minus_mean,
                                     double *sums) {
    vec sum[NORM_CHAINS], square[NORM_CHAINS], d;
    const ptrdiff_t end = first + n;
    ptrdiff_t j = first;
    UNROLL for (int c = 0; c < NORM_CHAINS; c++) sum[c] = square[c] = v_zero();
    for (; j + NORM_CHAINS * VL <= end; j += NORM_CHAINS * VL)
        UNROLL for (int c = 0; c < NORM_CHAINS; c++) {
            d = v_fma(v_get(kind, x, j + c * VL), scale, minus_mean);
            sum[c] = v_add(sum[c], d);
            if (squares) square[c] = v_fma(d, d, square[c]);
        }
    UNROLL for (int c = 0; c < NORM_CHAINS; c++) {
        if (j + VL > end) break;
        d = v_fma(v_get(kind, x, j), scale, minus_mean);
        sum[c] = v_add(sum[c], d);
        if (squares) square[c] = v_fma(d, d, square[c]);
        j += VL;
    }
    if (j < end) {
        float edge[VL] = {0.0f};
        v_store_n(edge, v_fma(v_get_n(kind, x, j, end - j), scale, minus_mean), end - j);
        d = v_load(edge);
        sum[NORM_CHAINS - 1] = v_add(sum[NORM_CHAINS - 1], d);
        if (squares) square[NORM_CHAINS - 1] = v_fma(d, d, square[NORM_CHAINS - 1]);
    }
    UNROLL for (int step = 1; step < NORM_CHAINS; step *= 2)
        UNROLL for (int c = 0; c < NORM_CHAINS; c += 2 * step) {
            sum[c] = v_add(sum[c], sum[c + step]);
            square[c] = v_add(square[c], square[c + step]);
        }
    sums[0] += v_hsum(sum[0]);
    if (squares) sums[1] += v_hsum(square[0]);
}

static ALWAYS_INLINE void row_sums(const int kind, const int squares, const void *x, ptrdiff_t n,
                                   qkv_norm_row *row) {
    const vec scale = v_set1(row->scale), minus_mean = v_set1(-row->mean);
    for (ptrdiff_t j = 0; j < n; j += NORM_BLOCK)
        block_sums(kind, squares, x, j, MIN(NORM_BLOCK, n - j), scale, minus_mean, row->sums);
}

static void norm_sums(int kind, const void *x, ptrdiff_t n, qkv_norm_row *row) {
    if (kind == QKV_FLOAT16)
        row_sums(QKV_FLOAT16, 1, x, n, row);
    else if (kind == QKV_BFLOAT16)
        row_sums(QKV_BFLOAT16, 1, x, n, row);
    else
        row_sums(QKV_FLOAT32, 1, x, n, row);
}

/* -0 is what changes no number that it is added to, and no zero. */
static ALWAYS_INLINE void apply_columns(const int kind, const int streams, const int biased,
                                        const qkv_norm *norm, const qkv_norm_row *row,
                                        const void *x, void *y, ptrdiff_t first, ptrdiff_t n) {
    const float *weight = norm->weight + first, *bias = biased ? norm->bias + first : NULL;
    const vec scale = v_set1(row->scale), minus_mean = v_set1(-row->mean), none = v_set1(-0.0f);
    const vec factor = v_set1(row->factor), rest = v_set1(row->rest);
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) {
        vec d = v_fma(v_get(kind, x, j), scale, minus_mean);
        d = v_fma(v_fma(d, factor, rest), v_load(weight + j), biased ? v_load(bias + j) : none);
        v_put(kind, y, j, d, streams);
    }
    if (j < n) {
        vec d = v_fma(v_get_n(kind, x, j, n - j), scale, minus_mean);
        vec b = biased ? v_load_n(bias + j, n - j) : none;
        d = v_fma(v_fma(d, factor, rest), v_load_n(weight + j, n - j), b);
        v_put_n(kind, y, j, d, n - j);
    }
}

static ALWAYS_INLINE void apply_row(const int kind, const int streams, const qkv_norm *norm,
                                    const qkv_norm_row *row, const void *x, void *y,
                                    ptrdiff_t first, ptrdiff_t n) {
    if (norm->bias)
        apply_columns(kind, streams, 1, norm, row, x, y, first, n);
    else
        apply_columns(kind, streams, 0, norm, row, x, y, first, n);
}

static void norm_apply(const qkv_norm *norm, const qkv_norm_row *row, const void *x, void *y,
                       ptrdiff_t first, ptrdiff_t n) {
    FOR_KIND(apply_row, norm->kind, norm->streams, norm, row, x, y, first, n);
}

static ALWAYS_INLINE void norm_rows(const int kind, const int streams, const qkv_norm *norm,
                                    const char *x, ptrdiff_t ldx, char *y, ptrdiff_t ldy,
                                    ptrdiff_t m) {
    for (ptrdiff_t i = 0; i < m; i++, x += ldx, y += ldy) {
        qkv_norm_row row;
        qkv_norm_start(&row, 1.0f);
        do { /* again for very large or small numbers alone */
            if (norm->centered) {
                row_sums(kind, 0, x, norm->n, &row);
                qkv_norm_mean(&row, norm->n);
            }
            row_sums(kind, 1, x, norm->n, &row);
        } while (!qkv_norm_factor(&row, norm));
        apply_row(kind, streams, norm, &row, x, y, 0, norm->n);
    }
}

static void norm(const qkv_norm *norm, const char *x, ptrdiff_t ldx, char *y, ptrdiff_t ldy,
                 ptrdiff_t m) {
    FOR_KIND(norm_rows, norm->kind, norm->streams, norm, x, ldx, y, ldy, m);
}
