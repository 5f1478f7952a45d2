"""The interceptors of both worlds: names, wrong arguments, and the arguments of each attempt."""

import asyncio
from functools import partial

import grpc
import pytest

from fixtures.client_interceptors import noting
from fixtures.clients import in_every_way
from fixtures.waiting import WAIT_S
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback import FailbackPolicy

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
