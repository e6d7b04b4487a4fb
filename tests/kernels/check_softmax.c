/* The softmax of a tile, and the options that a row's scores go through before it. */
#include "check.h"

#include <math.h>
#include <string.h>

/* Options of one row that sees the keys first .. first + n - 1, in arrays that end there. */
static qkv_row random_row(ptrdiff_t n, ptrdiff_t first) {
    qkv_row row = {.lo = 0, .hi = first + n, .mask_step = 1};
    if (one_in(2)) row.lo = between(0, first + n);
    if (one_in(2)) row.hi = between(row.lo, first + n + 20);
    if (one_in(4)) {
        row.softcap = uniform(0.5f, 20.0f);
        row.modifiers |= QKV_SOFTCAP;
    }
    if (one_in(4)) {
        row.slope = uniform(-0.3f, 0.3f);
        row.modifiers |= QKV_SLOPE;
    }
    if (one_in(4)) row.mask_step = 0;
    row.position = between(-20, first + n + 20);
    ptrdiff_t length = row.mask_step ? first + n : 1;
    if (one_in(4)) {
        uint8_t *keep = array((size_t)length);
        for (ptrdiff_t j = 0; j < length; j++) keep[j] = one_in(3) ? 0 : (uint8_t)between(1, 255);
        row.keep = keep;
        row.modifiers |= QKV_KEEP;
    }
    if (one_in(4)) {
        float *bias = floats(1, length, length);
        fill(bias, 1, length, length, PLAIN);
        for (ptrdiff_t j = 0; j < length; j++)
            if (one_in(4)) bias[j] = -INFINITY;
        row.bias = bias;
        row.modifiers |= QKV_BIAS;
    }
    if (one_in(4)) {
        int32_t *segments = array((size_t)(first + n) * sizeof *segments);
        row.segment = one_in(2) ? INT32_MIN : 0;
        for (ptrdiff_t j = 0; j < first + n; j++)
            segments[j] = one_in(3) ? (int32_t)between(-1, 1) : row.segment;
        row.segments = segments;
        row.modifiers |= QKV_SEGMENT;
    }
    if (one_in(4)) {
        row.block = one_in(3) ? between(1, 5) : between(1, 2 * (first + n));
        const ptrdiff_t blocks = (first + n - 1) / row.block + 1;
        uint8_t *keep = array((size_t)blocks);
        for (ptrdiff_t b = 0; b < blocks; b++) keep[b] = one_in(3) ? 0 : (uint8_t)between(1, 255);
        row.blocks = keep;
        row.modifiers |= QKV_BLOCKS;
    }
    return row;
}

static int allowed(const qkv_row *row, ptrdiff_t j) {
    return row->lo <= j && j < row->hi && !(row->keep && !row->keep[j * row->mask_step]) &&
           !(row->bias && row->bias[j * row->mask_step] == -INFINITY) &&
           !(row->segments && row->segments[j] != row->segment) &&
           !(row->blocks && !row->blocks[j / row->block]);
}

/* Masks of one value, and of several; each mask may leave a key that another denies, so that what is
   seen may promise more than there is, but never less. */
