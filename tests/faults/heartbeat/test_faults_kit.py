"""Heartbeats under what users have on top: the kit's interceptors and generated stubs, both worlds.

The stubs are made before a connection is replaced, and used after it.
"""

import grpc
import pytest

from fixtures.heartbeat_worlds import SyncClient
from fixtures.server_process import PUSH
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import Kit, RetryPolicy, aio
from rpcwheel.cli.audit_pb2 import Event
from rpcwheel.cli.audit_pb2_grpc import AuditStub


@pytest.fixture
def shop(start_server):
    return start_server(), start_server()


@pytest.fixture
def name(open_proxy, shop):
    return open_proxy(shop[0].target)


def kit(world, **settings):
    return (Kit if world == "sync" else aio.Kit)(**settings)


def freeze(client, shop, name):
    """Have the first freeze, and the other take its place."""
    frozen, other = shop
    name.to(other.target)
    frozen.stop()


def test_a_generated_stub_goes_on_after_the_replacement(shop, name, open_client):
    client = open_client(name.target)
    stub = client.do(AuditStub, client.channel)

    def push():
        return client.do(stub.Push, Event(text="order"), timeout=WAIT_S, wait_for_ready=True)

    assert push().server_pid == shop[0].pid
    freeze(client, shop, name)
    assert wait_until(lambda: client.bare.number == 2 and client.state == "ALIVE")
    assert push().server_pid == shop[1].pid


def test_the_kits_retries_take_a_call_to_the_next_connection(shop, name, open_client):
    """A call in flight on a dead connection ends UNAVAILABLE; what is idempotent is tried again."""
    retry = RetryPolicy(on="UNAVAILABLE", attempts=5, wait=0.05)
    ours = kit(open_client.world, retry=retry, idempotent=True)
    client = open_client(name.target, around=ours.intercept_channel)
    assert client.ping().pid == shop[0].pid
    freeze(client, shop, name)
    call = client.begin("/shop.Orders/Ping", timeout=WAIT_S)
    assert call.ended().pid == shop[1].pid
    assert client.bare.number == 2


def test_the_kits_deadline_ends_a_call_before_the_heartbeat_does(shop, name, open_client):
    ours = kit(open_client.world, timeout=1.0)
    client = open_client(name.target, around=ours.intercept_channel, interval=5.0, timeout=15.0)
    assert client.begin("/shop.Orders/Ping").ended().pid == shop[0].pid
    shop[0].stop()
    assert client.begin("/shop.Orders/Ping").ended().code == "DEADLINE_EXCEEDED"
    assert client.bare.number == 1


@pytest.mark.parametrize("style", ["future", "with_call"])
def test_every_style_of_a_sync_call_is_told(style, shop, name):
    with SyncClient(name.target) as client:
        assert client.ping().pid == shop[0].pid
        push = client.channel.unary_unary(PUSH)
        freeze(client, shop, name)
        with pytest.raises(grpc.RpcError) as caught:
            push.future(b"").result() if style == "future" else push.with_call(b"")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no answer to heartbeats" in caught.value.details()
        assert client.ping().pid == shop[1].pid
