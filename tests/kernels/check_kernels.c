/* Every micro-kernel against the scalar one.  A new kernel is one function and one line in the
   table at the end, which does not compile while a kernel of qkv_kernels is missing from it.

   Copies, conversions and sums of small integers are exact, so their bits are compared.  Where two
   tables may round differently, the tolerance is the sum of both bounds: a chain of k products and
   sums of x y is off by at most k + 1 units of sum |x y|; exp and tanh by what exp.h states. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- products -------------------------------------------------------------------------------- */

/* sum |a b| over k of element (i, j); b's elements lie step apart, and its columns ldb. */
static double magnitude(const float *a, const float *b, ptrdiff_t step, ptrdiff_t k) {
    double sum = 0.0;
    for (ptrdiff_t t = 0; t < k; t++) sum += fabs((double)a[t] * b[t * step]);
    return sum;
}

static void check_product(isa *ops, isa *scalar) {
    ptrdiff_t m = size_between(1, 20), n = size_between(1, 140), k = size_between(0, 280);
    if (one_in(6)) m = 1, n = size_between(100, 1500), k = size_between(0, 160); /* a long row */
    ptrdiff_t lda = k + between(0, 9), ldb = n + between(0, 20), ldc = n + between(0, 20);
    enum kind kind = random_bits() % KINDS;
    float *a = floats(m, k, lda), *b = floats(k, n, ldb), *beta = floats(1, m, m), *c, *expected;
    fill(a, m, k, lda, kind == TINY ? PLAIN : kind);
    fill(b, k, n, ldb, kind);
    c = floats(m, n, ldc);
    fill(c, m, n, ldc, INTEGERS);
    fill(beta, 1, m, m, kind == PLAIN ? PLAIN : INTEGERS);
    if (one_in(2)) beta = NULL; /* and then c may hold anything */
    if (!beta) fill(c, m, n, ldc, SPECIAL);
    expected = copy_of(c, m, n, ldc);
    float *before = copy_of(c, m, n, ldc), *part = floats(m, n, ldc);

    scalar->product(a, lda, b, ldb, expected, ldc, beta, m, n, k);
    ops->product(a, lda, b, ldb, c, ldc, beta, m, n, k);
    check_gaps(c, before, m, n, ldc);
    for (ptrdiff_t i = 0; i < m; i++) {
        for (ptrdiff_t j = 0; j < n; j++) {
            double by = 0.0;
            if (kind == PLAIN || kind == TINY) {
                by = magnitude(a + i * lda, b + j, ldb, k);
                if (beta) by += fabs((double)beta[i] * before[i * ldc + j]);
                by = 2 * (double)(k + 2) * (UNIT * by + LEAST);
            }
            if (!close_to(c[i * ldc + j], expected[i * ldc + j], by))
                fail("c[%td, %td] is %a, not %a: m %td n %td k %td", i, j, c[i * ldc + j],
                     expected[i * ldc + j], m, n, k);
        }
    }

    /* the bits of an element depend on its own row and column alone */
    ptrdiff_t i = between(0, m - 1), j = between(0, n - 1);
    ptrdiff_t rows = between(1, m - i), cols = between(1, n - j);
    if (beta) memcpy(part, before, (size_t)((m - 1) * ldc + n) * sizeof *part);
    ops->product(a + i * lda, lda, b + j, ldb, part + i * ldc + j, ldc, beta ? beta + i : NULL,
                 rows, cols, k);
    for (ptrdiff_t r = i; r < i + rows; r++)
        for (ptrdiff_t s = j; s < j + cols; s++)
            if (!same(part[r * ldc + s], c[r * ldc + s]))
                fail("c[%td, %td] depends on its place", r, s);
}

/* Storage types by kind, those of storage.def. */
static int any_storage(void) { return (int)between(QKV_FLOAT32 + 1, QKV_KINDS - 1); }

/* Any bits in [rows, cols] ld, read in whole vectors of LANES also where the last row ends. */
static void *any_stored(int kind, ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t ld) {
    size_t bytes = rows ? (size_t)qkv_bytes(kind, (rows - 1) * ld + lanes_up(cols)) : 0;
    unsigned char *x = array(bytes);
    for (size_t i = 0; i < bytes; i++) x[i] = (unsigned char)random_bits();
    return x;
}

/* The bits of a product with what widen makes of b; a panel may be of floats, too. */
static void check_storage(isa *ops, int panel) {
    ptrdiff_t m = size_between(1, 9), n = size_between(1, panel ? PANEL : 70);
    ptrdiff_t k = size_between(0, 260), lda = k + between(0, 9), ldc = n + between(0, 20);
    ptrdiff_t ldb = panel ? PANEL : n + between(0, 20), cols = panel ? PANEL : n;
    int kind = panel ? (int)between(QKV_FLOAT32, QKV_KINDS - 1) : any_storage();
    float *a = floats(m, k, lda), *beta = floats(1, m, m), *c = floats(m, n, ldc);
    float *before, *expected, *wide = floats(k, cols, cols);
    void *b = wide;
    fill(a, m, k, lda, PLAIN);
    fill(c, m, n, ldc, INTEGERS);
    fill(beta, 1, m, m, PLAIN);
    if (one_in(2)) beta = NULL;
    before = copy_of(c, m, n, ldc);
    expected = copy_of(c, m, n, ldc);
    if (kind == QKV_FLOAT32) {
        fill(wide, k, cols, cols, PLAIN);
    } else {
        b = any_stored(kind, k, cols, ldb);
        ops->widen(kind, b, ldb, wide, k, cols);
    }
    ops->product(a, lda, wide, cols, expected, ldc, beta, m, n, k);
    if (panel)
        ops->product_panel(kind, a, lda, b, c, ldc, beta, m, n, k);
    else
        ops->product_stored(kind, a, lda, b, ldb, c, ldc, beta, m, n, k);
    check_gaps(c, before, m, n, ldc);
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++)
            if (!same(c[i * ldc + j], expected[i * ldc + j]))
                fail("c[%td, %td] is %a, not %a: kind %d m %td n %td k %td", i, j, c[i * ldc + j],
                     expected[i * ldc + j], kind, m, n, k);
}

