"""`flush` and `close` of queues with a journal; channels and processes that end."""

import gc
import os
import signal
import subprocess
import sys
import textwrap

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.journaled_clients import LATER, push, queue_of
from fixtures.journals import store, stored, wait_for_none, wait_until_quiet
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import Kit
from rpcwheel.call import CallPolicy
from rpcwheel.errors import FailbackClosed, TimerStopped
from rpcwheel.events import FailbackGaveUp, FailbackLost, JournalFailed
from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.failback.stored import StoredFunction
from rpcwheel.interceptors import FailbackQueues, intercept_channel
from rpcwheel.journal import journal as front
from rpcwheel.journal.backend import CallState
from rpcwheel.timer import ManualTimer

# --- flush ---


def test_flush_waits_until_all_calls_are_delivered(shop, client, url):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    channel = client()
    push(channel)
    push(channel)
    assert client.queues.flush(WAIT_S)
    assert stored(url) == []
    assert len(shop.calls) == 4


def test_flush_returns_false_in_time_if_the_server_stays_down(shop, client, policy, url):
    shop.then(*["UNAVAILABLE"] * 3)
    push(client())
    assert client.queues.flush(0.2) is False
    assert len(stored(url)) == 1
    queue = queue_of(client.queues)
    queue.look()
    assert queue._flush_waiters == []


def test_flush_makes_the_calls_due_that_an_earlier_process_has_left(shop, client, url):
    store(url, count=30, target=shop.target, delay_s=3600)
    client()
    assert client.queues.flush(WAIT_S)
    assert len(shop.calls) == 30


def test_flush_does_not_wait_for_calls_that_this_process_cannot_deliver(shop, client, url):
    store(url, target="elsewhere:1")
    client()
    assert client.queues.flush(WAIT_S)
    assert len(stored(url)) == 1


def test_flush_waits_for_calls_that_another_process_attempts(shop, client, policy, url):
    shop.then("UNAVAILABLE", hang := Hang())
    other = client(policy(backoff=0.01))
    push(other)
    assert hang.begun.wait(WAIT_S)
    client()
    assert client.queues.flush(0.1) is False
    shop.kill()


def test_flush_returns_false_while_the_journal_fails(shop, client, url, script):
    shop.then("UNAVAILABLE")
    push(client())
    for name in ("take", "retry", "select"):
        script[name] = front.JournalUnavailable("locked")
    assert client.queues.flush(0.1) is False
    assert client.queues.entries() == {"*": []}
    del script["take"], script["retry"]
    assert client.queues.flush(0.1) is False
    script.clear()
    assert client.queues.flush(WAIT_S)


# --- close ---


def test_close_gives_the_calls_back_at_once(shop, client, policy, url):
    store(url, count=5, target=shop.target, delay_s=1.9)
    client()
    queue = queue_of(client.queues)
    wait_until(lambda: len(queue._calls) == 5)
    assert len(stored(url, CallState.TAKEN)) == 5
    assert client.queues.close() == []
    assert len(stored(url, CallState.READY)) == 5
    client()
    assert client.queues.flush(WAIT_S)  # without waiting for the lease
    assert len(shop.calls) == 5


def test_close_waits_for_running_attempts(shop, client, policy, url):
    gate = Hang()
    shop.then("UNAVAILABLE", gate)
    push(client(policy(backoff=0.01)))
    assert gate.begun.wait(WAIT_S)
    queues, seen, ended = client.queues, shop.calls[1], []

    def close():
        ended.append((queues.close(drain_timeout=WAIT_S), stored(url)))

    def answer():
        wait_until(lambda: queue_of(queues).closed)
        assert not ended
        seen.ended.set()

    run_threads(close, answer)
    assert ended == [([], [])]


def test_close_gives_running_attempts_back_after_the_drain_timeout(
    shop, client, policy, url, events
):
    shop.then("UNAVAILABLE", hang := Hang())
    push(client(policy(backoff=0.01)))
    assert hang.begun.wait(WAIT_S)
    assert client.queues.close(drain_timeout=0.05) == []
    assert [call.state for call in stored(url)] == [CallState.READY]
    assert events.of(FailbackLost) == []
    shop.calls[1].ended.set()


