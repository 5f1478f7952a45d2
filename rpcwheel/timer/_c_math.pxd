# `math.floor` without a Python call, for the compiled form of `_wheel.py`; exact for what fits 64 bits and is not negative.
from libc.stdint cimport int64_t


cdef inline int64_t floor(double value) noexcept nogil:
    return <int64_t> value
