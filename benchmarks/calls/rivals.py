"""What rpcwheel is compared with: no-op interceptors, and interceptors of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import grpc
import grpc.aio


class NoOp(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """An interceptor of grpc that only continues the call: the baseline."""

    def _continue(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details, request)

    intercept_unary_unary = _continue
    intercept_unary_stream = _continue
    intercept_stream_unary = _continue
    intercept_stream_stream = _continue


class AioNoOpUnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    """The same for grpc.aio, which takes one object for each kind of call."""

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(details, request)


class AioNoOpUnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    """For response streams."""

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(details, request)


class AioNoOpStreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    """For request streams."""

    async def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        return await continuation(details, requests)


class AioNoOpStreamStream(grpc.aio.StreamStreamClientInterceptor):
    """For streams both ways."""

    async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return await continuation(details, requests)


AIO_NOOPS = (AioNoOpUnaryUnary, AioNoOpUnaryStream, AioNoOpStreamUnary, AioNoOpStreamStream)


class ServerNoOp(grpc.ServerInterceptor):
    """A no-op interceptor of a server: returns the handler as it is."""

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        return continuation(details)


class AioServerNoOp(grpc.aio.ServerInterceptor):
    """The same for grpc.aio."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        return await continuation(details)


def grpc_interceptor_client() -> Any:
    """The interceptor of its README, as a no-op. It has none for clients of grpc.aio."""
    from grpc_interceptor import ClientInterceptor

    class Interceptor(ClientInterceptor):
        def intercept(self, method: Any, request_or_iterator: Any, call_details: Any) -> Any:
            return method(request_or_iterator, call_details)

    return Interceptor()


def grpc_interceptor_server(*, aio: bool) -> Any:
    """The interceptor of its README, as a no-op."""
    from grpc_interceptor import AsyncServerInterceptor, ServerInterceptor

    class Interceptor(ServerInterceptor):
        def intercept(self, method: Any, request: Any, context: Any, method_name: str) -> Any:
            return method(request, context)

    class AsyncInterceptor(AsyncServerInterceptor):
        async def intercept(self, method: Any, request: Any, context: Any, method_name: str) -> Any:
            answer = method(request, context)
            return answer if hasattr(answer, "__aiter__") else await answer

    return AsyncInterceptor() if aio else Interceptor()


def otel_channel(channel: grpc.Channel) -> grpc.Channel:
    """OpenTelemetry's interceptor in front of a channel of grpc."""
    from opentelemetry.instrumentation.grpc import client_interceptor
    from opentelemetry.instrumentation.grpc.grpcext import intercept_channel

    return intercept_channel(channel, client_interceptor(tracer_provider=_tracers()))


def otel_aio() -> Sequence[Any]:
    """OpenTelemetry's interceptors for a channel of grpc.aio."""
    from opentelemetry.instrumentation.grpc import aio_client_interceptors

    return aio_client_interceptors(tracer_provider=_tracers())


def otel_server(*, aio: bool) -> Any:
    """OpenTelemetry's interceptor for a server."""
    from opentelemetry.instrumentation import grpc as otel

    make = otel.aio_server_interceptor if aio else otel.server_interceptor
    return make(tracer_provider=_tracers())


@cache
def _tracers() -> Any:
    """Spans are made and recorded, and not exported."""
    from opentelemetry.sdk.trace import TracerProvider

    return TracerProvider()
