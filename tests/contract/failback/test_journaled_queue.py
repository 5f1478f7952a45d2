"""The queue of calls in a journal: when it attempts calls, leases, `flush` and `close`."""

import gc
import threading
import time
import tracemalloc
from contextlib import closing

import pytest
from tenacity import wait_fixed

from fixtures.journaled_clients import LATER, is_closed
from fixtures.journals import (
    ScriptedJournal,
    dead,
    open_backend,
    store,
    stored,
    wait_for_none,
    wait_until_quiet,
)
from fixtures.shop import Hang, Shop
from fixtures.timers import FullTimer
from fixtures.waiting import WAIT_S, Gate, in_thread, wait_until
from fixtures.worlds import only_sync
from rpcwheel.call import MethodPolicy
from rpcwheel.call.metadata import RETRY_KEY
from rpcwheel.errors import ConfigurationError, JournalUnavailable, TimerStopped
from rpcwheel.events import FailbackLeaseLost, JournalFailed
from rpcwheel.failback import FailbackInvoker
from rpcwheel.failback.stored import StoredFunction
from rpcwheel.journal.backend import CallState, Route
from rpcwheel.telemetry import components
from rpcwheel.timer import ManualTimer, WheelTimer

pytestmark = only_sync


@pytest.fixture
def begin(client, policy, new_queues, timer, manual_time):
    """Makes a client whose time is moved by hand, `begin.channel`, and returns its queues."""

    def begin(**settings):
        queues = new_queues(timer)
        begin.channel = client(policy(**settings), queues=queues)
        return queues

    return begin


# --- When calls are attempted ---


def test_a_long_queue_of_one_order_key_is_delivered_without_waits(shop, begin, url):
    store(url, count=50, target=shop.target, order_key="shop")
    begin()
    wait_for_none(url)  # without any time
    assert len(shop.calls) == 50


def test_calls_are_delivered_at_a_rate_below_one_in_two_seconds(shop, begin, url, manual_time):
    store(url, count=2, target=shop.target)
    manual_time(21, begin(rate=0.1))
    assert (len(shop.calls), stored(url)) == (2, [])


def test_a_call_is_attempted_when_it_is_due_before_the_next_look(shop, begin, push, timer):
    shop.then("UNAVAILABLE")
    begin(backoff=0.3)
    push(begin.channel)
    timer.advance(0.3)
    wait_until(lambda: len(shop.calls) == 2)


def test_the_journal_is_asked_for_calls_though_the_timer_is_full(
    shop, client, new_queues, url, monkeypatch
):
    timer = FullTimer()
    monkeypatch.setattr("fixtures.journals._timer", timer)  # the clock of `store`
    client(queues=new_queues(timer))
    for number in (1, 2):
        wait_until_quiet()
        store(url, target=shop.target)
        timer.advance(1)
        wait_until(lambda number=number: len(shop.calls) == number)


def test_only_max_age_limits_the_attempts_by_default(shop, client, policy, push, url):
    shop.then(*["UNAVAILABLE"] * 8)
    push(client(policy(backoff=0.001)))
    wait_for_none(url)
    assert len(shop.calls) == 9


def test_a_call_that_has_reached_its_max_age_is_a_dead_letter(shop, begin, push, url, manual_time):
    shop.then(*["UNAVAILABLE"] * 100)
    queues = begin(backoff=wait_fixed(4), max_age=10.0)
    push(begin.channel)
    manual_time(12, queues)
    (call,) = dead(url)
    assert call.reason == "its max_age has passed"
    assert [seen.metadata.get(RETRY_KEY) for seen in shop.calls] == [None, "1", "2", "3"]


# --- Leases ---


class Timeouts:
    """A timer whose timeouts run in `advance` of a manual timer. Its clock is that of the process.

    So the clock can go on without them, as on a machine that was suspended.
    """

    def __init__(self, timer):
        self.new_timeout = timer.new_timeout


