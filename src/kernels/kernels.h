/* The contract between the Cython modules and the micro-kernels.

   One table of micro-kernels per instruction set, all instantiated from template.h.  A kernel knows
   no Python, no heads and no batches: it works on rows of floats.  Arrays are written as
   [rows, cols] stride, where the stride is the distance between rows in floats and columns are
   adjacent.  No kernel can fail or allocate, or read past the columns it is given but where it
   says so.

   Panels: a matrix that is read again and again as the right operand of a product is kept as
   panels of PANEL columns, each [depth, PANEL] PANEL, so that the product streams through it.
   Tiles: sums over keys, and over the inner dimension of a matmul, run over TILE terms from zero
   and are then added to the total, which bounds the rounding error at length. */
#ifndef QKV_KERNELS_H
#define QKV_KERNELS_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* setup.py takes flags for fast floating point out of what the user gives; what still arrives, by a
   wrapper of the compiler or a pragma, ends here. */
#if defined(__FAST_MATH__) || defined(_M_FP_FAST) || defined(__ASSOCIATIVE_MATH__) ||              \
        defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__) ||                            \
        (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "fast floating point (-ffast-math, /fp:fast or a part of it): masks and NaN would be wrong"
#endif

#if defined(__x86_64__) || defined(_M_X64)
#define QKV_X86_64 1
#include <xmmintrin.h>
#elif defined(__aarch64__) || defined(_M_ARM64)
#define QKV_ARM64 1
#endif

enum { PANEL = 64, TILE = 256, LANES = 16 /* the widest vector; every width divides it */ };
_Static_assert(TILE % PANEL == 0 && PANEL % LANES == 0, "tiles are whole panels of whole vectors");

/* How far a row's maximum may rise before the sums of earlier keys are corrected, since each
   correction rounds them.  What is subtracted from a score may be so much less than the maximum, and
   then the difference is rounded, by at most a unit. */
#define HARDLY_LARGER 4.0f

/* What sums of exp(score - before) are multiplied by to be sums of exp(score - after): rarely anything
   but 1, and then without an error of its own, since all of them have it in common. */
static inline float qkv_correction(float before, float after) {
    if (before == after) return 1.0f;
    return before == -INFINITY ? 0.0f : (float)exp((double)before - after);
}

/* How numbers are stored; everything is computed in float32. */
#define STORAGE(NAME, ...) QKV_##NAME,
enum {
    QKV_FLOAT32,
#include "storage.def"
    QKV_KINDS
};
#undef STORAGE

#define STORAGE(NAME, name, bits, scaled, ...) {name, bits, scaled},
typedef struct {
    const char *name;
    int bits, scaled;
} qkv_kind;
static const qkv_kind qkv_storage[] = {
        {"float32", 32, 0},
#include "storage.def"
};
#undef STORAGE

/* The bytes of n numbers of so many bits, which fill whole ones.  n bits / 8 would be divided in inner
   loops: Python's compilers let integers wrap (-fwrapv), so that 8 / 8 does not cancel. */
static inline ptrdiff_t qkv_bytes_of(int bits, ptrdiff_t n) {
    return bits < 8 ? n * bits / 8 : n * (bits / 8);
}

/* The same for a kind; and how many numbers are in them. */
static inline ptrdiff_t qkv_bytes(int kind, ptrdiff_t n) {
    return qkv_bytes_of(qkv_storage[kind].bits, n);
}
static inline ptrdiff_t qkv_numbers(int kind, ptrdiff_t bytes) {
    return bytes * 8 / qkv_storage[kind].bits;
}

/* Whether each row has a scale. */
static inline int qkv_scaled(int kind) { return qkv_storage[kind].scaled; }

/* Codes of what is not finite: whole numbers, so that sums over a tile tell how often each was met. */
enum { QKV_PLUS = 1, QKV_MINUS = 4096 };

/* What a score may go through beside the plain formula, in this order.  A row says which of them it
   has, so that what leaves other rows alone need not know every option. */
enum {
    QKV_SOFTCAP = 1,
    QKV_SLOPE = 2,
    QKV_BIAS = 4,
    QKV_KEEP = 8,
    QKV_SEGMENT = 16,
    QKV_BLOCKS = 32,
    QKV_EXCLUDES = QKV_BIAS | QKV_KEEP | QKV_SEGMENT | QKV_BLOCKS, /* that may deny the row a key */
};

/* What the masks of a row do to some keys: they leave one to be seen, and they change one, which they
   exclude or add something to. */
enum { QKV_ALLOWS = 1, QKV_CHANGES = 2 };

/* The rules that a query row obeys on its way through the key tiles. */
typedef struct {
    ptrdiff_t lo, hi; /* keys lo <= j < hi are allowed by order, window, length */
    int modifiers; /* QKV_SOFTCAP, ...: which of the fields below count */
    float softcap; /* the score becomes softcap tanh(score / softcap) */
    float slope; /* slope |position - j| is taken off the score */
    int mask_step; /* 1, or 0 where the mask is broadcast along the keys */
    ptrdiff_t position; /* of the query on the axis of the keys */
    const float *bias; /* float mask of the row, added to the score */
    const uint8_t *keep; /* bool mask of the row, true keeps the key */
    const int32_t *segments; /* of the keys: those of the row's own are kept */
    int32_t segment; /* of the row */
    const uint8_t *blocks; /* mask of blocks of so many keys, true keeps those of a block */
    ptrdiff_t block;
    float *scores; /* where the row's final scores are kept for the weights; or NULL */
} qkv_row;

/* What is applied to each number of a product: max(x, 0); x Phi(x), with Phi the normal distribution;
   the same by tanh, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); x / (1 + exp(-x)). */
enum { QKV_RELU = 1, QKV_GELU, QKV_GELU_TANH, QKV_SILU };

/* A layer norm of rows of n numbers, or an RMS norm where it is not centered. */
typedef struct {
    int kind; /* of the rows and the result: QKV_FLOAT32, QKV_FLOAT16 or QKV_BFLOAT16 */
    int centered;
    int streams; /* as in rotate_halves */
    ptrdiff_t n;
    const float *weight; /* [n] */
    const float *bias; /* [n] or NULL */
    double eps;
} qkv_norm;

enum { NORM_BLOCK = 1024 /* numbers that are added up in float32; their sums are, in double */ };

/* What a row is normed by: y = ((x scale - mean) factor + rest) weight + bias.  scale is a power of 2,
   which keeps squares within float32; rest is what the rounding of the mean leaves. */
typedef struct {
    float scale, mean, factor, rest;
    double sums[2]; /* of x scale - mean, and of its squares */
} qkv_norm_row;

/* With a scale, before the sums around 0. */
static inline void qkv_norm_start(qkv_norm_row *row, float scale) {
    row->scale = scale;
    row->mean = 0.0f;
    row->sums[0] = row->sums[1] = 0.0;
}

/* After the sums around 0, before those around the mean. */
static inline void qkv_norm_mean(qkv_norm_row *row, ptrdiff_t n) {
    row->mean = (float)(row->sums[0] / (double)n);
    row->sums[0] = row->sums[1] = 0.0;
}

/* After both: whether they tell the factor.  If not, all begins once more with another scale: 2^-80
   where sums are beyond float32 (a row with that scale holds what is not finite), 2^60 and then 2^120
   where squares may be below it, and neither eps nor a mean is so much larger that it is all one. */
static inline int qkv_norm_factor(qkv_norm_row *row, const qkv_norm *norm) {
    const double n = (double)norm->n, scale = row->scale, eps = norm->eps * scale * scale;
    const double rest = norm->centered ? row->sums[0] / n : 0.0;
    double variance = row->sums[1] / n - rest * rest, factor;
    if (!(fabs(variance) <= DBL_MAX)) {
        if (row->scale == 1.0f) {
            qkv_norm_start(row, 0x1p-80f);
            return 0;
        }
    } else if (variance < 0x1p-80 && eps < 0x1p-50 && fabsf(row->mean) < 0x1p-16f && scale >= 1.0 &&
               scale < 0x1p120) {
        qkv_norm_start(row, row->scale * 0x1p60f);
        return 0;
    }
    if (variance < 0.0) variance = 0.0; /* equal numbers, by rounding */
    factor = 1.0 / sqrt(variance + eps);
    row->factor = factor > FLT_MAX && factor <= DBL_MAX ? FLT_MAX : (float)factor;
    row->rest = norm->centered ? (float)(-rest * factor) : -0.0f;
    return 1;
}

/* Whether the masks of a row leave key j. */
static inline int qkv_is_kept(const qkv_row *row, ptrdiff_t j) {
    const int modifiers = row->modifiers;
    return !(modifiers & QKV_EXCLUDES) ||
           ((!(modifiers & QKV_KEEP) || row->keep[j * row->mask_step]) &&
            (!(modifiers & QKV_BIAS) || row->bias[j * row->mask_step] != -INFINITY) &&
            (!(modifiers & QKV_SEGMENT) || row->segments[j] == row->segment) &&
            (!(modifiers & QKV_BLOCKS) || row->blocks[j / row->block]));
}

typedef struct {
    const char *name;

    /* How many rows a product takes at a time; whole groups are the fastest. */
    ptrdiff_t rows;

    /* c[m, n] ldc = a[m, k] lda . b[k, n] ldb, plus beta[i] c[i, :] where beta is not NULL.
       Each element is one chain of k steps from zero (fused, but in scalar), whatever m, n and the
       position. */
    void (*product)(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                    ptrdiff_t ldc, const float *beta, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k);

    /* The same with b in storage, any but QKV_FLOAT32, and the very bits of a product with what
       widen makes of it.  b is read in whole vectors of LANES numbers, also where
       its last row ends. */
    void (*product_stored)(int kind, const float *a, ptrdiff_t lda, const void *b, ptrdiff_t ldb,
                           float *c, ptrdiff_t ldc, const float *beta, ptrdiff_t m, ptrdiff_t n,
                           ptrdiff_t k);

    /* The same for few rows of a and a panel b[k, PANEL] in any kind, that comes from memory: n <= PANEL.
       All of the panel is read. */
    void (*product_panel)(int kind, const float *a, ptrdiff_t lda, const void *b, float *c,
                          ptrdiff_t ldc, const float *beta, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k);

    /* c[m, n] ldc = a[m, k] lda . b[n, k] ldb transposed: dot products of rows, for the few
       queries of a decode step, where packing b would cost more than the product. */
    void (*dots)(const float *a, ptrdiff_t lda, const float *b, ptrdiff_t ldb, float *c,
                 ptrdiff_t ldc, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k);

    /* panel[k, PANEL] PANEL = b[n, k] ldb transposed, n <= PANEL; columns from n up to the next
       multiple of LANES become zero. */
    void (*pack)(const float *b, ptrdiff_t ldb, float *panel, ptrdiff_t n, ptrdiff_t k);

    /* One step of the online softmax over the tile s[m, n] lds of the keys first .. first + n - 1.
       Scores become exp(score - max) with max[i] the maximum of row i so far or up to HARDLY_LARGER
       less, which starts at -inf, and sum[i] their sum so far; factor[i] is what the row's earlier
       sums are to be multiplied by.  Excluded keys are selected away, never added.
       s is written up to the next multiple of LANES. */
    void (*softmax_tile)(float *s, ptrdiff_t lds, ptrdiff_t m, ptrdiff_t n, ptrdiff_t first,
                         const qkv_row *rows, float *max, float *sum, float *factor);

    /* QKV_ALLOWS, QKV_CHANGES or both, for the keys first .. first + n - 1 of a tile, n > 0, and a row
       that has some of QKV_EXCLUDES. */
    int (*look_at_mask)(const qkv_row *row, ptrdiff_t first, ptrdiff_t n);

    /* c[m, n] ldc = activation(c + bias[n]) + residual[m, n] ldr, the end of a product: activation is 0 or
       one of QKV_RELU, ..., and bias or residual may be NULL. */
    void (*epilogue)(float *c, ptrdiff_t ldc, const float *bias, int activation,
                     const float *residual, ptrdiff_t ldr, ptrdiff_t m, ptrdiff_t n);

    /* What a row's options make of the scores s[n] of the keys first .. first + n - 1: the first step
       of softmax_tile alone.  s is read and written up to the next multiple of LANES. */
    void (*adjust)(float *s, ptrdiff_t n, ptrdiff_t first, const qkv_row *row);

    /* y[m, n] ldy = factor[i] x[m, n] ldx; returns whether all of y is finite.  A negative zero
       becomes zero. */
    int (*scale_rows)(const float *x, ptrdiff_t ldx, const float *factor, float *y, ptrdiff_t ldy,
                      ptrdiff_t m, ptrdiff_t n);

    /* The finite entries of x[m, n] ldx as finite[m, n] n, 0 in the place of others, and what the others
       are as code[m, n] n: 0 finite, QKV_PLUS infinity, QKV_MINUS -infinity, both together NaN.
       Returns whether all of x is finite.  finite may be x; code may be NULL, or both of them. */
    int (*split_finite)(const float *x, ptrdiff_t ldx, float *finite, float *code, ptrdiff_t m,
                        ptrdiff_t n);

    /* y[n] = factor exp(x[n] - max). */
    void (*weights)(const float *x, float max, float factor, float *y, ptrdiff_t n);

    /* The maximum of x[n], and y[n] = exp(x[n] - max) with its sum: pieces of a softmax.  Where x holds
       a NaN, or nothing but -inf, the sum is NaN. */
    float (*largest)(const float *x, ptrdiff_t n);
    float (*exp_and_sum)(const float *x, float max, float *y, ptrdiff_t n);

    /* y[n] = softmax(x[n]): the plain formula, NaN where it is NaN. */
    void (*softmax)(const float *x, float *y, ptrdiff_t n);

    /* y[m, n] n = x[m, n] ldx, from any kind of storage but QKV_FLOAT32. */
    void (*widen)(int kind, const void *x, ptrdiff_t ldx, float *y, ptrdiff_t m, ptrdiff_t n);

    /* s[m, n] lds *= factor[n], the scales of int8 keys or values.  s and factor are read, and s is
       written, up to the next multiple of LANES. */
    void (*scale_columns)(float *s, ptrdiff_t lds, ptrdiff_t m, ptrdiff_t n, const float *factor);

    /* y[n] = x[n] the other way, to the nearest, ties to even; to one that has no scales. */
    void (*narrow)(int kind, const float *x, uint16_t *y, ptrdiff_t n);

    /* y[n] = x[n] / scale to the nearest integer, ties to even, which is never beyond 127.  Returns the
       scale, max |x| / 127; 0 for a row of zeros, and NaN, with a y of zeros, where x is not finite. */
    float (*to_int8)(const float *x, int8_t *y, ptrdiff_t n);

    /* Pairs (a[n], b[n]) rotated: first = a cos - b sin, second = b cos + a sin, each product and sum
       rounded by itself.  Where pairs are neighbours, x[2 n] is a and b in turn, and so is y.  All but
       the tables is of QKV_FLOAT32, QKV_FLOAT16 or QKV_BFLOAT16, and rounded to that once.  The result
       may lie where what it is made of lies.
       streams: of float32 results aligned to 16 bytes, past the caches; then qkv_stream_end is called
       before another thread reads them. */
    void (*rotate_halves)(int kind, const void *a, const void *b, const float *cosines,
                          const float *sines, void *first, void *second, ptrdiff_t n, int streams);
    void (*rotate_pairs)(int kind, const void *x, const float *cosines, const float *sines, void *y,
                         ptrdiff_t n, int streams);

    /* The logarithms s[m, n] lds of m parts become their weights exp(s - lse), with the merged logarithm
       lse[n]; a part that is -inf gets the weight -1, and nothing but such parts the lse -inf.  s is
       read, and s and lse are written, up to the next multiple of LANES. */
    void (*merge_weights)(float *s, ptrdiff_t lds, ptrdiff_t m, ptrdiff_t n, float *lse);

    /* y[rows, n] ldy = sum over i of weight[i, rows] ldw x[i][rows, n] ldx[i], from the first of m parts
       to the last; one whose weight is less than 0 is left out, whatever it holds.  x and y are of
       QKV_FLOAT32, QKV_FLOAT16 or QKV_BFLOAT16, and their strides in bytes.  large: no cache holds x,
       so that later rows are asked for. */
    void (*merge_rows)(int kind, const char *const *x, const ptrdiff_t *ldx, const float *weight,
                       ptrdiff_t ldw, ptrdiff_t m, char *y, ptrdiff_t ldy, ptrdiff_t rows,
                       ptrdiff_t n, int large);

    /* y[m, n] ldy = the norm of the rows x[m, n] ldx, strides in bytes; y may be x. */
    void (*norm)(const qkv_norm *norm, const char *x, ptrdiff_t ldx, char *y, ptrdiff_t ldy,
                 ptrdiff_t m);

    /* The same in pieces, of a long row: sums of numbers x[n] are added to those of the row, and then the
       numbers x[n] from column first on are normed.  But for the last, pieces are of whole blocks. */
    void (*norm_sums)(int kind, const void *x, ptrdiff_t n, qkv_norm_row *row);
    void (*norm_apply)(const qkv_norm *norm, const qkv_norm_row *row, const void *x, void *y,
                       ptrdiff_t first, ptrdiff_t n);

    /* y[n] = exp(x[n]), where x <= 43, and tanh(x[n]), for tests of the polynomials. */
    void (*exp)(const float *x, float *y, ptrdiff_t n);
    void (*tanh)(const float *x, float *y, ptrdiff_t n);
} qkv_kernels;

/* The largest magnitude of x[n]; NaN counts as larger than all. */
static inline float qkv_magnitude(const float *x, ptrdiff_t n) {
    uint32_t largest = 0, bits;
    float magnitude;
    for (ptrdiff_t j = 0; j < n; j++) {
        memcpy(&bits, x + j, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    memcpy(&magnitude, &largest, sizeof magnitude);
    return magnitude;
}

/* Ask for the cache line at p, into the caches from that level on (3 is the first); never faults. */
#if defined(__GNUC__)
#define QKV_PREFETCH(p, level) __builtin_prefetch(p, 0, level)
#else
#define QKV_PREFETCH(p, level) ((void)(p))
#endif

/* Ask for the cache lines of n bytes, into the second-level cache. */
static inline void qkv_prefetch(const char *p, ptrdiff_t n) {
#if defined(__GNUC__)
    __asm__ volatile(""); /* or gcc takes this for a function without effect, and drops it */
#endif
    for (ptrdiff_t i = 0; i < n; i += 64) QKV_PREFETCH(p + i, 2);
}

enum { MASK_AHEAD = 8 /* rows from the one that is looked at to the one that is asked for */ };

/* The masks of a row for the keys first .. first + n - 1: rows of a mask lie far apart, and nobody else
   sees that the next one will be wanted. */
static inline void qkv_prefetch_mask(const qkv_row *row, ptrdiff_t first, ptrdiff_t n) {
    if (!row->mask_step) return;
    if (row->modifiers & QKV_KEEP) qkv_prefetch((const char *)(row->keep + first), n);
    if (row->modifiers & QKV_BIAS) qkv_prefetch((const char *)(row->bias + first), 4 * n);
}

/* Other threads see what was streamed before they see what is written afterwards. */
static inline void qkv_stream_end(void) {
#if QKV_X86_64
    _mm_sfence();
#endif
}

/* The tables of this build, slowest first.  A name is runnable where CPU and OS support it. */
extern const qkv_kernels *const qkv_tables[];
extern const int qkv_table_count;
int qkv_runnable(const char *name);

/* The compiler that built this, for show_config(). */
extern const char qkv_compiler[];

#endif