def test_close_is_idempotent_and_calls_after_it_are_refused(shop, client, url):
    channel = client()
    assert client.queues.close() == client.queues.close() == []
    shop.then("UNAVAILABLE")
    with pytest.raises(FailbackClosed, match=r"after close\(\)") as caught:
        push(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stored(url) == []
    assert push(channel) == b"order"
    assert client.queues.flush(WAIT_S)  # nothing to wait for


def test_a_queue_that_is_made_after_close_is_closed(shop, client, url):
    client()
    client.queues.close()
    channel = client(queues=client.queues)
    shop.then("UNAVAILABLE")
    with pytest.raises(FailbackClosed):
        push(channel)


def test_close_does_not_connect_a_journal_that_gave_no_call(shop, client, policy, tmp_path, events):
    invoker = FailbackInvoker(policy(journal=f"sqlite://{tmp_path}/missing/calls.db"))
    assert invoker.close() == []
    assert events.of(JournalFailed) == []


def test_a_queue_that_takes_calls_while_it_is_closed_gives_them_back(
    shop, client, policy, url, monkeypatch
):
    other = FailbackInvoker(policy(name="other"))  # keeps the journal open
    client()
    queue = queue_of(client.queues)
    wait_until_quiet(queue)
    store(url, target=shop.target, delay_s=1.9)
    monkeypatch.setattr(queue, "_keep_lease", lambda: client.queues.close(0))
    queue.look()
    assert [call.state for call in stored(url)] == [CallState.READY]
    other.close()


def test_close_with_a_journal_that_fails_does_not_raise(shop, client, policy, url, script):
    store(url, target=shop.target, delay_s=1.9)
    client()
    queue = queue_of(client.queues)
    wait_until(lambda: len(queue._calls) == 1)
    script["release"] = front.JournalUnavailable("locked")
    assert client.queues.close() == []
    assert len(stored(url, CallState.TAKEN)) == 1  # until the lease ends


def test_an_invoker_that_cannot_be_made_leaves_no_journal_open(policy):
    before = dict(front._OPEN.journals)
    with pytest.raises(TypeError):
        FailbackInvoker(policy(), timer=5)
    assert before == front._OPEN.journals


# --- Channels, timers ---


def test_calls_stay_in_the_journal_if_the_channel_is_closed_first(shop, client, policy, url):
    shop.then("UNAVAILABLE", hang := Hang(), "UNAVAILABLE")
    channel = client(policy(backoff=0.01))
    push(channel)
    assert hang.begun.wait(WAIT_S)
    push(channel)
    channel.close()  # during an attempt
    queue = queue_of(client.queues)
    wait_until(lambda: not queue._calls)
    wait_until_quiet(queue)
    assert {call.state for call in stored(url)} <= {CallState.READY}
    client.queues.close(0)


def test_calls_stay_in_the_journal_if_the_channel_below_is_closed(
    shop, policy, url, events, timer, manual_time
):
    store(url, target=shop.target, delay_s=1.9)
    with FailbackQueues(timer) as queues:
        bare = grpc.insecure_channel(shop.target)
        channel = intercept_channel(bare, CallPolicy(failback=policy()), queues=queues)
        queue = queue_of(queues)
        manual_time(1, queue)
        bare.close()
        timer.advance(1)
        wait_until(lambda: queue.stats().attempts == 1)
        wait_until_quiet(queue)
        channel.close()
    assert [call.state for call in stored(url)] == [CallState.READY]
    assert events.of(FailbackGaveUp) == []


def test_a_program_may_keep_only_a_stub(shop, policy, url):
    shop.then("UNAVAILABLE")
    with FailbackQueues() as queues:
        bare = grpc.insecure_channel(shop.target, options=IMPATIENT)
        call = intercept_channel(
            bare, CallPolicy(failback=policy(backoff=0.01)), queues=queues
        ).unary_unary(UNARY_UNARY)
        del bare
        gc.collect()
        assert call(b"order", timeout=WAIT_S) == LATER
        wait_for_none(url)
    assert len(shop.calls) == 2


@pytest.mark.parametrize("make", ["kit", "intercepted"])
def test_calls_stay_in_the_journal_if_the_channel_is_dropped(make, shop, policy, url):
    shop.then("UNAVAILABLE")
    kit = Kit(failback=policy())
    channel = kit.channel(shop.target)
    if make == "intercepted":
        own = grpc.intercept_channel(grpc.insecure_channel(shop.target, options=IMPATIENT))
        channel = kit.intercept_channel(own)
        del own
    push(channel)
    (queue,) = (invoker._queue for invoker in kit._queues._by_name.values())
    assert queue.has_route(shop.target)
    del channel
    gc.collect()
    assert not queue.has_route(shop.target)
    assert kit.flush(WAIT_S)
    assert len(stored(url)) == 1
    kit.close(0)


def test_queues_that_are_dropped_without_close_attempt_what_they_have_and_close_the_journal(
    shop, policy, url, timer, manual_time
):
    shop.then("UNAVAILABLE")
    store(url, target=shop.target, delay_s=1.9)
    kept = [FailbackQueues(timer)]
    channel = grpc.insecure_channel(shop.target)
    kept.append(intercept_channel(channel, CallPolicy(failback=policy()), queues=kept[0]))
    journal = queue_of(kept[0]).journal
    manual_time(1, queue_of(kept[0]))
    assert queue_of(kept[0])._calls
    kept.clear()
    timer.advance(1)
    wait_until(lambda: journal._closed or gc.collect() < 0)
    assert [(call.state, call.attempts) for call in stored(url)] == [(CallState.READY, 2)]
    channel.close()


def test_calls_are_stored_while_the_timer_is_stopped(shop, client, new_queues, url):
    timer = ManualTimer()
    channel = client(queues=new_queues(timer))
    shop.then("UNAVAILABLE")
    timer.stop()
    assert push(channel) == LATER
    with pytest.raises(TimerStopped):
        timer.new_timeout(print, 1)
    assert [call.state for call in stored(url)] == [CallState.READY]


# --- Processes ---

CLIENT = """
    import os, signal, sys, threading
    import grpc
    from rpcwheel import FailbackPolicy, Kit

    url, target = sys.argv[1:]
    policy = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0, default=b"later", journal=url)
    kit = Kit(failback=policy)
    call = kit.channel(target).unary_unary("/test.Shop/UnaryUnary")
    assert call(b"order", timeout=30) == b"later"
"""


def run(url, target, more):
    """Run a client whose call fails, and then more."""
    program = textwrap.dedent(CLIENT) + textwrap.dedent(more)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, url, target],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * WAIT_S,
    )


