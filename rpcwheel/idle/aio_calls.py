"""One call that a server of grpc.aio serves: its messages, its end, and how it is ended.

It is open from where its handler begins until its task has ended, which is when its status is out.
It is ended by `abort` from another task, which sends the status at once, whatever the handler waits
for; the handler then sees what it sees if its client leaves, `CancelledError`.

A plain function in a pool can't be ended so, nor is it known when its answer is out: it is open as
long as it runs, and its client sees the end of the connection.

What a call holds in gRPC is let go when its task has ended, and to touch it afterwards is a fault
of memory (`rpc_state.call`, grpcio 1.85). So that is looked at right before, on the loop.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import grpc

from rpcwheel._concurrency.loop import call_on_loop
from rpcwheel._grpc.serving import is_plain

from .entry import Call

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from rpcwheel.rpc import Kind

    from .table import Connections

    Task = asyncio.Task[Any]

__all__ = ["Answers", "Context", "Requests", "Served", "seen"]


class Served(Call):
    """A call that is served by a task, or in a pool."""

    __slots__ = ("_context", "_ending", "_task", "over")

    def __init__(
        self, connections: Connections, peer: str, *, streams: bool, heartbeat: bool
    ) -> None:
        self.over = False
        self._context: Any = None
        self._task: Task | None = None
        self._ending: Task | None = None
        super().__init__(connections, peer, streams=streams, heartbeat=heartbeat)

    def served_by(self, task: Task | None, context: Any) -> None:
        """Follow the task, which ends the call with it."""
        if self._connections.is_new(self):
            self.entry.seen.plain = is_plain(context)
        if task is not None:
            self._task, self._context = task, context
            task.add_done_callback(self._left)

    def _left(self, _: Task) -> None:
        self.ended()
        self._task = self._context = None  # no cycle: what a call holds is let go at once

    def ended(self) -> None:
        """It is over; a second time nothing."""
        self.over = True
        super().ended()

    def has_ended(self) -> bool:
        """Whether nobody takes its answers any more. Any thread; sooner than `over` tells."""
        task = self._task  # gone when it is over
        return self.over or (task is not None and task.done())

    def returned(self) -> None:
        """Its handler has ended; so has the call, if nothing tells when its answer is out."""
        if self._task is None:
            self.ended()

    def finish(self, details: str) -> None:
        """End it with UNAVAILABLE, if it can be. Any thread; does not wait."""
        task = self._task
        if task is not None:
            call_on_loop(task.get_loop(), self._finish, task, details)

    def _finish(self, task: Task, details: str) -> None:
        """On the loop. The status takes its first step before the handler is cancelled."""
        is_done = getattr(self._context, "done", None)  # a plain function's context has none
        if is_done is not None and not is_done():
            loop = task.get_loop()
            self._ending = loop.create_task(self._send(task, is_done, details))
            loop.call_soon(task.cancel)

    async def _send(self, task: Task, is_done: Callable[[], bool], details: str) -> None:
        if task.done() or is_done():
            return
        with suppress(Exception):  # it raises when it is out; if it fails, the socket's end follows
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, details)


class Context:
    """A context in which messages are seen that are read and written by hand."""

    __slots__ = ("_rpcwheel_call", "_rpcwheel_context")

    def __init__(self, context: Any, call: Call) -> None:
        object.__setattr__(self, "_rpcwheel_context", context)
        object.__setattr__(self, "_rpcwheel_call", call)

    async def read(self) -> object:
        """As grpc's own."""
        message = await self._rpcwheel_context.read()
        if message is not grpc.aio.EOF:
            self._rpcwheel_call.read()
        return message

    async def write(self, message: object) -> None:
        """As grpc's own."""
        await self._rpcwheel_context.write(message)
        self._rpcwheel_call.wrote()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """As grpc's own; the callback gets what the handler was given."""
        self._rpcwheel_context.add_done_callback(lambda _: callback(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rpcwheel_context, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._rpcwheel_context, name, value)


def seen(kind: Kind, request: Any, call: Call) -> Any:
    """What the handler gets: the one request, or a stream whose messages are seen."""
    if kind.streams_requests:
        return Requests(request, call)
    call.read()
    return request


class Requests:
    """The messages of a request stream, each seen as the handler takes it; of either nature."""

    __slots__ = ("_call", "_requests")

    def __init__(self, requests: Any, call: Call) -> None:
        self._requests = requests
        self._call = call

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        request = await self._requests.__anext__()
        self._call.read()
        return request

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        request = next(self._requests)
        self._call.read()
        return request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests, name)


class Answers:
    """The messages of a plain function's stream, each seen as grpc takes it.

    They end with the call: else the thread would put one where nobody takes it, and wait for ever
    (`generator_to_async_generator`, grpcio 1.85).
    """

    __slots__ = ("_answers", "_call")

    def __init__(self, answers: Iterator[object], call: Served) -> None:
        self._answers = answers
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        if not self._call.has_ended():
            try:
                answer = next(self._answers)
            except BaseException:  # its end, too
                self._call.returned()
                raise
            if not self._call.has_ended():
                self._call.wrote()
                return answer
        self._answers = iter(())
        raise StopIteration
