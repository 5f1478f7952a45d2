# The C types of `_base.py` in its compiled form, `_base_c`.
cimport cython
cimport cpython.time as time  # `time.monotonic_ns()` without a Python call
cimport rpcwheel.timer._c_collector as collector
cimport rpcwheel.timer._c_math as math
from libc.stdint cimport int64_t, uint64_t

cdef int PENDING, EXPIRED, CANCELLED, MOVES, BITS
cdef int64_t NEVER, MAX_NS, LONG_NS
cdef double LONG_S


cdef class Timeout:
    cdef public Timeout _prev
    cdef public Timeout _next
    cdef public object _task
    cdef public TimerState _timer_state
    cdef public int64_t _deadline_ns
    cdef public int64_t _tick
    cdef public int _state

    @cython.locals(before=Timeout, after=Timeout)
    cpdef bint cancel(self) except -1
    cpdef object _let_go(self)
    cpdef object _keep_task(self, task)


@cython.final
cdef class Slot(Timeout):
    cdef public uint64_t bit
    cdef public int64_t bound
    cdef public Level level


@cython.final
cdef class Level:
    cdef public uint64_t occupied
    cdef public int shift
    cdef public list slots


cdef class TimerQueue:
    cdef public int64_t _tick_ns
    cdef public int64_t _cursor
    cdef public int64_t _epoch
    cdef public int64_t _filed
    cdef public int64_t _refiled
    cdef public int64_t _gone
    cdef public int64_t _limit
    cdef public int64_t _capacity
    cdef public Slot _never
    cdef public Slot _recent
    cdef public int64_t _recent_tick
    cdef public int64_t _after
    cdef public int64_t _until
    cdef public bint _attached

    cpdef bint schedule(self, Timeout timeout) except -1
    cpdef bint cancel(self, Timeout timeout) except -1
    @cython.locals(tick=int64_t)
    cpdef bint reschedule(self, Timeout timeout, int64_t deadline_ns) except -1
    cpdef list advance(self, int64_t now_ns, int64_t limit=*)
    cpdef list drain(self)
    cpdef Timeout pop(self, int64_t now_ns)
    cpdef int64_t next_wake(self) except -1
    cpdef object attach(self)
    cpdef object limit(self, int64_t capacity)
    cpdef object check(self)
    cpdef object _check_slot(self, Slot slot, int64_t tick)
    cpdef list _slots(self)
    cpdef Slot _slot(self, int64_t tick, int64_t cursor)
    cpdef int64_t _due(self, int64_t deadline_ns) except -1
    @cython.locals(epoch=int64_t, cursor=int64_t, deadline_ns=int64_t, tick=int64_t,
                   until=int64_t, slot=Slot, before=Timeout, after=Timeout, last=Timeout)
    cpdef bint _file(self, Timeout timeout, bint fresh, bint first) except -1
    @cython.locals(before=Timeout, after=Timeout)
    cpdef bint _expire(self, Timeout timeout, int64_t tick) except -1
    cpdef bint _move_cursor(self, int64_t tick, int64_t filed) except -1


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
    @cython.locals(queue=TimerQueue, filed=int64_t, wake_ns=int64_t)
    cpdef int64_t arm(self) except -1