static void check_product_stored(isa *ops, isa *scalar) {
    (void)scalar;
    check_storage(ops, 0);
}

static void check_product_panel(isa *ops, isa *scalar) {
    (void)scalar;
    check_storage(ops, 1);
}

static void check_dots(isa *ops, isa *scalar) {
    ptrdiff_t m = size_between(1, 11), n = size_between(1, 70), k = size_between(0, 280);
    ptrdiff_t lda = k + between(0, 9), ldb = k + between(0, 9), ldc = n + between(0, 20);
    enum kind kind = random_bits() % KINDS;
    float *a = floats(m, k, lda), *b = floats(n, k, ldb), *c = floats(m, n, ldc);
    float *before = copy_of(c, m, n, ldc), *expected = copy_of(c, m, n, ldc);
    fill(a, m, k, lda, kind == TINY ? PLAIN : kind);
    fill(b, n, k, ldb, kind);
    scalar->dots(a, lda, b, ldb, expected, ldc, m, n, k);
    ops->dots(a, lda, b, ldb, c, ldc, m, n, k);
    check_gaps(c, before, m, n, ldc);
    for (ptrdiff_t i = 0; i < m; i++) {
        for (ptrdiff_t j = 0; j < n; j++) {
            double by = 0.0;
            if (kind == PLAIN || kind == TINY)
                by = 2 * (double)(k + 2) *
                     (UNIT * magnitude(a + i * lda, b + j * ldb, 1, k) + LEAST);
            if (!close_to(c[i * ldc + j], expected[i * ldc + j], by))
                fail("c[%td, %td] is %a, not %a: m %td n %td k %td", i, j, c[i * ldc + j],
                     expected[i * ldc + j], m, n, k);
        }
    }
}

static void check_pack(isa *ops, isa *scalar) {
    ptrdiff_t n = size_between(1, PANEL), k = size_between(0, 280), ldb = k + between(0, 20);
    float *b = floats(n, k, ldb), *panel = floats(k, lanes_up(n), PANEL);
    float *before = copy_of(panel, k, lanes_up(n), PANEL);
    (void)scalar;
    for (ptrdiff_t i = 0; i < n; i++)
        for (ptrdiff_t t = 0; t < k; t++) b[i * ldb + t] = any_float();
    ops->pack(b, ldb, panel, n, k);
    check_gaps(panel, before, k, lanes_up(n), PANEL);
    for (ptrdiff_t t = 0; t < k; t++)
        for (ptrdiff_t i = 0; i < lanes_up(n); i++)
            if (bits_of(panel[t * PANEL + i]) != (i < n ? bits_of(b[i * ldb + t]) : 0))
                fail("panel[%td, %td] is wrong: n %td k %td", t, i, n, k);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void check_scale_rows(isa *ops, isa *scalar) {
    ptrdiff_t m = between(1, 5), n = size_between(0, 300);
    ptrdiff_t ldx = n + between(0, 20), ldy = n + between(0, 20);
    float *x = floats(m, n, ldx), *y = floats(m, n, ldy), *factor = floats(1, m, m);
    float *expected = copy_of(y, m, n, ldy), *before = copy_of(y, m, n, ldy);
    int finite, expected_finite;
    fill(x, m, n, ldx, random_bits() % KINDS);
    for (ptrdiff_t i = 0; i < m; i++) {
        factor[i] = one_in(3 * (int)m) ? any_float() : uniform(-2.0f, 2.0f);
        for (ptrdiff_t j = 0; j < n; j++)
            if (one_in(400)) x[i * ldx + j] = any_float();
    }
    expected_finite = scalar->scale_rows(x, ldx, factor, expected, ldy, m, n);
    finite = ops->scale_rows(x, ldx, factor, y, ldy, m, n);
    check_gaps(y, before, m, n, ldy);
    if (!finite != !expected_finite) fail("says that it is %sfinite", finite ? "" : "not ");
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++) {
            float given = x[i * ldx + j], got = y[i * ldy + j], want = expected[i * ldy + j];
            if (!same(got, want) && (given == 0.0f || got != want)) /* -0 by underflow */
                fail("y[%td, %td] is %a, not %a", i, j, got, want);
        }
    ops->scale_rows(x, ldx, factor, x, ldx, m, n); /* in place */
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++)
            if (!same(x[i * ldx + j], y[i * ldy + j])) fail("in place it is another");
}

