"""A channel of one list has the list that is wanted, whoever makes it at the same moment."""

import threading

import grpc
import pytest

from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import aio
from rpcwheel.cluster import BroadcastInvoker, ClusterChannel, ClusterPolicy, ForkingInvoker
from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import ServiceInstance
from rpcwheel.observe import RecordSkipped
from rpcwheel.registry import RegistryPolicy, open_registry
from rpcwheel.registry._listed import Listed
from rpcwheel.registry.named import channel

LONG = RegistryPolicy(lease=1800.0)


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


def test_one_list_is_refused_for_calls_on_several_members(memory):
    refusal = 'with another balance, "round_robin" say'
    for view in (BroadcastInvoker, ForkingInvoker):
        refused = pytest.raises(ConfigurationError, match=refusal)
        with channel(memory, service=SERVICE, balance="core") as one_list, refused:
            view(one_list)
        with channel(memory, service=SERVICE) as of_members:
            view(of_members)


async def test_one_list_is_refused_for_calls_on_several_members_in_aio(memory):
    refusal = 'with another balance, "round_robin" say'
    for view in (aio.BroadcastInvoker, aio.ForkingInvoker):
        async with aio.channel(memory, service=SERVICE, balance="core") as one_list:
            with pytest.raises(ConfigurationError, match=refusal):
                view(one_list)
        async with aio.channel(memory, service=SERVICE) as of_members:
            view(of_members)


def who(to_service, times=1):
    ask = to_service.unary_unary(WHO)
    return {ask(b"", timeout=WAIT_S) for _ in range(times)}


def test_a_channel_of_one_list_follows_the_registry_and_ends_no_call(make_shop, memory, events):
    shop = make_shop("a")
    unreachable = [
        ServiceInstance(service=SERVICE, host="no.such.host.invalid", port=1),
        ServiceInstance(service=SERVICE, host="127.0.0.1", port=2, protocol="grpcs"),
    ]
    at_once = ClusterPolicy(drain=0.0)
    with (
        open_registry(memory, policy=LONG) as registry,
        channel(f"{memory}/{SERVICE}", balance="core", cluster=at_once) as to_service,
    ):
        first = registry.register(published(shop), wait=WAIT_S)
        for one in unreachable:
            registry.register(one, wait=WAIT_S)
        assert to_service.unary_unary(WHO)(b"", timeout=WAIT_S, wait_for_ready=True) == b"a"
        call = to_service.unary_unary(HOLD).future(b"", timeout=WAIT_S)
        assert shop.held.wait(WAIT_S)
        registry.register(published(make_shop("b")), wait=WAIT_S)
        assert wait_until(lambda: who(to_service, 4) == {b"a", b"b"})
        first.unregister(wait=WAIT_S)
        assert wait_until(lambda: who(to_service, 4) == {b"b"})
        shop.release.set()
        assert call.result() == b"a"
    skipped = lambda: {one.key for one in events if isinstance(one, RecordSkipped)}  # noqa: E731
    assert wait_until(lambda: skipped() == {"no.such.host.invalid:1", "127.0.0.1:2"})


async def test_a_channel_of_one_list_follows_the_registry_in_aio(make_shop, memory):
    async with aio.channel(f"{memory}/{SERVICE}", balance="core") as to_service:
        with open_registry(memory, policy=LONG) as registry:
            first = registry.register(published(make_shop("a")), wait=WAIT_S)
            ask = to_service.unary_unary(WHO)
            assert await ask(b"", timeout=WAIT_S, wait_for_ready=True) == b"a"
            registry.register(published(make_shop("b")), wait=WAIT_S)
            first.unregister(wait=WAIT_S)
            while await ask(b"", timeout=WAIT_S, wait_for_ready=True) != b"b":
                pass