@pytest.fixture
def pass_time(monkeypatch):
    """Lets time pass on the clocks of leases and of the journal, but in no timeout.

    On Linux, the monotonic clock stands still, as on a machine that is suspended.
    """
    name = "clock_gettime_ns" if hasattr(time, "CLOCK_BOOTTIME") else "monotonic_ns"
    clock_ns, time_s, passed_s = getattr(time, name), time.time, []
    monkeypatch.setattr(time, name, lambda *clock: clock_ns(*clock) + sum(passed_s) * 10**9)
    monkeypatch.setattr(time, "time", lambda: time_s() + sum(passed_s))
    return passed_s.append


@pytest.fixture
def begin_late(pass_time, client, policy, new_queues, timer):
    """Makes a client whose timeouts run in `timer.advance`, though the clock may be ahead."""

    def begin(**settings):
        queues = new_queues(Timeouts(timer))
        client(policy(**settings), queues=queues)
        return queues

    return begin


@pytest.fixture
def take_over(shop, url, closed_later):
    """Lets another process take the calls whose leases have ended; returns its journal."""

    def take_over(count, route=None):
        journal = closed_later(open_backend(url))
        routes = [route or Route("*", shop.target, 100)]
        assert len(journal.take("other", 60.0, routes, 0.0)) == count
        return journal

    return take_over


def test_a_queue_whose_lease_has_ended_starts_no_attempt(
    shop, begin_late, take_over, url, pass_time, timer, events
):
    store(url, target=shop.target, delay_s=0.9)
    queues = begin_late()
    wait_until(lambda: queues.stats()["*"].pending == 1)
    wait_until_quiet()
    pass_time(16)
    take_over(1)
    timer.advance(0.9)  # the call is due, and the next look is not
    wait_until_quiet(queues)
    stats = queues.stats()["*"]
    assert (shop.calls, stats.attempts, stats.pending) == ([], 0, 0)
    assert events.of(FailbackLeaseLost) == []  # no attempt was running


def test_a_call_that_waited_for_a_thread_while_its_lease_ended_is_not_attempted(
    world, policy, take_over, url, pass_time, timer
):
    calls, go_on = [], threading.Event()

    def push():
        calls.append(1)
        go_on.wait(WAIT_S)

    store(url, count=5, queue="push", method="push", body=StoredFunction(b"{}").encoded())
    with FailbackInvoker(policy(name="push", max_in_flight=5), timer=Timeouts(timer)) as failback:
        failback.register(push)
        failback.start()
        wait_until(lambda: len(calls) == 4)  # as many as there are threads
        pass_time(16)
        take_over(5, Route("push", "", 5))
        go_on.set()
        wait_until_quiet()
        assert failback.stats().pending == 0
    assert len(calls) == 4


def test_a_late_result_is_ignored(shop, begin_late, take_over, url, pass_time, timer, events):
    shop.then(hang := Hang())
    store(url, target=shop.target)
    queues = begin_late()
    assert hang.begun.wait(WAIT_S)
    pass_time(16)
    other = take_over(1)
    timer.advance(1)
    wait_until(lambda: events.of(FailbackLeaseLost))
    (lost,) = events.of(FailbackLeaseLost)
    assert (lost.name, lost.journal, lost.count) == ("*", url, 1)
    shop.calls[0].ended.set()
    wait_until(lambda: queues.stats()["*"].redelivered == 1)
    wait_until_quiet()
    assert [call.state for call in stored(url)] == [CallState.TAKEN]
    assert other.renew("other", 60.0)
    assert len(events.of(FailbackLeaseLost)) == 1


def test_calls_of_a_lost_answer_are_taken_by_another_name_after_a_lease(
    shop, begin, url, script, manual_time
):
    def lose_the_answer():
        _, worker, *others = ScriptedJournal.requests[-1]
        with closing(open_backend(url)) as backend:
            taken = backend.take(worker, *others)
        if taken:
            del script["take"]
            raise JournalUnavailable("the answer was lost")

    store(url, target=shop.target)
    script["take"] = lose_the_answer
    queues = begin()
    wait_until(lambda: stored(url, CallState.TAKEN))
    manual_time(16, queues)
    assert (len(shop.calls), stored(url)) == (1, [])


