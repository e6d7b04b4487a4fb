/* What ends a product: bias, activation, residual.  Part of template.h.

   Each activation but relu is x times a distribution function F with F(-a) = 1 - F(a), which is
   computed for negative arguments alone, where it is small:

       x F(x)  =  max(x, 0) + m F(m)        m = -|x|

   Neither term cancels the other: max is 0, or F(m) at most 1/2.  m is held above what makes the
   second term 0, so that an infinity is not multiplied by it: -inf gives 0 and inf itself.  NaN stays
   NaN. */

/* above + m F(m) of the normal distribution: F(m) = e^(-m^2 / 2) P(-m) / Q(-m), a rational approximation
   of the Mills ratio for a relative error of 6.3e-9 from 0 to 15; no sum of it cancels.  What is left of
   -m^2 / 2 beyond n ln 2 is rounded after that is taken off, so that e^r has all digits.  Error of gelu:
   at most 7 ulp with fused products, 8 without; results below 2^-126 are rounded once more. */
static ALWAYS_INLINE vec add_normal_part(vec above, vec m) {
    const vec to_integer = v_set1(TO_INTEGER);
    vec p, q, half, t, n, r;
    m = v_max(v_set1(-15.0f), m);
    half = v_mul(m, v_set1(-0.5f));
    t = v_fma(v_mul(m, v_set1(-0.5f * LOG2_E)), m, to_integer);
    n = v_sub(t, to_integer);
    r = v_fma_once(half, m, v_mul(n, v_set1(-LN2_HIGH)));
    r = v_fnma(n, v_set1(LN2_LOW), r);
    p = v_fma(v_set1(0x1.103046p-8f), m, v_set1(-0x1.4ee67ap-5f));
    p = v_fma(p, m, v_set1(0x1.78c536p-3f));
    p = v_fma(p, m, v_set1(-0x1.c1d3c8p-2f));
    p = v_fma(p, m, v_set1(0.5f));
    q = v_fma(v_set1(-0x1.552256p-7f), m, v_set1(0x1.a3c2a6p-4f));
    q = v_fma(q, m, v_set1(-0x1.e2b97cp-2f));
    q = v_fma(q, m, v_set1(0x1.349f04p+0f));
    q = v_fma(q, m, v_set1(-0x1.ad2c14p+0f));
    q = v_fma(q, m, v_set1(1.0f));
    return v_fma(v_div(v_mul(m, p), q), exp_of_parts(r, t), above);
}

/* above + m / (1 + e^-u) for -130 <= m, u <= 0: e^u in units of 2^-24, so that it has all its digits down
   to where the result is subnormal.  Error of silu: at most 5 ulp. */
static ALWAYS_INLINE vec add_logistic_part(vec above, vec m, vec u) {
    vec e = exp_of(u, 24);
    m = v_div(v_mul(m, e), v_fma(e, v_set1(0x1p-24f), v_set1(1.0f)));
    return v_fma(m, v_set1(0x1p-24f), above);
}

/* activation is constant in every caller. */
static ALWAYS_INLINE vec activate(const int activation, vec x) {
    vec above = v_max(v_zero(), x), m = v_minus_abs(x), u;
    switch (activation) {
    case QKV_RELU:
        return above;
    case QKV_GELU:
        return add_normal_part(above, m);
    case QKV_GELU_TANH: /* (1 + tanh(u / 2)) / 2 is 1 / (1 + e^-u) */
        m = v_max(v_set1(-20.0f), m);
        u = v_fma(v_mul(m, m), v_set1(0x1.2444f2p-4f), v_set1(0x1.988454p+0f));
        return add_logistic_part(above, m, v_max(v_set1(-130.0f), v_mul(m, u)));
    case QKV_SILU:
        m = v_max(v_set1(-130.0f), m);
        return add_logistic_part(above, m, m);
    default:
        return x;
    }
}

static ALWAYS_INLINE void finish_row(const int activation, float *c, const float *bias,
                                     const float *residual, ptrdiff_t n) {
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) {
        vec x = v_load(c + j);
        if (bias) x = v_add(x, v_load(bias + j));
        x = activate(activation, x);
        if (residual) x = v_add(x, v_load(residual + j));
        v_store(c + j, x);
    }
    if (j < n) {
        vec x = v_load_n(c + j, n - j);
        if (bias) x = v_add(x, v_load_n(bias + j, n - j));
        x = activate(activation, x);
        if (residual) x = v_add(x, v_load_n(residual + j, n - j));
        v_store_n(c + j, x, n - j);
    }
}

static void epilogue(float *c, ptrdiff_t ldc, const float *bias, int activation,
                     const float *residual, ptrdiff_t ldr, ptrdiff_t m, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < m; i++, c += ldc) {
        switch (activation) {
        case QKV_RELU:
            finish_row(QKV_RELU, c, bias, residual, n);
            break;
        case QKV_GELU:
            finish_row(QKV_GELU, c, bias, residual, n);
            break;
        case QKV_GELU_TANH:
            finish_row(QKV_GELU_TANH, c, bias, residual, n);
            break;
        case QKV_SILU:
            finish_row(QKV_SILU, c, bias, residual, n);
            break;
        default:
            finish_row(0, c, bias, residual, n);
        }
        if (residual) residual += ldr;
    }
}
