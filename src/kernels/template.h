/* The micro-kernels, written once in a small vector vocabulary.  The including file defines

     vec, VL                    a vector of VL floats
     ROWS, VECS                 the register tile of a product: ROWS rows by VECS vectors
     V_REGISTERS                the letter of inline assembly for a register that holds a vector
     THIN_ROWS                  how many rows by WIDE vectors the registers hold, 1 or 2
     v_zero v_set1              constants
     v_load v_store             VL floats, any alignment
     v_load_n v_store_n         the first n floats, 0 <= n <= VL; other lanes are zero, untouched
     v_add v_sub v_mul v_div v_abs   lane by lane
     v_max(a, b)                b where either is a NaN, or a NaN
     v_pick(a, b, x, y)         x where a < b, else y
     v_fma(a, b, c)             a b + c, and v_fnma: c - a b
     v_ldexp(p, n)              p 2^n with one rounding
     v_keep(s, bytes)           s where the byte is not 0, else -inf
     v_bias(s, b)               s + b, but -inf where b is -inf, whatever s is
     v_sum v_largest            over the lanes
     v_transpose(vec *)         VL vectors in place
     v_sums v_maxima(vec *)     lane i is the sum, or the largest, over the lanes of vector i
     v_from_half v_from_bfloat  VL floats of 16-bit numbers; v_to_half v_to_bfloat the other way
     v_from_int8                VL floats of 8-bit integers

   and then includes this file, which defines the table QKV_TABLE.  Arrays are documented in
   kernels.h.  Nothing here branches on a value except where a comment says why. */
#include "exp.h"

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

enum {
    FEW = 8,             /* rows of a up to here: what a product waits for are the rows of b */
    WIDE = 8,            /* vectors of their tile */
    LONG_COLUMNS = 4096, /* sums of a long row at most: half of the first-level cache */
};

#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") /* before acc is given a place in memory: it needs none */
#else
#define ALWAYS_INLINE __forceinline
#define UNROLL
#endif
#if defined(V_REGISTERS) && defined(__GNUC__)
#define IN_REGISTER(x) __asm__("" : "+" V_REGISTERS(x)) /* loaded once, not with each use */
#else
#define IN_REGISTER(x) ((void)0)
#endif

/* ---- product: c = a b (+ keep c) ------------------------------------------------------------- */

/* One register tile.  rows, vecs and partial are constants in every caller, so that the loops over
   them unroll and acc stays in registers; last is the number of columns of a partial last vector. */
static ALWAYS_INLINE void product_tile(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
                                       float *c, ptrdiff_t ldc, const float *keep, ptrdiff_t k,
                                       ptrdiff_t last, const int rows, const int vecs,
                                       const int partial) {
    vec acc[ROWS][VECS], right[VECS];
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
            if (keep) {
                vec old = short_one ? v_load_n(to, last) : v_load(to);
                value = v_fma(v_set1(keep[i]), old, value);
            }
            if (short_one)
                v_store_n(to, value, last);
            else
                v_store(to, value);
        }
    }
}

typedef void product_fn(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                        ptrdiff_t ldc, const float *keep, ptrdiff_t k, ptrdiff_t last);

