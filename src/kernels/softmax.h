/* The softmax of a tile, and of whole rows.  Part of template.h. */

/* The largest of each lane; v_hmax or v_hmax_n of it is the row's. */
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

/* A tile is summed in so many chains of vectors: 16 numbers side by side, or more. */
enum { CHAINS = VL < 8 ? 16 / VL : 2 };

/* y = exp(x - max); returns the sum of each lane.  Which of the chains a lane goes to depends on its
   place in the tile alone, so that excluded keys at the end, which add zeros, change no bit. */
static ALWAYS_INLINE vec exp_and_sums(const float *x, float *y, float max, ptrdiff_t whole) {
    vec sums[CHAINS], top = v_set1(max), value;
    ptrdiff_t j = 0;
    UNROLL for (int c = 0; c < CHAINS; c++) sums[c] = v_zero();
    for (; j + CHAINS * VL <= whole; j += CHAINS * VL) {
        vec values[CHAINS]; /* y may be x: the loads of all come before a store */
        UNROLL for (int c = 0; c < CHAINS; c++)
            values[c] = v_exp(v_sub(v_load(x + j + c * VL), top));
        UNROLL for (int c = 0; c < CHAINS; c++) {
            v_store(y + j + c * VL, values[c]);
            sums[c] = v_add(sums[c], values[c]);
        }
    }
    UNROLL for (int c = 0; c < CHAINS - 1; c++)
        if (j + c * VL < whole) {
            value = v_exp(v_sub(v_load(x + j + c * VL), top));
            v_store(y + j + c * VL, value);
            sums[c] = v_add(sums[c], value);
        }
    UNROLL for (int step = 1; step < CHAINS; step *= 2)
        UNROLL for (int c = 0; c < CHAINS; c += 2 * step) sums[c] = v_add(sums[c], sums[c + step]);
    return sums[0];
}

/* |at - lane| for each lane: as floats where these are exact, else from integers, rounded once. */
static ALWAYS_INLINE vec distances(ptrdiff_t at) {
    float lanes[VL];
    if (at > -(1 << 23) && at < 1 << 23) {
        for (int u = 0; u < VL; u++) lanes[u] = (float)u;
        return v_abs(v_sub(v_set1((float)at), v_load(lanes)));
    }
    for (int u = 0; u < VL; u++) lanes[u] = (float)(at < u ? u - at : at - u);
    return v_load(lanes);
}

/* kept[n] is 0 for the keys of a tile that the row's segment and blocks deny it, and elsewhere what its
   bool mask has or 1; then zeros up to the next multiple of LANES. */
static void find_kept(const qkv_row *row, ptrdiff_t first, ptrdiff_t n, uint8_t *kept) {
    if (row->modifiers & QKV_KEEP && row->mask_step)
        memcpy(kept, row->keep + first, (size_t)n);
    else
        memset(kept, row->modifiers & QKV_KEEP ? *row->keep : 1, (size_t)n);
    memset(kept + n, 0, (size_t)(ROUND_UP(n, LANES) - n));
    if (row->modifiers & QKV_SEGMENT)
        for (ptrdiff_t j = 0; j < n; j++)
            kept[j] = row->segments[first + j] == row->segment ? kept[j] : 0;
    if (row->modifiers & QKV_BLOCKS)
        for (ptrdiff_t at = first, end; at < first + n; at = end) {
            const ptrdiff_t b = at / row->block, rest = first + n - at;
            end = at + MIN((b + 1) * row->block - at, rest);
            if (!row->blocks[b]) memset(kept + (at - first), 0, (size_t)(end - at));
        }
}

/* What a score goes through beside the plain formula: softcap, ALiBi, float mask, what is kept.  Masks
   are not read past column n. */
