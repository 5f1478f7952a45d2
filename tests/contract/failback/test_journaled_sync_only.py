"""What only calls of `grpc` in a journal have: blocking forms, dropped channels, and processes."""

import gc
import os
import textwrap
from contextlib import closing

import grpc
import pytest

from fixtures.client_interceptors import interceptor
from fixtures.grpc_servers import IMPATIENT
from fixtures.journaled_clients import LATER
from fixtures.journals import ScriptedJournal, open_backend, store, stored, wait_until_quiet
from fixtures.programs import run_program
from fixtures.shop import STREAM_UNARY, UNARY_UNARY, Fail
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import only_sync
from rpcwheel import Kit
from rpcwheel.call import CallPolicy
from rpcwheel.errors import JournalUnavailable
from rpcwheel.events import FailbackGaveUp
from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.failback.stored import StoredFunction, decode
from rpcwheel.interceptors import FailbackQueues, intercept_channel
from rpcwheel.journal.backend import CallState, Route
from rpcwheel.telemetry import components


def order(channel):
    return channel.unary_unary(UNARY_UNARY)(b"order", timeout=WAIT_S)


BLOCKING = {
    "with_call": lambda channel: channel.unary_unary(UNARY_UNARY).with_call(b"ab", timeout=WAIT_S)[
        0
    ],
    "stream_unary": lambda channel: channel.stream_unary(STREAM_UNARY)(
        iter([b"a", b"b"]), timeout=WAIT_S
    ),
}


@only_sync
@pytest.mark.parametrize("form", BLOCKING)
def test_a_blocking_call_is_stored(form, shop, client, url):
    shop.then(Fail("UNAVAILABLE", read=True))
    assert BLOCKING[form](client()) == LATER
    assert b"".join(decode(stored(url)[0].body).requests) == b"ab"
    assert client.queues.flush(WAIT_S)
    assert shop.calls[1].requests == shop.calls[0].requests


@only_sync
def test_a_request_that_cannot_be_serialized_fails_with_its_own_error(client, policy, url):
    call = client(policy(retry_on="INTERNAL")).unary_unary(
        UNARY_UNARY, request_serializer=lambda message: 1 / 0
    )
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "not queued by failback: division by zero" in caught.value.__notes__[0]
    assert stored(url) == []


def test_a_delivery_passes_the_interceptors_of_the_channel_below(shop, policy):
    def add_a_token(continuation, details, request):
        metadata = [*(details.metadata or ()), ("token", "fresh")]
        return continuation(details._replace(metadata=metadata), request)

    shop.then("UNAVAILABLE")
    bare = grpc.insecure_channel(shop.target, options=IMPATIENT)
    own = grpc.intercept_channel(bare, interceptor(add_a_token))
    with FailbackQueues() as queues:
        channel = intercept_channel(own, CallPolicy(failback=policy()), queues=queues)
        order(channel)
        assert queues.flush(WAIT_S)
        channel.close()
    assert [seen.metadata["token"] for seen in shop.calls] == ["fresh"] * 2


# --- Channels ---


@pytest.mark.parametrize("make", ["kit", "intercepted"])
def test_calls_stay_in_the_journal_if_the_channel_is_dropped(make, shop, policy, url):
    shop.then("UNAVAILABLE")
    kit = Kit(failback=policy())
    channel = kit.channel(shop.target)
    if make == "intercepted":
        own = grpc.intercept_channel(grpc.insecure_channel(shop.target, options=IMPATIENT))
        channel = kit.intercept_channel(own)
        del own
    order(channel)
    del channel
    gc.collect()
    assert kit.flush(WAIT_S)
    assert len(shop.calls) == 1
    assert len(stored(url)) == 1
    kit.close(0)


def test_calls_stay_in_the_journal_if_the_channel_below_is_closed(
    shop, policy, url, rpcwheel_events, timer, manual_time
):
    store(url, target=shop.target, delay_s=1.9)
    with FailbackQueues(timer) as queues, grpc.insecure_channel(shop.target) as bare:
        channel = intercept_channel(bare, CallPolicy(failback=policy()), queues=queues)
        manual_time(1, queues)
        bare.close()
        timer.advance(1)
        wait_until_quiet(queues)
        assert queues.stats()["*"].attempts == 1
        channel.close()
    assert [call.state for call in stored(url)] == [CallState.READY]
    assert rpcwheel_events.of(FailbackGaveUp) == []


