# The C types of `_sparse.py` in its compiled form, `_sparse_c`.
cimport cython
cimport rpcwheel.timer._base_c as base
from libc.stdint cimport int64_t

cdef int STALE


cdef class SparseWheel(base.TimerQueue):
    cdef public dict _by_tick
    cdef public list _tick_of
    cdef public list _unused
    cdef public object _numbers
    cdef public list _ticks
    cdef public object _made
    cdef public int64_t _pushes

    @cython.locals(target=int64_t, changes=int64_t, slot=int64_t, tick=int64_t, moves=cython.int,
                   timeout=base.Timeout)
    cpdef base.Timeout pop(self, int64_t now_ns)
    @cython.locals(tick=int64_t)
    cpdef int64_t next_wake(self) except -1
    cdef int64_t _first(self) except -2
    @cython.locals(epoch=int64_t)
    cdef int64_t _slot(self, int64_t tick, int64_t cursor) except -1
    cdef object _new_slot(self, tick)
    cdef object _sweep(self)
    cdef object _forget(self, tick, int64_t slot)
