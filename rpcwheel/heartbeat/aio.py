"""Heartbeats for channels of `grpc.aio`, with the same names as in `sync.py`.

Heartbeats, reconnects, listeners and events run on the event loop on which the connection was
attached. The timer may run on another thread, which only schedules calls on the loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Self

import grpc

from rpcwheel._concurrency.loop import call_on_loop, running_loop
from rpcwheel.transport.probe import MARK

from .monitor import HeartbeatBase, HeartbeatManagerBase, Work, status_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from .monitor import Report

__all__ = ["Heartbeat", "HeartbeatManager"]


class Heartbeat(HeartbeatBase):
    """The heartbeat of one connection; created by `HeartbeatManager.attach`. Thread-safe."""

    _metadata: ClassVar[Any] = grpc.aio.Metadata(*MARK)

    def __init__(self, channel: Any, **settings: Any) -> None:
        """Create a heartbeat, for `HeartbeatManager.attach`. An event loop must be running."""
        self._loop = asyncio.get_running_loop()
        self._is_lost = self._loop.is_closed
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(channel, **settings)

    def _submit(self, work: Work, job: Callable[[], object]) -> None:
        # Never at once: a timer on this loop must not wait for user code.
        if running_loop() is self._loop:
            self._loop.call_soon(job)
        elif not call_on_loop(self._loop, job):  # it is closed
            with self._lock:
                self._core.close()
                self._clear()
            self._forget(self)

    def _start(self, multicallable: Any, options: dict[str, Any], report: Report) -> Any:
        call = multicallable(self._probe.request, **options)
        task = self._loop.create_task(self._await(call, report))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _await(self, call: Any, report: Report) -> None:
        code, response = "OK", None
        try:
            response = await call
        except asyncio.CancelledError:  # its answer no longer counts, or the loop ends: not missed
            call.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - also from the user's interceptors
            code = status_name(error)
        report(self._now_ns(), code, response)

    def _cancel(self, call: asyncio.Task[None]) -> None:
        self._submit(Work.BOOKKEEPING, call.cancel)

    async def ended(self) -> None:
        """Wait until none of its tasks runs any more; after `detach()`.

        Does not wait on another event loop than its own, which may not run any more.
        """
        while self._tasks and asyncio.get_running_loop() is self._loop:
            await asyncio.wait(self._tasks)


class HeartbeatManager(HeartbeatManagerBase[Heartbeat]):
    """Sends heartbeats on silent connections, and replaces dead ones; see `rpcwheel.heartbeat`.

    The arguments are those of `rpcwheel.heartbeat.HeartbeatManager`. The timer may also be one of
    another thread.

    An async context manager; its exit waits until no task is left. `attach` must be called on a
    running event loop, where the heartbeat then runs; without one it raises RuntimeError.

    Raises:
        TypeError, ConfigurationError: An argument is not valid.
    """

    _heartbeat: ClassVar[type[Heartbeat]] = Heartbeat
    _refused: ClassVar[tuple[type[Any], str]] = (
        grpc.Channel,
        "connection must be a grpc.aio.Channel; for grpc use rpcwheel.heartbeat",
    )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Detach all heartbeats, as `close()` does, and wait until none of their tasks is left.

        Tasks of other event loops are canceled, and not waited for.
        """
        heartbeats = self.heartbeats
        self.close()
        for heartbeat in heartbeats:
            await heartbeat.ended()
