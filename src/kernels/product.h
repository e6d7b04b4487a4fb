/* product: c = a b (+ beta c), product_stored, the same with b in storage, and product_panel, of few
   rows.
   Part of template.h. */

/* One register tile.  rows, vecs and partial are constants in every caller, so that the loops over
   them unroll and acc stays in registers; last is the number of columns of a partial last vector. */
static ALWAYS_INLINE void product_tile(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
                                       float *c, ptrdiff_t ldc, const float *beta, ptrdiff_t k,
                                       ptrdiff_t last, const int rows, const int vecs,
                                       const int partial) {
    vec acc[ROWS][VECS], right[VECS];
    for (int i = 0; beta && i < rows; i++) /* what is needed at the end may be far away */
        for (int j = 0; j < vecs; j++) QKV_PREFETCH(c + i * ldc + j * VL, 3);
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vecs; j++) acc[i][j] = v_zero();
    for (ptrdiff_t t = 0; t < k; t++) {
        UNROLL for (int j = 0; j < vecs - partial; j++) right[j] = v_load(b + t * ldb + j * VL);
        if (partial) right[vecs - 1] = v_load_n(b + t * ldb + (vecs - 1) * VL, last);
        UNROLL for (int i = 0; i < rows; i++) {
            vec left = v_set1(a[i * lda + t]);
            UNROLL for (int j = 0; j < vecs; j++) acc[i][j] = v_fma(left, right[j], acc[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int j = 0; j < vecs; j++) {
            float *to = c + i * ldc + j * VL;
            int short_one = partial && j == vecs - 1;
            vec value = acc[i][j];
            if (beta) {
                vec old = short_one ? v_load_n(to, last) : v_load(to);
                value = v_fma(v_set1(beta[i]), old, value);
            }
            if (short_one)
                v_store_n(to, value, last);
            else
                v_store(to, value);
        }
    }
}

typedef void product_fn(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                        ptrdiff_t ldc, const float *beta, ptrdiff_t k, ptrdiff_t last);

#define PRODUCT(rows, vecs)                                                                        \
    static void product_##rows##x##vecs(const float *a, ptrdiff_t lda, const float *b,             \
                                        ptrdiff_t ldb, float *c, ptrdiff_t ldc, const float *beta, \
                                        ptrdiff_t k, ptrdiff_t last) {                             \
        if (last < VL)                                                                             \
            product_tile(a, lda, b, ldb, c, ldc, beta, k, last, rows, vecs, 1);                    \
        else                                                                                       \
            product_tile(a, lda, b, ldb, c, ldc, beta, k, last, rows, vecs, 0);                    \
    }
#define PRODUCTS(vecs)                                                                             \
    PRODUCT(1, vecs) PRODUCT(2, vecs) PRODUCT(3, vecs) PRODUCT(4, vecs) PRODUCT(5, vecs)           \
    PRODUCT(6, vecs)