void check_look_at_mask(isa *ops, isa *scalar) {
    ptrdiff_t n = size_between(1, TILE), first = size_between(0, 300);
    qkv_row row = random_row(n, first);
    int seen, want = 0;
    (void)scalar; /* what is right is plain */
    if (!(row.modifiers & QKV_EXCLUDES)) return;
    if (one_in(2)) { /* all alike, or all but one */
        const int value = one_in(2);
        const ptrdiff_t length = row.mask_step ? first + n : 1, other = between(0, length - 1);
        uint8_t *keep = array((size_t)length);
        float *bias = floats(1, length, length);
        for (ptrdiff_t j = 0; j < length; j++) {
            keep[j] = (uint8_t)value;
            bias[j] = value ? 0.0f : -INFINITY;
        }
        if (one_in(2)) {
            keep[other] = (uint8_t)!value;
            bias[other] = one_in(2) ? NAN : 1.0f;
        }
        row.keep = row.modifiers & QKV_KEEP ? keep : NULL;
        row.bias = row.modifiers & QKV_BIAS ? bias : NULL;
    }
    row.lo = 0;
    row.hi = first + n;
    seen = ops->look_at_mask(&row, first, n);
    for (ptrdiff_t j = first; j < first + n; j++) {
        const int kept = allowed(&row, j);
        want |= kept ? QKV_ALLOWS : 0;
        if (!kept || (row.bias && row.bias[j * row.mask_step] != 0.0f)) want |= QKV_CHANGES;
        if (kept != qkv_is_kept(&row, j)) fail("key %td is %d", j, !kept);
    }
    if (want & ~seen) fail("saw %d of %d: n %td first %td", seen, want, n, first);
    if (seen != want && (row.modifiers & QKV_BIAS) == 0)
        fail("saw %d, not %d: n %td first %td", seen, want, n, first);
    if (seen != want && !(row.modifiers & ~(QKV_BIAS | QKV_SOFTCAP | QKV_SLOPE)))
        fail("of a bias saw %d, not %d: n %td first %td", seen, want, n, first);
}

/* How far two results of the row's options may be apart, for the score s of key j. */
static double slack(const qkv_row *row, float s, ptrdiff_t j) {
    double by = fabs((double)s), slope = fabs((double)row->slope * (double)(row->position - j));
    double bias = row->bias ? fabs((double)row->bias[j * row->mask_step]) : 0.0;
    if (row->softcap == 0.0f && row->slope == 0.0f) return 0.0; /* one sum, rounded once */
    if (bias == INFINITY) return 0.0;
    return EPS * ((row->softcap != 0.0f ? 2 * ULPS_TANH : 2) * by + 2 * (slope + bias));
}

void check_adjust(isa *ops, isa *scalar) {
    ptrdiff_t n = size_between(1, TILE), first = size_between(0, 300), whole = lanes_up(n);
    float *s = floats(1, whole, whole), *expected, *before;
    qkv_row row = random_row(n, first);
    fill(s, 1, n, n, PLAIN);
    expected = copy_of(s, 1, whole, whole);
    before = copy_of(s, 1, whole, whole);
    scalar->adjust(expected, n, first, &row);
    ops->adjust(s, n, first, &row);
    for (ptrdiff_t j = 0; j < n; j++)
        if (!close_to(s[j], expected[j], slack(&row, before[j], first + j)))
            fail("s[%td] is %a, not %a: n %td first %td", j, s[j], expected[j], n, first);
}

/* A row's running softmax. */
typedef struct {
    float max, sum, factor;
} running;

/* Compares one row of a tile after softmax_tile, and its running softmax. */
static void compare_row(const qkv_row *row, const qkv_row *expected_row, running got, running want,
                        float old_sum, const float *s, const float *expected, const float *before,
                        ptrdiff_t n, ptrdiff_t first) {
    double worst = 0.0, sum = 0.0, by;
    for (ptrdiff_t j = 0; j < n; j++) {
        by = allowed(row, first + j) ? slack(row, before[j], first + j) : 0.0;
        if (by > worst) worst = by;
        if (row->scores && !close_to(row->scores[first + j], expected_row->scores[first + j], by))
            fail("score %td is %a, not %a", first + j, row->scores[first + j],
                 expected_row->scores[first + j]);
        if (!allowed(row, first + j) && s[j] != 0.0f)
            fail("excluded key %td weighs %a", first + j, s[j]);
    }
    for (ptrdiff_t j = 0; row->scores && j < first; j++)
        if (row->scores[j] == row->scores[j]) fail("score %td is not of this tile", j);
    /* a weight is off by its exp, by the scores and the maximum, and by the rounding of 10 - -10 */
    double relative = (ULPS_EXP + 20) * EPS + 2.5 * worst;
    for (ptrdiff_t j = 0; j < n; j++) {
        if (!close_to(s[j], expected[j], relative * expected[j] + 2 * LEAST))
            fail("weight %td is %a, not %a: n %td first %td", j, s[j], expected[j], n, first);
        sum += expected[j];
    }
    if (!close_to(got.max, want.max, worst)) fail("max is %a, not %a", got.max, want.max);
    if (!close_to(got.factor, want.factor, relative * want.factor + 2 * LEAST))
        fail("factor is %a, not %a", got.factor, want.factor);
    by = (relative + 2 * UNIT * (double)(n + 2)) * (sum + (double)old_sum * want.factor);
    if (!close_to(got.sum, want.sum, by + 2 * LEAST * (double)n))
        fail("sum is %a, not %a", got.sum, want.sum);
}

