/* Rotary embedding of a row.  Part of template.h.

   Each product and each sum is rounded by itself, never fused: the bits are those of the formula in
   NumPy, on every instruction set.  A pair is read before it is written, so y may be x. */

static void rotate_halves(const float *x, const float *cosines, const float *sines, float *y,
                          ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; j += VL) {
        const ptrdiff_t filled = MIN(VL, n - j);
        vec a, b, c, s, first, second;
        if (filled == VL) {
            a = v_load(x + j), b = v_load(x + n + j);
            c = v_load(cosines + j), s = v_load(sines + j);
        } else {
            a = v_load_n(x + j, filled), b = v_load_n(x + n + j, filled);
            c = v_load_n(cosines + j, filled), s = v_load_n(sines + j, filled);
        }
        first = v_sub(v_mul(a, c), v_mul(b, s));
        second = v_add(v_mul(b, c), v_mul(a, s));
        if (filled == VL) {
            v_store(y + j, first), v_store(y + n + j, second);
        } else {
            v_store_n(y + j, first, filled), v_store_n(y + n + j, second, filled);
        }
    }
}

/* Pairs are parted in memory of their own, which compilers turn into shuffles. */
static void rotate_neighbours(const float *x, const float *cosines, const float *sines, float *y,
                              ptrdiff_t n) {
    float a[LANES], b[LANES];
    ptrdiff_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        for (int i = 0; i < LANES; i++) a[i] = x[2 * (j + i)], b[i] = x[2 * (j + i) + 1];
        for (int i = 0; i < LANES; i += VL) {
            vec even = v_load(a + i), odd = v_load(b + i);
            vec c = v_load(cosines + j + i), s = v_load(sines + j + i);
            v_store(a + i, v_sub(v_mul(even, c), v_mul(odd, s)));
            v_store(b + i, v_add(v_mul(odd, c), v_mul(even, s)));
        }
        for (int i = 0; i < LANES; i++) y[2 * (j + i)] = a[i], y[2 * (j + i) + 1] = b[i];
    }
    for (; j < n; j++) {
        float even = x[2 * j], odd = x[2 * j + 1];
        y[2 * j] = even * cosines[j] - odd * sines[j];
        y[2 * j + 1] = odd * cosines[j] + even * sines[j];
    }
}

static void rotate(const float *x, const float *cosines, const float *sines, float *y, ptrdiff_t n,
                   int interleaved) {
    if (interleaved)
        rotate_neighbours(x, cosines, sines, y, n);
    else
        rotate_halves(x, cosines, sines, y, n);
}
