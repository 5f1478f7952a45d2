# The C types of `_base.py` in its compiled form, `_base_c`.
cimport cython
cimport cpython.time as time  # `time.monotonic_ns()` without a Python call
cimport rpcwheel.timer._c_native as native
from libc.stdint cimport int64_t, uint64_t

cdef int64_t EXPIRED, CANCELLED, NEVER, MAX_NS, LONG_NS
cdef uint64_t ONE
cdef int MOVES
cdef double LONG_S


@cython.final
cdef class Timeout:  # no cdef method: without a table of methods it takes 80 bytes
    cdef public Timeout _prev
    cdef public Timeout _next
    cdef public object _task
    cdef public TimerState _timer_state
    cdef public int64_t _deadline_ns
    cdef public int64_t _slot


cdef class TimerQueue:
    cdef public int64_t _tick_ns
    cdef public int64_t _cursor
    cdef public int64_t _epoch
    cdef public int64_t _added
    cdef public int64_t _moved
    cdef public int64_t _removed
    cdef public int64_t _limit
    cdef public int64_t _capacity
    cdef public bint _bounded
    cdef public int64_t _never
    cdef public list _heads
    cdef int64_t* _bounds
    cdef uint64_t* _occupied
    cdef public int64_t _recent
    cdef public int64_t _after
    cdef public int64_t _until
    cdef public Timeout _mark
    cdef public bint _attached

    cpdef bint schedule(self, Timeout timeout) except -1
    cpdef bint cancel(self, Timeout timeout) except -1
    @cython.locals(later=bint)
    cpdef bint reschedule(self, Timeout timeout, int64_t deadline_ns) except -1
    cpdef list advance(self, int64_t now_ns, int64_t limit=*)
    cpdef list drain(self)
    cpdef Timeout pop(self, int64_t now_ns)
    cpdef int64_t next_wake(self) except -1
    cpdef object attach(self)
    cpdef object limit(self, int64_t capacity)
    cpdef object check(self)
    cpdef object _check_slot(self, int64_t slot, int64_t tick)
    cpdef list _slots(self)
    cdef int64_t _slot(self, int64_t tick, int64_t cursor) except -1
    cdef int64_t _due(self, int64_t deadline_ns) except -1
    @cython.locals(epoch=int64_t, cursor=int64_t, deadline_ns=int64_t, tick=int64_t, until=int64_t,
                   slot=int64_t, old=int64_t, head=Timeout, before=Timeout, after=Timeout, last=Timeout)
    cpdef bint _place(self, Timeout timeout, bint fresh, bint first) except -1
    @cython.locals(slot=int64_t, before=Timeout, after=Timeout)
    cpdef bint _expire(self, Timeout timeout, int64_t tick) except -1
    cpdef bint _move_cursor(self, int64_t tick, int64_t changes) except -1


@cython.final
cdef class TimerState:
    cdef public TimerQueue queue
    cdef public object owner
    cdef public int64_t manual_ns
    cdef public int64_t armed_ns
    cdef public object last_delay
    cdef public int64_t last_ns

    cpdef int64_t now(self) except -1
    @cython.locals(seconds=double, delay_ns=int64_t, now_ns=int64_t, plain=bint)
    cpdef int64_t deadline(self, delay) except -1
    cpdef object wake(self, int64_t deadline_ns)
    @cython.locals(queue=TimerQueue, changes=int64_t, wake_ns=int64_t)
    cpdef int64_t arm(self) except -1
