"""A channel of one list has the list that is wanted, whoever makes it at the same moment."""

import threading

import grpc
import pytest

from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel import aio
from rpcwheel.cluster import BroadcastInvoker, ClusterChannel, ForkingInvoker
from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry._aio_listed import Listed as AsyncListed
from rpcwheel.registry._listed import Listed
from rpcwheel.registry.named import channel


def published(shop):
    instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen())
    shop.server.start()
    return instance


def listed():
    return Listed(SERVICE, "memory://a", credentials=None, compression=None, timer=None)


class Gate:
    """Makes connections as it is told to; the first waits before it is given."""

    def __init__(self, connect):
        self._connect = connect
        self.made, self.go = threading.Event(), threading.Event()

    def __call__(self, instance, options):
        inner = self._connect(instance, options)
        if not self.made.is_set():
            self.made.set()
            assert self.go.wait(WAIT_S)
        return inner


def test_a_list_that_changes_while_a_call_makes_the_channel_of_the_old_one_counts(make_shop):
    one, other = published(make_shop("a")), published(make_shop("b"))
    lists = listed()
    gate, answers = Gate(lists.connect), []
    with ClusterChannel(SERVICE, connect=gate) as channel:
        ask = channel.unary_unary(WHO)
        lists.show(channel, [one])
        thread = threading.Thread(target=lambda: answers.append(ask(b"", timeout=WAIT_S)))
        thread.start()
        assert gate.made.wait(WAIT_S)  # for the list of the one
        lists.show(channel, [other])
        assert wait_until(lambda: f":{other.port}" in lists._using[0])
        gate.go.set()
        thread.join(WAIT_S)
        assert answers in [[b"a"], [b"b"]]
        assert wait_until(lambda: ask(b"", timeout=WAIT_S) == b"b")
        lists.close()


def test_a_list_that_is_never_called_is_swapped_and_connects_nobody(make_shop):
    one, other = published(make_shop("a")), published(make_shop("b"))
    lists = listed()
    with ClusterChannel(SERVICE, connect=lists.connect) as channel:
        lists.show(channel, [one])
        assert wait_until(lambda: channel.members)
        lists.show(channel, [one, other])
        assert wait_until(lambda: f":{other.port}" in lists._using[0])
        assert wait_until(lambda: channel.members[0].channel.number == 2)
        assert channel.get_state() is grpc.ChannelConnectivity.IDLE
        assert {channel.unary_unary(WHO)(b"", timeout=WAIT_S) for _ in range(4)} == {b"a", b"b"}
        lists.close()


def test_where_they_speak_another_protocol_from_now_on_so_does_the_channel(make_shop):
    one = published(make_shop("a"))
    lists = listed()
    with ClusterChannel(SERVICE, connect=lists.connect) as channel:
        ask = channel.unary_unary(WHO)
        lists.show(channel, [one.changed(protocol="grpcs")])
        assert wait_until(lambda: channel.members)
        with pytest.raises(grpc.RpcError):
            ask(b"", timeout=WAIT_S)  # it speaks plain HTTP/2
        lists.show(channel, [one])
        assert ask(b"", timeout=WAIT_S, wait_for_ready=True) == b"a"
        lists.close()


async def test_where_they_speak_another_protocol_from_now_on_so_does_the_channel_in_aio(make_shop):
    one = published(make_shop("a"))
    lists = AsyncListed(SERVICE, "memory://a", credentials=None, compression=None, timer=None)
    async with aio.ClusterChannel(SERVICE, connect=lists.connect) as channel:
        ask = channel.unary_unary(WHO)
        lists.show(channel, [one.changed(protocol="grpcs")])
        await aio_wait_until(lambda: channel.members)
        with pytest.raises(grpc.RpcError):
            await ask(b"", timeout=WAIT_S)
        lists.show(channel, [one])
        assert await ask(b"", timeout=WAIT_S, wait_for_ready=True) == b"a"
        await lists.close()


@pytest.mark.parametrize("view", [BroadcastInvoker, ForkingInvoker])
def test_one_list_is_refused_for_calls_on_several_members(memory, view):
    refusal = pytest.raises(ConfigurationError, match='with another balance, "round_robin" say')
    with channel(memory, service=SERVICE, balance="core") as one_list, refusal:
        view(one_list)
    with channel(memory, service=SERVICE) as of_members:
        view(of_members)


@pytest.mark.parametrize("view", [aio.BroadcastInvoker, aio.ForkingInvoker])
async def test_one_list_is_refused_for_calls_on_several_members_in_aio(memory, view):
    async with aio.channel(memory, service=SERVICE, balance="core") as one_list:
        with pytest.raises(ConfigurationError, match='with another balance, "round_robin" say'):
            view(one_list)
    async with aio.channel(memory, service=SERVICE) as of_members:
        view(of_members)
