# cython: language_level=3
"""What src/matmul.pyx has for other modules."""

cdef plain_product(int isa, a, b, bias, Py_ssize_t columns, int least, int threads)
