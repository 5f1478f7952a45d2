# The C types of `_wheel.py` in its compiled form.
cimport cython
cimport rpcwheel.timer._base_c as base
cimport rpcwheel.timer._c_native as native
from libc.stdint cimport int64_t, uint64_t

cdef int LEVELS, SLOTS


cdef class HierarchicalWheel(base.TimerQueue):
    cdef public int64_t _moving
    cdef public int64_t _start

    @cython.locals(target=int64_t, changes=int64_t, start=int64_t, moves=cython.int, slot=int64_t,
                   timeout=base.Timeout)
    cpdef base.Timeout pop(self, int64_t now_ns)
    @cython.locals(slot=int64_t)
    cpdef int64_t next_wake(self) except -1
    @cython.locals(slot=int64_t, level=cython.int, shift=cython.int, index=int64_t, bits=uint64_t,
                   start=int64_t)
    cdef int64_t _find(self) except -2
    @cython.locals(differs=uint64_t, level=cython.int)
    cdef int64_t _slot(self, int64_t tick, int64_t cursor) except -1


cdef class HashedWheel(base.TimerQueue):
    cdef public int64_t _mask
    cdef public int64_t _now
    cdef public int64_t _visiting

    @cython.locals(target=int64_t, changes=int64_t, tick=int64_t, moves=cython.int, slot=int64_t,
                   timeout=base.Timeout)
    cpdef base.Timeout pop(self, int64_t now_ns)
    @cython.locals(tick=int64_t)
    cpdef int64_t next_wake(self) except -1
    @cython.locals(cursor=int64_t, first=int64_t, best=int64_t, words=int64_t, step=int64_t, word=int64_t,
                   bits=uint64_t, index=cython.int, slot=int64_t, tick=int64_t)
    cdef int64_t _earliest(self) except -1
    cpdef list drain(self)
    @cython.locals(timeout=base.Timeout)
    cdef base.Timeout _next_of_visit(self)
    @cython.locals(mark=base.Timeout, first=base.Timeout, last=base.Timeout)
    cdef object _visit(self, int64_t slot)
    @cython.locals(slot=int64_t, mark=base.Timeout, before=base.Timeout, after=base.Timeout)
    cdef object _end_visit(self)
    @cython.locals(slot=int64_t, tick=int64_t, mark=base.Timeout, before=base.Timeout, after=base.Timeout)
    cdef object _pass_by(self, base.Timeout timeout)
    cdef int64_t _slot(self, int64_t tick, int64_t cursor) except -1