/* In double, by the C library; in the limit at the infinities. */
static double activated(int activation, double x) {
    double u;
    if (activation && x == -INFINITY) return 0.0;
    switch (activation) {
    case QKV_RELU:
        return isnan(x) ? x : fmax(x, 0.0);
    case QKV_GELU:
        return 0.5 * x * erfc(-x * sqrt(0.5));
    case QKV_GELU_TANH:
        u = 2.0 * sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x);
        return x / (1.0 + exp(-u));
    case QKV_SILU:
        return x / (1.0 + exp(-x));
    default:
        return x;
    }
}

/* How far an activation may be from the truth: in units of its result, but that of gelu_tanh below 0
   has e^u for a u that was rounded. */
static double activation_error(int activation, double x, double right) {
    const int exponent = right == 0.0 || !isfinite(right) ? -126 : ilogb(right);
    const double ulp = ldexp(1.0, (exponent < -126 ? -126 : exponent) - 23);
    if (activation == QKV_GELU_TANH && x < 0.0) return (8.0 + 6.0 * x * x) * ulp;
    return (activation <= QKV_RELU ? 0.0 : 8.0) * ulp;
}

static void check_epilogue(isa *ops, isa *scalar) {
    const ptrdiff_t m = between(1, 4), n = size_between(0, 200), ldc = n + between(0, 20);
    const ptrdiff_t ldr = n + between(0, 9);
    const int activation = (int)between(0, QKV_SILU);
    const float reach = one_in(3) ? 140.0f : 15.0f;
    float *c = floats(m, n, ldc), *bias = floats(1, n, n), *residual = floats(m, n, ldr), *before;
    (void)scalar; /* what is right is plain */
    fill(bias, 1, n, n, PLAIN);
    fill(residual, m, n, ldr, INTEGERS);
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++) {
            c[i * ldc + j] = one_in(3) ? uniform(-1.0f, 1.0f) : uniform(-reach, reach);
            if (one_in(50)) c[i * ldc + j] = any_float();
            if (one_in(50)) c[i * ldc + j] = one_in(2) ? INFINITY : -INFINITY;
        }
    if (one_in(2)) bias = NULL;
    if (one_in(2)) residual = NULL;
    before = copy_of(c, m, n, ldc);
    ops->epilogue(c, ldc, bias, activation, residual, ldr, m, n);
    check_gaps(c, before, m, n, ldc);
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++) {
            volatile float x = before[i * ldc + j], sum;
            double right, by;
            if (bias) x += bias[j];
            right = activated(activation, x);
            by = activation_error(activation, x, right);
            if (residual) {
                sum = (float)(right + residual[i * ldr + j]);
                by += EPS * fabs(sum);
            } else {
                sum = (float)right;
            }
            if (!close_to(c[i * ldc + j], sum, by))
                fail("activation %d of %a is %a, not %a", activation, x, c[i * ldc + j], right);
        }
}

static void check_split_finite(isa *ops, isa *scalar) {
    ptrdiff_t m = between(1, 5), n = size_between(0, 300), ldx = n + between(0, 20);
    float *x = floats(m, n, ldx), *finite = floats(m, n, n), *code = floats(m, n, n);
    int all = 1, said;
    (void)scalar; /* what is right is plain */
    fill(x, m, n, ldx, random_bits() % KINDS);
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++) {
            if (one_in(50)) x[i * ldx + j] = any_float();
            all = all && isfinite(x[i * ldx + j]);
        }
    said = ops->split_finite(x, ldx, finite, code, m, n);
    if (!said != !all) fail("says that it is %sfinite", said ? "" : "not ");
    if (!ops->split_finite(x, ldx, NULL, NULL, m, n) != !all) fail("asked alone it says another");
    if (one_in(2)) memset(finite, 1, (size_t)(m * n) * sizeof *finite);
    ops->split_finite(x, ldx, finite, NULL, m, n);
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++) {
            float given = x[i * ldx + j], part = isfinite(given) ? given : 0.0f, is = 0.0f;
            if (isnan(given)) is = QKV_PLUS + QKV_MINUS;
            if (isinf(given)) is = given > 0 ? QKV_PLUS : QKV_MINUS;
            if (!same(finite[i * n + j], part)) fail("[%td, %td] of %a is another", i, j, given);
            if (code[i * n + j] != is) fail("%a has the code %g", given, code[i * n + j]);
        }
}

static void check_scale_columns(isa *ops, isa *scalar) {
    ptrdiff_t m = between(1, 5), n = size_between(1, 256), whole = lanes_up(n);
    ptrdiff_t lds = whole + between(0, 20);
    float *s = floats(m, whole, lds), *factor = floats(1, whole, whole), *before, *expected;
    fill(s, m, whole, lds, random_bits() % KINDS);
    fill(factor, 1, whole, whole, random_bits() % KINDS);
    before = copy_of(s, m, whole, lds);
    expected = copy_of(s, m, whole, lds);
    scalar->scale_columns(expected, lds, m, n, factor);
    ops->scale_columns(s, lds, m, n, factor);
    check_gaps(s, before, m, whole, lds);
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++)
            if (!same(s[i * lds + j], expected[i * lds + j])) fail("s[%td, %td] is wrong", i, j);
}

