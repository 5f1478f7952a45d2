"""The interceptors of both worlds: names, wrong arguments, and the arguments of each attempt."""

import asyncio
import itertools
from functools import partial

import grpc
import pytest

from fixtures.client_interceptors import noting
from fixtures.clients import in_every_way
from fixtures.shop import UNARY_UNARY, Shop
from fixtures.waiting import WAIT_S
from fixtures.worlds import RETRY
from rpcwheel.call import CallPolicy
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import aio

TOKEN = grpc.access_token_call_credentials("token")


# --- What is refused ---


def test_an_invalid_time_is_refused_before_any_queue_is_closed(world, timer):
    queues = world.keep(world.do(world.interceptors.FailbackQueues, timer))
    for wrong, error in ((float("nan"), ConfigurationError), ("soon", TypeError)):
        for act in (queues.close, queues.flush):
            with pytest.raises(error):
                world.do(act, wrong)
    queue = queues.queue_for(FailbackPolicy(retry_on=ConnectionError), "/a/B")
    deliver = print if world.name == "sync" else partial(asyncio.sleep, 0)
    assert world.do(queue.enqueue, ConnectionError(), deliver)
    assert world.do(queues.flush, WAIT_S)


# --- The arguments of each attempt ---


@in_every_way
def test_each_attempt_has_what_the_caller_gave_and_the_number_of_previous_ones(shop, client):
    seen = []
    given = {"wait_for_ready": True, "compression": grpc.Compression.Gzip}
    if client.world.name == "sync":  # grpc.aio passes neither on to interceptors
        given["credentials"] = TOKEN

    def note(details):
        seen.append({name: getattr(details, name, given[name]) for name in given})
        if "credentials" in given:
            return details._replace(credentials=None)  # no TLS here
        return None

    channel = client.open(inner=noting(client.world, note), timeout=WAIT_S)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert client.ask(channel, metadata=(("k", "v"),), **given) == b"x"
    assert seen == [given] * 3
    previous = [call.metadata.get("grpc-previous-rpc-attempts") for call in shop.calls]
    assert previous == [None, "1", "2"]
    assert [call.metadata["k"] for call in shop.calls] == ["v"] * 3
    assert all(0 < call.time_remaining < 1.1 * WAIT_S for call in shop.calls)


class Tokens(grpc.AuthMetadataPlugin):
    """A new token for each attempt."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, context, callback):
        callback((("authorization", f"token {next(self._numbers)}"),), None)


@pytest.mark.parametrize("api", ["interceptors", "channel"])
async def test_with_grpc_aio_each_attempt_and_each_delivery_gets_a_new_token(api):
    failback = FailbackPolicy(retry_on="UNAVAILABLE", backoff=30.0)
    retry = RETRY.replace(max_attempts=2)
    policy = CallPolicy(retry=retry, idempotent=True, failback=failback)
    tokens = grpc.metadata_call_credentials(Tokens())
    with Shop(credentials=grpc.local_server_credentials()) as shop:
        async with aio.FailbackQueues() as queues:
            ours = aio.client_interceptors(policy, queues=queues) if api == "interceptors" else []
            local = grpc.local_channel_credentials()
            channel = grpc.aio.secure_channel(shop.target, local, interceptors=ours)
            if api == "channel":
                channel = aio.intercept_channel(channel, policy, queues=queues)
            async with channel:
                member = channel.unary_unary(UNARY_UNARY)
                shop.then("UNAVAILABLE")
                assert await member(b"x", credentials=tokens) == b"x"
                shop.then("UNAVAILABLE", "UNAVAILABLE")
                assert await member(b"x", credentials=tokens) is None
                assert await queues.flush(WAIT_S)
        sent = [seen.metadata["authorization"] for seen in shop.calls]
    assert sent == [f"token {number}" for number in range(1, 6)]