#define PRODUCT(rows, vecs)                                                                        \
    static void product_##rows##x##vecs(const float *a, ptrdiff_t lda, const float *b,             \
                                        ptrdiff_t ldb, float *c, ptrdiff_t ldc, const float *keep, \
                                        ptrdiff_t k, ptrdiff_t last) {                             \
        if (last < VL)                                                                             \
            product_tile(a, lda, b, ldb, c, ldc, keep, k, last, rows, vecs, 1);                    \
        else                                                                                       \
            product_tile(a, lda, b, ldb, c, ldc, keep, k, last, rows, vecs, 0);                    \
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
static ALWAYS_INLINE void thin_tile(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
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

/* c = sums + keep c for one row of a product. */
static void settle(const float *sums, float *c, const float *keep, ptrdiff_t n) {
    ptrdiff_t j = 0;
    if (!keep) {
        memcpy(c, sums, (size_t)n * sizeof *c);
        return;
    }
    vec factor = v_set1(*keep);
    for (; j + VL <= n; j += VL) v_store(c + j, v_fma(factor, v_load(c + j), v_load(sums + j)));
    if (j < n)
        v_store_n(c + j, v_fma(factor, v_load_n(c + j, n - j), v_load_n(sums + j, n - j)), n - j);
}

/* A few rows by WIDE vectors.  The rows of b come from memory one after the other, which is what
   the hardware prefetches best; more rows of a than THIN_ROWS see them again in the first-level
   cache, a few rows of b at a time. */
static void product_thin(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                         ptrdiff_t ldc, const float *keep, ptrdiff_t m, ptrdiff_t k) {
    enum { AT_A_TIME = 16 };
    _Alignas(64) float sums[FEW][WIDE * VL];
    for (ptrdiff_t t = 0; t < k; t += AT_A_TIME) {
        ptrdiff_t depth = m <= THIN_ROWS ? k : MIN(AT_A_TIME, k - t), i = 0;
        if (THIN_ROWS == 2)
            for (; i + 2 <= m; i += 2)
                thin_tile(a + i * lda + t, lda, b + t * ldb, ldb, sums[i], depth, t == 0, 2);
        for (; i < m; i++)
            thin_tile(a + i * lda + t, lda, b + t * ldb, ldb, sums[i], depth, t == 0, 1);
        if (m <= THIN_ROWS) break;
    }
    if (k <= 0) memset(sums, 0, sizeof sums);
    for (ptrdiff_t i = 0; i < m; i++) settle(sums[i], c + i * ldc, keep ? keep + i : NULL, WIDE * VL);
}

/* One long row: eight rows of b, each read from end to end, are added to sums in the first-level
   cache. */
static void product_long(const float *a, const float *b, ptrdiff_t ldb, float *c,
                         const float *keep, ptrdiff_t n, ptrdiff_t k) {
    _Alignas(64) float sums[LONG_COLUMNS];
    ptrdiff_t t = 0;
    memset(sums, 0, (size_t)n * sizeof *sums);
    for (; t + 8 <= k; t += 8) {
        const float *rows = b + t * ldb;
        vec left[8];
        UNROLL for (int u = 0; u < 8; u++) left[u] = v_set1(a[t + u]);
        for (ptrdiff_t j = 0; j < n; j += VL) {
            vec sum = v_load(sums + j);
            UNROLL for (int u = 0; u < 8; u++) sum = v_fma(left[u], v_load(rows + u * ldb + j), sum);
            v_store(sums + j, sum);
        }
    }
    for (; t < k; t++) {
        vec left = v_set1(a[t]);
        for (ptrdiff_t j = 0; j < n; j += VL)
            v_store(sums + j, v_fma(left, v_load(b + t * ldb + j), v_load(sums + j)));
    }
    settle(sums, c, keep, n);
}

static void product(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                    ptrdiff_t ldc, const float *keep, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k) {
    ptrdiff_t j = 0;
    if (m <= FEW && n > VECS * VL) {
        for (; m == 1 && n - j >= LONG_COLUMNS / 16;) {
            ptrdiff_t cols = MIN(LONG_COLUMNS, (n - j) / VL * VL);
            product_long(a, b + j, ldb, c + j, keep, cols, k);
            j += cols;
        }
        for (; j + WIDE * VL <= n; j += WIDE * VL)
            product_thin(a, lda, b + j, ldb, c + j, ldc, keep, m, k);
    }
    for (; j < n; j += VECS * VL) {
        ptrdiff_t cols = MIN(VECS * VL, n - j), vecs = (cols + VL - 1) / VL;
        product_fn *const *by_rows = products[vecs - 1];
        for (ptrdiff_t i = 0; i < m; i += ROWS)
            by_rows[MIN(ROWS, m - i) - 1](a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc,
                                          keep ? keep + i : NULL, k, cols - (vecs - 1) * VL);
    }
}

/* ---- storage types ---------------------------------------------------------------------------- */

/* VL numbers of a storage type from place i on; kind is a constant in every caller. */
static ALWAYS_INLINE vec v_stored(const int kind, const void *x, ptrdiff_t i) {
    if (kind == QKV_FLOAT16) return v_from_half((const uint16_t *)x + i);
    if (kind == QKV_BFLOAT16) return v_from_bfloat((const uint16_t *)x + i);
    return v_from_int8((const int8_t *)x + i);
}

/* product_tile with b in storage: the same operations on the same numbers. */
static ALWAYS_INLINE void stored_tile(const int kind, const float *a, ptrdiff_t lda, const void *b,
                                      ptrdiff_t ldb, float *c, ptrdiff_t ldc, const float *keep,
                                      ptrdiff_t k, ptrdiff_t last, const int rows, const int vecs) {
    vec acc[ROWS][VECS], right[VECS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vecs; j++) acc[i][j] = v_zero();
    for (ptrdiff_t t = 0; t < k; t++) {
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
            if (keep) value = v_fma(v_set1(keep[i]), v_load_n(to, cols), value);
            v_store_n(to, value, cols);
        }
}

typedef void stored_fn(const float *a, ptrdiff_t lda, const void *b, ptrdiff_t ldb, float *c,
                       ptrdiff_t ldc, const float *keep, ptrdiff_t k, ptrdiff_t last);

#define STORED(name, kind, rows, vecs)                                                             \
    static void name##_##rows##x##vecs(const float *a, ptrdiff_t lda, const void *b,               \
                                       ptrdiff_t ldb, float *c, ptrdiff_t ldc, const float *keep,  \
                                       ptrdiff_t k, ptrdiff_t last) {                              \
        stored_tile(kind, a, lda, b, ldb, c, ldc, keep, k, last, rows, vecs);                      \
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

STORED_KIND(half, QKV_FLOAT16)
STORED_KIND(bfloat, QKV_BFLOAT16)
STORED_KIND(int8, QKV_INT8)
/* by storage type, one vector or VECS of them, rows */
static stored_fn *const stored[3][2][ROWS] = {STORED_TABLE(half), STORED_TABLE(bfloat),
                                              STORED_TABLE(int8)};

static void product_stored(int kind, const float *a, ptrdiff_t lda, const void *b, ptrdiff_t ldb,
                           float *c, ptrdiff_t ldc, const float *keep, ptrdiff_t m, ptrdiff_t n,
                           ptrdiff_t k) {
    const ptrdiff_t size = kind == QKV_INT8 ? 1 : 2;
    for (ptrdiff_t j = 0; j < n;) {
        int whole = n - j >= VECS * VL;
        ptrdiff_t cols = whole ? VECS * VL : MIN(VL, n - j);
        for (ptrdiff_t i = 0; i < m; i += ROWS)
            stored[kind - QKV_FLOAT16][whole][MIN(ROWS, m - i) - 1](
                a + i * lda, lda, (const char *)b + j * size, ldb, c + i * ldc + j, ldc,
                keep ? keep + i : NULL, k, whole ? VL : cols);
        j += cols;
    }
}

/* ---- dots: c = a b^T from rows of b ---------------------------------------------------------- */

#if VL >= 4
/* sums[i][p] += a[i] b[p] lane by lane, for a pair of rows of b.  Eight vectors of the first one are
   held in registers until the second one is read: each row is read from end to end, which is what
   the hardware prefetches best, and each vector of a serves both. */
static ALWAYS_INLINE void dots_pair(const float *a, ptrdiff_t lda, const float *b0, const float *b1,
                                    vec sums[4][2], ptrdiff_t k, const int rows) {
    enum { HELD = 8 };
    ptrdiff_t t = 0;
    vec held[HELD], x, left;
    for (; t + HELD * VL <= k; t += HELD * VL) {
        UNROLL for (int v = 0; v < HELD; v++) held[v] = v_load(b0 + t + v * VL);
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
    v_store(sums, v_sums(acc));
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

/* ---- softmax ---------------------------------------------------------------------------------- */

/* The largest of each lane; v_largest or v_maxima of it is the row's. */
static ALWAYS_INLINE vec lane_maxima(const float *s, ptrdiff_t whole) {
    vec a = v_set1(-INFINITY), b = a;
    ptrdiff_t j = 0;
    for (; j + 2 * VL <= whole; j += 2 * VL) {
        a = v_max(a, v_load(s + j));
        b = v_max(b, v_load(s + j + VL));
    }
    if (j < whole) a = v_max(a, v_load(s + j));
    return v_max(a, b);
}

/* y = exp(x - max); returns the sum of each lane.  Which of the two sums a lane goes to depends on
   its place in the tile alone, so that excluded keys at the end, which add zeros, change no bit. */
static ALWAYS_INLINE vec exp_and_sums(const float *x, float *y, float max, ptrdiff_t whole) {
    vec a = v_zero(), b = v_zero(), top = v_set1(max);
    ptrdiff_t j = 0;
    for (; j + 2 * VL <= whole; j += 2 * VL) {
        vec even = v_exp(v_sub(v_load(x + j), top)), odd = v_exp(v_sub(v_load(x + j + VL), top));
        v_store(y + j, even);
        v_store(y + j + VL, odd);
        a = v_add(a, even);
        b = v_add(b, odd);
    }
    if (j < whole) {
        vec even = v_exp(v_sub(v_load(x + j), top));
        v_store(y + j, even);
        a = v_add(a, even);
    }
    return v_add(a, b);
}

/* What a score goes through beside the plain formula: softcap, ALiBi, float mask, bool mask.  Masks
   are not read past column n. */
static void adjust_row(float *s, ptrdiff_t n, ptrdiff_t first, const qkv_row *row) {
    const ptrdiff_t step = row->mask_step;
    float lanes[VL];
    for (int u = 0; u < VL; u++) lanes[u] = (float)u;
    for (ptrdiff_t j = 0; j < n; j += VL) {
        ptrdiff_t filled = MIN(VL, n - j);
        vec x = v_load(s + j);
        if (row->softcap != 0.0f) {
            vec cap = v_set1(row->softcap);
            x = v_mul(cap, v_tanh(v_div(x, cap)));
        }
        if (row->slope != 0.0f) {
            vec distance = v_sub(v_set1((float)(row->position - first - j)), v_load(lanes));
            x = v_fnma(v_set1(row->slope), v_abs(distance), x);
        }
        if (row->bias) {
            const float *bias = row->bias + (first + j) * step;
            x = v_bias(x, step ? v_load_n(bias, filled) : v_set1(*bias));
        }
        if (row->keep) {
            const uint8_t *keep = row->keep + (first + j) * step;
            uint8_t edge[VL] = {0};
            if (!step || filled < VL) {
                for (ptrdiff_t u = 0; u < filled; u++) edge[u] = keep[u * step];
                keep = edge;
            }
            x = v_keep(x, keep);
        }
        v_store(s + j, x);
    }
}

/* Up to VL rows at a time: their maxima and sums over the lanes are found in one tree each, and
   what follows from them is computed a row per lane. */
static void softmax_tile(float *s, ptrdiff_t lds, ptrdiff_t m, ptrdiff_t n, ptrdiff_t first,
                         const qkv_row *rows, float *max, float *sum, float *factor) {
    const ptrdiff_t whole = ROUND_UP(n, VL);
    for (ptrdiff_t i = 0; i < m; i += VL, s += VL * lds) {
        const ptrdiff_t filled = MIN(VL, m - i);
        float base[VL];
        vec lanes[VL];

        /* 1. scores: what the options add, then -inf wherever no key is allowed; their maximum */
        for (ptrdiff_t u = 0; u < VL; u++) lanes[u] = v_zero();
        for (ptrdiff_t u = 0; u < filled; u++) {
            const qkv_row *row = rows + i + u;
            float *scores = s + u * lds;
            ptrdiff_t lo = MIN(MAX(row->lo - first, 0), n), hi = MIN(MAX(row->hi - first, lo), n);
            if (row->softcap != 0.0f || row->slope != 0.0f || row->bias || row->keep)
                adjust_row(scores, n, first, row);
            for (ptrdiff_t j = 0; j < lo; j++) scores[j] = -INFINITY;
            for (ptrdiff_t j = hi; j < whole; j++) scores[j] = -INFINITY;
            if (row->scores) memcpy(row->scores + first, scores, (size_t)n * sizeof *scores);
            lanes[u] = lane_maxima(scores, whole);
        }

        /* 2. the maximum so far; a row with no key yet subtracts 0, so that exp gives zeros */
        vec before = v_load_n(max + i, filled), top = v_max(v_maxima(lanes), before);
        vec shift = v_pick(v_set1(-INFINITY), top, top, v_zero());
        v_store(base, shift);
        v_store_n(max + i, top, filled);

        /* 3. weights, their sum, and the correction of what came before */
        for (ptrdiff_t u = 0; u < filled; u++)
            lanes[u] = exp_and_sums(s + u * lds, s + u * lds, base[u], whole);
        vec correction = v_exp(v_sub(before, shift));
        v_store_n(factor + i, correction, filled);
        v_store_n(sum + i, v_add(v_mul(v_load_n(sum + i, filled), correction), v_sums(lanes)),
                  filled);
    }
}

static void softmax(const float *x, float *y, ptrdiff_t n) {
    const ptrdiff_t whole = n / VL * VL;
    const size_t rest = (size_t)(n - whole) * sizeof *x;
    float edge[VL];
    for (int u = 0; u < VL; u++) edge[u] = -INFINITY;
    memcpy(edge, x + whole, rest);
    float max = v_largest(v_max(lane_maxima(x, whole), v_load(edge)));
    float sum = v_sum(v_add(exp_and_sums(x, y, max, whole), exp_and_sums(edge, edge, max, VL)));
    memcpy(y + whole, edge, rest);
    vec inverse = v_set1(1.0f / sum);
    for (ptrdiff_t j = 0; j < whole; j += VL) v_store(y + j, v_mul(v_load(y + j), inverse));
    for (ptrdiff_t j = whole; j < n; j++) y[j] *= 1.0f / sum;
}

/* ---- rows -------------------------------------------------------------------------------------- */

static int scaled(const float *x, ptrdiff_t ldx, const float *factor, float *y, ptrdiff_t ldy,
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
    return v_sum(check) == 0.0f;
}

static void weights(const float *x, float max, float factor, float *y, ptrdiff_t n) {
    vec top = v_set1(max), f = v_set1(factor);
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) v_store(y + j, v_mul(f, v_exp(v_sub(v_load(x + j), top))));
    if (j < n) v_store_n(y + j, v_mul(f, v_exp(v_sub(v_load_n(x + j, n - j), top))), n - j);
}

static ALWAYS_INLINE void widen_rows(const int kind, const size_t size, const void *x,
                                     ptrdiff_t ldx, float *y, ptrdiff_t m, ptrdiff_t n) {
    const ptrdiff_t whole = n / VL * VL;
    const size_t rest = (size_t)(n - whole);
    for (ptrdiff_t i = 0; i < m; i++, y += n) {
        const char *row = (const char *)x + i * ldx * (ptrdiff_t)size;
        for (ptrdiff_t j = 0; j < whole; j += VL) v_store(y + j, v_stored(kind, row, j));
        if (rest) {
            uint16_t edge[VL] = {0};
            memcpy(edge, row + (size_t)whole * size, rest * size);
            v_store_n(y + whole, v_stored(kind, edge, 0), (ptrdiff_t)rest);
        }
    }
}

static void widen(int kind, const void *x, ptrdiff_t ldx, float *y, ptrdiff_t m, ptrdiff_t n) {
    if (kind == QKV_FLOAT16)
        widen_rows(QKV_FLOAT16, 2, x, ldx, y, m, n);
    else if (kind == QKV_BFLOAT16)
        widen_rows(QKV_BFLOAT16, 2, x, ldx, y, m, n);
    else
        widen_rows(QKV_INT8, 1, x, ldx, y, m, n);
}

static void times(float *s, ptrdiff_t lds, ptrdiff_t m, ptrdiff_t n, const float *factor) {
    for (ptrdiff_t i = 0; i < m; i++, s += lds)
        for (ptrdiff_t j = 0; j < n; j += VL) v_store(s + j, v_mul(v_load(s + j), v_load(factor + j)));
}

static void narrow(int kind, const float *x, uint16_t *y, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; j += VL) {
        uint16_t edge[VL];
        vec value = v_load_n(x + j, MIN(VL, n - j));
        if (kind == QKV_FLOAT16)
            v_to_half(edge, value);
        else
            v_to_bfloat(edge, value);
        memcpy(y + j, edge, (size_t)MIN(VL, n - j) * sizeof *y);
    }
}

static void tanh_of(const float *x, float *y, ptrdiff_t n) {
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) v_store(y + j, v_tanh(v_load(x + j)));
    if (j < n) v_store_n(y + j, v_tanh(v_load_n(x + j, n - j)), n - j);
}

static void exp_of(const float *x, float *y, ptrdiff_t n) {
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) v_store(y + j, v_exp(v_load(x + j)));
    if (j < n) v_store_n(y + j, v_exp(v_load_n(x + j, n - j)), n - j);
}

const qkv_kernels QKV_TABLE = {
    QKV_NAME, ROWS,    product, product_stored, dots,  pack,   softmax_tile, adjust_row, scaled,
    weights,  softmax, widen,   times,          narrow, exp_of, tanh_of,
};