static void check_weights(isa *ops, isa *scalar) {
    ptrdiff_t n = size_between(0, 300);
    float *x = floats(1, n, n), *y, *expected = floats(1, n, n);
    float max = uniform(-5.0f, 90.0f), factor = uniform(0.0f, 2.0f);
    fill(x, 1, n, n, one_in(2) ? PLAIN : SPECIAL);
    for (ptrdiff_t j = 0; j < n; j++) /* not beyond the maximum, as in the softmax */
        if (x[j] > max) x[j] = one_in(2) ? max : -INFINITY;
    y = copy_of(x, 1, n, n);
    scalar->weights(x, max, factor, expected, n);
    ops->weights(y, max, factor, y, n);
    for (ptrdiff_t j = 0; j < n; j++)
        if (!close_to(y[j], expected[j], (ULPS_EXP + 2) * EPS * expected[j] + 4 * LEAST))
            fail("y[%td] is %a, not %a", j, y[j], expected[j]);
}

static void check_largest(isa *ops, isa *scalar) {
    ptrdiff_t n = size_between(0, 600);
    float *x = floats(1, n, n), got, want = -INFINITY;
    (void)scalar; /* what is right is plain */
    fill(x, 1, n, n, one_in(2) ? PLAIN : TINY);
    for (ptrdiff_t j = 0; j < n; j++) {
        if (one_in(50)) x[j] = one_in(2) ? INFINITY : -INFINITY;
        if (x[j] > want) want = x[j];
    }
    got = ops->largest(x, n);
    if (got != want) fail("the largest of %td is %a, not %a", n, got, want);
}

static void check_exp_and_sum(isa *ops, isa *scalar) {
    ptrdiff_t n = size_between(0, 600);
    float *x = floats(1, n, n), *y = floats(1, n, n), max = uniform(1.0f, 90.0f), sum, want;
    double total = 0.0;
    fill(x, 1, n, n, PLAIN);
    for (ptrdiff_t j = 0; j < n; j++)
        if (one_in(9)) x[j] = one_in(2) ? max : -INFINITY;
    sum = ops->exp_and_sum(x, max, y, n);
    for (ptrdiff_t j = 0; j < n; j++) {
        scalar->exp_and_sum(x + j, max, &want, 1);
        if (!close_to(y[j], want, ULPS_EXP * EPS * want + 2 * LEAST))
            fail("y[%td] is %a, not %a: n %td", j, y[j], want, n);
        total += y[j];
    }
    if (!close_to(sum, (float)total, UNIT * (double)(n + 1) * total))
        fail("the sum of %td is %a, not %a", n, sum, total);
}

static void check_softmax(isa *ops, isa *scalar) {
    ptrdiff_t n = size_between(1, 600);
    float *x = floats(1, n, n), *y = floats(1, n, n), *expected = floats(1, n, n);
    fill(x, 1, n, n, random_bits() % KINDS);
    if (one_in(20))
        for (ptrdiff_t j = 0; j < n; j++) x[j] = -INFINITY; /* NaN in the plain formula */
    scalar->softmax(x, expected, n);
    ops->softmax(x, y, n);
    double relative = 2 * (ULPS_EXP + 4) * EPS + 2 * UNIT * (double)n;
    for (ptrdiff_t j = 0; j < n; j++)
        if (!close_to(y[j], expected[j], relative * expected[j] + 2 * LEAST))
            fail("y[%td] is %a, not %a: n %td", j, y[j], expected[j], n);
}

static void check_widen(isa *ops, isa *scalar) {
    ptrdiff_t m = between(1, 5), n = size_between(0, 200), ldx = n + between(0, 40);
    int kind = any_storage();
    size_t bytes = (size_t)qkv_bytes(kind, (m - 1) * ldx + n);
    unsigned char *x = array(bytes);
    float *y = floats(m, n, n), *expected = floats(m, n, n);
    for (size_t i = 0; i < bytes; i++) x[i] = (unsigned char)random_bits();
    scalar->widen(kind, x, ldx, expected, m, n);
    ops->widen(kind, x, ldx, y, m, n);
    for (ptrdiff_t j = 0; j < m * n; j++)
        if (!same(y[j], expected[j])) fail("y[%td] is %a, not %a", j, y[j], expected[j]);
}

static int is_nan(int kind, uint16_t x) {
    return (x & 0x7fff) > (kind == QKV_FLOAT16 ? 0x7c00 : 0x7f80);
}

static void check_narrow(isa *ops, isa *scalar) {
    ptrdiff_t n = size_between(0, 200);
    float *x = floats(1, n, n), pair[2];
    uint16_t *y = array((size_t)n * sizeof *y), *expected = array((size_t)n * sizeof *y), two[2];
    int kind = one_in(2) ? QKV_FLOAT16 : QKV_BFLOAT16;
    for (ptrdiff_t j = 0; j < n; j++) {
        if (one_in(2)) { /* on a number, or halfway between two, or next to that */
            two[0] = (uint16_t)random_bits();
            two[1] = (uint16_t)(two[0] + 1);
            scalar->widen(kind, two, 2, pair, 1, 2);
            x[j] = one_in(3) ? pair[0] : pair[0] * 0.5f + pair[1] * 0.5f;
            if (one_in(3)) x[j] = nextafterf(x[j], one_in(2) ? INFINITY : -INFINITY);
        } else {
            x[j] = one_in(2) ? any_float() : uniform(-70000.0f, 70000.0f);
        }
    }
    scalar->narrow(kind, x, expected, n);
    ops->narrow(kind, x, y, n);
    for (ptrdiff_t j = 0; j < n; j++)
        if (y[j] != expected[j] && !(is_nan(kind, y[j]) && is_nan(kind, expected[j])))
            fail("y[%td] is %#x, not %#x, of %a", j, y[j], expected[j], x[j]);
}

