"""Heartbeats for channels of `grpc.aio`, with the same names as in `sync.py`.

Heartbeats, replacements, listeners and events all run on the loop that ran when the connection was
attached. The timer may run on another thread; it only schedules calls on the loop.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import grpc

from rpcwheel._concurrency.loop import call_on_loop, running_loop
from rpcwheel.durations import to_seconds
from rpcwheel.exiting import BACKGROUND
from rpcwheel.probe import MARK

from .base import SLACK_S, HeartbeatBase
from .manager import ManagerBase

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.exiting import BackgroundCall

    from .rules import Send

__all__ = ["Heartbeat", "HeartbeatManager"]


class Heartbeat(HeartbeatBase):
    """The heartbeat of one connection; made by `HeartbeatManager.attach`.

    `detach`, `withdraw` and `beat` may be called from any thread.
    """

    def __init__(self, connection: Any, **settings: Any) -> None:
        """For `HeartbeatManager.attach`; a loop must be running."""
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(connection, **settings)

    def _soon(self, job: Callable[[], object]) -> None:
        # Always in a later round of the loop: the timer's own must not wait for user code.
        if running_loop() is self._loop:
            self._loop.call_soon(job)
        elif not call_on_loop(self._loop, job):  # it is closed
            with self._lock:
                self._core.close()
                self._tidy()
            self._forget(self)

    _soon_users = _soon_replaced = _soon_notified = _soon

    def _start(
        self,
        call: Any,
        step: Send,
        settle: Callable[[int, str, object], None],
        background: BackgroundCall,
    ) -> Any:
        made = call(
            self._probe.request,
            timeout=to_seconds(step.limit_ns) + SLACK_S,
            metadata=grpc.aio.Metadata(*MARK),
            wait_for_ready=step.patient or None,
        )
        task = self._loop.create_task(self._watch(made, settle))
        self._tasks.add(task)
        background.is_lost = self._loop.is_closed
        task.add_done_callback(partial(self._ended, background))
        return task

    def _ended(self, background: BackgroundCall, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        BACKGROUND.end_call(background)

    async def _watch(self, call: Any, settle: Callable[[int, str, object], None]) -> None:
        """Wait for the answer; cancelled if nobody waits for it any more."""
        code, response = "OK", None
        try:
            response = await call
        except asyncio.CancelledError:  # nobody waits; or the loop ends, and no miss is to be told
            call.cancel()
            raise
        except grpc.RpcError as error:
            status = error.code() if hasattr(error, "code") else None
            code = getattr(status, "name", "UNKNOWN")
        except Exception as error:  # noqa: BLE001 - of the user's interceptors
            code = type(error).__name__
        settle(self._now_ns(), code, response)

    def _give_up(self, call: asyncio.Task[None]) -> None:
        self._soon(call.cancel)

    async def ended(self) -> None:
        """Wait until no task of it runs any more; after `detach()`."""
        while self._tasks:
            await asyncio.wait(self._tasks)


class HeartbeatManager(ManagerBase[Heartbeat]):
    """Asks silent connections whether they live, and replaces the dead; see `rpcwheel.heartbeat`.

    Args:
        timer: Where the heartbeats wait; None: `shared_timer()`. A thread's timer does as well as
            an `AsyncWheelTimer`.
        interval: A heartbeat is sent when nothing was read, or nothing written, for more than so
            many seconds. None: never.
        timeout: Dead when nothing was read for more than so many seconds; None: three intervals.
        probe: What is asked; None: `HealthProbe()`.
        drain_timeout: Seconds that calls in flight on a dead connection may go on; 0: ended at
            once with UNAVAILABLE; None: as long as they take.
        reconnect: Whether dead connections are replaced, or only reported.

    An async context manager, whose end waits until no task is left. `attach` needs a running loop
    (RuntimeError without one); each heartbeat lives on the loop where it was attached. To be closed
    before its timer is stopped: who waits on a stopped timer is not told.

    Raises:
        TypeError, ConfigurationError: An argument makes no sense.
    """

    _kind: ClassVar[type[Heartbeat]] = Heartbeat
    _other: ClassVar[tuple[type[Any], str]] = grpc.Channel, "rpcwheel.heartbeat.HeartbeatManager"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Detach all, as `close()` does, and wait until no task of theirs is left."""
        heartbeats = self.heartbeats
        self.close()
        for heartbeat in heartbeats:
            await heartbeat.ended()
