"""What only calls of `grpc.aio` in a journal have: canceled tasks, and loops that end."""

import asyncio
from concurrent.futures import CancelledError

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.grpcio import with_target
from fixtures.journaled_clients import LATER, is_closed
from fixtures.journals import stored, wait_for_none
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S, Gate, aio_wait_until, in_thread, wait_until
from fixtures.worlds import only_aio
from rpcwheel.call import CallPolicy
from rpcwheel.errors import FailbackClosed, JournalFull
from rpcwheel.events import FailbackQueued, TaskFailed
from rpcwheel.interceptors.aio import FailbackQueues, intercept_channel
from rpcwheel.journal.backend import CallState
from rpcwheel.journal.journal import open_journal


@only_aio
def test_a_caller_that_is_canceled_while_its_call_is_stored_may_find_it_stored(
    world, shop, client, url, script, events
):
    shop.then("UNAVAILABLE")
    script["append"] = gate = Gate()
    call = world.call(client(), timeout=WAIT_S)
    assert gate.entered.wait(WAIT_S)
    world.do(asyncio.sleep, 0)  # the loop is not blocked meanwhile
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        call.result()
    assert client.queues.stats()["*"].calls == 0
    gate.opened.set()
    wait_until(lambda: len(stored(url)) == 1)
    wait_until(lambda: client.queues.stats()["*"].queued_total == 1)
    wait_until(lambda: events.of(FailbackQueued))


@only_aio
def test_a_caller_that_is_canceled_while_its_call_is_refused_is_counted(
    world, shop, client, script, events
):
    gate = Gate()

    def refuse():
        gate()
        raise JournalFull("the disk is full")

    shop.then("UNAVAILABLE")
    script["append"] = refuse
    call = world.call(client(), timeout=WAIT_S)
    assert gate.entered.wait(WAIT_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        call.result()
    gate.opened.set()
    wait_until(lambda: client.queues.stats()["*"].rejected == 1)
    assert events.of(TaskFailed) == []


@only_aio
def test_a_queue_that_is_made_after_close_does_not_block_the_loop(
    world, policy, new_queues, url, script
):
    script["renew"] = gate = Gate()
    patient = f"{url}?timeout=3600"
    queues, journal = new_queues(), open_journal(patient)
    world.do(queues.close, 0)
    busy = in_thread(journal.renew, "busy")
    assert gate.entered.wait(WAIT_S)
    queue = world.do(queues.queue_for, policy(journal=patient), "*")
    assert not busy.done()
    gate.opened.set()
    busy.result(WAIT_S)
    with pytest.raises(FailbackClosed):
        world.do(queue._queue.store.append, None, 0)
    journal.close()


@only_aio
def test_a_close_that_is_canceled_gives_the_calls_back(world, shop, client, policy, push, url):
    shop.then("UNAVAILABLE", hang := Hang())
    push(channel := client(policy(backoff=0.01, max_pending=1)))
    assert hang.begun.wait(WAIT_S)
    closing = asyncio.run_coroutine_threadsafe(client.queues.close(WAIT_S), world.loop)
    wait_until(lambda: is_closed(world, channel, shop))
    closing.cancel()
    with pytest.raises(CancelledError):
        closing.result(WAIT_S)
    wait_until(lambda: [call.state for call in stored(url)] == [CallState.READY])
    shop.calls[1].ended.set()


@pytest.fixture
def in_loop(shop, policy):
    """Runs a function of a new channel on a loop of its own, and closes the loop.

    All channels share the queues `in_loop.queues`.
    """
    queues = FailbackQueues()

    def in_loop(function, **settings):
        async def program():
            bare = with_target(
                grpc.aio.insecure_channel(shop.target, options=IMPATIENT), shop.target
            )
            call_policy = CallPolicy(failback=policy(**settings))
            return await function(intercept_channel(bare, call_policy, queues=queues))

        return asyncio.run(program())

    in_loop.queues = queues
    yield in_loop
    asyncio.run(queues.close())


def test_the_next_loop_delivers_the_calls_that_one_has_left_in_flight(shop, in_loop, url):
    shop.then("UNAVAILABLE", hang := Hang())

    async def begin(channel):
        answer = await channel.unary_unary(UNARY_UNARY)(b"order", timeout=WAIT_S)
        await aio_wait_until(hang.begun.is_set)
        return answer

    async def follow(channel):
        async with channel:
            return await in_loop.queues.flush(WAIT_S)

    assert in_loop(begin, backoff=0.01) == LATER
    wait_until(lambda: [call.state for call in stored(url)] == [CallState.READY])
    assert in_loop(follow, backoff=0.01) is True
    assert len(shop.calls) >= 3  # the first loop may have begun another attempt while it ended
    wait_for_none(url)