static void adjust_row(float *s, ptrdiff_t n, ptrdiff_t first, const qkv_row *row) {
    const ptrdiff_t step = row->mask_step;
    const int modifiers = row->modifiers, parts = modifiers & (QKV_SEGMENT | QKV_BLOCKS);
    uint8_t kept[TILE];
    if (parts) find_kept(row, first, n, kept);
    for (ptrdiff_t j = 0; j < n; j += VL) {
        ptrdiff_t filled = MIN(VL, n - j);
        vec x = v_load(s + j);
        if (modifiers & QKV_SOFTCAP) {
            vec cap = v_set1(row->softcap);
            x = v_mul(cap, v_tanh(v_div(x, cap)));
        }
        if (modifiers & QKV_SLOPE)
            x = v_fnma(v_set1(row->slope), distances(row->position - first - j), x);
        if (modifiers & QKV_BIAS) {
            const float *bias = row->bias + (first + j) * step;
            x = v_bias(x, step ? v_load_n(bias, filled) : v_set1(*bias));
        }
        if (parts) {
            x = v_keep(x, kept + j);
        } else if (modifiers & QKV_KEEP) {
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

/* Of bytes, of which compilers make instructions on many. */
static int look_at_bytes(const uint8_t *x, ptrdiff_t n) {
    uint8_t some = 0, every = UINT8_MAX;
    for (ptrdiff_t j = 0; j < n; j++) {
        some |= x[j];
        every = MIN(every, x[j]);
    }
    return (some ? QKV_ALLOWS : 0) | (every ? 0 : QKV_CHANGES);
}

static int look_at_mask(const qkv_row *row, ptrdiff_t first, ptrdiff_t n) {
    const ptrdiff_t start = first * row->mask_step, count = row->mask_step ? n : 1;
    int seen = QKV_ALLOWS, bias = 0;
    if (row->modifiers & (QKV_SEGMENT | QKV_BLOCKS)) {
        uint8_t kept[TILE];
        find_kept(row, first, n, kept);
        seen = look_at_bytes(kept, n);
    } else if (row->modifiers & QKV_KEEP)
        seen = look_at_bytes(row->keep + start, count);
    if (row->modifiers & QKV_BIAS && seen & QKV_ALLOWS) {
        int allows = 0, changes = 0;
        for (ptrdiff_t j = start; j < start + count; j++) {
            allows |= row->bias[j] != -INFINITY;
            changes |= row->bias[j] != 0.0f;
        }
        bias = (allows ? QKV_ALLOWS : 0) | (changes ? QKV_CHANGES : 0);
        seen = (seen & bias & QKV_ALLOWS) | ((seen | bias) & QKV_CHANGES);
    }
    return seen;
}

/* Up to VL rows at a time: their maxima and sums over the lanes are found in one tree each, and
   what follows from them is computed a row per lane. */
static void softmax_tile(float *s, ptrdiff_t lds, ptrdiff_t m, ptrdiff_t n, ptrdiff_t first,
                         const qkv_row *rows, float *max, float *sum, float *factor) {
    const ptrdiff_t whole = ROUND_UP(n, VL);
    for (ptrdiff_t i = 0; i < m; i += VL, s += VL * lds) {
        const ptrdiff_t filled = MIN(VL, m - i);
        float base[VL], old[VL];
        vec lanes[VL];

        /* 1. scores: what the options add, then -inf wherever no key is allowed; their maximum */
        for (ptrdiff_t u = 0; u < VL; u++) lanes[u] = v_zero();
        for (ptrdiff_t u = 0; u < filled; u++) {
            const qkv_row *row = rows + i + u;
            float *scores = s + u * lds;
            ptrdiff_t lo = MIN(MAX(row->lo - first, 0), n), hi = MIN(MAX(row->hi - first, lo), n);
            if (row->modifiers & QKV_EXCLUDES && i + u + MASK_AHEAD < m)
                qkv_prefetch_mask(row + MASK_AHEAD, first, n);
            if (row->modifiers) adjust_row(scores, n, first, row);
            for (ptrdiff_t j = 0; j < lo; j++) scores[j] = -INFINITY;
            for (ptrdiff_t j = hi; j < whole; j++) scores[j] = -INFINITY;
            if (row->scores) memcpy(row->scores + first, scores, (size_t)n * sizeof *scores);
            lanes[u] = lane_maxima(scores, whole);
        }

        /* 2. what is subtracted: the maximum so far, but not a new one that is hardly larger, since
           each correction of what came before rounds it; a row with no key yet subtracts 0, so that
           exp gives zeros */
        vec before = v_load_n(max + i, filled), top = v_max(v_hmax_n(lanes), before);
        top = v_select_lt(v_add(before, v_set1(HARDLY_LARGER)), top, top, before);
        vec shift = v_select_lt(v_set1(-INFINITY), top, top, v_zero());
        v_store(base, shift);
        v_store_n(max + i, top, filled);

        /* 3. weights, their sum, and the correction of what came before */
        for (ptrdiff_t u = 0; u < filled; u++)
            lanes[u] = exp_and_sums(s + u * lds, s + u * lds, base[u], whole);
        v_store_n(old, before, filled);
        for (ptrdiff_t u = 0; u < filled; u++) factor[i + u] = qkv_correction(old[u], base[u]);
        vec sums = v_mul(v_load_n(sum + i, filled), v_load_n(factor + i, filled));
        v_store_n(sum + i, v_add(sums, v_hsum_n(lanes)), filled);
    }
}

/* The last numbers of a row that fill no vector, and -inf behind them. */
static ALWAYS_INLINE void load_edge(float *edge, const float *x, size_t n) {
    for (int u = 0; u < VL; u++) edge[u] = -INFINITY;
    memcpy(edge, x, n * sizeof *x);
}

static ALWAYS_INLINE float largest_of(const float *x, ptrdiff_t n) {
    const ptrdiff_t whole = n / VL * VL;
    vec top = lane_maxima(x, whole);
    if (whole < n) {
        float edge[VL];
        load_edge(edge, x + whole, (size_t)(n - whole));
        top = v_max(top, v_load(edge));
    }
    return v_hmax(top);
}

static ALWAYS_INLINE float exp_and_sum_of(const float *x, float max, float *y, ptrdiff_t n) {
    const ptrdiff_t whole = n / VL * VL;
    float edge[VL];
    if (whole < n) load_edge(edge, x + whole, (size_t)(n - whole)); /* y may be x */
    vec sums = v_zero();
    for (ptrdiff_t j = 0; j < whole; j += TILE)
        sums = v_add(sums, exp_and_sums(x + j, y + j, max, MIN(TILE, whole - j)));
    if (whole < n) {
        sums = v_add(sums, exp_and_sums(edge, edge, max, VL));
        memcpy(y + whole, edge, (size_t)(n - whole) * sizeof *y);
    }
    return v_hsum(sums);
}

static float largest(const float *x, ptrdiff_t n) { return largest_of(x, n); }

static float exp_and_sum(const float *x, float max, float *y, ptrdiff_t n) {
    return exp_and_sum_of(x, max, y, n);
}

static void softmax(const float *x, float *y, ptrdiff_t n) {
    const ptrdiff_t whole = n / VL * VL;
    const float factor = 1.0f / exp_and_sum_of(x, largest_of(x, n), y, n);
    const vec inverse = v_set1(factor);
    for (ptrdiff_t j = 0; j < whole; j += VL) v_store(y + j, v_mul(v_load(y + j), inverse));
    for (ptrdiff_t j = whole; j < n; j++) y[j] *= factor;
}
