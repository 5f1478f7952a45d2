"""The limit of a server of `grpc`: an executor, and an interceptor that marks calls for it.

`grpc` (1.60 to 1.85) calls interceptors for each call on its one serving thread, and then submits
the call to the executor of the server, in the `contextvars` context in which the interceptors ran.
So the interceptor stores in that context what it knows of the call, and the executor decides before
the call takes a thread.

What gRPC submits is private: a function, the event of the call, its state, and more. Of these the
executor reads the deadline and whether the client has canceled, and adds a callback for the end of
a call that waits. It refuses a call with the function by which gRPC itself ends a call, which takes
no thread and does not read the request. It takes 25 us less than a handler that aborts, which is an
eighth of all that a refused call costs.
`tests/interop/grpcio/test_canaries_server.py` fails if grpcio changes that.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.handlers import DEADLINE_TOLERANCE_S, NO_DEADLINE_S
from rpcwheel._grpc.serving import end_unserved_call, on_end, submitted_call
from rpcwheel.durations import NEVER
from rpcwheel.timer.manual import start_timeout

from .limiter import CALL, UNLIMITED, LimitedCall, RefusalReason
from .pause import ROUND_S
from .server import CPU_EVERY_NS, Decisions, ServerLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.timer import Timeout

UNLIMITED_THREADS: Final = 4
"""How many calls of methods without a limit can run in addition to `max_workers` of them, and as
many health checks and heartbeats. A thread is started when it is needed."""

CANCELED: Final = "cancelled"
"""The `client` of the state of a call that its client has canceled."""


class LimitedFuture(Future[Any]):
    """The future that gRPC gets of a call. gRPC adds one callback, and reads nothing.

    A `Future` with its lock and condition would take longer than all that the limit does.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Future[Any]], object]] = []
        self._ended = False

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call a function at the end, or now if that has come."""
        self._callbacks.append(fn)
        if self._ended:
            self.end()

    def end(self) -> None:
        """Call the callback, once. Any thread."""
        self._ended = True
        if self._callbacks:  # else not added yet
            with suppress(IndexError):  # called by another thread
                self._callbacks.pop()(self)


REFUSED: Final = LimitedFuture()
"""The future of all calls that are refused when they arrive: it has ended."""
REFUSED.end()


class LimitInterceptor(grpc.ServerInterceptor):
    """Tells the executor of a server about each call."""

    def __init__(self, limit: ServerLimit) -> None:
        self._limit = limit
        self._seen = 0

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Store the call in its context, for the executor."""
        handler = continuation(handler_call_details)
        if handler is not None:
            limit = self._limit
            call = limit.call(handler_call_details, handler)
            CALL.set(call)
            if not limit.pause.arrivals and call is not None and call.limit is not None:
                self._check_executor()
        return handler

    def _check_executor(self) -> None:
        """Report once that the server has another executor: none of its calls arrives there."""
        self._seen += 1
        if self._seen == 3:  # noqa: PLR2004 - not the first: it arrives after this
            self._limit.report_ineffective()


class CpuClock(threading.local):
    """The processor time of each thread."""

    read_ns = 0
    """When it was read."""
    _cpu_ns = 0

    def read(self, now_ns: int) -> int:
        """Return what the thread has used since the last time."""
        self.read_ns, before_ns = now_ns, self._cpu_ns
        self._cpu_ns = time.thread_time_ns()
        return self._cpu_ns - before_ns