/* Against the rule in double: |x / scale - y| <= 1/2 but for the rounding of the quotient. */
static void check_to_int8(isa *ops, isa *scalar) {
    ptrdiff_t n = size_between(0, 200);
    float *x = floats(1, n, n), scale;
    int8_t *y = array((size_t)n), *expected = array((size_t)n);
    const float size = one_in(3) ? powf(2.0f, uniform(-149.0f, 128.0f)) : 1.0f;
    int finite = 1;
    for (ptrdiff_t j = 0; j < n; j++) {
        x[j] = one_in(20) ? 0.0f : size * uniform(-1.0f, 1.0f);
        if (one_in(2000)) x[j] = any_float();
        finite = finite && isfinite(x[j]);
    }
    scale = scalar->to_int8(x, expected, n);
    if (!same(ops->to_int8(x, y, n), scale)) fail("the scale is not %a", scale);
    if (isnan(scale) == finite) fail("the scale is %a", scale);
    for (ptrdiff_t j = 0; j < n; j++) {
        double quotient = scale > 0.0f ? (double)x[j] / (double)scale : 0.0;
        if (y[j] != expected[j]) fail("y[%td] is %d, not %d", j, y[j], expected[j]);
        if (y[j] < -127) fail("y[%td] is %d", j, y[j]);
        if (fabs(quotient - y[j]) > 0.50001) fail("y[%td] is %d, not %g", j, y[j], quotient);
    }
}

/* Against the C library's in double, so that exp.h's bounds hold for the scalar table too. */
static void check_function(isa *ops, void (*function)(const float *, float *, ptrdiff_t),
                           double (*truth)(double), float low, float high, double ulps) {
    ptrdiff_t n = size_between(0, 200);
    float *x = floats(1, n, n), *y = floats(1, n, n);
    (void)ops;
    for (ptrdiff_t j = 0; j < n; j++) x[j] = one_in(4) ? uniform(-1.0f, 1.0f) : uniform(low, high);
    for (ptrdiff_t j = 0; j < n; j++)
        if (one_in(50)) x[j] = one_in(3) ? NAN : one_in(2) ? -INFINITY : 0.0f;
    function(x, y, n);
    for (ptrdiff_t j = 0; j < n; j++) {
        double right = truth((double)x[j]);
        int exponent = ilogb(right);
        double ulp = right == 0.0 || exponent < -126 ? LEAST : ldexp(1.0, exponent - 23);
        if (isnan(x[j]) != isnan(y[j]) || (!isnan(x[j]) && fabs(y[j] - right) > ulps * ulp))
            fail("f(%a) is %a, not %a", x[j], y[j], right);
    }
}

/* Against the formula in double. */
static void check_merge_weights(isa *ops, isa *scalar) {
    const ptrdiff_t m = size_between(1, 20), n = size_between(1, 70), whole = lanes_up(n);
    const ptrdiff_t lds = whole + between(0, 20);
    float *s = floats(m, whole, lds), *lse = floats(1, whole, whole), *before, *given;
    const int special = one_in(3);
    (void)scalar; /* what is right is plain */
    fill(s, m, whole, lds, special ? SPECIAL : PLAIN);
    for (ptrdiff_t i = 0; i < m; i++)
        for (ptrdiff_t j = 0; j < n; j++)
            if (one_in(4)) s[i * lds + j] = -INFINITY;
    before = copy_of(s, m, whole, lds);
    given = copy_of(s, m, whole, lds);
    ops->merge_weights(s, lds, m, n, lse);
    check_gaps(s, before, m, whole, lds);
    for (ptrdiff_t j = 0; j < n; j++) {
        double max = -INFINITY, sum = 0.0, log_sum;
        for (ptrdiff_t i = 0; i < m; i++) max = fmax(max, given[i * lds + j]);
        for (ptrdiff_t i = 0; i < m; i++)
            if (given[i * lds + j] != -INFINITY) sum += exp((double)given[i * lds + j] - max);
        log_sum = sum == 0.0 ? -INFINITY : max + log(sum); /* NaN where one is, and of infinity */
        if (!close_to(lse[j], (float)log_sum, (ULPS_EXP + (double)m + 9) * EPS))
            fail("lse[%td] is %a, not %a", j, lse[j], log_sum);
        for (ptrdiff_t i = 0; i < m; i++) {
            double want = exp((double)given[i * lds + j] - max) / sum;
            if (given[i * lds + j] == -INFINITY) want = -1.0;
            if (!close_to(s[i * lds + j], (float)want, (2 * ULPS_EXP + (double)m + 9) * EPS))
                fail("the weight of %a is %a, not %a", given[i * lds + j], s[i * lds + j], want);
        }
    }
}

/* Numbers of float32, float16 or bfloat16: x[n], where that cannot be rounded, and memory for as
   many; float32 ones start at a multiple of 16 bytes where they may be streamed. */