def test_a_lease_is_renewed_though_no_call_can_be_taken(
    shop, begin, take_over, url, script, manual_time
):
    shop.then(hang := Hang())
    store(url, target=shop.target)
    begin()
    assert hang.begun.wait(WAIT_S)
    script["take"] = JournalUnavailable("locked")
    manual_time(16)
    take_over(0)
    shop.calls[0].ended.set()


def test_close_keeps_the_lease_of_an_attempt_that_runs_and_gives_the_other_calls_back(
    world, shop, begin, take_over, url, events, timer
):
    shop.then(hang := Hang())
    store(url, target=shop.target)
    queues = begin(journal=f"{url}?lease=1", max_pending=1)
    assert hang.begun.wait(WAIT_S)
    store(url, target=shop.target, delay_s=1.9)
    timer.advance(0.25)  # the next look takes the second call
    wait_until(lambda: queues.stats()["*"].pending == 2)
    closing = in_thread(queues.close, WAIT_S)
    wait_until(lambda: is_closed(world, begin.channel, shop))
    wait_until(lambda: stored(url, CallState.READY))
    timer.advance(4)
    take_over(1)
    assert not closing.done()
    shop.calls[0].ended.set()
    assert closing.result(WAIT_S) == []
    assert [call.state for call in stored(url)] == [CallState.TAKEN]  # by the other process
    assert events.of(FailbackLeaseLost) == []


@pytest.mark.parametrize(("name", "left_s"), [("renew", 1), ("take", 15)])
def test_a_request_that_ends_after_the_lease_does_not_prolong_it(
    name, left_s, shop, begin_late, url, pass_time, timer, script, events
):
    shop.then(hang := Hang())
    store(url, target=shop.target)
    begin_late()
    assert hang.begun.wait(WAIT_S)
    script[name] = lambda: pass_time(left_s + 1)
    pass_time(15 - left_s)
    timer.advance(1)
    wait_until(lambda: events.of(FailbackLeaseLost))
    assert [event.count for event in events.of(FailbackLeaseLost)] == [1]
    shop.kill()


def test_a_result_that_is_not_stored_yet_when_its_lease_ends_is_reported(
    shop, begin_late, take_over, url, pass_time, timer, script, events
):
    store(url, target=shop.target)
    looked = threading.Event()
    script["report"] = gate = Gate()
    shop.then(hang := Hang())
    begin_late()
    assert hang.begun.wait(WAIT_S)
    wait_until_quiet()  # a look that ran beside the report would wait for it, and none could follow
    shop.calls[0].ended.set()
    assert gate.entered.wait(WAIT_S)
    pass_time(600)  # more than a slow count makes the next one wait
    take_over(1)
    script["depths"] = looked.set
    timer.advance(1)
    assert looked.wait(WAIT_S)
    gate.opened.set()
    wait_until_quiet()
    assert [event.count for event in events.of(FailbackLeaseLost)] == [1]


# --- Windows ---


def test_a_target_that_does_not_answer_does_not_delay_the_others(
    shop, client, policy, url, manual_time, timer, new_queues
):
    silent, queues, shared = Shop(), new_queues(timer), policy()
    silent.then(*[Hang() for _ in range(10)])
    store(url, count=300, target=shop.target)
    store(url, count=300, target=silent.target)
    client(shared, queues=queues, target=silent.target)
    wait_until(lambda: len(silent.calls) == 4)
    client(shared, queues=queues)
    wait_until(lambda: len(shop.calls) == 300)  # without any time
    assert len(silent.calls) == 4
    silent.kill()