def test_a_call_that_was_answered_survives_sigkill(shop, client, url):
    shop.then("UNAVAILABLE")
    ended = run(url, shop.target, "os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode == -signal.SIGKILL
    client()
    assert client.queues.flush(WAIT_S)
    assert [seen.requests for seen in shop.calls] == [[b"order"]] * 2
    assert len({seen.metadata["idempotency-key"] for seen in shop.calls}) == 1


def test_a_process_that_exits_gives_its_calls_back_and_reports_none_as_lost(shop, client, url):
    shop.then("UNAVAILABLE")
    store(url, count=5, target=shop.target, delay_s=60.0)
    ended = run(
        url,
        shop.target,
        """
        from rpcwheel.timer import ManualTimer
        timer = ManualTimer()
        kit = Kit(failback=policy, timer=timer)
        channel = kit.channel(target)
        (invoker,) = kit._queues._by_name.values()
        while not invoker._queue._calls:
            timer.advance(1)  # takes as many as the pacing allows, before they are due
        """,
    )
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "not delivered" not in ended.stderr
    assert [call.state for call in stored(url)] == [CallState.READY] * 6


def test_an_attempt_that_hangs_does_not_delay_the_exit(shop, url):
    shop.then("UNAVAILABLE", Hang())
    ended = run(
        url,
        shop.target,
        """
        kit.flush(0)
        (invoker,) = kit._queues._by_name.values()
        while not invoker.stats().attempts:
            pass
        """,
    )
    assert ended.returncode == 0, ended.stderr
    assert [call.state for call in stored(url)] == [CallState.READY]


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
        manual_time(1, failback._queue)
        assert len(failback._queue._calls) == 1
        worker = failback._queue.worker
        child = os.fork()
        if child == 0:
            good = failback._queue.worker != worker and failback.stats().pending == 0
            failback.invoke(function, 5)
            while len(calls) < 2:
                timer.advance(1)
            good = good and failback.close() == [] and calls == [5, 5]
            os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert failback._queue.journal.backend.renew(worker, 15.0)
        assert [(call.id, call.state) for call in stored(url)] == [(1, CallState.TAKEN)]
