# The C types of `_front.py` in its compiled form, `_front_c`.
cimport cython
cimport cpython.time as time
cimport rpcwheel.timer._base_c as base
cimport rpcwheel.timer._c_native as native
from libc.stdint cimport int64_t

cdef int64_t SLOW_NS
cdef int BUCKETS
cdef int64_t* BOUNDS_NS


cdef class TimerBase:
    cdef public base.TimerState _timer_state
    cdef public object _executor
    cdef public bint _stopped
    cdef public bint _running
    cdef public int64_t _fired
    cdef public int64_t _late_ns
    cdef public int64_t _max_late_ns
    cdef public int64_t _slowest_ns
    cdef public int64_t _window_end_ns
    cdef int64_t* _buckets

    @cython.locals(deadline_ns=int64_t, state=base.TimerState, queue=base.TimerQueue, timeout=base.Timeout,
                   slot=int64_t, head=base.Timeout, last=base.Timeout)
    cpdef object new_timeout(self, task, delay)
    @cython.locals(state=base.TimerState, queue=base.TimerQueue, timeout=base.Timeout, now_ns=int64_t,
                   count=int64_t, late_ns=int64_t, after_ns=int64_t, took_ns=int64_t)
    cpdef bint _run_due(self, int64_t limit) except -1
    cpdef object _refuse(self)
