"""Heartbeats for channels of `grpc`: calls are futures, blocking work runs on worker threads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import grpc

from rpcwheel._concurrency.closing import Closing
from rpcwheel._concurrency.executor import EXECUTOR, SerialExecutor
from rpcwheel.transport.probe import MARK, HealthProbe, MethodProbe

from .monitor import HeartbeatBase, HeartbeatManagerBase, Work, status_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from .monitor import Report

__all__ = ["Heartbeat", "HeartbeatManager"]

BUILTIN_PROBES: Final = (HealthProbe, MethodProbe)
"""Probes that are not user code, so that gRPC's thread may run them."""

BOOKKEEPING: Final = SerialExecutor()
"""Runs the bookkeeping of all heartbeats. It uses one thread: on several, heartbeats that are due
together would only wait for each other's locks."""

PARALLEL_RECONNECTS: Final = 8
"""Threads for the reconnects to one target, as `connect` and event handlers are user code."""

EVENTS_TIMEOUT_S: Final = 0.05
"""How long a reconnect waits until `ConnectionDead` was emitted, so that events are in order. An
event handler that hangs does not delay it for longer."""


class Heartbeat(HeartbeatBase):
    """The heartbeat of one connection; created by `HeartbeatManager.attach`. Thread-safe."""

    _metadata: ClassVar[Any] = MARK

    def _submit(self, work: Work, job: Callable[[], object]) -> None:
        match work:
            case Work.BOOKKEEPING:
                BOOKKEEPING.submit(job)
            case Work.USER_CODE:
                EXECUTOR.submit(self, job)
            case Work.RECONNECT:
                thread = id(self) // 64 % PARALLEL_RECONNECTS
                after_events = partial(self._run_after_events, job)
                EXECUTOR.submit(("heartbeat reconnects", self.target, thread), after_events)
            case Work.NOTIFY:
                # One thread for the events of all heartbeats: a thousand connections may be dead at
                # the same time. Listeners can hang, so each heartbeat with listeners has a thread.
                EXECUTOR.submit(("heartbeat events", self if self._listeners else None), job)

    def _run_after_events(self, job: Callable[[], object]) -> None:
        self._notifications.wait(EVENTS_TIMEOUT_S)
        job()

    def _start(self, multicallable: Any, options: dict[str, Any], report: Report) -> Any:
        future = multicallable.future(self._probe.request, **options)
        future.add_done_callback(partial(self._done, report))
        return future

    def _done(self, report: Report, future: Any) -> None:
        """Read the answer, on gRPC's thread, which must not run user code."""
        read = partial(_read, report, self._now_ns(), future)
        if self._channel.runs_user_code or type(self._probe) not in BUILTIN_PROBES:
            self._submit(Work.USER_CODE, read)
        else:
            read()

    def _cancel(self, call: Any) -> None:
        if not call.done():
            self._submit(Work.BOOKKEEPING, call.cancel)


def _read(report: Report, ended_ns: int, future: Any) -> None:
    """Report the result of a future that is done."""
    code, response = "OK", None
    try:
        response = future.result(timeout=0)
    except grpc.FutureCancelledError:
        code = "CANCELLED"
    except Exception as error:  # noqa: BLE001 - also from the future of an interceptor
        code = status_name(error)
        error.__traceback__ = None  # the error is the future, which its frames would keep
    report(ended_ns, code, response)


class HeartbeatManager(HeartbeatManagerBase[Heartbeat], Closing):
    """Sends heartbeats on silent connections, and replaces dead ones; see `rpcwheel.heartbeat`.

    Args:
        timer: The timer to use; None: `shared_timer()`. Close the manager before you stop its
            timer, because nothing reports that heartbeats stop with it.
        interval: Seconds. A heartbeat is sent if nothing was read, or nothing written, for longer.
            None: never.
        timeout: Seconds. A connection is dead if nothing was read for longer. None: three times
            the interval.
        probe: The call that is made; None: `HealthProbe()`.
        drain_timeout: Seconds for which calls in flight on a dead connection may continue. 0: they
            end at once with UNAVAILABLE. None: no limit.
        reconnect: Whether dead connections are replaced, or only reported.

    A context manager. Thread-safe. A forked child has none of its parent's heartbeats; it may
    attach the channels anew.

    Raises:
        TypeError, ConfigurationError: An argument is not valid.
    """

    _heartbeat: ClassVar[type[Heartbeat]] = Heartbeat
    _refused: ClassVar[tuple[type[Any], str]] = (
        grpc.aio.Channel,
        "connection must be a grpc.Channel; for grpc.aio use rpcwheel.heartbeat.aio",
    )