#define PRODUCT_NAMES(vecs)                                                                        \
    {product_1x##vecs, product_2x##vecs, product_3x##vecs,                                         \
     product_4x##vecs, product_5x##vecs, product_6x##vecs}

PRODUCTS(1)
PRODUCTS(2)
#if VECS == 4
PRODUCTS(3)
PRODUCTS(4)
static product_fn *const products[VECS][ROWS] = {PRODUCT_NAMES(1), PRODUCT_NAMES(2),
                                                 PRODUCT_NAMES(3), PRODUCT_NAMES(4)};
#else
static product_fn *const products[VECS][ROWS] = {PRODUCT_NAMES(1), PRODUCT_NAMES(2)};
#endif

/* c += a b for rows rows by WIDE vectors, in the same order as product_tile; c starts as it is, or
   from zero where first. */
static ALWAYS_INLINE void skinny_tile(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
                                    float *c, ptrdiff_t k, int first, const int rows) {
    vec acc[2][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++)
            acc[i][j] = first ? v_zero() : v_load(c + (i * WIDE + j) * VL);
    for (ptrdiff_t t = 0; t < k; t++, b += ldb) {
        vec left[2];
        UNROLL for (int i = 0; i < rows; i++) left[i] = v_set1(a[i * lda + t]);
        UNROLL for (int j = 0; j < WIDE; j++) {
            vec right = v_load(b + j * VL);
            if (rows > 1) IN_REGISTER(right);
            UNROLL for (int i = 0; i < rows; i++) acc[i][j] = v_fma(left[i], right, acc[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < WIDE; j++) v_store(c + (i * WIDE + j) * VL, acc[i][j]);
}

/* c = sums + beta c for one row of a product. */
static void store_beta(const float *sums, float *c, const float *beta, ptrdiff_t n) {
    ptrdiff_t j = 0;
    if (!beta) {
        memcpy(c, sums, (size_t)n * sizeof *c);
        return;
    }
    vec factor = v_set1(*beta);
    for (; j + VL <= n; j += VL) v_store(c + j, v_fma(factor, v_load(c + j), v_load(sums + j)));
    if (j < n)
        v_store_n(c + j, v_fma(factor, v_load_n(c + j, n - j), v_load_n(sums + j, n - j)), n - j);
}

/* A few rows by WIDE vectors.  The rows of b come from memory one after the other, which is what
   the hardware prefetches best; more rows of a than SKINNY_ROWS see them again in the first-level
   cache, a few rows of b at a time. */
static void product_skinny(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                         ptrdiff_t ldc, const float *beta, ptrdiff_t m, ptrdiff_t k) {
    enum { AT_A_TIME = 16 };
    _Alignas(64) float sums[FEW][WIDE * VL];
    for (ptrdiff_t t = 0; t < k; t += AT_A_TIME) {
        ptrdiff_t depth = m <= SKINNY_ROWS ? k : MIN(AT_A_TIME, k - t), i = 0;
        if (SKINNY_ROWS == 2)
            for (; i + 2 <= m; i += 2)
                skinny_tile(a + i * lda + t, lda, b + t * ldb, ldb, sums[i], depth, t == 0, 2);
        for (; i < m; i++)
            skinny_tile(a + i * lda + t, lda, b + t * ldb, ldb, sums[i], depth, t == 0, 1);
        if (m <= SKINNY_ROWS) break;
    }
    if (k <= 0) memset(sums, 0, sizeof sums);
    for (ptrdiff_t i = 0; i < m; i++) store_beta(sums[i], c + i * ldc, beta ? beta + i : NULL, WIDE * VL);
}

/* One long row: four rows of b, each read from end to end, are added to sums in the first-level
   cache.  More would push each other out of it where ldb is a multiple of its 4 KB. */
static void gemv(const float *a, const float *b, ptrdiff_t ldb, float *c,
                         const float *beta, ptrdiff_t n, ptrdiff_t k) {
    _Alignas(64) float sums[GEMV_COLUMNS];
    ptrdiff_t t = 0;
    memset(sums, 0, (size_t)n * sizeof *sums);
    for (; t + 4 <= k; t += 4) {
        const float *rows = b + t * ldb;
        vec left[4];
        UNROLL for (int u = 0; u < 4; u++) left[u] = v_set1(a[t + u]);
        for (ptrdiff_t j = 0; j < n; j += VL) {
            vec sum = v_load(sums + j);
            UNROLL for (int u = 0; u < 4; u++) sum = v_fma(left[u], v_load(rows + u * ldb + j), sum);
            v_store(sums + j, sum);
        }
    }
    for (; t < k; t++) {
        vec left = v_set1(a[t]);
        for (ptrdiff_t j = 0; j < n; j += VL)
            v_store(sums + j, v_fma(left, v_load(b + t * ldb + j), v_load(sums + j)));
    }
    store_beta(sums, c, beta, n);
}

static void product(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                    ptrdiff_t ldc, const float *beta, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k) {
    ptrdiff_t j = 0;
    if (m <= FEW && n > VECS * VL) {
        for (; m == 1 && n - j >= GEMV_COLUMNS / 16;) {
            ptrdiff_t cols = MIN(GEMV_COLUMNS, (n - j) / VL * VL);
            gemv(a, b + j, ldb, c + j, beta, cols, k);
            j += cols;
        }
        for (; j + WIDE * VL <= n; j += WIDE * VL)
            product_skinny(a, lda, b + j, ldb, c + j, ldc, beta, m, k);
    }
    for (; j < n; j += VECS * VL) {
        ptrdiff_t cols = MIN(VECS * VL, n - j), vecs = (cols + VL - 1) / VL;
        product_fn *const *by_rows = products[vecs - 1];
        for (ptrdiff_t i = 0; i < m; i += ROWS)
            by_rows[MIN(ROWS, m - i) - 1](a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc,
                                          beta ? beta + i : NULL, k, cols - (vecs - 1) * VL);
    }
}

/* ---- storage types ---------------------------------------------------------------------------- */

/* VL numbers of a kind from place i on; kind is a constant in every caller. */
static ALWAYS_INLINE vec v_stored(const int kind, const void *x, ptrdiff_t i) {
    if (kind == QKV_FLOAT32) return v_load((const float *)x + i);
#define STORAGE(NAME, name, bits, scaled, load, store)                                             \
    if (kind == QKV_##NAME) return load((const void *)((const char *)x + qkv_bytes_of(bits, i)));
#include "storage.def"
#undef STORAGE
    return v_zero(); /* there is no such kind */
}

/* product_tile with b in storage: the same operations on the same numbers.  asks for rows of b ahead,
   where they come from memory. */
static ALWAYS_INLINE void stored_tile(const int kind, const float *a, ptrdiff_t lda, const void *b,
                                      ptrdiff_t ldb, float *c, ptrdiff_t ldc, const float *beta,
                                      ptrdiff_t k, ptrdiff_t last, int asks, const int rows,
                                      const int vecs) {
    enum { AHEAD_BYTES = 2048 };
    vec acc[ROWS][WIDE], right[WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vecs; j++) acc[i][j] = v_zero();
    for (ptrdiff_t t = 0; t < k; t++) {
        if (asks)
            for (ptrdiff_t line = 0; line < qkv_bytes(kind, ldb); line += 64)
                QKV_PREFETCH((const char *)b + qkv_bytes(kind, t * ldb) + AHEAD_BYTES + line, 3);
        UNROLL for (int j = 0; j < vecs; j++) right[j] = v_stored(kind, b, t * ldb + j * VL);
        UNROLL for (int i = 0; i < rows; i++) {
            vec left = v_set1(a[i * lda + t]);
            UNROLL for (int j = 0; j < vecs; j++) acc[i][j] = v_fma(left, right[j], acc[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vecs; j++) {
            float *to = c + i * ldc + j * VL;
            ptrdiff_t cols = j == vecs - 1 ? last : VL;
            vec value = acc[i][j];
            if (beta) value = v_fma(v_set1(beta[i]), v_load_n(to, cols), value);
            v_store_n(to, value, cols);
        }
}

typedef void stored_fn(const float *a, ptrdiff_t lda, const void *b, ptrdiff_t ldb, float *c,
                       ptrdiff_t ldc, const float *beta, ptrdiff_t k, ptrdiff_t last);

#define STORED(name, kind, rows, vecs)                                                             \
    static void name##_##rows##x##vecs(const float *a, ptrdiff_t lda, const void *b,               \
                                       ptrdiff_t ldb, float *c, ptrdiff_t ldc, const float *beta,  \
                                       ptrdiff_t k, ptrdiff_t last) {                              \
        stored_tile(kind, a, lda, b, ldb, c, ldc, beta, k, last, 0, rows, vecs);                   \
    }
#define STORED_ROWS(name, kind, vecs)                                                              \
    STORED(name, kind, 1, vecs) STORED(name, kind, 2, vecs) STORED(name, kind, 3, vecs)            \
    STORED(name, kind, 4, vecs) STORED(name, kind, 5, vecs) STORED(name, kind, 6, vecs)
#define STORED_NAMES(name, vecs)                                                                   \
    {name##_1x##vecs, name##_2x##vecs, name##_3x##vecs,                                            \
     name##_4x##vecs, name##_5x##vecs, name##_6x##vecs}
#if VECS == 4
#define STORED_KIND(name, kind) STORED_ROWS(name, kind, 1) STORED_ROWS(name, kind, 4)
#define STORED_TABLE(name) {STORED_NAMES(name, 1), STORED_NAMES(name, 4)}
#else
#define STORED_KIND(name, kind) STORED_ROWS(name, kind, 1) STORED_ROWS(name, kind, 2)
#define STORED_TABLE(name) {STORED_NAMES(name, 1), STORED_NAMES(name, 2)}
#endif

#define STORAGE(NAME, ...) STORED_KIND(by_##NAME, QKV_##NAME)
#include "storage.def"
#undef STORAGE
/* by storage type, one vector or VECS of them, rows */
#define STORAGE(NAME, ...) [QKV_##NAME] = STORED_TABLE(by_##NAME),
static stored_fn *const stored[QKV_KINDS][2][ROWS] = {
#include "storage.def"
};
#undef STORAGE

static void product_stored(int kind, const float *a, ptrdiff_t lda, const void *b, ptrdiff_t ldb,
                           float *c, ptrdiff_t ldc, const float *beta, ptrdiff_t m, ptrdiff_t n,
                           ptrdiff_t k) {
    for (ptrdiff_t j = 0; j < n;) {
        int whole = n - j >= VECS * VL;
        ptrdiff_t cols = whole ? VECS * VL : MIN(VL, n - j);
        for (ptrdiff_t i = 0; i < m; i += ROWS)
            stored[kind][whole][MIN(ROWS, m - i) - 1](
                a + i * lda, lda, (const char *)b + qkv_bytes(kind, j), ldb, c + i * ldc + j, ldc,
                beta ? beta + i : NULL, k, whole ? VL : cols);
        j += cols;
    }
}

/* ---- few rows by a panel ---------------------------------------------------------------------- */

/* rows rows, in tiles as wide as the registers take; only the first one asks. */
static ALWAYS_INLINE void panel_rows(const int kind, const float *a, ptrdiff_t lda, const char *b,
                                     float *c, ptrdiff_t ldc, const float *beta, ptrdiff_t n,
                                     ptrdiff_t k, int asks, const int rows) {
    const int most = MIN(PANEL / VL, WIDE);
    const int vecs = rows == 4 ? MIN(most, VECS) : rows == 2 ? MIN(most, 4) : most;
    ptrdiff_t j = 0;
    for (; j + vecs * VL <= n; j += vecs * VL, asks = 0)
        stored_tile(kind, a, lda, b + qkv_bytes(kind, j), PANEL, c + j, ldc, beta, k, VL, asks,
                    rows, vecs);
    for (; j < n; j += VL, asks = 0)
        stored_tile(kind, a, lda, b + qkv_bytes(kind, j), PANEL, c + j, ldc, beta, k,
                    MIN(VL, n - j), asks, rows, 1);
}

static ALWAYS_INLINE void panel_of_kind(const int kind, const float *a, ptrdiff_t lda,
                                        const char *b, float *c, ptrdiff_t ldc, const float *beta,
                                        ptrdiff_t m, ptrdiff_t n, ptrdiff_t k) {
#define ROWS_FROM(i) a + (i)*lda, lda, b, c + (i)*ldc, ldc, beta ? beta + (i) : NULL, n, k, (i) == 0
    ptrdiff_t i = 0;
    for (; i + 4 <= m; i += 4) panel_rows(kind, ROWS_FROM(i), 4);
    for (; i + 2 <= m; i += 2) panel_rows(kind, ROWS_FROM(i), 2);
    if (i < m) panel_rows(kind, ROWS_FROM(i), 1);
#undef ROWS_FROM
}

static void product_panel(int kind, const float *a, ptrdiff_t lda, const void *b, float *c,
                          ptrdiff_t ldc, const float *beta, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k) {
    if (kind == QKV_FLOAT32) panel_of_kind(QKV_FLOAT32, a, lda, b, c, ldc, beta, m, n, k);
#define STORAGE(NAME, ...)                                                                         \
    if (kind == QKV_##NAME) panel_of_kind(QKV_##NAME, a, lda, b, c, ldc, beta, m, n, k);
#include "storage.def"
#undef STORAGE
}
