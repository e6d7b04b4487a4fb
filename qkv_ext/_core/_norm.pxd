# cython: language_level=3
"""What src/norm.pyx has for other modules."""

# Rows x[m, n] ldx into y[m, n] ldy, strides in bytes, in the thread of the caller and with the bits
# of a call: float32, float16 or bfloat16 by kind, float32 weight[n] and bias[n], which may be NULL.
# y may be x.  The caller has entered the floating-point mode; nothing is polled.
cdef void norm_rows(int isa, int kind, bint centered, const char *x, Py_ssize_t ldx,
                    const float *weight, const float *bias, double eps, char *y, Py_ssize_t ldy,
                    Py_ssize_t m, Py_ssize_t n) noexcept nogil
