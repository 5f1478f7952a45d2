"""Calls of `grpc.aio` in a journal: what differs from `grpc`."""

import asyncio
import gc

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.journaled_clients import LATER, key_of
from fixtures.journals import (
    is_quiet,
    store,
    stored,
    wait_for_none,
)
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import aio
from rpcwheel.call import CallPolicy, HedgingPolicy, RetryPolicy
from rpcwheel.call.idempotency import IDEMPOTENCY_KEY
from rpcwheel.errors import (
    ConfigurationError,
    FailbackClosed,
    FailbackFull,
    JournalFull,
    JournalRefused,
    JournalUnavailable,
)
from rpcwheel.events import (
    CallbackFailed,
    FailbackDelivered,
    FailbackDropped,
    FailbackGaveUp,
    FailbackQueued,
)
from rpcwheel.failback.stored import decode
from rpcwheel.interceptors.aio import FailbackQueues, client_interceptors, intercept_channel
from rpcwheel.journal.backend import CallState
from rpcwheel.rpc import Kind


@pytest.fixture
async def client(shop, policy):
    """Makes channels to the shop. Each has queues of its own, `client.queues`."""
    made = []

    def make(failback=None, *, queues=None, target=shop.target, **settings):
        bare = grpc.aio.insecure_channel(target, options=IMPATIENT)
        make.queues = queues or FailbackQueues()
        settings = {"failback": failback or policy()} | settings
        channel = intercept_channel(bare, CallPolicy(**settings), queues=make.queues)
        made.append((channel, make.queues))
        return channel

    yield make
    for channel, queues in made:
        await queues.close(0)
        await channel.close()


def push(channel, request=b"order", **options):
    return channel.unary_unary(UNARY_UNARY)(request, timeout=WAIT_S, **options)


async def first(call):
    return await anext(aiter(call))


async def written(call):
    for request in (b"a", b"b"):
        await call.write(request)
    await call.done_writing()
    return await call


MAKE = {
    "unary": lambda channel, **given: channel.unary_unary(UNARY_UNARY)(b"ab", **given),
    "unary_stream": lambda channel, **given: first(
        channel.unary_stream(UNARY_STREAM)(b"ab", **given)
    ),
    "stream_unary": lambda channel, **given: channel.stream_unary(STREAM_UNARY)(
        [b"a", b"b"], **given
    ),
    "stream_stream": lambda channel, **given: first(
        channel.stream_stream(STREAM_STREAM)([b"a", b"b"], **given)
    ),
}
KINDS = dict(zip((UNARY_UNARY, UNARY_STREAM, STREAM_UNARY, STREAM_STREAM), Kind, strict=True))


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
async def test_a_call_is_stored_before_its_caller_is_answered_and_then_delivered(
    make, shop, client, url, events
):
    shop.then(Fail("UNAVAILABLE", read=True))
    channel = client()
    metadata = (("k", "v"), ("k-bin", b"\xff"), ("authorization", "x"))
    assert await make(channel, timeout=WAIT_S, metadata=metadata) == LATER
    (call,) = stored(url)
    seen = shop.calls[0]
    assert (call.queue, call.target, call.method) == ("*", shop.target, seen.method)
    assert (call.key, call.attempts) == (key_of(seen), 1)
    body = decode(call.body)
    assert (body.requests, body.kind) == (tuple(seen.requests), KINDS[seen.method])
    assert (body.metadata, body.timeout_s) == ((("k", "v"), ("k-bin", b"\xff")), WAIT_S)
    assert await client.queues.flush(WAIT_S)
    again = shop.calls[1]
    assert (again.requests, again.method) == (seen.requests, seen.method)
    assert (again.metadata["k"], again.metadata["k-bin"]) == ("v", b"\xff")
    assert "authorization" not in again.metadata
    assert key_of(again) == key_of(seen)
    assert again.metadata["grpc-previous-rpc-attempts"] == "1"
    assert stored(url) == []
    assert [type(event) for event in events] == [FailbackQueued, FailbackDelivered]


async def test_a_message_is_stored_as_its_serializer_writes_it(shop, client, url):
    shop.then("UNAVAILABLE")
    call = client().unary_unary(UNARY_UNARY, request_serializer=str.encode)
    assert await call("text", timeout=WAIT_S) == LATER
    assert decode(stored(url)[0].body).requests == (b"text",)


async def test_a_channel_of_a_kit_delivers_the_calls_of_an_earlier_process(shop, policy, url):
    shop.then("UNAVAILABLE")
    async with aio.Kit(failback=policy()) as kit, kit.channel(shop.target) as channel:
        assert await push(channel) == LATER
        assert await kit.close(0) == []
    assert len(stored(url)) == 1
    kit = aio.Kit(failback=policy())
    async with kit.channel(shop.target), kit:
        assert await kit.flush(WAIT_S)
    assert [seen.requests for seen in shop.calls] == [[b"order"]] * 2


