"""Heartbeats for channels of `grpc`: calls are futures, blocking work runs on worker threads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import grpc

from rpcwheel._concurrency.executor import EXECUTOR, SerialExecutor
from rpcwheel.durations import to_seconds
from rpcwheel.exiting import BACKGROUND
from rpcwheel.probe import MARK, HealthProbe, MethodProbe

from .base import SLACK_S, HeartbeatBase
from .manager import ManagerBase

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.exiting import BackgroundCall

    from .rules import Send

__all__ = ["Heartbeat", "HeartbeatManager"]

OWN_PROBES: Final = (HealthProbe, MethodProbe)
"""Probes whose responses may be read on gRPC's thread, as they are not user code."""

BOOKKEEPING: Final = SerialExecutor()
"""For all heartbeats, jobs that can't block. One worker runs them: heartbeats that are due together
only wait for each other's locks on several."""

NOTIFY: Final = "heartbeat notifications"
REPLACE: Final = "heartbeat replacements"
"""Keys for `EXECUTOR`. Events of all heartbeats share one, or a thousand connections that die
together would start a thousand threads; each heartbeat with listeners has one of its own."""

PARALLEL_REPLACEMENTS: Final = 8
"""Of one target, if they take long: `connect` and sinks are user code."""

NOTIFIED_TIMEOUT_S: Final = 0.05
"""For so long a replacement waits until `ConnectionDead` is emitted, so that events are in order;
a sink that hangs delays it no longer."""


class Heartbeat(HeartbeatBase):
    """The heartbeat of one connection; made by `HeartbeatManager.attach`. Thread-safe."""

    def _soon(self, job: Callable[[], object]) -> None:
        BOOKKEEPING.submit(job)

    def _soon_users(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit(self, job)

    def _soon_replaced(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit(
            (REPLACE, self.target, id(self) // 64 % PARALLEL_REPLACEMENTS),
            partial(self._replace_after_events, job),
        )

    def _replace_after_events(self, job: Callable[[], object]) -> None:
        self._notifications.wait(NOTIFIED_TIMEOUT_S)
        job()

    def _soon_notified(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit((self, NOTIFY) if self._listeners else NOTIFY, job)

    def _start(
        self,
        call: Any,
        step: Send,
        settle: Callable[[int, str, object], None],
        background: BackgroundCall,
    ) -> Any:
        future = call.future(
            self._probe.request,
            timeout=to_seconds(step.limit_ns) + SLACK_S,
            metadata=MARK,
            wait_for_ready=step.patient or None,
        )
        future.add_done_callback(partial(self._ended, settle, background))
        return future

    def _ended(
        self,
        settle: Callable[[int, str, object], None],
        background: BackgroundCall,
        future: Any,
    ) -> None:
        """On gRPC's thread: our own bookkeeping, or a hand-over where a user's code takes part."""
        BACKGROUND.end_call(background)
        read = partial(_read, settle, self._now_ns(), future)
        if self._watched.pure and type(self._probe) in OWN_PROBES:
            read()
        else:
            self._soon_users(read)

    def _give_up(self, call: Any) -> None:
        if not call.done():
            self._soon(call.cancel)


class HeartbeatManager(ManagerBase[Heartbeat]):
    """Asks silent connections whether they live, and replaces the dead; see `rpcwheel.heartbeat`.

    Args:
        timer: Where the heartbeats wait; None: `shared_timer()`.
        interval: A heartbeat is sent when nothing was read, or nothing written, for more than so
            many seconds. None: never.
        timeout: Dead when nothing was read for more than so many seconds; None: three intervals.
        probe: What is asked; None: `HealthProbe()`.
        drain_timeout: Seconds that calls in flight on a dead connection may go on; 0: ended at
            once with UNAVAILABLE; None: as long as they take.
        reconnect: Whether dead connections are replaced, or only reported.

    A context manager. Thread-safe. To be closed before its timer is stopped: who waits on a stopped
    timer is not told. In a forked child no heartbeat of the parent's beats: make others there.

    Raises:
        TypeError, ConfigurationError: An argument makes no sense.
    """

    _kind: ClassVar[type[Heartbeat]] = Heartbeat
    _other: ClassVar[tuple[type[Any], str]] = (
        grpc.aio.Channel,
        "rpcwheel.heartbeat.aio.HeartbeatManager",
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(settle: Callable[[int, str, object], None], at_ns: int, future: Any) -> None:
    """How a call that is done has ended."""
    code, response = "OK", None
    try:
        response = future.result(timeout=0)
    except grpc.FutureCancelledError:
        code = "CANCELLED"
    except grpc.RpcError as error:
        status = error.code() if hasattr(error, "code") else None
        code = getattr(status, "name", "UNKNOWN")
    except Exception as error:  # noqa: BLE001 - of an interceptor's own future
        code = type(error).__name__
    settle(at_ns, code, response)