static void *stored(isa *ops, int kind, float *x, ptrdiff_t n) {
    void *made = array((size_t)n * (kind == QKV_FLOAT32 ? sizeof(float) : sizeof(uint16_t)));
    if (kind == QKV_FLOAT32) {
        memcpy(made, x, (size_t)n * sizeof *x);
    } else {
        ops->narrow(kind, x, made, n);
        ops->widen(kind, made, n, x, 1, n);
    }
    return made;
}

static int any_kind(void) { return (int)between(QKV_FLOAT32, QKV_BFLOAT16); }

/* What a result of that kind holds, as floats. */
static float *read_back(isa *ops, int kind, void *y, ptrdiff_t n) {
    float *made = floats(1, n, n);
    if (kind == QKV_FLOAT32) return y;
    ops->widen(kind, y, n, made, 1, n);
    return made;
}

static float rounded(isa *ops, int kind, float x) {
    uint16_t bits;
    if (kind == QKV_FLOAT32) return x;
    ops->narrow(kind, &x, &bits, 1);
    ops->widen(kind, &bits, 1, &x, 1, 1);
    return x;
}

static void check_merge_rows(isa *ops, isa *scalar) {
    const ptrdiff_t m = size_between(0, 12), n = size_between(0, 300), rows = between(1, 4);
    const ptrdiff_t ldw = rows + between(0, 3);
    const int kind = any_kind();
    const ptrdiff_t size = kind == QKV_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    const char *x[13];
    ptrdiff_t ldx[13];
    float *wide = floats(m * rows, n, n), *weight = floats(m, rows, ldw), *got;
    float *nothing = floats(rows, n, n);
    char *y = stored(ops, kind, nothing, rows * n);
    (void)scalar; /* what is right is plain */
    fill(weight, m, rows, ldw, one_in(2) ? PLAIN : SPECIAL); /* among them less than 0 */
    for (ptrdiff_t i = 0; i < m; i++) {
        fill(wide + i * rows * n, rows, n, n, (enum kind)between(0, KINDS - 1));
        x[i] = stored(ops, kind, wide + i * rows * n, rows * n);
        ldx[i] = n * size;
        if (one_in(4)) x[i] += (rows - 1) * ldx[i], ldx[i] = -ldx[i];
    }
    ops->merge_rows(kind, x, ldx, weight, ldw, m, y, n * size, rows, n, one_in(2));
    got = read_back(ops, kind, y, rows * n);
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t j = 0; j < n; j++) {
            double sum = 0.0, sums = 0.0, by;
            for (ptrdiff_t i = 0; i < m; i++) {
                const ptrdiff_t from = ldx[i] < 0 ? rows - 1 - r : r;
                const double w = weight[i * ldw + r], number = wide[(i * rows + from) * n + j];
                if (w < 0) continue;
                sum += w * number;
                sums += fabs(w * number);
            }
            by = 2 * (double)(m + 1) * (UNIT * sums + LEAST);
            if (kind != QKV_FLOAT32) by += sums * 0x1p-7 + 0x1p-24; /* may be neighbours */
            if (!close_to(got[r * n + j], rounded(ops, kind, (float)sum), by))
                fail("y[%td, %td] is %a, not %a: kind %d m %td n %td", r, j, got[r * n + j], sum,
                     kind, m, n);
        }
}

/* The bits of the formula, its steps kept apart, and rounded once. */
static void check_pair(isa *ops, int kind, float a, float b, float c, float s, float first,
                       float second) {
    volatile float ac = a * c, bs = b * s, bc = b * c, as = a * s;
    if (!same(first, rounded(ops, kind, ac - bs)) || !same(second, rounded(ops, kind, bc + as)))
        fail("(%a, %a) becomes (%a, %a), not (%a, %a)", a, b, first, second, ac - bs, bc + as);
}

static void check_rotate_halves(isa *ops, isa *scalar) {
    const ptrdiff_t n = size_between(0, 80);
    const int kind = any_kind(), streams = one_in(2) && n % 4 == 0;
    float *a = floats(1, n, n), *b = floats(1, n, n), *cosines = floats(1, n, n), *got, *other;
    float *sines = floats(1, n, n);
    void *x, *y, *first, *second;
    (void)scalar;
    fill(a, 1, n, n, (enum kind)between(0, KINDS - 1));
    fill(b, 1, n, n, (enum kind)between(0, KINDS - 1));
    fill(cosines, 1, n, n, (enum kind)between(0, KINDS - 1));
    fill(sines, 1, n, n, (enum kind)between(0, KINDS - 1));
    x = stored(ops, kind, a, n), y = stored(ops, kind, b, n);
    first = stored(ops, kind, a, n), second = stored(ops, kind, b, n);
    ops->rotate_halves(kind, x, y, cosines, sines, first, second, n,
                       streams && ((uintptr_t)first | (uintptr_t)second) % 16 == 0);
    got = read_back(ops, kind, first, n), other = read_back(ops, kind, second, n);
    for (ptrdiff_t t = 0; t < n; t++)
        check_pair(ops, kind, a[t], b[t], cosines[t], sines[t], got[t], other[t]);
    ops->rotate_halves(kind, x, y, cosines, sines, x, y, n, 0); /* in place */
    a = read_back(ops, kind, x, n), b = read_back(ops, kind, y, n);
    for (ptrdiff_t t = 0; t < n; t++)
        if (!same(a[t], got[t]) || !same(b[t], other[t])) fail("in place it is another");
}

