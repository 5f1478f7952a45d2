"""Calls that a server refuses before their handlers, because it has too many."""

import contextlib

import grpc
import pytest
from scenarios.served import handler

from fixtures.clients import held, in_every_way, patient, ways
from fixtures.shop import UNARY_UNARY, Refuse
from fixtures.small_servers import METHOD, serving_in
from fixtures.waiting import wait_until
from fixtures.worlds import KINDS, RETRY
from rpcwheel.call import HedgingPolicy
from rpcwheel.events import RetryScheduled, RetryStopped
from rpcwheel.failback import FailbackPolicy
from rpcwheel.rpc import NONCE_KEY

RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

ONCE = {"idempotent": False}
"""The method is not idempotent."""


def nonces(shop):
    return [seen.metadata.get(NONCE_KEY) for seen in shop.calls]


@in_every_way
def test_a_proven_refusal_is_retried_although_the_method_is_not_idempotent(shop, client, events):
    shop.then(Refuse(), Refuse())
    assert client.ask(client.open(**ONCE), metadata=iter([("a", "b")])) == b"x"
    assert [seen.metadata["a"] for seen in shop.calls] == ["b"] * 3
    assert len(set(nonces(shop))) == 3
    assert all(nonces(shop))
    wait_until(lambda: len(events) == 2)
    method, code = client.method, "RESOURCE_EXHAUSTED"
    assert events == [RetryScheduled(method, number, code, 0.0) for number in (1, 2)]


def test_a_refused_call_of_each_kind_is_sent_again_as_a_whole(shop, world):
    channel = world.retrying(shop.target, **ONCE)
    for kind in KINDS:
        shop.then(Refuse())
        messages = (b"xyz",) if kind.startswith("unary") else (b"x", b"y", b"z")
        response = world.call(channel, kind, *messages).result()
        assert b"".join(response if isinstance(response, list) else [response]) == b"xyz"
    assert len(shop.calls) == 2 * len(KINDS)
    assert all(seen.requests in ([b"xyz"], [b"x", b"y", b"z"]) for seen in shop.calls[1::2])


@in_every_way
def test_a_refusal_of_another_attempt_is_not_retried(shop, client, events):
    for retry in (RETRY, RETRY.replace(retry_on={"RESOURCE_EXHAUSTED"})):
        for nonce in ("", "x-1"):
            shop.then(Refuse(nonce=nonce))
            error = client.refused(client.open(retry=retry, **ONCE))
            assert error.code() is RESOURCE_EXHAUSTED
    assert len(shop.calls) == 4
    wait_until(lambda: len(events) == 2)
    assert [type(event) for event in events] == [RetryStopped] * 2
    assert all("is not marked idempotent" in event.reason for event in events)


@in_every_way
def test_any_refusal_of_an_idempotent_call_is_retried_and_it_has_no_nonce(shop, client):
    shop.then(Refuse(nonce="x-1"), Refuse())
    assert client.ask(client.open()) == b"x"
    assert nonces(shop) == [None] * 3


@in_every_way
def test_without_retries_a_refusal_is_a_failure_as_any(shop, client):
    one = RETRY.replace(max_attempts=1)
    for settings in ({"retry": None}, {"retry": one}, {"retry": one} | ONCE):
        shop.then(Refuse())
        assert client.refused(client.open(**settings)).code() is RESOURCE_EXHAUSTED
    assert nonces(shop) == [None] * 3


@held
def test_a_refused_call_is_sent_again_after_the_pushback(shop, client, timer):
    shop.then(Refuse(after_ms=5000))
    call = client.begin(client.open(timer=timer, **ONCE))
    patient(timer)
    assert client.answer(call) == b"x"


@ways("sync blocking", "aio unary")
def test_failback_delivers_a_refused_call_without_a_nonce(shop, client, timer):
    shop.then(*[Refuse()] * 3)
    failback = FailbackPolicy(retry_on="RESOURCE_EXHAUSTED", backoff=1.0, default=b"later")
    channel = client.open(failback=failback, timer=timer, **ONCE)
    assert client.ask(channel) == b"later"
    assert len(shop.calls) == 3
    wait_until(lambda: timer.pending)
    timer.advance(1.0)
    wait_until(lambda: len(shop.calls) == 4)
    assert nonces(shop)[3] is None


@ways("sync future", "aio unary")
def test_a_refused_hedge_is_followed_by_the_next_one(shop, client, timer):
    shop.then(Refuse(), Refuse(nonce="x-1"))
    hedging = HedgingPolicy(delay=60.0, max_attempts=3, retry_budget=None)
    channel = client.open(api="channel", hedging=hedging, retry=None, timer=timer)
    assert client.ask(channel) == b"x"
    assert len(shop.calls) == 3


# --- Calls of handlers ---


@in_every_way
def test_a_nonce_that_a_handler_has_copied_is_not_sent(shop, client):
    copied = (("a", "b"), (NONCE_KEY, "copied"))
    for settings in (ONCE, {"retry": None}, {"retry": None} | ONCE, {}):
        channel = client.open(**settings)
        shop.then(Refuse())
        for metadata in (copied, iter(copied)):
            with contextlib.suppress(grpc.RpcError):
                client.ask(channel, metadata=metadata)
    assert "copied" not in nonces(shop)
    assert [seen.metadata["a"] for seen in shop.calls] == ["b"] * len(shop.calls)


@pytest.mark.parametrize("settings", [ONCE, {"retry": None}, {}])
def test_a_refusal_that_a_handler_passes_on_is_not_retried(shop, world, settings):
    """The handler may have done half of its work, so its call must not be repeated."""
    onward = world.retrying(shop.target, **settings).unary_unary(UNARY_UNARY)
    runs = []

    def inbound(context):
        runs.append(context)
        return tuple(context.invocation_metadata())

    async def serve_on_loop(request, context):
        try:
            return await onward(request, metadata=inbound(context))
        except grpc.RpcError as error:
            trailing = tuple(error.trailing_metadata())
            await context.abort(error.code(), error.details(), trailing)

    def serve(request, context):
        try:
            return onward(request, metadata=inbound(context))
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            context.abort(error.code(), error.details())

    made = handler("unary_unary", serve if world.name == "sync" else serve_on_loop)
    shop.then(*[Refuse()] * 20)
    with serving_in(world, made, *world.interceptors.server_interceptors()) as target:
        caller = world.retrying(target, **ONCE)
        error = world.call(caller, method=METHOD).error()
        assert error.code() is RESOURCE_EXHAUSTED
        assert len(runs) == 1
        before = len(shop.calls)
        world.call(world.retrying(target), method=METHOD).error()  # an idempotent one is repeated
        assert len(runs) == 4
        assert len(shop.calls) > before
