"""The client interceptors for `grpc.aio`: four small objects that share one state.

Four, because grpc.aio registers an object of several kinds only for the first of them (1.60 to
1.85). None awaits the call: a caller that writes its requests could not begin to, because grpc.aio
lets it write only when all interceptors have returned. The call that an interceptor returns is
either the inner one itself, where its config asks for no more than a timeout, or a relay of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from rpcwheel._grpc.aio_finished import CANCELLED_HERE, failed_call, finished_call, metadata_from
from rpcwheel._grpc.details import AioDetails, metadata_of, with_attempt
from rpcwheel.call._aio_member import Member
from rpcwheel.call._aio_resend import Resend
from rpcwheel.call.aio_call import Tries, late
from rpcwheel.call.config import MOST_METHODS, kept_metadata, resend_timeout, seconds_left
from rpcwheel.durations import to_ns
from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from rpcwheel._grpc.aio_relay import Relay
    from rpcwheel._grpc.details import Metadata
    from rpcwheel.call._aio_member import State
    from rpcwheel.failback.policy import FailbackPolicy

    Continuation: TypeAlias = Callable[[Any, Any], Awaitable[Any]]

__all__ = ["interceptors_of"]


class _Interceptor:
    """What the four have in common."""

    kind: Kind

    def __init__(self, state: State) -> None:
        self._state = state
        self._members: dict[bytes | str, Member] = {}

    async def intercept(self, continuation: Continuation, given: Any, request: Any) -> Any:
        """Make the first try, and give the caller's call."""
        member = self._members.get(given.method) or self._add(given.method)
        own = given.timeout
        own_ns = None if own is None else to_ns(own, what="timeout")
        now_ns, deadline_ns, attempt_ns = member.state.open(member.config, own_ns)
        is_late = now_ns >= deadline_ns
        if is_late and not member.answers:
            return late(member.kind)
        left = seconds_left(attempt_ns, now_ns)
        metadata, credentials, waits = given.metadata, given.credentials, given.wait_for_ready
        if member.plain:
            details = AioDetails(given.method, left, metadata, credentials, waits)
            return await continuation(details, request)
        pairs: Any = metadata_of(metadata)  # interceptors below may add to what they are given
        kept = AioDetails(given.method, None, pairs, credentials, waits)
        details = AioDetails(given.method, left, metadata_from(pairs), credentials, waits)
        tries = _Tries(member, now_ns, deadline_ns, request, continuation, kept, own)
        relay: Relay = member.relay(tries)
        if is_late:
            tries.begun_late(relay)
            return relay
        if tries.requests is not None:
            request = tries.sent
        try:
            call = await continuation(details, request)
        except grpc.RpcError as error:  # of an interceptor below, that has awaited it
            call = failed_call(member.kind, error)
        except BaseException:
            tries.finished()
            raise
        relay.begin(call)
        return relay

    def _add(self, method: bytes | str) -> Member:
        name = method.decode() if isinstance(method, bytes) else method
        if len(self._members) >= MOST_METHODS:
            self._members.clear()
        member = self._members[method] = Member(self._state, name, self.kind)
        return member


# The method of each kind is `intercept` itself: to await another costs every call a coroutine.


class _UnaryUnary(_Interceptor, grpc.aio.UnaryUnaryClientInterceptor):
    kind = Kind.UNARY_UNARY
    intercept_unary_unary: Any = _Interceptor.intercept


class _UnaryStream(_Interceptor, grpc.aio.UnaryStreamClientInterceptor):
    kind = Kind.UNARY_STREAM
    intercept_unary_stream: Any = _Interceptor.intercept


class _StreamUnary(_Interceptor, grpc.aio.StreamUnaryClientInterceptor):
    kind = Kind.STREAM_UNARY
    intercept_stream_unary: Any = _Interceptor.intercept


class _StreamStream(_Interceptor, grpc.aio.StreamStreamClientInterceptor):
    kind = Kind.STREAM_STREAM
    intercept_stream_stream: Any = _Interceptor.intercept


def interceptors_of(state: State) -> list[grpc.aio.ClientInterceptor]:
    """Make the four."""
    return [_UnaryUnary(state), _UnaryStream(state), _StreamUnary(state), _StreamStream(state)]


class _Tries(Tries["Continuation", AioDetails]):
    """Tries made by awaiting a continuation."""

    def make(self, relay: Relay, timeout: float | None, number: int) -> None:
        metadata = metadata_from(with_attempt(self._options.metadata, number))
        details = self._options._replace(timeout=timeout, metadata=metadata)
        self._task = asyncio.get_running_loop().create_task(self._make(relay, details))

    async def _make(self, relay: Relay, details: AioDetails) -> None:
        try:
            call = await self._start(details, self.sent)
        except asyncio.CancelledError as error:
            if self._task is None:  # by `finished`
                raise
            call = failed_call(self.kind, error)
        except grpc.aio.UsageError:  # the channel was closed meanwhile
            call = finished_call(self.kind, grpc.StatusCode.CANCELLED, CANCELLED_HERE)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            call = failed_call(self.kind, error)
        self._task = None
        if relay.done():
            call.cancel()
        else:
            relay.begin(call)

    def resend(self, policy: FailbackPolicy, attempts: int) -> Resend:
        return Resend(
            self.method,
            self.kind,
            self._start_alone,
            timeout=resend_timeout(self._own_timeout, self._member.config),
            metadata=kept_metadata(self._options.metadata, policy),
            attempts=attempts,
        )

    async def _start_alone(self, request: Any, timeout: float, metadata: Metadata) -> Any:  # noqa: ASYNC109
        details = self._options._replace(timeout=timeout, metadata=metadata_from(metadata))
        return await self._start(details, request)