void check_softmax_tile(isa *ops, isa *scalar) {
    enum { MOST = 20 };
    ptrdiff_t m = one_in(2) ? between(1, 3) : between(1, MOST), n = size_between(1, TILE);
    ptrdiff_t first = size_between(0, 300), whole = lanes_up(n), lds = whole + between(0, 20);
    ptrdiff_t length = first + n;
    float *s = floats(m, whole, lds), *max = floats(1, m, m), *sum = floats(1, m, m);
    float *factor = floats(1, m, m), *expected_factor = floats(1, m, m);
    float *expected, *before, *expected_max, *expected_sum, old_sum[MOST];
    qkv_row rows[MOST], expected_rows[MOST];
    const int with_options = one_in(2), with_nan = one_in(8);
    fill(s, m, n, lds, PLAIN);
    for (ptrdiff_t i = 0; i < m; i++) {
        qkv_row bare = {.lo = 0, .hi = length, .mask_step = 1};
        rows[i] = with_options && i == 0 ? random_row(n, first) : bare;
        max[i] = -INFINITY;
        sum[i] = 0.0f;
        if (one_in(3)) {
            max[i] = uniform(-10.0f, 10.0f);
            sum[i] = uniform(0.5f, 50.0f);
        }
        old_sum[i] = sum[i];
        for (ptrdiff_t j = 0; j < n; j++) /* what is excluded may hold anything */
            if (!allowed(rows + i, first + j) && one_in(5))
                s[i * lds + j] = one_in(2) ? NAN : INFINITY;
        if (with_nan) s[i * lds + between(0, n - 1)] = NAN;
    }
    memcpy(expected_rows, rows, sizeof rows);
    if (one_in(2)) {
        rows[0].scores = floats(1, length, length);
        expected_rows[0].scores = floats(1, length, length);
    }
    expected = copy_of(s, m, whole, lds);
    before = copy_of(s, m, whole, lds);
    expected_max = copy_of(max, 1, m, m);
    expected_sum = copy_of(sum, 1, m, m);

    scalar->softmax_tile(expected, lds, m, n, first, expected_rows, expected_max, expected_sum,
                         expected_factor);
    ops->softmax_tile(s, lds, m, n, first, rows, max, sum, factor);
    check_gaps(s, before, m, whole, lds);
    for (ptrdiff_t i = 0; i < m; i++) {
        int spoilt = 0; /* by a NaN in an allowed key: then the sum is, whatever the rest */
        for (ptrdiff_t j = 0; j < n; j++)
            spoilt |= isnan(before[i * lds + j]) && allowed(rows + i, first + j);
        if (!spoilt)
            compare_row(rows + i, expected_rows + i, (running){max[i], sum[i], factor[i]},
                        (running){expected_max[i], expected_sum[i], expected_factor[i]}, old_sum[i],
                        s + i * lds, expected + i * lds, before + i * lds, n, first);
        else if (!isnan(sum[i]))
            fail("a NaN among the allowed scores is lost: n %td", n);
    }
}
