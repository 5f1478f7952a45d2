"""A unary call of `grpc.aio` that its caller gets as it is, as long as all goes well.

What a `Relay` does for a call takes as many steps as a third of grpc.aio's own. Most calls need
none of it: they are awaited, and answered. So the caller is handed grpc's own object, of a class of
ours: it runs as ever, with one hook more at its end. Once something else is asked of it, or it
fails, it *turns*: a relay takes over, with grpc's call as its first try, and whatever is asked of
the object is done by the relay.

A note tells what would be needed then: a list, as no call of a function is cheaper. It begins with
the call, or None once that has ended or turned, so that no cycle of references is left behind; and
with its `Owner`, which knows the rest.

This knows more of grpc.aio's insides than anything else here, so it looks at them before (`PLAIN`);
where they are not as expected all calls get a relay, as those with interceptors do.
`tests/legacy/_grpc/test_aio_plain.py` tells when they change; proved on grpcio 1.60 and 1.85.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import current_task
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc
from grpc._cython import cygrpc
from grpc.aio import _call, _channel

from rpcwheel.rpc import Kind

from .aio_calls import ended
from .aio_kinds import relay_of
from .aio_relay import Conductor, call_back

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .aio_relay import Relay

__all__ = ["PLAIN", "Owner", "PlainCall", "plain_beginner"]

Native: Any = _call.UnaryUnaryCall
EOF: Final = grpc.aio.EOF


class Owner(Protocol):
    """Whose calls they are: one method of a stub."""

    method: str
    """In full."""

    def conductor(self, note: list[Any], native: Any) -> Follower:
        """Who decides about a call that turns; it is counted by it from now on.

        Args:
            note: What was noted when the call began; the first is the call.
            native: The same as an object of its own, which is to be the first try.
        """


class Follower(Conductor, Protocol):
    """A conductor of a relay that is made after it."""

    def follow(self, relay: Relay) -> None:
        """Take note which it is."""


class PlainCall(Native):  # type: ignore[misc]  # grpc has no types for it
    """What the caller holds. Made by what `plain_beginner` gives."""

    note: list[Any]
    is_ok: Callable[[], bool]
    """Internal: whether grpc's call has ended well; of core."""
    running: Any = None
    """Internal: grpc's set of what its channel cancels when it is closed (since 1.85)."""
    _relay: Any = None  # once it has turned
    _native: Any = None  # the first try, then

    def turn(self) -> Any:
        """Have a relay do it from now on; None if the call has ended well, and needs none."""
        note = self.note
        if note[0] is None:
            return self._relay
        native = Native.__new__(Native)
        native.__dict__.update(self.__dict__)
        self._native = native  # not before, or it would refer to itself
        if self.running is not None:  # the next try is another channel's
            self.running.discard(self)
            self.running.add(native)
        conductor = note[1].conductor(note, native)
        note[0] = None
        self._relay = relay = relay_of(Kind.UNARY_UNARY)(conductor)
        conductor.follow(relay)
        relay.begin(native)
        return relay

    def end(self, details: str) -> None:
        """Internal: end with UNAVAILABLE, as the connection is given up."""
        relay = self.turn()
        if relay is not None:
            relay.end(ended(Kind.UNARY_UNARY, grpc.StatusCode.UNAVAILABLE, details))

    # --- For the caller ---

    def __await__(self) -> Generator[Any, None, Any]:
        if self._relay is None:
            task = current_task()
            cancels = 0 if task is None else task.cancelling()
            try:
                response = yield from self._call_response
                if response is EOF:
                    yield from super().__await__()  # which raises
            except asyncio.CancelledError:
                relay = self.turn()
                if relay is None or not relay.was_given_up(self._native, cancels):
                    self.cancel()
                    raise
            except Exception:
                if self.turn() is None:
                    raise
            else:
                if self._relay is None:
                    return response
        return (yield from self._turned().__await__())

    def _turned(self) -> Any:
        """Who knows how it ends, or has ended."""
        return self.turn() or super()

    def _now(self) -> Any:
        """Who knows what is now, for which it need not turn."""
        return self._relay or super()

    def cancelled(self) -> bool:
        return bool(self._now().cancelled())

    def done(self) -> bool:
        return bool(self._now().done())

    def time_remaining(self) -> float | None:
        left: float | None = self._now().time_remaining()
        return left

    def cancel(self) -> bool:
        relay = self.turn()
        return relay is not None and bool(relay.cancel())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have `callback(call)` called when the call has ended, as `Relay.add_done_callback`."""
        relay = self.turn()
        if relay is None:
            call_back(callback, self, self.note[1].method)
        else:
            relay.add_done_callback(callback, self)

    async def initial_metadata(self) -> Any:
        return await self._turned().initial_metadata()

    async def trailing_metadata(self) -> Any:
        return await self._turned().trailing_metadata()

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await self._turned().code()
        return code

    async def details(self) -> Any:
        return await self._turned().details()

    async def debug_error_string(self) -> Any:
        return await self._turned().debug_error_string()

    async def wait_for_connection(self) -> None:
        await self._turned().wait_for_connection()


def plain_beginner(multicallable: Any) -> Callable[..., PlainCall] | None:
    """What begins plain calls of a multi-callable of grpc.aio; None where there are none of it.

    It does what the multi-callable does, but for the empty metadata of most calls, which take
    grpc.aio an object and two functions. `begin(request, timeout, metadata, credentials,
    wait_for_ready, compression, note, at_end)` gives the call. Its note is `[None, owner, ...]`,
    and `at_end(note)` is called when grpc's call has ended; it is to `turn` one that is not OK.
    """
    made = multicallable
    if not PLAIN or type(made) is not _channel.UnaryUnaryMultiCallable or made._interceptors:  # noqa: SLF001
        return None
    rest = [getattr(made, name) for name in REST if hasattr(made, name)]
    running = getattr(getattr(made, "_python_channel", None), "_active_calls", None)
    as_metadata, now_s = made._init_metadata, time.time  # noqa: SLF001

    def begin(
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: grpc.CallCredentials | None,
        wait_for_ready: bool | None,
        compression: grpc.Compression | None,
        note: list[Any],
        at_end: Callable[[list[Any]], None],
    ) -> PlainCall:
        call = PlainCall(
            request,
            None if timeout is None else now_s() + timeout,
            as_metadata(metadata, compression) if metadata or compression else (),
            credentials,
            wait_for_ready,
            *rest,
        )
        call.note = note
        note[0] = call
        core = call._cython_call  # noqa: SLF001
        call.is_ok = core.is_ok
        core.add_done_callback(partial(at_end, note))
        if running is not None:
            call.running = running
            running.add(call)  # a set of weak references: one that has ended does no harm there
        return call

    return begin


REST: Final = (
    "_channel",
    "_method",
    "_request_serializer",
    "_response_deserializer",
    "_loop",
    "_registered_call_handle",  # since 1.63
)
"""What a multi-callable gives each of its calls, in the order of their last parameters."""

KNOWN: Final = {
    *REST,
    "InterceptedUnaryUnaryCall",
    "UnaryUnaryCall",
    "_init_metadata",
    "_interceptors",
    "_python_channel",
    "_register_call",
    "_timeout_to_deadline",
}
"""All that a multi-callable of grpc.aio uses to begin a call."""

FIRST: Final = ("self", "request", "deadline", "metadata", "credentials", "wait_for_ready")


def _fits() -> bool:
    """Whether this grpc's calls are made as we know it."""
    try:
        made = _channel.UnaryUnaryMultiCallable.__call__.__code__
        own = Native.__init__.__code__
        waited = Native._init_unary_response_mixin.__code__.co_names  # noqa: SLF001
        hooks = (cygrpc._AioCall.add_done_callback, cygrpc._AioCall.is_ok)  # noqa: SLF001
        register = getattr(_channel.Channel, "_register_call", None)  # it came with 1.85
        registered = () if register is None else register.__code__.co_names
    except AttributeError:
        return False
    taken = own.co_varnames[: own.co_argcount]
    given = tuple(name.removeprefix("_") for name in REST if name in made.co_names)
    return (
        all(hooks)
        and {"_active_calls", "add", "add_done_callback", "discard"}.issuperset(registered)
        and KNOWN.issuperset(made.co_names)
        and taken == FIRST + given
        and "_call_response" in waited
    )


PLAIN: Final = _fits()
"""Whether there are plain calls with this grpc."""
