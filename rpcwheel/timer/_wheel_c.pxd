# The C types of `_wheel.py` in its compiled form.
cimport cython
from libc.stdint cimport int64_t, uint64_t

cimport rpcwheel.timer._base_c as base


cdef class HierarchicalWheel(base.TimerQueue):
    cdef public list _levels
    cdef public base.Slot _moving
    cdef public int64_t _start

    @cython.locals(target=int64_t, filed=int64_t, start=int64_t, moves=cython.int,
                   slot=base.Slot, timeout=base.Timeout)
    cpdef base.Timeout pop(self, int64_t now_ns)
    @cython.locals(slot=base.Slot)
    cpdef int64_t next_wake(self) except -1
    @cython.locals(slot=base.Slot, level=base.Level, index=int64_t, above=int64_t, start=int64_t)
    cdef base.Slot _find(self)
    @cython.locals(differs=uint64_t, depth=cython.int, level=base.Level)
    cpdef base.Slot _slot(self, int64_t tick, int64_t cursor)
    cdef object _grow(self, int depth)
    @cython.locals(level=base.Level, slots=list)
    cpdef list _slots(self)


cdef class HashedWheel(base.TimerQueue):
    cdef public list _ring
    cdef public int64_t _mask
    cdef public base.Slot _visiting
    cdef public base.Slot _later

    @cython.locals(target=int64_t, filed=int64_t, tick=int64_t, moves=cython.int,
                   slot=base.Slot, timeout=base.Timeout)
    cpdef base.Timeout pop(self, int64_t now_ns)
    @cython.locals(slot=base.Slot, tick=int64_t)
    cpdef int64_t next_wake(self) except -1
    @cython.locals(cursor=int64_t, best=int64_t, offset=int64_t, slot=base.Slot)
    cdef int64_t _earliest(self) except -1
    @cython.locals(timeout=base.Timeout, after=base.Timeout, later=base.Slot, last=base.Timeout)
    cdef object _set_aside(self, base.Slot slot)
    @cython.locals(later=base.Slot, first=base.Timeout, last=base.Timeout)
    cdef object _leave(self, base.Slot slot)
    cpdef base.Slot _slot(self, int64_t tick, int64_t cursor)


@cython.locals(bits=uint64_t)
cdef int _lowest(uint64_t bits) except -1
