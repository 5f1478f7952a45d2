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


@pytest.mark.parametrize("api", ["interceptors", "channel"])
async def test_each_attempt_and_each_delivery_gets_a_new_token(api):
    seen, fails = [], iter([True, False, True, True, False])

    def guarded(request, context):
        seen.append(dict(context.invocation_metadata())["authorization"])
        if next(fails):
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return request

    policy = CallPolicy(
        retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0, max_attempts=2),
        idempotent=True,
        failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=30.0),
    )
    tokens = grpc.metadata_call_credentials(Tokens())
    handler = grpc.unary_unary_rpc_method_handler(guarded)
    with serving(handler, credentials=grpc.local_server_credentials()) as target:
        async with aio.FailbackQueues() as queues:
            ours = aio.client_interceptors(policy, queues=queues) if api == "interceptors" else []
            channel = grpc.aio.secure_channel(
                target, grpc.local_channel_credentials(), interceptors=ours
            )
            if api == "channel":
                channel = aio.intercept_channel(channel, policy, queues=queues)
            async with channel:
                member = channel.unary_unary(METHOD)
                assert await member(b"x", credentials=tokens) == b"x"
                assert seen == ["token 1", "token 2"]
                assert await member(b"x", credentials=tokens) is None
                assert await queues.flush(WAIT_S)
                assert seen[2:] == ["token 3", "token 4", "token 5"]
