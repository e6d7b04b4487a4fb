/* dots: c = a b^T from rows of b, and pack: rows become the columns of a panel.
   Part of template.h. */

#if VL >= 4
enum { HELD = 8 };

static ALWAYS_INLINE void hold(vec held[HELD], const float *b) {
    UNROLL for (int v = 0; v < HELD; v++) held[v] = v_load(b + v * VL);
}

/* sums[i][p] += a[i] b[p] lane by lane, for a pair of rows of b.  HELD vectors of the first one are
   kept in registers until the second one is read: each row is read from end to end, which is what
   the hardware prefetches best, and each vector of a serves both. */
static ALWAYS_INLINE void dots_pair(const float *a, ptrdiff_t lda, const float *b0, const float *b1,
                                    vec sums[4][2], ptrdiff_t k, const int rows) {
    ptrdiff_t t = 0;
    vec held[HELD], x, left;
    for (; t + HELD * VL <= k; t += HELD * VL) {
        hold(held, b0 + t);
        UNROLL for (int v = 0; v < HELD; v++) {
            x = v_load(b1 + t + v * VL);
            UNROLL for (int i = 0; i < rows; i++) {
                left = v_load(a + i * lda + t + v * VL);
                IN_REGISTER(left);
                sums[i][0] = v_fma(left, held[v], sums[i][0]);
                sums[i][1] = v_fma(left, x, sums[i][1]);
            }
        }
    }
    for (; t < k; t += VL) {
        held[0] = v_load_n(b0 + t, MIN(VL, k - t));
        x = v_load_n(b1 + t, MIN(VL, k - t));
        UNROLL for (int i = 0; i < rows; i++) {
            left = v_load_n(a + i * lda + t, MIN(VL, k - t));
            sums[i][0] = v_fma(left, held[0], sums[i][0]);
            sums[i][1] = v_fma(left, x, sums[i][1]);
        }
    }
}
#endif

/* rows rows of a with VL / rows rows of b make VL sums over lanes, added up in one tree.  filled of
   the rows of b are there; rows, and filled where the group is whole, are constants. */
static ALWAYS_INLINE void dots_group(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
                                     float *c, ptrdiff_t ldc, ptrdiff_t k, const ptrdiff_t filled,
                                     const int rows) {
    const int keys = VL / rows;
    float sums[VL];
    vec acc[VL];
    for (int u = 0; (rows == 1 || keys == 1) && u < keys; u++) { /* no pairs */
        const float *right = b + MIN(u, filled - 1) * ldb;
        ptrdiff_t t = 0;
        vec sum[4], x;
        UNROLL for (int i = 0; i < rows; i++) sum[i] = v_zero();
        for (; t + VL <= k; t += VL) {
            x = v_load(right + t);
            UNROLL for (int i = 0; i < rows; i++) sum[i] = v_fma(v_load(a + i * lda + t), x, sum[i]);
        }
        if (t < k) {
            x = v_load_n(right + t, k - t);
            UNROLL for (int i = 0; i < rows; i++)
                sum[i] = v_fma(v_load_n(a + i * lda + t, k - t), x, sum[i]);
        }
        UNROLL for (int i = 0; i < rows; i++) acc[i * keys + u] = sum[i];
    }
#if VL >= 4
    if (rows > 1 && keys > 1)
        UNROLL for (int u = 0; u + 1 < keys; u += 2) {
            vec pair[4][2];
            UNROLL for (int i = 0; i < rows; i++) pair[i][0] = pair[i][1] = v_zero();
            dots_pair(a, lda, b + MIN(u, filled - 1) * ldb, b + MIN(u + 1, filled - 1) * ldb, pair,
                      k, rows);
            UNROLL for (int i = 0; i < rows; i++)
                UNROLL for (int p = 0; p < 2; p++) acc[i * keys + u + p] = pair[i][p];
        }
#endif
    v_store(sums, v_hsum_n(acc));
    UNROLL for (int i = 0; i < rows; i++)
        memcpy(c + i * ldc, sums + i * keys, (size_t)filled * sizeof *c);
}

static ALWAYS_INLINE void dots_rows(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
                                    float *c, ptrdiff_t ldc, ptrdiff_t n, ptrdiff_t k,
                                    const int rows) {
    const int keys = VL / rows;
    ptrdiff_t j = 0;
    for (; j + keys <= n; j += keys)
        dots_group(a, lda, b + j * ldb, ldb, c + j, ldc, k, keys, rows);
    if (j < n) dots_group(a, lda, b + j * ldb, ldb, c + j, ldc, k, n - j, rows);
}

static void dots(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                 ptrdiff_t ldc, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k) {
#if VL >= 4
    for (; m >= 4; m -= 4, a += 4 * lda, c += 4 * ldc) dots_rows(a, lda, b, ldb, c, ldc, n, k, 4);
    for (; m >= 2; m -= 2, a += 2 * lda, c += 2 * ldc) dots_rows(a, lda, b, ldb, c, ldc, n, k, 2);
#endif
    for (; m >= 1; m -= 1, a += lda, c += ldc) dots_rows(a, lda, b, ldb, c, ldc, n, k, 1);
}

/* ---- pack: rows become the columns of a panel ------------------------------------------------ */

/* VL rows by VL columns, of which filled and depth are there; constants where the block is whole. */
static ALWAYS_INLINE void pack_block(const float *b, ptrdiff_t ldb, float *panel,
                                     const ptrdiff_t filled, const ptrdiff_t depth) {
    vec block[VL];
    UNROLL for (int i = 0; i < VL; i++)
        block[i] = i >= filled    ? v_zero()
                   : depth == VL ? v_load(b + i * ldb)
                                 : v_load_n(b + i * ldb, depth);
    v_transpose(block);
    UNROLL for (int i = 0; i < VL; i++)
        if (i < depth) v_store(panel + i * PANEL, block[i]);
}

static void pack(const float *b, ptrdiff_t ldb, float *panel, ptrdiff_t n, ptrdiff_t k) {
    for (ptrdiff_t j = 0; j < ROUND_UP(n, LANES); j += VL) {
        for (ptrdiff_t t = 0; t < k; t += VL) {
            const float *from = b + j * ldb + t;
            float *to = panel + t * PANEL + j;
            if (n - j >= VL && k - t >= VL)
                pack_block(from, ldb, to, VL, VL);
            else
                pack_block(from, ldb, to, MAX(n - j, 0), MIN(VL, k - t));
        }
    }
}
