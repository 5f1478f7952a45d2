"""The queue of calls in a journal: when it attempts calls, leases, `flush` and `close`."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tenacity import wait_fixed

from fixtures.journaled_clients import LATER, only_sync, queue_of
from fixtures.journals import (
    dead,
    paused,
    store,
    stored,
    wait_for_dead,
    wait_for_none,
    wait_until_quiet,
)
from fixtures.shop import Hang, Shop
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.call import MethodPolicy
from rpcwheel.call.retry import RETRY_KEY
from rpcwheel.errors import ConfigurationError, TimerStopped
from rpcwheel.events import FailbackLeaseLost, JournalFailed
from rpcwheel.failback import FailbackInvoker
from rpcwheel.failback.journaled import CallRoute, JournaledQueue
from rpcwheel.failback.queued_call import QueuedCallState
from rpcwheel.failback.stored import StoredFunction
from rpcwheel.journal import journal as front
from rpcwheel.journal.backend import CallState, NewCall
from rpcwheel.timer import ManualTimer

pytestmark = only_sync


@pytest.fixture
def begin(client, policy, new_queues, timer, manual_time):
    """Makes a client whose time is moved by hand, `begin.channel`, and returns its queue."""

    def begin(**settings):
        queues = new_queues(timer)
        begin.channel = client(policy(**settings), queues=queues)
        return queue_of(queues)

    return begin


# --- When calls are attempted ---


def test_a_long_queue_of_one_order_key_is_delivered_without_waits(shop, begin, url):
    store(url, count=50, target=shop.target, order_key="shop")
    queue = begin()
    wait_until(lambda: len(shop.calls) == 50)  # without any time
    wait_until_quiet(queue)
    assert stored(url) == []


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


def test_a_stop_object_limits_the_attempts(shop, client, policy, push, url):
    shop.then(*["UNAVAILABLE"] * 2)
    push(client(policy(backoff=0.01, stop=lambda state: state.attempt_number >= 2)))
    assert wait_for_dead(url)[0].attempts == 2


def test_only_max_age_limits_the_attempts_by_default(shop, client, policy, push, url):
    shop.then(*["UNAVAILABLE"] * 8)
    push(client(policy(backoff=0.001)))
    wait_for_none(url)
    assert len(shop.calls) == 9


def test_a_call_that_has_reached_its_max_age_is_a_dead_letter(shop, begin, push, url, manual_time):
    shop.then(*["UNAVAILABLE"] * 100)
    queue = begin(backoff=wait_fixed(4), max_age=10.0)
    push(begin.channel)
    manual_time(12, queue)
    (call,) = dead(url)
    assert call.reason == "its max_age has passed"
    assert [seen.metadata.get(RETRY_KEY) for seen in shop.calls] == [None, "1", "2", "3"]


# --- Leases ---


def test_a_queue_whose_lease_has_ended_starts_no_attempt(
    shop, begin, url, manual_time, timer, events
):
    store(url, target=shop.target, delay_s=1.5)
    queue = begin()
    manual_time(1, queue)
    with paused(queue):  # for as long as its lease
        queue._lease_ends_ns = 1
        timer.advance(1)
        assert [call.state for call in queue._calls] == [QueuedCallState.WAITING]
    manual_time(16, queue)
    assert [seen.metadata[RETRY_KEY] for seen in shop.calls] == ["1"]
    assert stored(url) == []
    assert events.of(FailbackLeaseLost) == []  # no attempt was running


def test_a_call_that_waited_for_a_thread_while_its_lease_ended_is_not_attempted(
    shop, begin, url, manual_time, timer, monkeypatch
):
    begin_attempt, calls = JournaledQueue.begin_attempt, []

    def pause(queue, call):
        if not calls:  # the process is paused for as long as its lease
            calls.append(call)
            queue._lease_ends_ns = 1
        return begin_attempt(queue, call)

    monkeypatch.setattr(JournaledQueue, "begin_attempt", pause)
    timer.advance(1)
    store(url, target=shop.target)
    queue = begin()
    wait_until(lambda: calls)
    wait_until_quiet(queue)
    assert shop.calls == []
    manual_time(16, queue)
    assert [seen.metadata[RETRY_KEY] for seen in shop.calls] == ["1"]


def test_a_late_result_is_ignored(shop, begin, url, events, timer):
    shop.then(hang := Hang())
    store(url, target=shop.target)
    slow = begin()
    assert hang.begun.wait(WAIT_S)
    with paused(slow):  # it does not renew its lease
        timer.advance(16)
        begin()
        wait_for_none(url)
    timer.advance(1)
    (lost,) = events.of(FailbackLeaseLost)
    assert (lost.name, lost.journal, lost.count) == ("*", url, 1)
    shop.kill()  # ends the first attempt
    wait_until(lambda: not slow._calls)
    wait_until_quiet(slow)
    assert stored(url) == []
    assert len(events.of(FailbackLeaseLost)) == 1


def test_a_lease_is_renewed_while_an_attempt_runs(shop, begin, url, events, timer):
    shop.then(hang := Hang())
    store(url, target=shop.target)
    queue = begin(journal=f"{url}?lease=1")
    assert hang.begun.wait(WAIT_S)
    for _ in range(40):
        timer.advance(0.1)
        wait_until(lambda: not queue._load_requested and not queue._loading.locked())
    assert queue.journal.backend.renew(queue.worker, 1.0)
    assert events.of(FailbackLeaseLost) == []
    shop.kill()


# --- Windows ---


def test_while_the_server_is_down_ten_calls_per_second_are_attempted(shop, begin, url, manual_time):
    store(url, count=200, target=shop.target)
    shop.then(*["UNAVAILABLE"] * 500)
    queue = begin(backoff=0.1)
    wait_until_quiet(queue)
    for second in range(1, 6):
        assert len(shop.calls) <= 10 * second
        manual_time(1, queue)
    assert len(shop.calls) >= 50


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
        script[name] = front.JournalUnavailable("locked")
    assert client.queues.flush(0.1) is False
    assert client.queues.entries() == {"*": []}
    del script["take"], script["retry"]
    assert client.queues.flush(0.1) is False
    script.clear()
    assert client.queues.flush(WAIT_S)


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


def test_an_invoker_that_cannot_be_made_leaves_no_journal_open(world, policy):
    before = dict(front._OPEN.journals)
    with pytest.raises(TypeError):
        FailbackInvoker(policy(), timer=5)
    assert before == front._OPEN.journals


def test_calls_are_stored_while_the_timer_is_stopped(shop, push, client, new_queues, url):
    timer = ManualTimer()
    channel = client(queues=new_queues(timer))
    shop.then("UNAVAILABLE")
    timer.stop()
    assert push(channel) == LATER
    with pytest.raises(TimerStopped):
        timer.new_timeout(print, 1)
    assert [call.state for call in stored(url)] == [CallState.READY]


# --- How long a lease is ---


@pytest.mark.parametrize(("lease", "interval_s"), [(2, 0.5), (15, 1.0)])
def test_the_journal_is_asked_several_times_in_a_lease(
    lease, interval_s, timer, world, policy, url, monkeypatch
):
    with FailbackInvoker(policy(journal=f"{url}?lease={lease}"), timer=timer) as invoker:
        looks = []
        backend = invoker._queue.journal.backend
        monkeypatch.setattr(backend, "take", lambda *given: looks.append(given) or [])
        invoker.add_route("orders:443", lambda *_: None, lambda: True)
        wait_until(lambda: len(looks) == 1)
        for number in range(3):
            timer.advance(interval_s)
            wait_until(lambda number=number: len(looks) == 2 + number)


@pytest.fixture
def invoker(world, policy):
    invoker = FailbackInvoker(policy())
    yield invoker
    invoker.close(0)


def begin_attempt(queue):
    """Take a call from the journal, and begin its attempt."""
    begun = []
    route = CallRoute(
        "", lambda *_: (print, (), {}), lambda _, call: begun.append(call), None, lambda: True
    )
    call = NewCall(queue.name, "", "f", "k", StoredFunction(b"{}").encoded(), 0.0, 60.0)
    queue.journal.backend.append([call])
    queue.add_route(route)
    wait_until(lambda: begun)
    assert queue.begin_attempt(begun[0])
    return begun[0]


@pytest.mark.parametrize("request_name", ["renew", "take"])
def test_a_request_that_ends_after_the_lease_does_not_prolong_it(
    request_name, invoker, monkeypatch, events
):
    queue = invoker._queue
    backend = queue.journal.backend
    begin_attempt(queue)
    worker, real = queue.worker, getattr(backend, request_name)

    def ends_late(*given):
        queue._lease_ends_ns = time.monotonic_ns()
        return real(*given)

    with queue._loading:
        monkeypatch.setattr(backend, request_name, ends_late)
        left_s = 1 if request_name == "renew" else 15
        queue._lease_ends_ns = time.monotonic_ns() + left_s * 1_000_000_000
    queue.look()
    assert queue.worker != worker
    assert [event.count for event in events if isinstance(event, FailbackLeaseLost)] == [1]


def test_a_result_that_is_not_stored_yet_when_its_lease_ends_is_reported(invoker, events):
    queue = invoker._queue
    journal, worker = queue.journal, queue.worker
    call = begin_attempt(queue)
    journal.backend.release(worker)  # another process may have the call now
    with ThreadPoolExecutor() as pool:
        with journal._turn:  # no result is stored meanwhile
            queue.succeeded(call)
            with queue._loading:
                queue._lease_ends_ns = time.monotonic_ns()
            look = pool.submit(queue.look)
            wait_until(lambda: queue.worker != worker)
        look.result(WAIT_S)
    assert [event.count for event in events if isinstance(event, FailbackLeaseLost)] == [1]


def test_the_names_of_ended_leases_are_forgotten(invoker):
    queue = invoker._queue
    queue.journal._holders.add(queue.worker)
    queue._end_lease()
    assert not queue.journal._holders