def test_policies_with_a_journal_share_a_queue_if_they_are_equal_and_else_have_other_names(
    shop, client, policy
):
    client()
    client(queues=client.queues)
    assert len(client.queues.stats()) == 1
    methods = {"/a/*": MethodPolicy(failback=policy(name="same", backoff=1.0))}
    with pytest.raises(ConfigurationError, match="have the name 'same'"):
        client(policy(name="same"), methods=methods)


# --- flush and close ---


def test_flush_does_not_wait_for_calls_that_this_process_cannot_deliver(shop, client, url):
    store(url, target="elsewhere:1")
    client()
    assert client.queues.flush(WAIT_S)
    assert len(stored(url)) == 1


def test_flush_waits_for_calls_that_another_process_attempts(shop, push, client, policy, url):
    shop.then("UNAVAILABLE", hang := Hang())
    other = client(policy(backoff=0.01))
    push(other)
    assert hang.begun.wait(WAIT_S)
    client()
    assert client.queues.flush(0.1) is False
    shop.kill()


def test_flush_returns_false_while_the_journal_fails(shop, push, client, url, script):
    shop.then("UNAVAILABLE")
    push(client())
    for name in ("take", "retry", "select"):
        script[name] = JournalUnavailable("locked")
    assert client.queues.flush(0.1) is False
    assert client.queues.entries() == {"*": []}
    del script["take"], script["retry"]
    assert client.queues.flush(0.1) is False
    script.clear()
    assert client.queues.flush(WAIT_S)


def test_entries_do_not_read_the_requests_of_all_calls_at_once(world, policy, url):
    body, megabyte = StoredFunction(bytes(1 << 20)).encoded(), 1 << 20
    store(url, count=40, queue="*", body=body)
    with FailbackInvoker(policy(name="*")) as invoker:
        tracemalloc.start()
        try:
            assert len(invoker.entries()) == 40
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 25 * megabyte


def test_close_does_not_connect_a_journal_that_gave_no_call(shop, client, policy, tmp_path, events):
    invoker = FailbackInvoker(policy(journal=f"sqlite://{tmp_path}/missing/calls.db"))
    assert invoker.close() == []
    assert events.of(JournalFailed) == []


def test_a_closed_queue_that_is_dropped_leaves_the_journal_open_for_others(world, policy):
    with FailbackInvoker(policy(name="other")):
        FailbackInvoker(policy()).close()
        gc.collect()
        wait_until_quiet()
        assert len(components.of_kind("journal")) == 1


def test_a_queue_that_takes_calls_while_it_is_closed_gives_them_back(world, policy, url):
    store(url, target="orders")
    closed = []

    def is_open():  # asked before calls are taken
        closed.append(invoker.close(0))
        return True

    with FailbackInvoker(policy(name="other")):  # keeps the journal open
        invoker = FailbackInvoker(policy(name="*"))
        invoker.add_route("orders", lambda *_: (print, (), {}), is_open)
        wait_until_quiet()
        assert closed[0] == []
        assert [call.state for call in stored(url)] == [CallState.READY]


def test_close_with_a_journal_that_fails_does_not_raise(shop, client, policy, url, script):
    store(url, target=shop.target, delay_s=1.9)
    client()
    wait_until(lambda: stored(url, CallState.TAKEN))
    script["report"] = script["release"] = JournalUnavailable("locked")
    assert client.queues.close() == []
    assert len(stored(url, CallState.TAKEN)) == 1  # until the lease ends


def test_close_gives_the_calls_back_and_closes_the_journal_in_one_wait(
    shop, begin, url, script, manual_time
):
    """The wait may take the `timeout` of the URL."""
    store(url, target=shop.target, delay_s=1.9)
    queues = begin(journal=f"{url}?timeout=60")
    manual_time(1, queues)
    assert stored(url, CallState.TAKEN)
    closed = []
    script["release"] = lambda: closed.append(
        wait_until(lambda: not components.of_kind("journal"))  # whose close has begun
    )
    queues.close()
    assert closed == [True]


