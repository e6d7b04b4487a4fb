/* exp for the softmax and tanh for the softcap, in the vector vocabulary of the including file.

   exp: x = n ln 2 + r with n = round(x log2 e) and |r| <= ln 2 / 2.  n ln 2 is taken off in two parts:
   LN2_HIGH has nine bits, so that n LN2_HIGH is exact with or without a fused product.  Then
   e^r = 1 + r + r^2 q(r), with q of degree 3 by the Remez algorithm for the relative error of the
   whole (1.05e-7).  It is computed in units of 2^-64, so that what is left to multiply by, 2^(n + 64),
   is a normal number for every n from -190 to 63: for x up to 43.  A softmax needs
   none above 0, but in rows that hold a NaN, which make NaN of whatever else is found there.
   Error: at most 2.3 ulp with fused products, 4 ulp without; results below 2^-126 are rounded once
   more, to the subnormal grid.  exp(0) == 1 and exp(-inf) == 0 exactly; NaN stays NaN. */
#define LOG2_E 1.4426950408889634f
/* Added and taken off again, it leaves the nearest integer; its last bits are the exponent of 2^64. */
#define TO_INTEGER (0x1.8p23f + 191.0f)
#define UNITS(x) v_set1((x) * 0x1p-64f)
#define LN2_HIGH 0.693359375f
#define LN2_LOW (-2.12194440e-4f)

/* e^r 2^n, with t = n + TO_INTEGER. */
static ALWAYS_INLINE vec exp_of_parts(vec r, vec t) {
    vec p = v_fma(UNITS(0x1.1062100p-7f), r, UNITS(0x1.572a600p-5f));
    p = v_fma(p, r, UNITS(0x1.5557b00p-3f));
    p = v_fma(p, r, UNITS(0x1.fffdfc0p-2f));
    p = v_fma(p, r, UNITS(1.0f));
    p = v_fma(p, r, UNITS(1.0f));
    return v_ldexp(p, t);
}

/* 2^lift e^x for x >= -130; lift is constant in every caller. */
static ALWAYS_INLINE vec exp_of(vec x, const int lift) {
    const vec to_integer = v_set1(TO_INTEGER + (float)lift);
    vec t = v_fma(x, v_set1(LOG2_E), to_integer), n = v_sub(t, to_integer);
    return exp_of_parts(v_fnma(n, v_set1(LN2_LOW), v_fnma(n, v_set1(LN2_HIGH), x)), t);
}

static inline vec v_exp(vec x) { /* e^-105 rounds to zero; the order of operands keeps a NaN */
    x = v_max(v_set1(-105.0f), x);
    return exp_of(x, 0);
}

/* tanh, odd and therefore computed for |x|.  Below 0.625: x + x^3 p(x^2), with p of degree 4 by the
   Remez algorithm (relative error 4.7e-9), which is right near 0 too.  Above: 1 - 2 / (e^2x + 1), and
   1 from 10 on.  Error: at most 3 ulp.  NaN stays NaN. */
static inline vec v_tanh(vec x) {
    vec a = v_abs(x), z = v_mul(a, a), p, near, far, e;
    p = v_fma(v_set1(-0x1.7454320p-8f), z, v_set1(0x1.51d0cc0p-6f));
    p = v_fma(p, z, v_set1(-0x1.b82fbc0p-5f));
    p = v_fma(p, z, v_set1(0x1.1106ca0p-3f));
    p = v_fma(p, z, v_set1(-0x1.5555320p-2f));
    near = v_fma(v_mul(p, z), a, a);
    e = v_select_lt(v_set1(10.0f), a, v_set1(10.0f), a);
    e = v_exp(v_add(e, e));
    far = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(e, v_set1(1.0f))));
    a = v_select_lt(a, v_set1(0.625f), near, far);
    return v_select_lt(x, v_zero(), v_sub(v_zero(), a), a);
}
