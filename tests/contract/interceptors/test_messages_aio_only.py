"""Call credentials, with both APIs of `grpc.aio`."""

import itertools

import grpc
import pytest

from fixtures.small_servers import METHOD, serving
from fixtures.waiting import WAIT_S
from rpcwheel.call import CallPolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import aio


class Tokens(grpc.AuthMetadataPlugin):
    """A new token for each attempt."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, context, callback):
        callback((("authorization", f"token {next(self._numbers)}"),), None)


class Guarded:
    """A handler that records the tokens, and fails the first calls."""

    def __init__(self) -> None:
        self.seen = []
        self.failures = 0

    def __call__(self, request, context):
        self.seen.append(dict(context.invocation_metadata())["authorization"])
        if self.failures:
            self.failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return request


@pytest.fixture
def guarded():
    """The handler of a server with TLS, which has its `target`."""
    guarded = Guarded()
    handler = grpc.unary_unary_rpc_method_handler(guarded)
    with serving(handler, credentials=grpc.local_server_credentials()) as guarded.target:
        yield guarded


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
        member = channel.unary_unary(METHOD)
        guarded.failures = 1
        assert await member(b"x", credentials=tokens) == b"x"
        assert guarded.seen == ["token 1", "token 2"]
        guarded.failures = 2
        assert await member(b"x", credentials=tokens) is None
        assert await queues.flush(WAIT_S)
        assert guarded.seen[2:] == ["token 3", "token 4", "token 5"]