def test_an_invoker_that_cannot_be_made_leaves_no_journal_open(world, policy):
    before = components.of_kind("journal")
    with pytest.raises(TypeError):
        FailbackInvoker(policy(), timer=5)
    assert components.of_kind("journal") == before


def test_calls_are_stored_while_the_timer_is_stopped(shop, push, client, new_queues, url):
    timer = ManualTimer()
    channel = client(queues=new_queues(timer))
    shop.then("UNAVAILABLE")
    timer.stop()
    assert push(channel) == LATER
    with pytest.raises(TimerStopped):
        timer.new_timeout(print, 1)
    assert [call.state for call in stored(url)] == [CallState.READY]


def test_flush_does_not_wait_for_an_attempt_that_a_stopped_timer_will_not_begin(
    shop, push, client, new_queues, url
):
    timer = ManualTimer()
    channel = client(queues=new_queues(timer))
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    push(channel)
    timer.stop()
    assert client.queues.flush() is False  # the second attempt has failed
    assert [call.attempts for call in stored(url)] == [2]
    assert client.queues.flush() is True
    assert stored(url) == []


def test_flush_does_not_wait_for_a_call_that_is_due_soon_if_the_timer_was_stopped(
    shop, push, client, policy, new_queues
):
    timer = WheelTimer()  # calls are taken 2 s before they are due
    channel = client(policy(backoff=1.0), queues=new_queues(timer))
    shop.then(*["UNAVAILABLE"] * 100)
    push(channel)
    timer.stop()
    assert client.queues.flush() is False


def test_flush_attempts_all_calls_although_a_stopped_timer_cannot_pace_them(
    shop, push, client, policy, new_queues, url
):
    timer = ManualTimer()
    channel = client(policy(rate=1), queues=new_queues(timer))
    shop.then("UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE")
    for _ in range(3):
        push(channel)
    timer.stop()
    assert client.queues.flush(WAIT_S)
    assert stored(url) == []


def test_flush_with_a_stopped_timer_waits_for_the_result_of_a_call_that_has_just_ended(
    shop, push, client, new_queues, script
):
    timer, may_store, has_looked = ManualTimer(), threading.Event(), threading.Event()
    channel = client(queues=new_queues(timer))
    shop.then("UNAVAILABLE", hang := Hang())
    push(channel)

    def end_the_call():
        script.pop("take")
        shop.calls[1].ended.set()
        assert wait_until(lambda: client.queues.stats()["*"].redelivered == 1)
        script["select"] = has_looked.set

    script["report"] = lambda: may_store.wait(WAIT_S)
    flushes = [in_thread(client.queues.flush, WAIT_S)]
    assert hang.begun.wait(WAIT_S)
    timer.stop()
    script["take"] = end_the_call
    flushes.append(in_thread(client.queues.flush, WAIT_S))
    assert has_looked.wait(WAIT_S)
    may_store.set()
    assert [flush.result() for flush in flushes] == [True, True]


@pytest.mark.parametrize("request_name", ["take", "select"])
def test_flush_ends_if_the_timer_was_stopped_and_the_journal_fails(
    request_name, shop, push, client, new_queues, script
):
    timer = ManualTimer()
    channel = client(queues=new_queues(timer))
    shop.then("UNAVAILABLE")
    push(channel)
    timer.stop()
    script[request_name] = JournalUnavailable("locked")
    assert client.queues.flush() is False


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(("lease", "interval_s"), [(2, 0.5), (15, 1.0)])
def test_the_journal_is_asked_several_times_in_a_lease_by_the_same_worker(
    lease, interval_s, begin, timer, url
):
    def workers():
        return [arguments[0] for name, *arguments in ScriptedJournal.requests if name == "take"]

    begin(journal=f"{url}?lease={lease}")
    wait_until(lambda: len(workers()) == 1)
    for number in range(3):
        timer.advance(interval_s)
        assert len(workers()) == 2 + number
    assert len(set(workers())) == 1