async def test_calls_of_an_earlier_process_are_pending_as_soon_as_they_are_counted(shop, policy):
    shop.then("UNAVAILABLE")
    async with aio.Kit(failback=policy()) as kit, kit.channel(shop.target) as channel:
        assert await push(channel) == LATER
        await kit.close(0)
    kit = aio.Kit(failback=policy())
    async with kit.channel(shop.target), kit:
        await aio_wait_until(lambda: kit.pending == 1)
        await kit.close(0)


async def test_a_program_may_keep_only_a_stub(shop, policy, url):
    shop.then("UNAVAILABLE")
    async with FailbackQueues() as queues:
        bare = grpc.aio.insecure_channel(shop.target, options=IMPATIENT)
        settings = CallPolicy(failback=policy(backoff=0.01))
        call = intercept_channel(bare, settings, queues=queues).unary_unary(UNARY_UNARY)
        gc.collect()
        assert await call(b"order", timeout=WAIT_S) == LATER
        await aio_wait_until(lambda: not stored(url))
        await bare.close()
    assert len(shop.calls) == 2


async def test_interceptors_refuse_a_policy_with_a_journal(policy):
    with pytest.raises(ConfigurationError, match="no effect with client_interceptors"):
        client_interceptors(CallPolicy(failback=policy()))


# --- Keys, order ---


async def test_the_key_is_the_same_in_retries_hedges_and_deliveries(shop, client, policy):
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=0, max_attempts=2)
    hedging = HedgingPolicy(delay=0, max_attempts=2, non_fatal_codes={"UNAVAILABLE"})
    for settings in ({"retry": retry}, {"hedging": hedging}):
        shop.reset()
        shop.then(*["UNAVAILABLE"] * 2)
        assert await push(client(policy(), idempotent=True, **settings)) == LATER
        assert await client.queues.flush(WAIT_S)
        assert len({key_of(seen) for seen in shop.calls}) == 1
        assert len(shop.calls) == 3


async def test_a_key_of_the_user_is_kept(shop, client, url):
    shop.then("UNAVAILABLE")
    await push(client(), metadata=((IDEMPOTENCY_KEY, "mine"),))
    assert [call.key for call in stored(url)] == ["mine"]
    assert [key_of(seen) for seen in shop.calls] == ["mine"]


async def test_calls_with_an_order_key_are_delivered_in_order(shop, client, policy, url):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = client(policy(order_key="shop"))
    for request in (b"1", b"2", b"3"):
        await push(channel, request, metadata=(("shop", "a"),))
    assert await client.queues.flush(WAIT_S)
    assert [seen.requests for seen in shop.calls[3:]] == [[b"1"], [b"2"], [b"3"]]


async def test_an_order_key_that_raises_is_that_of_no_call(shop, client, policy, url, events):
    shop.then("UNAVAILABLE")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push(client(policy(order_key=lambda request: 1 / 0)))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "not queued by failback: division by zero" in caught.value.__notes__[0]
    assert [type(event) for event in events] == [CallbackFailed]
    assert stored(url) == []


# --- Dead letters, refusals ---


async def test_a_call_that_is_given_up_is_a_dead_letter(shop, client, policy, url, events):
    shop.then("UNAVAILABLE", "INVALID_ARGUMENT")
    letters = []

    async def hook(letter):
        letters.append(letter.args)

    await push(client(policy(backoff=0.01, dead_letter=hook)))
    await aio_wait_until(lambda: stored(url, CallState.DEAD))
    (call,) = stored(url)
    assert call.reason == "its error is not one that `retry_on` names"
    assert letters == [(b"order",)]
    assert len(events.of(FailbackGaveUp)) == 1


async def test_a_poisoned_entry_is_a_dead_letter_and_stops_nothing(shop, client, url):
    store(url, target=shop.target, body=b"\x02")
    store(url, target=shop.target)
    client()
    await aio_wait_until(lambda: [one.state for one in stored(url)] == [CallState.DEAD])
    assert [seen.requests for seen in shop.calls] == [[b"order"]]


async def test_a_full_queue_refuses_or_drops_calls(shop, client, policy, url, events):
    shop.then(*["UNAVAILABLE"] * 3)
    assert await push(client(policy(max_pending=1))) == LATER
    with pytest.raises(FailbackFull, match="max_pending") as caught:
        await push(client(policy(max_pending=1), queues=client.queues))
    del caught
    assert await push(client(policy(max_pending=1, overflow="drop"))) == LATER
    assert len(events.of(FailbackDropped)) == 1
    assert len(stored(url)) == 1


