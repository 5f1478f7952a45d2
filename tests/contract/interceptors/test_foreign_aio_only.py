"""Interceptors of other libraries outside and inside of rpcwheel's, with `grpc.aio`."""

import itertools

import grpc
import pytest

from fixtures.aio_channels import read_all, refused
from fixtures.client_interceptors import aio_interceptor
from fixtures.grpcio import BUGS_OF_INTERCEPTORS, all_channels_but
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail
from fixtures.waiting import WAIT_S
from rpcwheel.call import RetryPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors.aio import FailbackQueues

RETRY = RetryPolicy(retry_on={"UNAVAILABLE", "CANCELLED"}, backoff=0.0, retry_budget=None)

CANCELED_THERE = Fail("CANCELLED", "Locally cancelled by application!")
"""The status of a call that the server has canceled itself, and passes on."""

each_failure = pytest.mark.parametrize(
    "failure", ["UNAVAILABLE", CANCELED_THERE], ids=["unavailable", "canceled there"]
)


class Foreign(grpc.aio.UnaryUnaryClientInterceptor):
    """Awaits the call, as many interceptors do; returns the call, or the response."""

    def __init__(self, gives: str) -> None:
        self.gives = gives
        self.seen = 0

    async def intercept_unary_unary(self, continuation, details, request):
        self.seen += 1
        call = await continuation(details, request)
        match self.gives:
            case "call":
                return call
            case "code":
                await call.code()
                return call
            case _:
                return await call


@each_failure
@pytest.mark.parametrize("gives", ["call", "code", "answer"])
async def test_outer_interceptors_see_one_call_and_inner_ones_each_attempt(
    shop, channels, gives, failure
):
    shop.then(failure)
    inner, outer = Foreign(gives), Foreign(gives)
    can_be_outside = channels.name == "interceptors"
    outside = [outer] if can_be_outside else []
    channel = channels.retrying(retry=RETRY, inner=[inner], outer=outside)
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    assert await call == b"x"
    assert await call.code() is grpc.StatusCode.OK
    assert (outer.seen, inner.seen) == (can_be_outside, 2)


class ForeignStream(grpc.aio.UnaryStreamClientInterceptor):
    """Wraps the messages in a generator, as many interceptors do."""

    def __init__(self) -> None:
        self.seen = 0

    async def intercept_unary_stream(self, continuation, details, request):
        self.seen += 1
        call = await continuation(details, request)

        async def messages():
            async for message in call:
                yield message.upper()

        return messages()


@each_failure
async def test_a_stream_that_an_inner_interceptor_wraps_in_a_generator_is_retried(
    shop, channels, failure
):
    shop.then(failure)
    foreign = ForeignStream()
    call = channels.retrying(retry=RETRY, inner=[foreign]).unary_stream(UNARY_STREAM)(b"xy")
    assert await read_all(call) == [b"X", b"Y"]
    assert await call.code() is grpc.StatusCode.OK
    assert (foreign.seen, len(shop.calls)) == (2, 2)


async def test_a_stream_that_an_inner_interceptor_wraps_in_a_generator_fails_unchanged(
    shop, channels
):
    shop.then(Fail("NOT_FOUND", after=1))
    call = channels.retrying(inner=[ForeignStream()]).unary_stream(UNARY_STREAM)(b"xy")
    assert await anext(aiter(call)) == b"X"
    error = await refused(anext(aiter(call)))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert await call.code() is error.code()


@all_channels_but(channel=BUGS_OF_INTERCEPTORS)
async def test_an_exception_of_an_inner_interceptor_in_a_retry_is_raised_to_the_caller(
    shop, channels
):
    async def break_later(continuation, details, request):
        if shop.calls:
            raise KeyError("a bug")
        return await continuation(details, request)

    shop.then("UNAVAILABLE")
    channel = channels.retrying(inner=[aio_interceptor(break_later)])
    call = channel.unary_unary(UNARY_UNARY)(b"x")
    with pytest.raises(KeyError, match="a bug"):
        await call
    assert call.done()


@pytest.mark.parametrize(
    ("given", "channels"),
    [(None, "channel"), ((("k", "v"),), "interceptors"), ("metadata", "channel")],
    indirect=["channels"],
)
async def test_metadata_that_an_inner_interceptor_adds_is_not_in_the_next_attempt(
    shop, channels, given
):
    numbers = itertools.count(1)

    async def add_a_new_token(continuation, details, request):
        details.metadata.add(f"token-{next(numbers)}", "x")
        return await continuation(details, request)

    own = grpc.aio.Metadata(("k", "v")) if given == "metadata" else given
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    queues = FailbackQueues()
    failback = FailbackPolicy(retry_on="UNAVAILABLE", backoff=30.0)
    retry = RetryPolicy(retry_on="UNAVAILABLE", max_attempts=2, backoff=0.0)
    inner = [aio_interceptor(add_a_new_token)]
    channel = channels.retrying(inner=inner, retry=retry, failback=failback, queues=queues)
    await channel.unary_unary(UNARY_UNARY)(b"x", metadata=own)
    assert await queues.flush(WAIT_S)
    await queues.close(0)
    tokens = [[key for key in seen.metadata if key.startswith("token")] for seen in shop.calls]
    assert tokens == [["token-1"], ["token-2"], ["token-3"]]
    assert given != "metadata" or list(own) == [("k", "v")]
