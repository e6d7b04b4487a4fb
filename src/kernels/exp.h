/* exp for the softmax, in the vector vocabulary of the including file.

   x = n ln 2 + r with n = round(x log2 e) and |r| <= ln 2 / 2.  n ln 2 is taken off in two parts:
   LN2_HIGH has nine bits, so that n LN2_HIGH is exact with or without a fused product.  Then
   e^r = 1 + r + r^2 q(r), with q of degree 3 by the Remez algorithm for the relative error of the
   whole (1.05e-7), and 2^n is multiplied in.
   Error: at most 2.3 ulp with fused products, 4 ulp without; results below 2^-126 are rounded once
   more, to the subnormal grid.  exp(0) == 1 and exp(-inf) == 0 exactly; NaN stays NaN. */
#define LOG2_E 1.4426950408889634f
#define LN2_HIGH 0.693359375f
#define LN2_LOW (-2.12194440e-4f)

static inline vec v_exp(vec x) {
    vec n, r, p;
    x = v_max(v_set1(-105.0f), x); /* e^-105 rounds to zero; the order of operands keeps a NaN */
    n = v_round(v_mul(x, v_set1(LOG2_E)));
    r = v_fnma(n, v_set1(LN2_HIGH), x);
    r = v_fnma(n, v_set1(LN2_LOW), r);
    p = v_fma(v_set1(0x1.1062100p-7f), r, v_set1(0x1.572a600p-5f));
    p = v_fma(p, r, v_set1(0x1.5557b00p-3f));
    p = v_fma(p, r, v_set1(0x1.fffdfc0p-2f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_ldexp(p, n);
}
