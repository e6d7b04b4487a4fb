# cython: language_level=3
"""What src/attention.pyx has for other modules."""

cdef bint is_simple(tuple given, bint *causal, double *scale)
cdef int attend_rows(int isa, const Py_buffer *q, const Py_buffer *out, pages, list lengths,
                     bint causal, double scale, sinks, int threads) except -1
