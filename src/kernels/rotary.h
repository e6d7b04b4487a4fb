/* Rotary embedding of a row.  Part of template.h.

   Each product and each sum is rounded by itself, never fused: the bits are those of the formula in
   NumPy, on every instruction set.  A pair is read before it is written: the result may lie on it. */

static ALWAYS_INLINE vec first_of_pair(vec a, vec b, vec c, vec s) {
    return v_sub(v_mul(a, c), v_mul(b, s));
}

static ALWAYS_INLINE vec second_of_pair(vec a, vec b, vec c, vec s) {
    return v_add(v_mul(b, c), v_mul(a, s));
}

static ALWAYS_INLINE void halves(const int kind, const int streams, const void *a, const void *b,
                                 const float *cosines, const float *sines, void *first,
                                 void *second, ptrdiff_t n) {
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) {
        vec x = v_get(kind, a, j), y = v_get(kind, b, j);
        vec c = v_load(cosines + j), s = v_load(sines + j);
        v_put(kind, first, j, first_of_pair(x, y, c, s), streams);
        v_put(kind, second, j, second_of_pair(x, y, c, s), streams);
    }
    if (j < n) {
        vec x = v_get_n(kind, a, j, n - j), y = v_get_n(kind, b, j, n - j);
        vec c = v_load_n(cosines + j, n - j), s = v_load_n(sines + j, n - j);
        v_put_n(kind, first, j, first_of_pair(x, y, c, s), n - j);
        v_put_n(kind, second, j, second_of_pair(x, y, c, s), n - j);
    }
}

static void rotate_halves(int kind, const void *a, const void *b, const float *cosines,
                          const float *sines, void *first, void *second, ptrdiff_t n, int streams) {
    FOR_KIND(halves, kind, streams, a, b, cosines, sines, first, second, n);
}

static ALWAYS_INLINE void neighbours(const int kind, const int streams, const void *x,
                                     const float *cosines, const float *sines, void *y,
                                     ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + VL <= n; i += VL) {
        vec given[2] = {v_get(kind, x, 2 * i), v_get(kind, x, 2 * i + VL)}, made[2];
        vec c = v_load(cosines + i), s = v_load(sines + i);
        v_unzip(given);
        made[0] = first_of_pair(given[0], given[1], c, s);
        made[1] = second_of_pair(given[0], given[1], c, s);
        v_zip(made);
        v_put(kind, y, 2 * i, made[0], streams);
        v_put(kind, y, 2 * i + VL, made[1], streams);
    }
    if (i < n) {
        const ptrdiff_t low = MIN(VL, 2 * (n - i)), high = 2 * (n - i) - low;
        vec given[2] = {v_get_n(kind, x, 2 * i, low), v_get_n(kind, x, 2 * i + VL, high)}, made[2];
        vec c = v_load_n(cosines + i, n - i), s = v_load_n(sines + i, n - i);
        v_unzip(given);
        made[0] = first_of_pair(given[0], given[1], c, s);
        made[1] = second_of_pair(given[0], given[1], c, s);
        v_zip(made);
        v_put_n(kind, y, 2 * i, made[0], low);
        v_put_n(kind, y, 2 * i + VL, made[1], high);
    }
}

static void rotate_pairs(int kind, const void *x, const float *cosines, const float *sines, void *y,
                         ptrdiff_t n, int streams) {
    FOR_KIND(neighbours, kind, streams, x, cosines, sines, y, n);
}