class ServerExecutor(ThreadPoolExecutor):
    """The executor of a server of `grpc` with a limit: in place of a `ThreadPoolExecutor`.

    A call takes a thread when the limit lets it run. Calls of servers without a limit run at once,
    as in a `ThreadPoolExecutor`. Calls of methods without a limit, such as long polls, have threads
    of their own. So do health checks and heartbeats, which must not wait for such calls.

    `kit.server_executor()` makes it; the server also needs `kit.server_interceptors()`.
    """

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "") -> None:
        """Start no thread yet.

        Args:
            max_workers: The highest number of handlers that run at the same time, as in a
                `ThreadPoolExecutor`. An adaptive limit may be lower, never higher.
            thread_name_prefix: As in a `ThreadPoolExecutor`.

        Raises:
            ValueError: `max_workers` is not positive.
        """
        super().__init__(max_workers, thread_name_prefix or "rpcwheel-server")
        threads = self._max_workers + UNLIMITED_THREADS
        self._unlimited = ThreadPoolExecutor(threads, "rpcwheel-server-unlimited")
        self._probes = ThreadPoolExecutor(threads, "rpcwheel-server-probe")
        self._limits: dict[ServerLimit, None] = {}
        self._is_shut_down = False
        self._clock = CpuClock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call of a server when its limit permits; any other function at once."""
        context = getattr(fn, "__self__", None)
        call = context.get(CALL) if type(context) is Context else None
        if call is None or call.start is not None:  # else a handler submits in its own context
            return _run_or_end(super().submit, fn, args, kwargs)
        limit = call.limit
        if limit is None:
            pool = self._unlimited if call is UNLIMITED else self._probes
            return _run_or_end(pool.submit, fn, args, kwargs)
        if limit not in self._limits:
            self._limits[limit] = None
            limit.limiter.set_threads(self._max_workers)
        call.start = [(fn, args)]
        now_ns, decisions = time.monotonic_ns(), None
        with limit.lock:
            limit.pause.arrivals += 1
            if self._is_shut_down:
                limit.limiter.refuse_closed(call)
                starts = False
            else:
                starts = limit.limiter.arrive(call, now_ns, must_wait=limit.pause.is_on(now_ns))
            call.future = future = REFUSED if call.refused else LimitedFuture()
            if not starts:
                call.deadline_ns = _deadline_ns(args, now_ns)
                decisions = limit.decide(now_ns, starts=False)
        if decisions is None:
            try:
                super().submit(self._run, call)
            except RuntimeError:  # it was shut down meanwhile, or can't start a thread
                decisions = self._not_started(call, now_ns)
            else:
                return future
        elif call.has_waited:
            on_end(args[2], partial(_note_canceled, call))
        self._carry_out(limit, decisions, now_ns)
        return future

    def _run(self, call: LimitedCall) -> None:
        """Run a call, and then waiting calls; to start another thread for them takes longer."""
        following: LimitedCall | None = call
        while following is not None:
            following = self._run_one(following)

    def _run_one(self, call: LimitedCall) -> LimitedCall | None:
        """Run a call; return one to run now, on this thread."""
        try:
            fn, args = call.start.pop()
        except IndexError:  # refused, because no thread could be started
            return None
        limit = call.limit
        started_ns = time.monotonic_ns()
        if args[2].client == CANCELED:
            call.is_gone = True  # gRPC would run its handler if it has a request stream
        else:
            with suppress(BaseException):  # gRPC does not catch SystemExit of a handler
                fn(*args)
        ended_ns = time.monotonic_ns()
        clock, decisions = self._clock, None
        is_answered = args[2].client != CANCELED
        with limit.lock:
            reads = ended_ns - clock.read_ns >= CPU_EVERY_NS
            if reads:
                limit.cpu_ns += clock.read(ended_ns)
            limit.limiter.ended(call, started_ns, ended_ns, limit.cpu_ns, is_answered=is_answered)
            must_pause = reads and limit.begin_pause(ended_ns, limit.cpu_ns)
            if limit.limiter.waiting and not must_pause:
                decisions = limit.decide(ended_ns := time.monotonic_ns())
        if must_pause:
            call.future.end()
            del fn, args  # they have the context of the call
            decisions = _let_accept(limit)
            ended_ns = time.monotonic_ns()
        following = None
        if decisions is not None:
            # Not before many refusals, nor if calls of another server are queued for a thread.
            if decisions.started and len(decisions.refused) <= 1 and self._work_queue.empty():
                following = decisions.started.pop(0)
            self._carry_out(limit, decisions, ended_ns)
        call.future.end()
        return following

    def _not_started(self, call: LimitedCall, now_ns: int) -> Decisions:
        """Refuse a call that could not be started, and those that wait."""
        limit = call.limit
        is_refused = _refuse(call, RefusalReason.CLOSED)
        with limit.lock:
            if is_refused:
                call.is_gone = True
                limit.limiter.ended(call, now_ns, now_ns, 0)
                limit.limiter.refuse_closed(call)
            limit.limiter.refuse_all()
            decisions: Decisions = limit.decide(now_ns, starts=False)
        return decisions

    def _carry_out(self, limit: ServerLimit, decisions: Decisions, now_ns: int) -> None:
        """Start calls and refuse others, and schedule when to decide again. Any thread."""
        for call in decisions.started:
            try:
                super().submit(self._run, call)
            except RuntimeError:
                self._carry_out(limit, self._not_started(call, now_ns), now_ns)
        if decisions.refused:
            for call, reason in decisions.refused:
                _refuse(call, reason)
            limit.report_refused(decisions.refused)
        expires_ns = decisions.expires_ns
        if expires_ns is not None:
            expire = partial(self._expire, limit, expires_ns)
            if start_timeout(limit.timer, expire, max(0, expires_ns - now_ns) / 1e9) is None:
                with limit.lock:
                    limit.has_expired(expires_ns)  # scheduled again when the next call arrives

    def _expire(self, limit: ServerLimit, expires_ns: int, _: Timeout) -> None:
        # On a worker: a refusal takes longer than a task on the timer's thread should.
        EXECUTOR.submit(("limit", id(limit)), partial(self._refuse_late, limit, expires_ns))

    def _refuse_late(self, limit: ServerLimit, expires_ns: int) -> None:
        now_ns = time.monotonic_ns()
        with limit.lock:
            limit.has_expired(expires_ns)
            decisions = limit.decide(now_ns)
        self._carry_out(limit, decisions, now_ns)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse calls that wait or arrive, and end the threads, as a `ThreadPoolExecutor` does.

        Args:
            wait: As in a `ThreadPoolExecutor`.
            cancel_futures: Has no effect: what was submitted runs, because gRPC does not answer a
                call whose function is canceled.
        """
        del cancel_futures
        self._is_shut_down = True
        for limit in tuple(self._limits):
            with limit.lock:
                limit.limiter.refuse_all()
                refused = limit.decide(0, starts=False).refused
            for call, reason in refused:
                _refuse(call, reason)
        self._unlimited.shutdown(wait)
        self._probes.shutdown(wait)
        super().shutdown(wait)


