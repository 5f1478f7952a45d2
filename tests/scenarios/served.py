"""Calls of the four kinds for the tests of servers, with one request each."""

import inspect

import grpc

from fixtures.grpc_servers import IMPATIENT
from fixtures.small_servers import METHOD
from fixtures.waiting import WAIT_S

KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
ONE_ANSWER = ["unary_unary", "stream_unary"]
STREAMS = ["unary_stream", "stream_stream"]

ROUNDED = 1.02
"""A client of grpc rounds up the timeout that it sends, by at most a hundredth."""


def handler(kind, behavior, **serializers):
    """A handler of that kind."""
    return getattr(grpc, f"{kind}_rpc_method_handler")(behavior, **serializers)


def answering(kind, look, first=()):
    """A handler function that returns the result of `look(context)` as bytes.

    A stream has the messages of `first` before it.
    """

    def unary(request, context):
        return repr(look(context)).encode()

    def stream(request, context):
        yield from first
        yield repr(look(context)).encode()

    return unary if kind in ONE_ANSWER else stream


async def awaited(result):
    """The result of a `look`, which may be a coroutine function."""
    return await result if inspect.isawaitable(result) else result


def aio_answering(kind, look, first=()):
    """The same in coroutines."""

    async def unary(request, context):
        return repr(await awaited(look(context))).encode()

    async def stream(request, context):
        for message in first:
            yield message
        yield repr(await awaited(look(context))).encode()

    return unary if kind in ONE_ANSWER else stream


def begin(channel, kind, request=b"x", *, timeout=WAIT_S, metadata=None):
    """Begin a call of grpc or grpc.aio; return a future, or a stream of responses."""
    method = getattr(channel, kind)(METHOD)
    given = iter([request]) if kind.startswith("stream") else request
    if isinstance(channel, grpc.Channel) and kind in ONE_ANSWER:
        return method.future(given, timeout=timeout, metadata=metadata)
    return method(given, timeout=timeout, metadata=metadata)


def ask(target, kind, request=b"x", **options):
    """Make a call; return its responses as a list."""
    with grpc.insecure_channel(target, options=IMPATIENT) as channel:
        call = begin(channel, kind, request, **options)
        return [call.result()] if kind in ONE_ANSWER else list(call)


async def aio_ask(target, kind, request=b"x", **options):
    """Make a call of grpc.aio; return its responses as a list."""
    async with grpc.aio.insecure_channel(target, options=IMPATIENT) as channel:
        call = begin(channel, kind, request, **options)
        return [await call] if kind in ONE_ANSWER else [answer async for answer in call]
