"""Heartbeats for channels of `grpc`: calls are futures, what may block runs on workers."""

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

OWN: Final = (HealthProbe, MethodProbe)
"""Probes whose answers may be read on gRPC's thread: they are not the user's code."""

BOOKS: Final = SerialExecutor()
"""What can't hang, of all heartbeats: on one worker, as heartbeats that are due together would
only get in each other's way on several."""

TOLD: Final = "heartbeats told"
REPLACED: Final = "heartbeats replaced"
"""By which the workers know our jobs. What can't hang is one key's for all heartbeats, or a
thousand that die together would make a thousand threads; users' code has a key for each."""

LANES: Final = 8
"""Replacements of one target at a time, if they take long: `connect` and sinks are the user's."""

TOLD_S: Final = 0.05
"""How long a replacement waits for the death to be told, for their order's sake; a sink that hangs
delays nobody for longer."""


class Heartbeat(HeartbeatBase):
    """The heartbeat of one connection; made by `HeartbeatManager.attach`. Thread-safe."""

    def _soon(self, job: Callable[[], object]) -> None:
        BOOKS.submit(job)

    def _soon_users(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit(self, job)

    def _soon_replaced(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit(
            (REPLACED, self.target, id(self) // 64 % LANES), partial(self._after_told, job)
        )

    def _after_told(self, job: Callable[[], object]) -> None:
        self._notifications.wait(TOLD_S)
        job()

    def _soon_told(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit((self, TOLD) if self._listeners else TOLD, job)

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
        if self._watched.pure and type(self._probe) in OWN:
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
    _other: ClassVar[tuple[type[Any], str]] = grpc.aio.Channel, "rpcwheel.aio.HeartbeatManager"

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
