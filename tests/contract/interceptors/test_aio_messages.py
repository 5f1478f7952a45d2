"""Protobuf messages and call credentials, with both APIs of `grpc.aio`."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from fixtures.aio_policy_channels import read_all
from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.call import CallPolicy, DeadlinePolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import aio

PROTOBUF = {
    "request_serializer": StringValue.SerializeToString,
    "response_deserializer": StringValue.FromString,
}
WIRE = StringValue(value="as it was").SerializeToString()
LATER = RetryPolicy(retry_on="UNAVAILABLE", backoff=5.0, retry_budget=None)
TOKENS_METHOD = "/test.Tokens/Get"


async def test_protobuf_messages_are_sent_and_received(shop, channels):
    shop.then("UNAVAILABLE")
    member = channels.retrying().unary_unary(UNARY_UNARY, **PROTOBUF)
    assert (await member(StringValue(value="as it was"))).value == "as it was"
    assert [seen.requests for seen in shop.calls] == [[WIRE], [WIRE]]


@pytest.mark.parametrize(
    ("kind", "channels"),
    [("unary_unary", "interceptors"), ("unary_stream", "channel")],
    indirect=["channels"],
)
async def test_a_retry_sends_the_message_as_it_was_at_the_call(shop, channels, timer, kind):
    shop.then(Fail("UNAVAILABLE"))
    channel = channels.retrying(timer=timer, retry=LATER)
    method = UNARY_UNARY if kind == "unary_unary" else UNARY_STREAM
    member = getattr(channel, kind)(method, request_serializer=StringValue.SerializeToString)
    call = member(request := StringValue(value="as it was"))
    await aio_wait_until(lambda: timer.pending)
    request.value = "changed"
    timer.advance(5.0)
    assert b"".join(await read_all(call) if kind == "unary_stream" else [await call]) == WIRE
    assert len(shop.calls) == 2


async def test_failback_delivers_the_message_as_it_was_at_the_call(shop, own):
    async with aio.FailbackQueues() as queues:
        codes = {"UNAVAILABLE", "CANCELLED"}  # how a call fails whose server is stopped
        later = FailbackPolicy(retry_on=codes, backoff=30.0)
        channel = own.retrying(retry=None, failback=later, queues=queues)
        member = channel.unary_unary(UNARY_UNARY, request_serializer=StringValue.SerializeToString)
        shop.then(hang := Hang())
        call = member(request := StringValue(value="as it was"))
        await aio_wait_until(hang.begun.is_set)
        request.value = "changed"
        shop.kill()
        await call
        shop.start()
        assert await queues.flush(WAIT_S)
        assert shop.calls[-1].requests == [WIRE]


async def test_only_requests_that_may_be_sent_again_are_copied(own):
    copied = []

    class Dear:
        def __deepcopy__(self, memo):
            copied.append(self)
            return self

    once = {"retry": None, "timeout": DeadlinePolicy(slow_call_threshold=9.0)}
    for settings, copies in (once, 0), ({}, 1):
        channel = own.retrying(**settings)
        member = channel.unary_unary(UNARY_UNARY, request_serializer=lambda _: b"x")
        assert await member(Dear()) == b"x"
        assert len(copied) == copies


async def test_a_retry_sends_each_message_of_a_stream_that_reuses_one_object(shop, own):
    async def filled():
        message = StringValue()
        for text in ("a", "b", "c"):
            message.value = text
            yield message

    shop.then(Fail("UNAVAILABLE", read=True))
    channel = own.retrying()
    member = channel.stream_unary(STREAM_UNARY, request_serializer=StringValue.SerializeToString)
    await member(filled())
    wire = [StringValue(value=text).SerializeToString() for text in "abc"]
    assert [seen.requests for seen in shop.calls] == [wire, wire]


# --- Call credentials ---


class Tokens(grpc.AuthMetadataPlugin):
    """A new token for each attempt."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, context, callback):
        callback((("authorization", f"token {next(self._numbers)}"),), None)


class Guarded:
    """A server with TLS that records the tokens, and fails the first calls."""

    def __init__(self) -> None:
        self.seen = []
        self.failures = 0
        self._pool = ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        handler = grpc.unary_unary_rpc_method_handler(self._act)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Tokens", {"Get": handler})]
        )
        port = self._server.add_secure_port("127.0.0.1:0", grpc.local_server_credentials())
        self.target = f"127.0.0.1:{port}"
        self._server.start()

    def _act(self, request, context):
        self.seen.append(dict(context.invocation_metadata())["authorization"])
        if self.failures:
            self.failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return request

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()


@pytest.fixture
def guarded():
    guarded = Guarded()
    yield guarded
    guarded.stop()


def secured(guarded, api, policy, queues):
    credentials = grpc.local_channel_credentials()
    if api == "channel":
        bare = grpc.aio.secure_channel(guarded.target, credentials)
        return aio.intercept_channel(bare, policy, queues=queues)
    ours = aio.client_interceptors(policy, queues=queues)
    return grpc.aio.secure_channel(guarded.target, credentials, interceptors=ours)


@pytest.mark.parametrize("api", ["interceptors", "channel"])
async def test_each_attempt_and_each_delivery_gets_a_new_token(guarded, api):
    policy = CallPolicy(
        retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, max_attempts=2),
        idempotent=True,
        failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=30.0),
    )
    tokens = grpc.metadata_call_credentials(Tokens())
    async with aio.FailbackQueues() as queues, secured(guarded, api, policy, queues) as channel:
        member = channel.unary_unary(TOKENS_METHOD)
        guarded.failures = 1
        assert await member(b"x", credentials=tokens) == b"x"
        assert guarded.seen == ["token 1", "token 2"]
        guarded.failures = 2
        assert await member(b"x", credentials=tokens) is None
        assert await queues.flush(WAIT_S)
        assert guarded.seen[2:] == ["token 3", "token 4", "token 5"]
