# cython: language_level=3
"""What Python and the compiled modules both count on; attention.pyx compares the two at import."""

cdef enum:               # columns of Rules.spans, explained in _problem.py
    ITEM, Q_START, Q_LENGTH, Q_ROOM, K_START, K_LENGTH, DIAGONAL, COLUMNS

cdef enum:               # columns of the table of pages, explained in _problem.py
    K_ADDRESS, V_ADDRESS, K_SCALE_ADDRESS, V_SCALE_ADDRESS, ADDRESSES
