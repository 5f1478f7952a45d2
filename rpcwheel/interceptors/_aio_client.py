"""The client interceptors for `grpc.aio`: four small objects that share one state.

Four, because grpc.aio registers an object of several kinds only for the first of them (1.60 to
1.85). None awaits the call: a caller that writes its requests could not begin to, because grpc.aio
lets it write only when all interceptors have returned. The call that an interceptor returns is
either the inner one itself, where its rules ask for no more than a timeout, or a relay of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from rpcwheel._grpc.aio_calls import CANCELLED_HERE, ended, ended_by, metadata_from
from rpcwheel._grpc.aio_kinds import relay_for
from rpcwheel._grpc.details import AioDetails, with_attempt
from rpcwheel.call import Finish, Kind
from rpcwheel.durations import to_ns

from ._aio_resend import Resend
from ._aio_tries import Member, Tries, late
from .parked import kept_metadata, resend_timeout
from .state import seconds_left

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from rpcwheel._grpc.aio_relay import Relay
    from rpcwheel._grpc.details import Metadata
    from rpcwheel.call import Attempt
    from rpcwheel.deadline.core import DeadlinePlan
    from rpcwheel.failback.policy import FailbackPolicy

    from ._aio_tries import State

    Continuation: TypeAlias = Callable[[Any, Any], Awaitable[Any]]

__all__ = ["interceptors_of"]


class _Interceptor:
    """What the four have in common."""

    kind: Kind

    def __init__(self, state: State) -> None:
        self._state = state
        self._members: dict[bytes | str, Member] = {}

    async def _intercept(self, continuation: Continuation, given: Any, request: Any) -> Any:  # noqa: ANN401
        """Make the first try, and give the caller's call."""
        member = self._members.get(given.method) or self._add(given.method)
        state, timeout = member.state, given.timeout
        plan = state.plan(member.rules, None if timeout is None else to_ns(timeout, what="timeout"))
        now_ns = state.now_ns()
        step = plan.begin(now_ns)
        if isinstance(step, Finish):
            return late(member.kind, step.reason)
        left = seconds_left(step.deadline_ns, now_ns)
        details = AioDetails(
            given.method, left, given.metadata, given.credentials, given.wait_for_ready
        )
        if member.plain:
            return await continuation(details, request)
        tries = _Tries(
            member,
            plan,
            step,
            request,
            continuation=continuation,
            details=details,
            own_timeout=timeout,
        )
        relay = relay_for(tries)
        try:
            call = await continuation(details, tries.sent)
        except grpc.RpcError as error:  # of an interceptor below, that has awaited it
            call = ended_by(member.kind, error)
        except BaseException:
            tries.finished()
            raise
        relay.begin(call)
        return relay

    def _add(self, method: bytes | str) -> Member:
        name = method.decode() if isinstance(method, bytes) else method
        member = self._members[method] = Member(self._state, name, self.kind)
        return member


class _UnaryUnary(_Interceptor, grpc.aio.UnaryUnaryClientInterceptor):
    kind = Kind.UNARY_UNARY

    async def intercept_unary_unary(
        self,
        continuation: Any,  # noqa: ANN401
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return await self._intercept(continuation, client_call_details, request)


class _UnaryStream(_Interceptor, grpc.aio.UnaryStreamClientInterceptor):
    kind = Kind.UNARY_STREAM

    async def intercept_unary_stream(
        self,
        continuation: Any,  # noqa: ANN401
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return await self._intercept(continuation, client_call_details, request)


class _StreamUnary(_Interceptor, grpc.aio.StreamUnaryClientInterceptor):
    kind = Kind.STREAM_UNARY

    async def intercept_stream_unary(
        self,
        continuation: Any,  # noqa: ANN401
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return await self._intercept(continuation, client_call_details, request_iterator)


class _StreamStream(_Interceptor, grpc.aio.StreamStreamClientInterceptor):
    kind = Kind.STREAM_STREAM

    async def intercept_stream_stream(
        self,
        continuation: Any,  # noqa: ANN401
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return await self._intercept(continuation, client_call_details, request_iterator)


def interceptors_of(state: State) -> list[grpc.aio.ClientInterceptor]:
    """Make the four."""
    return [_UnaryUnary(state), _UnaryStream(state), _StreamUnary(state), _StreamStream(state)]


class _Tries(Tries):
    """Tries made by awaiting a continuation."""

    def __init__(
        self,
        member: Member,
        plan: DeadlinePlan,
        attempt: Attempt,
        request: object,
        *,
        continuation: Continuation,
        details: AioDetails,
        own_timeout: float | None,
    ) -> None:
        super().__init__(member, plan, attempt, request)
        self._continuation = continuation
        self._details = details  # of the first try
        self._own_timeout = own_timeout

    def make(self, relay: Relay, timeout: float | None, number: int) -> None:
        metadata = metadata_from(with_attempt(self._details.metadata, number))
        details = self._details._replace(timeout=timeout, metadata=metadata)
        self._task = self._loop.create_task(self._make(relay, details))

    async def _make(self, relay: Relay, details: AioDetails) -> None:
        try:
            call = await self._continuation(details, self.sent)
        except asyncio.CancelledError as error:
            if self._task is None:  # by `finished`
                raise
            call = ended_by(self.kind, error)
        except grpc.aio.UsageError:  # the channel was closed meanwhile
            call = ended(self.kind, grpc.StatusCode.CANCELLED, CANCELLED_HERE)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            call = ended_by(self.kind, error)
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
            timeout=resend_timeout(self._own_timeout, self._member.rules),
            metadata=kept_metadata(self._details.metadata, policy),
            attempts=attempts,
        )

    async def _start_alone(self, request: Any, timeout: float, metadata: Metadata) -> Any:  # noqa: ANN401, ASYNC109
        details = self._details._replace(timeout=timeout, metadata=metadata_from(metadata))
        return await self._continuation(details, request)