static void check_rotate_pairs(isa *ops, isa *scalar) {
    const ptrdiff_t n = size_between(0, 80);
    const int kind = any_kind();
    float *wide = floats(1, 2 * n, 2 * n), *cosines = floats(1, n, n), *sines = floats(1, n, n);
    float *got;
    void *x, *y;
    (void)scalar;
    fill(wide, 1, 2 * n, 2 * n, (enum kind)between(0, KINDS - 1));
    fill(cosines, 1, n, n, (enum kind)between(0, KINDS - 1));
    fill(sines, 1, n, n, (enum kind)between(0, KINDS - 1));
    x = stored(ops, kind, wide, 2 * n), y = stored(ops, kind, wide, 2 * n);
    ops->rotate_pairs(kind, x, cosines, sines, y, n, (uintptr_t)y % 16 == 0);
    got = read_back(ops, kind, y, 2 * n);
    for (ptrdiff_t t = 0; t < n; t++)
        check_pair(ops, kind, wide[2 * t], wide[2 * t + 1], cosines[t], sines[t], got[2 * t],
                   got[2 * t + 1]);
    ops->rotate_pairs(kind, x, cosines, sines, x, n, 0); /* in place */
    wide = read_back(ops, kind, x, 2 * n);
    for (ptrdiff_t t = 0; t < 2 * n; t++)
        if (!same(wide[t], got[t])) fail("in place it is another");
}

/* What a row of a norm may be: its numbers, and what they are moved and multiplied by. */
static void fill_row(float *x, ptrdiff_t n) {
    static const float sizes[] = {1.0f, 1.0f, 1e30f, 1.5e38f, 1e-20f, 1e-42f};
    const float size = sizes[between(0, 5)];
    const float off = size == 1.0f && one_in(2) ? uniform(-100.0f, 100.0f) : 0.0f;
    fill(x, 1, n, n, one_in(4) ? INTEGERS : PLAIN);
    for (ptrdiff_t j = 0; j < n; j++) x[j] = size > 1e5f ? x[j] / 8 * size : x[j] * size + off;
}

/* Against the formula in double; where the result is stored in 16 bits, it may be the neighbour. */
static void check_normed(const qkv_norm *norm, const float *x, const float *got) {
    const ptrdiff_t n = norm->n;
    const double unit = norm->kind == QKV_FLOAT32   ? EPS
                        : norm->kind == QKV_FLOAT16 ? 0x1p-10
                                                    : 0x1p-7;
    double mean = 0.0, top = 0.0, squares = 0.0, by;
    for (ptrdiff_t j = 0; norm->centered && j < n; j++) mean += (double)x[j] / (double)n;
    for (ptrdiff_t j = 0; j < n; j++) {
        top = fmax(top, fabs((double)x[j]));
        squares += ((double)x[j] - mean) * ((double)x[j] - mean) / (double)n;
    }
    if (squares <= 0x1p-90 * top * top && norm->eps < 1e-10) return; /* equal numbers: 0 / 0 */
    for (ptrdiff_t j = 0; j < n; j++) {
        const double root = sqrt(squares + norm->eps), d = ((double)x[j] - mean) / root;
        const double b = norm->bias ? (double)norm->bias[j] : 0.0, want = d * norm->weight[j] + b;
        /* what the sums are off by, what x - mean is (corrected, so rounded once), and the rest */
        by = fabs(d * norm->weight[j]) * 80 * EPS + fabs(want) * 2 * unit + 4 * LEAST;
        by += (top * 80 * EPS * EPS / root + 2 * EPS * fabs(mean) * EPS / root) *
              fabs(norm->weight[j]);
        by += (n == 1 ? 1.0 : sqrt((double)n)) * 4 * EPS * fabs(norm->weight[j]);
        by += norm->kind == QKV_FLOAT16 ? 0x1p-24 : 0.0;
        if (!(fabs(got[j] - want) <= by))
            fail("y[%td] is %a, not %a: n %td kind %d centered %d eps %g", j, got[j], want, n,
                 norm->kind, norm->centered, norm->eps);
    }
}

static qkv_norm any_norm(ptrdiff_t n) {
    static const double least[] = {0.0, 1e-5, 1e-6, 1e-40};
    qkv_norm norm = {any_kind(), one_in(2), 0, n, NULL, NULL, least[between(0, 3)]};
    float *weight = floats(1, n, n), *bias = floats(1, n, n);
    fill(weight, 1, n, n, PLAIN);
    fill(bias, 1, n, n, PLAIN);
    norm.weight = weight;
    if (one_in(2)) norm.bias = bias;
    return norm;
}