@pytest.mark.parametrize("kind", [JournalUnavailable, JournalFull, JournalRefused])
async def test_a_call_that_the_journal_does_not_store_is_refused_with_its_code(
    kind, shop, client, script, url
):
    shop.then("UNAVAILABLE")
    script["append"] = kind("why")
    with pytest.raises(kind, match="was not queued, because why") as caught:
        await push(client())
    assert isinstance(caught.value, grpc.aio.AioRpcError)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stored(url) == []


async def test_a_caller_that_is_canceled_while_its_call_is_stored_may_find_it_stored(
    shop, client, url, script
):
    shop.then("UNAVAILABLE")
    channel = client()
    entered, opened = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait():
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(opened.wait(), loop).result(WAIT_S)

    script["append"] = wait
    task = asyncio.ensure_future(asyncio.wait_for(push(channel), WAIT_S))
    await entered.wait()  # the loop is not blocked meanwhile
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    opened.set()
    await aio_wait_until(lambda: len(stored(url)) == 1)


# --- The end ---


async def test_close_gives_the_calls_back_and_is_idempotent(shop, client, policy, url):
    store(url, count=3, target=shop.target, delay_s=1.9)
    channel = client()
    (invoker,) = client.queues._by_name.values()
    await aio_wait_until(lambda: len(invoker._queue._calls) == 3)
    assert await client.queues.close() == []
    assert await client.queues.close() == []
    assert [call.state for call in stored(url)] == [CallState.READY] * 3
    shop.then("UNAVAILABLE")
    with pytest.raises(FailbackClosed):
        await push(channel)
    assert await client.queues.flush(0.01) is True


async def test_a_queue_that_is_made_after_close_is_closed(shop, client):
    client()
    await client.queues.close()
    channel = client(queues=client.queues)
    shop.then("UNAVAILABLE")
    with pytest.raises(FailbackClosed):
        await push(channel)


async def test_close_waits_for_running_attempts(shop, client, policy, url):
    shop.then("UNAVAILABLE", hang := Hang())
    await push(client(policy(backoff=0.01)))
    await aio_wait_until(hang.begun.is_set)
    closing = asyncio.ensure_future(client.queues.close(WAIT_S))
    (invoker,) = client.queues._by_name.values()
    await aio_wait_until(lambda: invoker._queue.closed)
    shop.calls[1].ended.set()
    assert await closing == []
    assert stored(url) == []


async def test_a_close_that_is_canceled_gives_the_calls_back(shop, client, policy, url):
    shop.then("UNAVAILABLE", hang := Hang())
    await push(client(policy(backoff=0.01)))
    await aio_wait_until(hang.begun.is_set)
    (invoker,) = client.queues._by_name.values()
    closing = asyncio.ensure_future(invoker.close(WAIT_S))
    await aio_wait_until(lambda: invoker._queue.closed)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await aio_wait_until(lambda: [one.state for one in stored(url)] == [CallState.READY])
    shop.calls[1].ended.set()


async def test_flush_returns_false_in_time_if_the_server_stays_down(shop, client, url):
    shop.then(*["UNAVAILABLE"] * 2)
    await push(client())
    assert await client.queues.flush(0.1) is False
    assert len(stored(url)) == 1


async def test_calls_stay_in_the_journal_if_the_channel_is_closed_first(shop, client, policy, url):
    shop.then("UNAVAILABLE", hang := Hang())
    channel = client(policy(backoff=0.01))
    await push(channel)
    await aio_wait_until(hang.begun.is_set)
    await channel.close()
    (invoker,) = client.queues._by_name.values()
    await aio_wait_until(lambda: not invoker._queue._calls and is_quiet(invoker._queue))
    assert [call.state for call in stored(url)] == [CallState.READY]


def test_a_loop_that_ends_with_calls_in_flight_leaves_them_in_the_journal(shop, policy, url):
    shop.then("UNAVAILABLE", hang := Hang())
    queues = FailbackQueues()

    async def program():
        bare = grpc.aio.insecure_channel(shop.target, options=IMPATIENT)
        settings = CallPolicy(failback=policy(backoff=0.01))
        channel = intercept_channel(bare, settings, queues=queues)
        await push(channel)
        await aio_wait_until(hang.begun.is_set)

    asyncio.run(program())
    asyncio.run(queues.close())
    assert [call.state for call in stored(url)] == [CallState.READY]


def test_the_next_loop_delivers_the_calls_of_one_that_was_closed(shop, policy, url):
    shop.then("UNAVAILABLE")
    queues, settings = FailbackQueues(), CallPolicy(failback=policy())

    async def program():
        bare = grpc.aio.insecure_channel(shop.target, options=IMPATIENT)
        async with intercept_channel(bare, settings, queues=queues) as channel:
            if not shop.calls:
                return await push(channel)
            return await queues.flush(WAIT_S)

    assert asyncio.run(program()) == LATER
    assert asyncio.run(program()) is True
    assert len(shop.calls) == 2
    asyncio.run(queues.close())
    wait_for_none(url)
