"""The criticality of calls: what clients send, and what the calls of handlers inherit.

What handlers see is in `test_server`, with their deadlines.
"""

import pytest
from scenarios.served import ask, handler

from fixtures.clients import held, in_every_way
from fixtures.handlers import serving_a_call_of
from fixtures.shop import UNARY_UNARY
from fixtures.small_servers import serving_in
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import KINDS
from rpcwheel import Criticality, call_options
from rpcwheel.call import CallPolicy, MethodPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.rpc import CRITICALITY_KEY

LATER = FailbackPolicy(retry_on="UNAVAILABLE", backoff=5.0, metadata=())
"""Failback that sends no metadata of the caller again."""

MINE = ((CRITICALITY_KEY, "mine"),)


def sent(shop):
    """The criticality in the metadata of each call that has arrived."""
    return [seen.metadata.get(CRITICALITY_KEY) for seen in shop.calls]


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
@pytest.mark.parametrize("retries", [{}, {"retry": None}], ids=["retries", "no retries"])
def test_metadata_come_before_options_and_these_before_the_policy_and_the_call_being_served(
    shop, client, retries
):
    plain, own = client.open(**retries), client.open(criticality="Critical-Plus", **retries)
    client.ask(plain, metadata=(("a", "b"),))
    client.ask(own)
    with serving_a_call_of(Criticality.SHEDDABLE):
        client.ask(plain)
        client.ask(own)
        with call_options(criticality="critical"):
            client.ask(own)
            with call_options(timeout=60.0):
                client.ask(plain)
            client.ask(own, metadata=iter(MINE))
        client.ask(plain, metadata=MINE)
    assert sent(shop)[:2] == [None, "critical_plus"]
    assert sent(shop)[2:4] == ["sheddable", "critical_plus"]
    assert sent(shop)[4:] == ["critical", "critical", "mine", "mine"]


def test_a_method_may_have_another_criticality(shop, world):
    methods = {UNARY_UNARY: MethodPolicy(criticality="critical")}
    channel = world.intercepted(shop.target, CallPolicy(criticality="sheddable", methods=methods))
    for kind in KINDS:
        world.call(channel, kind).result()
    assert sent(shop) == ["critical", "sheddable", "sheddable", "sheddable"]


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


# --- The calls of handlers ---


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