static void check_norm(isa *ops, isa *scalar) {
    const ptrdiff_t n = one_in(9) ? between(1000, 3000) : size_between(1, 300), m = between(1, 3);
    qkv_norm norm = any_norm(n);
    const ptrdiff_t size = norm.kind == QKV_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    float *wide = floats(m, n, n), *got;
    char *x, *y, *alone;
    (void)scalar; /* what is right is plain */
    for (ptrdiff_t i = 0; i < m; i++) fill_row(wide + i * n, n);
    for (ptrdiff_t i = 0; norm.kind == QKV_FLOAT16 && i < m * n; i++)
        if (fabsf(wide[i]) > 65504.0f) wide[i] = uniform(-6e4f, 6e4f);
    x = stored(ops, norm.kind, wide, m * n);
    y = stored(ops, norm.kind, wide, m * n);
    alone = stored(ops, norm.kind, wide, n);
    norm.streams = norm.kind == QKV_FLOAT32 && n % 16 == 0 && (uintptr_t)y % 16 == 0;
    ops->norm(&norm, x + (m - 1) * n * size, -n * size, y, n * size, m); /* from the last up */
    got = read_back(ops, norm.kind, y, m * n);
    norm.streams = 0;
    for (ptrdiff_t i = 0; i < m; i++) {
        const float *row = wide + (m - 1 - i) * n;
        check_normed(&norm, row, got + i * n);
        ops->norm(&norm, x + (m - 1 - i) * n * size, 0, alone, 0, 1);
        if (memcmp(alone, y + i * n * size, (size_t)(n * size))) fail("alone it is another");
    }
    ops->norm(&norm, x, n * size, x, n * size, m); /* in place */
    for (ptrdiff_t i = 0; i < m; i++)
        if (memcmp(x + (m - 1 - i) * n * size, y + i * n * size, (size_t)(n * size)))
            fail("in place it is another");
}

/* Pieces of whole blocks are the row, to the last bit. */
static void check_norm_pieces(isa *ops, isa *scalar) {
    const ptrdiff_t n = between(1, 4 * NORM_BLOCK), piece = between(1, 3) * NORM_BLOCK;
    qkv_norm norm = any_norm(n);
    const ptrdiff_t size = norm.kind == QKV_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    float *wide = floats(1, n, n);
    char *x, *y, *whole;
    qkv_norm_row row;
    (void)scalar;
    fill_row(wide, n);
    x = stored(ops, norm.kind, wide, n);
    y = stored(ops, norm.kind, wide, n);
    whole = stored(ops, norm.kind, wide, n);
    ops->norm(&norm, x, 0, whole, 0, 1);
    qkv_norm_start(&row, 1.0f);
    do
        for (int pass = !norm.centered; pass < 2; pass++) {
            for (ptrdiff_t j = 0; j < n; j += piece)
                ops->norm_sums(norm.kind, x + j * size, n - j < piece ? n - j : piece, &row);
            if (pass == 0) qkv_norm_mean(&row, n);
        }
    while (!qkv_norm_factor(&row, &norm));
    for (ptrdiff_t j = 0; j < n; j += piece)
        ops->norm_apply(&norm, &row, x + j * size, y + j * size, j, n - j < piece ? n - j : piece);
    if (memcmp(whole, y, (size_t)(n * size))) fail("in pieces of %td it is another", piece);
}

static void check_exp(isa *ops, isa *scalar) {
    check_function(ops, ops->exp, exp, -110.0f, 43.0f, ops == scalar ? 4.0 : 2.3);
}

static void check_tanh(isa *ops, isa *scalar) {
    (void)scalar;
    check_function(ops, ops->tanh, tanh, -12.0f, 12.0f, 3.0);
}

/* ---- the table ------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*check)(isa *ops, isa *scalar);
} checks[] = {
        {"product", check_product},
        {"product_stored", check_product_stored},
        {"product_panel", check_product_panel},
        {"dots", check_dots},
        {"pack", check_pack},
        {"softmax_tile", check_softmax_tile},
        {"epilogue", check_epilogue},
        {"look_at_mask", check_look_at_mask},
        {"adjust", check_adjust},
        {"scale_rows", check_scale_rows},
        {"split_finite", check_split_finite},
        {"weights", check_weights},
        {"largest", check_largest},
        {"exp_and_sum", check_exp_and_sum},
        {"softmax", check_softmax},
        {"widen", check_widen},
        {"scale_columns", check_scale_columns},
        {"narrow", check_narrow},
        {"to_int8", check_to_int8},
        {"rotate_halves", check_rotate_halves},
        {"rotate_pairs", check_rotate_pairs},
        {"merge_weights", check_merge_weights},
        {"merge_rows", check_merge_rows},
        {"norm", check_norm},
        {"norm_sums", check_norm_pieces},
        {"norm_apply", check_norm_pieces},
        {"exp", check_exp},
        {"tanh", check_tanh},
};

enum { COUNT = sizeof checks / sizeof *checks };
_Static_assert(sizeof(qkv_kernels) ==
                       offsetof(qkv_kernels, product) + COUNT * sizeof(void (*)(void)),
               "a kernel has no check, or a check no kernel");

void check_kernels(long trials) {
    for (int t = 0; t < qkv_table_count; t++) {
        const qkv_kernels *ops = qkv_tables[t];
        if (!qkv_runnable(ops->name)) {
            printf("%-8s not on this CPU\n", ops->name);
            continue;
        }
        context.of = ops->name;
        printf("%-8s %ld trials of each:", ops->name, trials);
        for (int c = 0; c < COUNT; c++) {
            context.what = checks[c].name;
            printf(" %s", checks[c].name);
            fflush(stdout);
            for (long trial = 0; trial < trials; trial++) {
                next_trial(trial);
                checks[c].check(ops, qkv_tables[0]);
            }
            next_trial(0);
        }
        printf("\n");
    }
}
