"""A call of `grpc.aio` that is several calls at once, one on each of some members.

What the caller holds is a `Relay` without a try (`rpcwheel._grpc.aio_relay`); a task begins the
calls, and gathers what comes of them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel._grpc.aio_finished import CANCELLED_HERE, failed_call, failed_with, finished_call
from rpcwheel._grpc.aio_relay import cancels_of_task, relay_of
from rpcwheel._grpc.calls import is_channel_closed
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.rpc import Kind
from rpcwheel.timer.clock import clock_of

from ._aio_leg import Forks
from .failed import told_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from rpcwheel._grpc.aio_relay import Relay

    from ._aio_calls import Calls

    Source: TypeAlias = "OfCluster | OfChannels"

__all__ = ["OfChannels", "OfCluster", "Several", "answer_of", "cancel_all"]

KIND: Final = Kind.UNARY_UNARY
UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE

PATIENCE_NS: Final = 1_000_000_000
"""After which forks that may wait are tried again though all members are down still."""

Leg: TypeAlias = tuple[str, Any]
"""A call that was begun: where, and grpc's call or one like it."""


class OfCluster:
    """One method of a channel of many members."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.now_ns = calls.fleet.now_ns

    async def legs(
        self,
        count: int | None,
        request: Any,
        options: dict[str, Any],
        left_ns: int,
    ) -> tuple[list[Leg], Forks | None]:
        """Begin it on so many members, on all if None; waits until they are known.

        Gives the forks too, if there are any: whether they were heard says whether it may be begun
        again.

        Raises:
            grpc.aio.AioRpcError: There are none, or they are not known in time.
        """
        calls = self._calls
        until_ns = NEVER if left_ns == NEVER else self.now_ns() + left_ns
        await self._members(until_ns, patient=bool(options["wait_for_ready"]))
        if until_ns != NEVER:
            options = options | {"timeout": max(0, until_ns - self.now_ns()) / 1e9}
        roster = calls.roster
        members, forks = roster.members, None
        if count is not None:
            members = roster.several(count, (calls.method, request, options["metadata"]))
            forks = Forks(list(members))
            if options["wait_for_ready"]:  # or each would wait for its own member only
                options = options | {"wait_for_ready": False}
        names = told_apart(one.address for one in members)
        begun = _all([partial(calls.on, one, request, options, forks) for one in members])
        return list(zip(names, begun, strict=True)), forks

    async def _members(self, until_ns: int, *, patient: bool) -> None:
        """Wait until there are members, as long as any call does."""
        self._calls.fleet.home.enter()
        roster = self._calls.roster
        wait_ns = NEVER if patient else self.now_ns() + roster.rules.wait_ns
        while roster.pick is None:
            if roster.closed:
                raise asyncio.CancelledError
            refusal, now_ns = roster.refusal(), self.now_ns()
            is_late = now_ns >= until_ns
            if is_late or now_ns >= wait_ns or (refusal is not None and not patient):
                code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else UNAVAILABLE
                raise failed_with(code, refusal or roster.too_late())
            await self._change(min(until_ns, wait_ns))

    async def look_again(self, left_ns: int) -> bool:
        """Wait until forks that found nobody may find somebody; False if there is no time."""
        roster, now_ns = self._calls.roster, self.now_ns()
        if left_ns <= 0:
            return False
        until_ns = now_ns + min(left_ns, PATIENCE_NS)
        while roster.all_down and self.now_ns() < until_ns:
            await self._change(until_ns)
        return left_ns == NEVER or self.now_ns() < now_ns + left_ns

    async def _change(self, until_ns: int) -> None:
        """Wait for a change of the members, but no longer than that."""
        fleet, timeout = self._calls.fleet, None
        if until_ns != NEVER:
            timeout = fleet.home.after(max(0, until_ns - self.now_ns()), fleet.changed.give)
        try:
            await fleet.changed.wait()
        finally:
            if timeout is not None:
                timeout.cancel()


class OfChannels:
    """One method of several channels."""

    def __init__(self, names: Sequence[str], methods: Sequence[Any]) -> None:
        self._named = list(zip(names, methods, strict=True))
        self._turn = 0
        self.now_ns = clock_of(None)

    async def legs(
        self,
        count: int | None,
        request: Any,
        options: dict[str, Any],
        _: int,
    ) -> tuple[list[Leg], None]:
        """Begin it on so many channels, in turn; on all if None."""
        size = len(self._named)
        self._turn = (self._turn + 1) % size
        places = [(self._turn + step) % size for step in range(min(size, count or size))]
        named = [self._named[place] for place in places]
        begun = _all([partial(_begun, method, request, options) for _, method in named])
        return [(name, call) for (name, _), call in zip(named, begun, strict=True)], None

    async def look_again(self, _: int) -> bool:
        """Tell that there is nobody else."""
        return False


def _begun(method: Any, request: Any, options: dict[str, Any]) -> Any:
    """A call, or the end of one whose channel is closed."""
    try:
        return method(request, **options)
    except grpc.aio.UsageError as error:
        if not is_channel_closed(error):
            raise
        return failed_call(KIND, error)


def _all(beginnings: Iterable[Callable[[], Any]]) -> list[Any]:
    """Begin them all, or none."""
    begun: list[Any] = []
    try:
        begun.extend(begin() for begin in beginnings)
    except BaseException:
        cancel_all(begun)
        raise
    return begun


def cancel_all(calls: Iterable[Any]) -> None:
    """Cancel those that run, whatever a foreign one raises."""
    for call in calls:
        with suppress(Exception):
            call.cancel()


class Several:
    """A call that is several calls at once; conducts what its caller holds."""

    kind = KIND
    requests = None

    def __init__(self, method: str, source: Source, options: dict[str, Any]) -> None:
        self.method = method
        self.source = source
        self.options = options
        timeout, now_ns = options["timeout"], source.now_ns()
        own_ns = NEVER if timeout is None else to_ns(timeout, what="timeout")
        self._deadline_ns = NEVER if own_ns == NEVER else now_ns + own_ns
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Relay:
        """Make what the caller holds; it ends with the call that `work` gives, or by its error."""
        relay = relay_of(KIND)(self)
        self._task = asyncio.get_running_loop().create_task(_settle(relay, work))
        return relay

    async def legs(self, count: int | None, request: Any) -> tuple[list[Leg], Forks | None]:
        """Begin it on so many members; on all if None."""
        return await self.source.legs(count, request, self.options, self.left_ns())

    def left_ns(self) -> int:
        """Until the deadline."""
        return NEVER if self._deadline_ns == NEVER else self._deadline_ns - self.source.now_ns()

    def failed(self, relay: Relay, call: Any, error: BaseException | None) -> None:
        """Not called: there is no try."""

    def finished(self) -> None:
        """End all that runs."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def time_remaining(self) -> float | None:
        """Seconds until the deadline."""
        left_ns = self.left_ns()
        return None if left_ns == NEVER else max(0.0, to_seconds(left_ns))

    def listen(self, relay: Relay, call: object) -> None:
        """Nothing is done while the caller waits for a message."""


async def _settle(relay: Relay, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    try:
        relay.finish(await work())
    except asyncio.CancelledError:
        relay.finish(finished_call(KIND, grpc.StatusCode.CANCELLED, CANCELLED_HERE))
    except Exception as error:  # noqa: BLE001 - the caller gets it
        relay.finish(failed_call(KIND, error))


async def answer_of(call: Any) -> tuple[Any, BaseException | None]:
    """What comes of a call: its response, or its error."""
    cancels = cancels_of_task()
    try:
        return await call, None
    except asyncio.CancelledError:
        if cancels_of_task() > cancels:
            raise
        code = grpc.StatusCode.CANCELLED  # it was: by an interceptor, or its channel's end
        return None, failed_with(code, CANCELLED_HERE)
    except Exception as error:  # noqa: BLE001 - of a foreign interceptor, too
        return None, error
