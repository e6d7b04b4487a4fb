/* The micro-kernels, written once in a small vector vocabulary.  The including file defines

     vec, VL                    a vector of VL floats
     ROWS, VECS                 the register tile of a product: ROWS rows by VECS vectors
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

   and then includes this file, which defines the table QKV_TABLE.  Arrays are documented in
   kernels.h.  Nothing here branches on a value except where a comment says why. */
#include "exp.h"

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define LINE 16 /* floats of a cache line */
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") /* before acc is given a place in memory: it needs none */
#define PREFETCH(p) __builtin_prefetch(p, 0, 2) /* into the second-level cache; never faults */
#else
#define ALWAYS_INLINE __forceinline
#define UNROLL
#define PREFETCH(p) ((void)0)
#endif

/* ---- product: c = a b (+ keep c) ------------------------------------------------------------- */

/* One register tile.  rows, vecs and partial are constants in every caller, so that the loops over
   them unroll and acc stays in registers; last is the number of columns of a partial last vector.
   Row t of next is prefetched while row t of b is read. */
static ALWAYS_INLINE void product_tile(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
                                       float *c, ptrdiff_t ldc, const float *keep, ptrdiff_t k,
                                       const float *next, ptrdiff_t ldn, ptrdiff_t last,
                                       const int rows, const int vecs, const int partial) {
    vec acc[ROWS][VECS], right[VECS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vecs; j++) acc[i][j] = v_zero();
    for (ptrdiff_t t = 0; t < k; t++) {
        UNROLL for (int j = 0; j < vecs - partial; j++) right[j] = v_load(b + t * ldb + j * VL);
        if (partial) right[vecs - 1] = v_load_n(b + t * ldb + (vecs - 1) * VL, last);
        if (next)
            UNROLL for (int j = 0; j < vecs * VL; j += LINE) PREFETCH(next + t * ldn + j);
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
                        ptrdiff_t ldc, const float *keep, ptrdiff_t k, const float *next,
                        ptrdiff_t ldn, ptrdiff_t last);

#define PRODUCT(rows, vecs)                                                                        \
    static void product_##rows##x##vecs(const float *a, ptrdiff_t lda, const float *b,             \
                                        ptrdiff_t ldb, float *c, ptrdiff_t ldc, const float *keep, \
                                        ptrdiff_t k, const float *next, ptrdiff_t ldn,             \
                                        ptrdiff_t last) {                                          \
        if (last < VL)                                                                             \
            product_tile(a, lda, b, ldb, c, ldc, keep, k, NULL, 0, last, rows, vecs, 1);           \
        else if (next)                                                                             \
            product_tile(a, lda, b, ldb, c, ldc, keep, k, next, ldn, last, rows, vecs, 0);         \
        else                                                                                       \
            product_tile(a, lda, b, ldb, c, ldc, keep, k, NULL, 0, last, rows, vecs, 0);           \
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

static void product(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                    ptrdiff_t ldc, const float *keep, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k,
                    const float *next, ptrdiff_t ldn) {
    for (ptrdiff_t j = 0; j < n; j += VECS * VL) {
        ptrdiff_t cols = MIN(VECS * VL, n - j), vecs = (cols + VL - 1) / VL;
        product_fn *const *by_rows = products[vecs - 1];
        for (ptrdiff_t i = 0; i < m; i += ROWS)
            by_rows[MIN(ROWS, m - i) - 1](a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc,
                                          keep ? keep + i : NULL, k, next ? next + j : NULL, ldn,
                                          cols - (vecs - 1) * VL);
    }
}

/* ---- dots: c = a b^T from rows of b ---------------------------------------------------------- */

/* rows rows of a with VL / rows rows of b make VL sums over lanes, added up in one tree.  filled of
   the rows of b are there; rows, and filled where the group is whole, are constants. */
static ALWAYS_INLINE void dots_group(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
                                     float *c, ptrdiff_t ldc, ptrdiff_t k, const float *next,
                                     ptrdiff_t ldn, const ptrdiff_t filled, const int rows) {
    const int keys = VL / rows;
    ptrdiff_t t = 0;
    float sums[VL];
    vec acc[VL];
    UNROLL for (int u = 0; u < VL; u++) acc[u] = v_zero();
    for (; t + VL <= k; t += VL) {
        UNROLL for (int u = 0; u < keys; u++) {
            vec x = v_load(b + MIN(u, filled - 1) * ldb + t);
            if (next && t % LINE == 0) PREFETCH(next + u * ldn + t);
            UNROLL for (int i = 0; i < rows; i++)
                acc[i * keys + u] = v_fma(v_load(a + i * lda + t), x, acc[i * keys + u]);
        }
    }
    if (t < k) {
        UNROLL for (int u = 0; u < keys; u++) {
            vec x = v_load_n(b + MIN(u, filled - 1) * ldb + t, k - t);
            UNROLL for (int i = 0; i < rows; i++)
                acc[i * keys + u] = v_fma(v_load_n(a + i * lda + t, k - t), x, acc[i * keys + u]);
        }
    }
    v_store(sums, v_sums(acc));
    UNROLL for (int i = 0; i < rows; i++)
        memcpy(c + i * ldc, sums + i * keys, (size_t)filled * sizeof *c);
}

static ALWAYS_INLINE void dots_rows(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb,
                                    float *c, ptrdiff_t ldc, ptrdiff_t n, ptrdiff_t k,
                                    const float *next, ptrdiff_t ldn, const int rows) {
    const int keys = VL / rows;
    ptrdiff_t j = 0;
    if (next)
        for (; j + keys <= n; j += keys)
            dots_group(a, lda, b + j * ldb, ldb, c + j, ldc, k, next + j * ldn, ldn, keys, rows);
    for (; j + keys <= n; j += keys)
        dots_group(a, lda, b + j * ldb, ldb, c + j, ldc, k, NULL, 0, keys, rows);
    if (j < n) dots_group(a, lda, b + j * ldb, ldb, c + j, ldc, k, NULL, 0, n - j, rows);
}

static void dots(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                 ptrdiff_t ldc, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k, const float *next,
                 ptrdiff_t ldn) {
#if VL >= 4
    for (; m >= 4; m -= 4, a += 4 * lda, c += 4 * ldc, next = NULL)
        dots_rows(a, lda, b, ldb, c, ldc, n, k, next, ldn, 4);
    for (; m >= 2; m -= 2, a += 2 * lda, c += 2 * ldc, next = NULL)
        dots_rows(a, lda, b, ldb, c, ldc, n, k, next, ldn, 2);
#endif
    for (; m >= 1; m -= 1, a += lda, c += ldc, next = NULL)
        dots_rows(a, lda, b, ldb, c, ldc, n, k, next, ldn, 1);
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

static ALWAYS_INLINE vec from_kind(const int kind, const uint16_t *p) {
    return kind == QKV_FLOAT16 ? v_from_half(p) : v_from_bfloat(p);
}

static ALWAYS_INLINE void widen_rows(const int kind, const uint16_t *x, ptrdiff_t ldx, float *y,
                                     ptrdiff_t m, ptrdiff_t n, const uint16_t *next,
                                     ptrdiff_t ldn) {
    const ptrdiff_t whole = n / VL * VL;
    const size_t rest = (size_t)(n - whole);
    for (ptrdiff_t i = 0; i < m; i++, x += ldx, y += n) {
        for (ptrdiff_t j = 0; j < whole; j += VL) {
            if (next && j % (2 * LINE) == 0) PREFETCH(next + i * ldn + j);
            v_store(y + j, from_kind(kind, x + j));
        }
        if (rest) {
            uint16_t edge[VL] = {0};
            memcpy(edge, x + whole, rest * sizeof *x);
            v_store_n(y + whole, from_kind(kind, edge), (ptrdiff_t)rest);
        }
    }
}

static void widen(int kind, const uint16_t *x, ptrdiff_t ldx, float *y, ptrdiff_t m, ptrdiff_t n,
                  const uint16_t *next, ptrdiff_t ldn) {
    if (kind == QKV_FLOAT16)
        widen_rows(QKV_FLOAT16, x, ldx, y, m, n, next, ldn);
    else
        widen_rows(QKV_BFLOAT16, x, ldx, y, m, n, next, ldn);
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
    QKV_NAME, ROWS,    product, dots,  pack,   softmax_tile, adjust_row, scaled,
    weights,  softmax, widen,   narrow, exp_of, tanh_of,
};
