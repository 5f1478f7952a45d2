"""The criticality of calls: what clients send, what handlers see, and what their calls inherit."""

import contextlib

import pytest
from scenarios.served import aio_answering, answering, ask, handler

from fixtures.clients import held, in_every_way
from fixtures.grpc_servers import GrpcServer
from fixtures.handlers import bound, partly, reading_and_writing
from fixtures.shop import UNARY_UNARY
from fixtures.small_servers import serving_in, small
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import KINDS, AioWorld, SyncWorld
from rpcwheel import Criticality, call_options, current_criticality, current_deadline
from rpcwheel.call import CallPolicy, MethodPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.rpc import CRITICALITY, CRITICALITY_KEY

LATER = FailbackPolicy(retry_on="UNAVAILABLE", backoff=5.0, metadata=())
"""Failback that sends no metadata of the caller again."""


def sent(shop):
    """The criticality in the metadata of each call that has arrived."""
    return [seen.metadata.get(CRITICALITY_KEY) for seen in shop.calls]


@contextlib.contextmanager
def serving_a_call_of(level):
    """Run the block as in the handler of a call of this criticality."""
    token = CRITICALITY.set(level)
    try:
        yield
    finally:
        CRITICALITY.reset(token)


# --- What clients send ---


@in_every_way
def test_the_criticality_of_the_policy_is_sent_with_each_attempt(shop, client):
    shop.then("UNAVAILABLE")
    channel = client.open(criticality=Criticality.SHEDDABLE_PLUS)
    metadata = [("a", "b")]
    assert client.ask(channel, metadata=iter(metadata)) == b"x"
    assert client.ask(channel) == b"x"
    assert sent(shop) == ["sheddable_plus"] * 3
    assert [seen.metadata.get("a") for seen in shop.calls] == ["b", "b", None]


@in_every_way
def test_a_call_without_retries_has_the_criticality_of_its_policy_too(shop, client):
    client.ask(client.open(criticality="Critical-Plus", retry=None))
    assert sent(shop) == ["critical_plus"]


@in_every_way
def test_without_a_setting_no_criticality_is_sent(shop, client):
    client.ask(client.open(), metadata=(("a", "b"),))
    client.ask(client.open(criticality=None, retry=None))
    assert sent(shop) == [None, None]


@in_every_way
def test_the_metadata_of_the_caller_and_call_options_come_before_the_policy(shop, client):
    channel = client.open(criticality="sheddable")
    with call_options(criticality="critical"):
        client.ask(channel)
        with call_options(timeout=60.0):
            client.ask(channel)
        client.ask(channel, metadata=((CRITICALITY_KEY, "mine"),))
    client.ask(channel, metadata=iter([(CRITICALITY_KEY, "mine")]))
    client.ask(channel)
    assert sent(shop) == ["critical", "critical", "mine", "mine", "sheddable"]


def test_a_method_may_have_another_criticality(shop, world):
    methods = {UNARY_UNARY: MethodPolicy(criticality="critical")}
    channel = world.intercepted(shop.target, CallPolicy(criticality="sheddable", methods=methods))
    for kind in KINDS:
        world.call(channel, kind).result()
    assert sent(shop) == ["critical", "sheddable", "sheddable", "sheddable"]


@in_every_way
def test_a_call_inherits_the_criticality_of_the_call_being_served(shop, client):
    with serving_a_call_of(Criticality.SHEDDABLE):
        client.ask(client.open())
        client.ask(client.open(retry=None))
        client.ask(client.open(criticality="critical"))
        client.ask(client.open(), metadata=((CRITICALITY_KEY, "mine"),))
    client.ask(client.open())
    assert sent(shop) == ["sheddable", "sheddable", "critical", "mine", None]


@held
def test_a_delivery_of_failback_has_the_criticality_of_its_call(shop, client, timer):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = client.open(retry=None, failback=LATER, timer=timer)
    with call_options(criticality="sheddable"):
        client.answer(client.begin(channel))
    with serving_a_call_of(Criticality.CRITICAL):
        client.ask(channel)
    client.ask(channel)
    wait_until(lambda: timer.pending == 3)
    timer.advance(5.0)
    wait_until(lambda: len(shop.calls) == 6)
    assert sent(shop)[:3] == ["sheddable", "critical", None]
    assert sorted(sent(shop)[3:], key=str) == [None, "critical", "sheddable"]


# --- What handlers see ---

HANDLERS = [
    *((SyncWorld, answering, kind) for kind in KINDS),
    (AioWorld, aio_answering, "unary_unary"),
    (AioWorld, aio_answering, "stream_stream"),
    (AioWorld, reading_and_writing, "unary_stream"),
    (AioWorld, bound, "unary_unary"),
    (AioWorld, partly, "stream_stream"),
    (AioWorld, answering, "unary_unary"),
    (AioWorld, answering, "unary_stream"),
]


class Shown(str):
    """A text whose `repr`, which handlers of `scenarios.served` return, is itself."""

    __slots__ = ()

    def __repr__(self):
        return str(self)


def look(_context):
    return Shown(current_criticality())


@pytest.mark.parametrize(("world", "nature", "kind"), HANDLERS, indirect=["world"])
def test_a_handler_sees_the_criticality_of_its_own_call(world, nature, kind):
    """And not that of the previous call on its thread, or of the start of the server."""
    ours = world.interceptors.server_interceptors()
    made = handler(kind, nature(kind, look))
    with (
        serving_a_call_of(Criticality.CRITICAL),
        serving_in(world, made, *ours, workers=1) as target,
    ):
        for level, label in (("sheddable", "sheddable"), ("CRITICAL-PLUS", "critical_plus")):
            assert ask(target, kind, metadata=((CRITICALITY_KEY, level),)) == [label.encode()]
        assert ask(target, kind) == [b"None"]
        for invalid in ("urgent", "", "critical,sheddable"):
            assert ask(target, kind, metadata=((CRITICALITY_KEY, invalid),)) == [b"None"]
        assert ask(target, kind, metadata=((CRITICALITY_KEY, "critical"),) * 2) == [b"None"]


@pytest.mark.parametrize(("world", "nature", "kind"), HANDLERS, indirect=["world"])
def test_the_threads_of_a_server_do_not_keep_what_is_current(world, nature, kind):
    ours = world.interceptors.server_interceptors()
    service = small(handler(kind, nature(kind, look)))
    with GrpcServer(service, world=world, workers=1, interceptors=ours) as server:
        ask(server.target, kind, metadata=((CRITICALITY_KEY, "critical"),))
        assert server.pool.submit(current_criticality).result() is None
        assert server.pool.submit(current_deadline).result() is None


@pytest.mark.parametrize("of_kit", [None, "critical_plus"])
def test_the_calls_of_a_handler_have_its_criticality_and_deadline(shop, world, of_kit):
    kit = world.keep(world.api.Kit(criticality=of_kit))
    channel = world.do(kit.intercept_channel, world.channel(shop.target))
    onward = channel.unary_unary(UNARY_UNARY)

    def serve(request, context):
        return onward(request)

    async def serve_on_loop(request, context):
        return await onward(request)

    made = handler("unary_unary", serve if world.name == "sync" else serve_on_loop)
    with serving_in(world, made, *kit.server_interceptors()) as target:
        ask(target, "unary_unary", metadata=((CRITICALITY_KEY, "sheddable"),))
        ask(target, "unary_unary")
    assert sent(shop) == ([of_kit] * 2 if of_kit else ["sheddable", None])
    assert 0 < shop.calls[0].time_remaining < 1.1 * WAIT_S
