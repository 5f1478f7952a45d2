# The C types of `_sparse.py` in its compiled form, `_sparse_c`.
cimport cython
cimport rpcwheel.timer._base_c as base
from libc.stdint cimport int64_t

cdef int STALE


cdef class SparseWheel(base.TimerQueue):
    cdef public dict _by_tick
    cdef public list _ticks
    cdef public object _made
    cdef public int64_t _pushes
    cdef public base.Slot _emptied

    @cython.locals(target=int64_t, filed=int64_t, tick=int64_t, moves=cython.int, slot=base.Slot,
                   timeout=base.Timeout)
    cpdef base.Timeout pop(self, int64_t now_ns)
    @cython.locals(slot=base.Slot)
    cpdef int64_t next_wake(self) except -1
    @cython.locals(slot=base.Slot)
    cdef base.Slot _first(self)
    @cython.locals(slot=base.Slot, fresh=base.Slot)
    cpdef base.Slot _slot(self, int64_t tick, int64_t cursor)
    @cython.locals(slot=base.Slot)
    cdef object _sweep(self)
    cdef object _forget(self, base.Slot slot)
