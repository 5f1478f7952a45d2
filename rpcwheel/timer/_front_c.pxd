# The C types of `_front.py` in its compiled form, `_front_c`.
cimport cython
cimport cpython.time as time
cimport rpcwheel.timer._base_c as base
from libc.stdint cimport int64_t


cdef class TimerBase:
    cdef public base.TimerState _timer_state

    @cython.locals(deadline_ns=int64_t, state=base.TimerState, queue=base.TimerQueue, timeout=base.Timeout,
                   slot=base.Slot, last=base.Timeout)
    cpdef object new_timeout(self, task, delay)
    cpdef object _refuse(self)
