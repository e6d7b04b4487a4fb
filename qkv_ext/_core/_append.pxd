# cython: language_level=3
"""What src/append.pyx has for other modules."""

cdef bint append_rows(int isa, int given, const Py_buffer *k, const Py_buffer *v, list counts,
                      pages, int threads) except -1