def test_queues_that_are_dropped_without_close_attempt_what_they_have_and_close_the_journal(
    shop, policy, url, timer, manual_time
):
    shop.then("UNAVAILABLE")
    store(url, target=shop.target, delay_s=1.9)
    kept = [FailbackQueues(timer)]
    channel = grpc.insecure_channel(shop.target)
    kept.append(intercept_channel(channel, CallPolicy(failback=policy()), queues=kept[0]))
    manual_time(1, kept[0])
    assert kept[0].stats()["*"].pending == 1
    kept.clear()
    timer.advance(1)
    wait_until(lambda: not components.of_kind("journal") or gc.collect() < 0)
    wait_until(lambda: [call.state for call in stored(url)] == [CallState.READY])
    assert [call.attempts for call in stored(url)] == [2]
    channel.close()


def test_queues_that_are_dropped_without_close_give_back_what_they_may_have_taken(
    shop, policy, url, timer, manual_time, script
):
    def lose_the_answer():
        worker = ScriptedJournal.requests[-1][1]
        with closing(open_backend(url)) as backend:
            backend.take(worker, 60.0, [Route("*", shop.target, 1)], 0.0)
        raise JournalUnavailable("the connection was lost")

    store(url, target=shop.target)
    script["take"] = lose_the_answer
    kept = [FailbackQueues(timer)]
    channel = grpc.insecure_channel(shop.target)
    kept.append(intercept_channel(channel, CallPolicy(failback=policy()), queues=kept[0]))
    wait_until(lambda: stored(url, CallState.TAKEN))
    kept.clear()
    wait_until(lambda: stored(url, CallState.READY) or gc.collect() < 0)
    channel.close()


# --- Processes ---

CLIENT = """
    import sys, time
    import grpc
    from rpcwheel import FailbackPolicy, Kit

    url, target = sys.argv[1:]
    policy = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0, default=b"later", journal=url)
    kit = Kit(failback=policy)
    call = kit.channel(target).unary_unary("/test.Shop/UnaryUnary")
    assert call(b"order", timeout=30) == b"later"
"""


def run(url, target, more):
    """Run a client whose call fails, and then more; returns its output and its errors."""
    return run_program(textwrap.dedent(CLIENT) + textwrap.dedent(more), url, target)


def test_a_process_that_exits_gives_its_calls_back_and_reports_none_as_lost(shop, url):
    shop.then("UNAVAILABLE")
    store(url, count=5, target=shop.target, delay_s=60.0)
    out, log = run(
        url,
        shop.target,
        """
        from rpcwheel.timer import ManualTimer
        timer = ManualTimer()
        kit = Kit(failback=policy, timer=timer)
        channel = kit.channel(target)
        while not kit.stats()["*"].pending:
            timer.advance(1)  # takes as many as the pacing allows, before they are due
        """,
    )
    assert out == ""
    assert "not delivered" not in log
    assert [call.state for call in stored(url)] == [CallState.READY] * 6


def test_a_forked_child_has_its_own_queue_and_does_not_release_the_calls_of_its_parent(
    url, timer, manual_time
):
    calls = []

    def function(number: int):
        calls.append(number)
        if len(calls) == 1:
            raise ConnectionError

    policy = FailbackPolicy(retry_on=ConnectionError, journal=url, backoff=0.01, name="fork")
    with FailbackInvoker(policy, timer=timer) as failback:
        failback.register(function)
        body = StoredFunction(b'{"number": 1}').encoded()
        store(url, queue="fork", method="fork", delay_s=1.9, body=body)
        failback.start()
        manual_time(1)
        assert failback.stats().pending == 1
        child = os.fork()
        if child == 0:
            good = False
            try:
                assert failback.stats().pending == 0
                failback.invoke(function, 5)
                manual_time(2)
                assert (failback.close(), calls) == ([], [5, 5])
                good = True
            finally:
                os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [(call.id, call.state) for call in stored(url)] == [(1, CallState.TAKEN)]
        manual_time(2)
        assert (stored(url), calls) == ([], [1, 1])