def _run_or_end(
    submit: Callable[..., Future[Any]],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Future[Any]:
    """Submit a function. If it is a call, and the pool does not take it, end the call.

    The pool was shut down, or no thread can be started. An error would end the serving thread of
    gRPC, and then the server hangs.
    """
    call = submitted_call(args)
    if call is None:
        return submit(fn, *args, **kwargs)
    start = [(fn, args)]  # popped once: without a new thread, another may take it from the pool
    try:
        return submit(_run_started, start)
    except RuntimeError:
        with suppress(IndexError):
            start.pop()
            end_unserved_call(*call, "UNAVAILABLE", RefusalReason.CLOSED.details, ())
        return REFUSED


def _run_started(start: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    try:
        fn, args = start.pop()
    except IndexError:
        return
    fn(*args)


def _let_accept(limit: ServerLimit) -> Decisions:
    """Wait until gRPC has accepted the calls that have arrived; it needs the interpreter."""
    while True:
        time.sleep(ROUND_S)
        now_ns = time.monotonic_ns()
        with limit.lock:
            if limit.end_pause(now_ns, limit.cpu_ns):
                return limit.decide(now_ns)


def _deadline_ns(args: tuple[Any, ...], now_ns: int) -> int:
    """Return the deadline of a call, from the event with which it arrived."""
    left_s = args[1].call_details.deadline - time.time()
    return NEVER if left_s > NO_DEADLINE_S else now_ns + int(left_s * 1e9)


def _note_canceled(call: LimitedCall) -> None:
    """Forget a call that has ended while it waits, because its client has canceled it.

    At the deadline the client does so too. Such a call is refused: it had to wait for too long.
    """
    with call.limit.lock:
        left_ns = call.deadline_ns - time.monotonic_ns()
        if not call.is_waiting or left_ns <= DEADLINE_TOLERANCE_S * 1e9:
            return
        call.limit.limiter.forget(call)
    call.start.clear()
    call.future.end()


def _refuse(call: LimitedCall, reason: RefusalReason) -> bool:
    """End a call with the status of a refusal. Does not wait, and runs no handler.

    Returns:
        False: a thread has started it meanwhile.
    """
    try:
        try:
            _, args = call.start.pop()
        except IndexError:
            return False
        event, state = args[1:3]
        code, details, metadata = call.limit.refusal(call, reason)
        end_unserved_call(event, state, code, details, metadata)
    finally:
        call.future.end()
    return True
