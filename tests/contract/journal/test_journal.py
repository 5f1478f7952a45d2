"""The journal of a process: group commit, results, counts, and failures of the engine."""

import dataclasses
import threading
from concurrent.futures import wait
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from fixtures.forks import holds_in_child
from fixtures.journals import ScriptedJournal, store, stored, wait_until_quiet
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, Gate, in_thread, wait_until
from rpcwheel.errors import (
    ConfigurationError,
    JournalFull,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
)
from rpcwheel.events import JournalFailed, JournalRecovered
from rpcwheel.journal.backend import (
    CallState,
    Dead,
    Delivered,
    Filter,
    NewCall,
    Postponed,
    Route,
)
from rpcwheel.journal.journal import Journal, open_journal
from rpcwheel.telemetry import components

MANY = 1_000_000
ROUTE = Route("*", "", 100)


def new_call(**fields):
    usual = {"queue": "*", "target": "", "method": "/a/B", "key": "k", "body": b""}
    return NewCall(**usual | {"delay_s": 0.0, "max_age_s": 60.0} | fields)


@pytest.fixture
def journal(url, script):
    journal = open_journal(url)
    journal.add_worker("w", "*", lambda ids: None)
    yield journal
    journal.close()


@pytest.fixture
def busy(script):
    """Keeps a journal busy with a request of another thread; what comes then is one group."""

    @contextmanager
    def busy(journal):
        script["renew"] = gate = Gate()
        renewing = in_thread(journal.renew, "busy")
        assert gate.entered.wait(WAIT_S)
        yield
        del script["renew"]
        gate.opened.set()
        renewing.result(WAIT_S)

    return busy


def taken(journal):
    return journal.take("w", [ROUTE], 0.0)


# --- Appends ---


def test_many_threads_append_at_the_same_time_and_each_gets_its_id(journal, url):
    ids = {}

    def append(thread):
        for number in range(10):
            key = f"{thread}-{number}"
            ids[key] = journal.append_now(new_call(key=key), MANY)

    run_threads(*(lambda thread=thread: append(thread) for thread in range(16)))
    assert {call.key: call.id for call in stored(url)} == ids
    assert journal.counts.of("*") == 160
    for thread in range(16):
        own = [ids[f"{thread}-{number}"] for number in range(10)]
        assert own == sorted(own)


def test_calls_that_come_during_a_transaction_share_the_next_one(journal, monkeypatch):
    entered, opened, batches = threading.Event(), threading.Event(), []
    append = journal.backend.append

    def slow(calls):
        batches.append([call.key for call in calls])
        entered.set()
        assert opened.wait(WAIT_S)
        return append(calls)

    monkeypatch.setattr(journal.backend, "append", slow)
    first = journal.append(new_call(key="first"), MANY)
    assert entered.wait(WAIT_S)
    others = [journal.append(new_call(key=f"{number}"), MANY) for number in range(1500)]
    assert not first.done()
    opened.set()
    wait([first, *others], WAIT_S)
    assert [len(batch) for batch in batches] == [1, 1000, 500]
    assert [future.result() for future in (first, *others)] == list(range(1, 1502))


def test_large_calls_that_come_at_the_same_time_are_stored_in_transactions_of_a_few_megabytes(
    journal, busy
):
    with busy(journal):
        futures = [journal.append(new_call(body=bytes(3 << 20)), MANY) for _ in range(5)]
    wait(futures, WAIT_S)
    assert [future.result() for future in futures] == [1, 2, 3, 4, 5]
    batches = [request[1] for request in ScriptedJournal.requests if request[0] == "append"]
    assert [len(calls) for calls in batches] == [2, 2, 1]


def test_a_worker_renews_its_lease_while_calls_are_appended_without_pause(journal, url, script):
    store(url)
    taken(journal)
    appending, ended = threading.Event(), threading.Event()

    def another_one_comes():
        appending.set()
        if not ended.is_set():
            journal.append(new_call(), MANY)

    script["append"] = another_one_comes
    journal.append(new_call(), MANY)
    assert appending.wait(WAIT_S)
    try:
        assert in_thread(journal.renew, "w").result(WAIT_S)
    finally:
        ended.set()


@pytest.mark.parametrize("bad", [{"attempts": 1 << 70}, {"delay_s": float("nan")}])
def test_an_append_with_a_value_that_the_engine_refuses_fails_alone(
    bad, journal, busy, url, events
):
    with busy(journal):
        futures = [
            journal.append(new_call(key="1"), MANY),
            journal.append(new_call(key="2", **bad), MANY),
            journal.append(new_call(key="3"), MANY),
        ]
    wait(futures, WAIT_S)
    assert [call.key for call in stored(url)] == ["1", "3"]
    assert [futures[0].result(), futures[2].result()] == [call.id for call in stored(url)]
    with pytest.raises(JournalRefused, match=f"{url}: (Overflow|Value)Error: "):
        futures[1].result()
    assert events == []  # the engine is well
    assert journal.counts.of("*") == 2


def test_the_limit_is_that_of_the_queue(journal, busy):
    with busy(journal):
        futures = [journal.append(new_call(queue=queue), 2) for queue in ("a", "a", "b", "a")]
    wait(futures, WAIT_S)
    assert [future.exception() is None for future in futures] == [True, True, True, False]
    with pytest.raises(JournalFull, match=r"has max_pending \(2\) calls of 'a'"):
        futures[3].result()
    assert not journal.outage.is_failing


def append_in_a_group(journal, call, limit):
    return journal.append(call, limit).result(WAIT_S)


@pytest.mark.parametrize("append", [Journal.append_now, append_in_a_group])
def test_the_limit_is_that_of_all_processes_exceeded_by_an_eighth_at_most(url, append):
    journals = [Journal(url), Journal(url)]  # as in two processes
    full, limit = 0, 80
    while full < 2:
        full = 0
        for journal in journals:
            try:
                append(journal, new_call(), limit)
            except JournalFull:
                full += 1
    for journal in journals:
        journal.close()
    assert limit <= len(stored(url)) <= limit * 9 // 8


def test_dead_letters_do_not_count_and_delivered_calls_make_room(journal, url):
    for key in "123":
        journal.append_now(new_call(key=key), MANY)
    first, second, third = taken(journal)
    journal.report("w", Delivered(first.id))
    journal.report("w", Dead(second.id, 2, "", "why"))
    journal.report("w", Postponed(third.id, 2, 0.0, ""))
    wait_until(lambda: journal.counts.of("*") == 1)
    journal.counts.count()
    assert journal.counts.of("*") == 1
    assert [(one.waiting, one.dead) for one in journal.counts.depths] == [(1, 1)]


@pytest.mark.parametrize(
    ("error", "raised", "failing"),
    [
        (JournalUnavailable("gone"), JournalUnavailable, True),
        (KeyError("x"), JournalRefused, False),
    ],
)
def test_a_caller_alone_gets_the_error_of_the_engine(error, raised, failing, journal, url, script):
    script["append"] = error
    with pytest.raises(raised):
        journal.append_now(new_call(), MANY)
    assert journal.outage.is_failing is failing
    script.clear()
    assert journal.append_now(new_call(), MANY) == 1
    assert not journal.outage.is_failing


# --- Results ---


def test_results_that_are_refused_are_kept_and_stored_later(journal, url, script, events):
    for key in "12":
        journal.append_now(new_call(key=key), MANY)
    calls = taken(journal)
    script["report"] = JournalUnavailable("locked")
    for call in calls:
        journal.report("w", Postponed(call.id, 2, 0.0, "x"))
    wait_until(lambda: journal.unstored_results == 2)
    with pytest.raises(JournalUnavailable):  # a call whose result is not stored is not taken again
        taken(journal)
    assert journal.unstored_results == 2
    assert journal.outage.is_failing
    script.clear()
    assert [call.attempts for call in taken(journal)] == [2, 2]
    *_, results = [request[2] for request in ScriptedJournal.requests if request[0] == "report"]
    assert [result.id for result in results] == [call.id for call in calls]  # in order
    assert [type(event) for event in events] == [JournalFailed, JournalRecovered]


def test_results_that_the_engine_is_storing_count_as_not_stored(journal, url, script):
    store(url)
    (call,) = taken(journal)
    script["report"] = gate = Gate()
    journal.report("w", Delivered(call.id))
    assert gate.entered.wait(WAIT_S)
    assert journal.unstored_results == 1
    gate.opened.set()
    wait_until(lambda: journal.unstored_results == 0)
    assert stored(url) == []


def test_late_results_are_ignored_and_reported_to_the_worker(journal, url):
    late = []
    journal.append_now(new_call(), MANY)
    journal.add_worker("w", "*", late.extend)
    (call,) = taken(journal)
    journal.backend.release("w")
    journal.report("w", Delivered(call.id))
    wait_until(lambda: late == [call.id])
    assert len(stored(url)) == 1
    assert journal.counts.of("*") == 1
    journal.report("w", Postponed(call.id, 2, 0.0, ""))
    wait_until(lambda: late == [call.id] * 2)
    assert journal.counts.of("*") == 1
    journal.remove_worker("w")
    journal.report("w", Delivered(call.id))
    wait_until(lambda: not journal.unstored_results)
    assert late == [call.id] * 2


def test_results_of_several_workers_are_stored_for_each(journal, busy, url):
    for key in "1234":
        journal.append_now(new_call(key=key), MANY)
    half = dataclasses.replace(ROUTE, limit=2)
    with_a = journal.take("a", [half], 0.0)
    with_b = journal.take("b", [half], 0.0)
    with busy(journal):
        for first, second in zip(with_a, with_b, strict=True):
            journal.report("a", Delivered(first.id))
            journal.report("b", Delivered(second.id))
    wait_until(lambda: stored(url) == [])


def test_results_whose_answer_was_lost_are_stored_again_and_the_next_one_may_be_late(
    journal, monkeypatch
):
    late, report = [], journal.backend.report

    def lose_the_answer(*results):
        report(*results)
        raise JournalUnavailable("the connection was lost")

    for key in "12":
        journal.append_now(new_call(key=key), MANY)
    journal.add_worker("w", "*", late.extend)
    first, second = taken(journal)
    with monkeypatch.context() as patch:
        patch.setattr(journal.backend, "report", lose_the_answer)
        journal.report("w", Delivered(first.id))
        journal.report("w", Postponed(second.id, 2, 0.0, "again"))
        wait_until(lambda: journal.outage.is_failing)
    assert [call.id for call in taken(journal)] == [second.id]
    assert (journal.unstored_results, late, journal.counts.of("*")) == (0, [], 1)
    journal.backend.delete(Filter())
    journal.report("w", Delivered(second.id))
    wait_until(lambda: late == [second.id])


def test_release_stores_results_first(journal, busy, url):
    for key in "12":
        journal.append_now(new_call(key=key), MANY)
    first, _ = taken(journal)
    with busy(journal):
        journal.report("w", Delivered(first.id))
    journal.release("w")
    assert [(call.key, call.state) for call in stored(url)] == [("2", CallState.READY)]


def test_a_worker_that_has_taken_nothing_is_released_without_a_request(journal, url, script):
    script["release"] = JournalUnavailable("must not be asked")
    assert taken(journal) == []
    journal.release("w")
    assert not journal.outage.is_failing
    script["take"] = JournalUnavailable("the answer was lost")
    with pytest.raises(JournalUnavailable):
        taken(journal)
    script.clear()
    released = []
    script["release"] = lambda: released.append(1)
    journal.release("w")
    assert released == [1]


# --- Failures of the engine ---


def test_a_failure_is_reported_once_and_so_is_the_recovery(journal, url, script, events):
    script["append"] = JournalFull("full")
    for _ in range(3):
        with pytest.raises(JournalFull):
            journal.append_now(new_call(), MANY)
        assert taken(journal) == []  # reading is no recovery
        journal.counts.count()
    script.clear()
    journal.append_now(new_call(), MANY)
    journal.append_now(new_call(key="2"), MANY)
    failed, recovered = events
    assert (failed.journal, str(failed.error), failed.results) == (url, "full", 0)
    assert recovered.after_s >= 0


def test_after_a_failure_to_read_a_read_is_a_recovery(journal, url, script, events):
    script["take"] = script["depths"] = script["renew"] = JournalUnavailable("away")
    journal.counts.count()
    with pytest.raises(JournalUnavailable):
        taken(journal)
    with pytest.raises(JournalUnavailable):
        journal.renew("w")
    script.clear()
    assert (taken(journal), journal.renew("w")) == ([], False)
    assert [type(event) for event in events] == [JournalFailed, JournalRecovered]


@pytest.mark.parametrize("works", ["renew", "take", "report"])
def test_after_a_failure_to_write_any_write_is_a_recovery(works, journal, url, script, events):
    store(url, count=2)
    (call, *_) = taken(journal)
    script["append"] = JournalUnavailable("away")
    with pytest.raises(JournalUnavailable):
        journal.append_now(new_call(), MANY)
    if works == "renew":
        assert journal.renew("w")
    elif works == "take":
        store(url)
        assert len(taken(journal)) == 1
    else:
        journal.report("w", Delivered(call.id))
        wait_until(lambda: len(events) == 2)
    assert [type(event) for event in events] == [JournalFailed, JournalRecovered]


# --- Sharing, closing ---


def test_users_of_one_url_share_a_journal_that_the_last_one_closes(url, events):
    first, second = open_journal(url), open_journal(url)
    assert first is second
    first.append_now(new_call(), MANY)
    first.close()
    assert second.append_now(new_call(key="2"), MANY) == 2
    second.close()
    with pytest.raises(JournalUnavailable, match="was closed"):
        second.append_now(new_call(), MANY)
    with pytest.raises(JournalUnavailable):
        taken(second)
    assert events == []  # it is no failure of the engine
    third = open_journal(url)
    assert third is not second
    third.close()


def test_close_stores_the_results(url, script):
    journal = open_journal(url)
    store(url)
    (call,) = taken(journal)
    script["report"] = JournalUnavailable("locked")  # so that no earlier request stores it
    journal.report("w", Delivered(call.id))
    wait_until(lambda: journal.outage.is_failing)
    script.clear()
    journal.close()
    assert stored(url) == []


def test_close_releases_its_worker_though_others_use_the_journal(journal, url):
    store(url)
    taken(journal)
    open_journal(url).close("w")
    assert [call.state for call in stored(url)] == [CallState.READY]


def test_close_closes_the_connection_though_the_release_has_an_error(url, script):
    journal = open_journal(url)
    store(url)
    taken(journal)
    script["release"] = ValueError()
    journal.close("w")
    with pytest.raises(JournalUnavailable, match="was closed"):
        taken(journal)


def test_a_wrong_url_leaves_nothing_open():
    before = components.of_kind("journal")
    with pytest.raises(ConfigurationError):
        open_journal("sqlite:///x.db?typo=1")
    assert components.of_kind("journal") == before


def test_the_calls_are_counted_at_intervals_only(journal, script):
    counted = []
    script["depths"] = lambda: counted.append(1)
    for _ in range(3):
        journal.counts.count_if_due()
    wait_until(lambda: counted)
    journal.counts.count_if_due()
    wait_until_quiet()
    assert len(counted) == 1


def test_a_forked_child_appends_by_itself_and_forgets_the_results_of_its_parent(journal, busy, url):
    journal.append_now(new_call(), MANY)
    (call,) = taken(journal)
    with busy(journal):
        journal.report("w", Delivered(call.id))
        journal.append(new_call(key="parent"), MANY)
        assert holds_in_child(
            lambda: (
                journal.unstored_results == 0
                and journal in components.of_kind("journal")
                and journal.append_now(new_call(key="child"), MANY) == 2
            )
        )
        assert [one.key for one in stored(url)] == ["k", "child"]


# --- An engine that does not answer ---


@pytest.fixture
def silent(url, script, monkeypatch):
    """A journal on a server that does not answer `append` until the test ends, or sets it."""
    monkeypatch.setattr(ScriptedJournal, "is_file", False)
    journal = open_journal(f"{url}?timeout=0.2")
    journal.answers = threading.Event()
    script["append"] = lambda: journal.answers.wait(WAIT_S)
    yield journal
    journal.answers.set()
    journal.close()


def append_begun(journal, **call):
    """Append a call, and wait until its request has begun."""
    appended = journal.append(new_call(**call), MANY)
    assert wait_until(lambda: "append" in {request[0] for request in ScriptedJournal.requests})
    return appended


def test_the_outcome_of_a_request_that_is_not_answered_is_not_known(silent, url, events):
    appended = append_begun(silent)
    with pytest.raises(JournalOutcomeUnknown, match=r"not answered for 0\.2 s; it is not known"):
        silent.wait_until_stored(appended, 0.2)
    assert [type(event) for event in events] == [JournalFailed]
    assert stored(url) == []
    silent.answers.set()
    wait_until(lambda: len(stored(url)) == 1)
    wait_until(lambda: not silent.outage.is_failing)


def test_a_call_that_waits_for_the_request_of_another_one_is_not_stored(silent, url):
    """Its caller waits for the timeout of the URL only."""
    first = append_begun(silent, key="first")
    with pytest.raises(JournalUnavailable, match=r"has not answered for 0\.2 s$") as refused:
        silent.append_now(new_call(key="second"), MANY)
    assert not isinstance(refused.value, JournalOutcomeUnknown)
    silent.answers.set()
    assert first.result(WAIT_S) == 1
    silent.append(new_call(key="third"), MANY).result(WAIT_S)  # not within 0.2 s
    assert [call.key for call in stored(url)] == ["first", "third"]


def test_nobody_waits_for_an_engine_that_is_known_not_to_answer(silent, script):
    script["take"] = script.pop("append")
    taking = in_thread(silent.take, "w", [ROUTE], 0.0)
    wait_until(lambda: silent.append(new_call(), MANY).done())
    for _ in range(100):
        assert isinstance(silent.append(new_call(), MANY).exception(0), JournalUnavailable)
    silent.answers.set()
    taking.result(WAIT_S)
    assert silent.append(new_call(), MANY).result(WAIT_S)  # not within 0.2 s


def test_each_request_of_a_busy_engine_has_the_whole_timeout(url, script, busy, monkeypatch):
    monkeypatch.setattr(ScriptedJournal, "is_file", False)
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr("rpcwheel.journal.journal.time", clock)
    journal = open_journal(f"{url}?timeout=1")
    appends = []

    def append():
        clock.now_s += 0.6
        if len(appends) < 9:
            appends.append(journal.append(new_call(), MANY))
        if len(appends) == 5:  # a request with several calls: each gets a request of its own
            raise ValueError

    script["append"] = append
    with busy(journal):
        appends += [journal.append(new_call(), MANY) for _ in range(4)]
    wait_until(lambda: len(appends) == 9)
    for future in appends:
        assert future.result(WAIT_S)
    journal.close()


def test_release_and_close_do_not_wait_longer_either(silent, url, script):
    store(url)
    silent.add_worker("w", "*", lambda ids: None)
    silent.take("w", [ROUTE], 0.0)
    script["release"] = script.pop("append")
    silent.release("w")
    open_journal(f"{url}?timeout=0.2").close()
    assert [call.state for call in stored(url)] == [CallState.TAKEN]
    silent.answers.set()
    wait_until(lambda: [call.state for call in stored(url)] == [CallState.READY])


# --- Signal handlers and finalizers, which run during a request of their thread ---


def test_a_call_that_fails_in_a_signal_handler_during_an_append_is_refused(journal, url, script):
    def handle():
        with pytest.raises(JournalUnavailable, match="signal handler or finalizer"):
            journal.append_now(new_call(key="handler"), MANY)
        with pytest.raises(JournalUnavailable, match="signal handler"), journal.beside():
            pytest.fail("it may wait for a count of the interrupted request")

    script["append"] = handle
    journal.append_now(new_call(), MANY)
    assert [call.key for call in stored(url)] == ["k"]


def test_requests_in_a_signal_handler_are_refused_while_its_thread_reads(journal, url):
    store(url)
    clock = journal.backend.clock
    handled = []

    def handle():  # as SQLite executes the statement
        handled.append(1)
        with pytest.raises(JournalUnavailable, match="signal handler or finalizer"):
            journal.append_now(new_call(key="handler"), MANY)
        with pytest.raises(JournalUnavailable, match="signal handler"), journal.beside():
            pytest.fail("it would wait for the interrupted request")
        return clock()

    journal.backend.clock = handle
    with journal.beside() as backend:
        assert len(backend.select(Filter())) == 1
    assert handled
    journal.backend.clock = clock
    assert "handler" not in [call.key for call in stored(url)]


@pytest.mark.parametrize("block", [True, False], ids=["here", "on a worker thread"])
def test_a_count_in_a_handler_does_not_wait_for_the_count_that_it_interrupts(
    block, journal, script
):
    handled = []

    def handle():
        del script["depths"]
        journal.counts.ensure(block=True)
        handled.append(1)

    script["depths"] = handle
    journal.counts.ensure(block=block)
    wait_until(lambda: handled)


def test_max_pending_limits_the_calls_also_during_a_long_request_beside(journal, url):
    store(url, count=5)
    with journal.beside(), pytest.raises(JournalFull):
        journal.append(new_call(), 5).result(WAIT_S)


def test_a_release_in_a_signal_handler_waits_for_the_interrupted_request(journal, url, script):
    store(url)
    (call,) = taken(journal)

    def handle():
        journal.report("w", Postponed(call.id, 2, 0.0, "down"))
        journal.release("w")
        assert [one.state for one in stored(url)] == [CallState.TAKEN]

    script["renew"] = handle
    assert journal.renew("w")
    wait_until(lambda: [one.state for one in stored(url)] == [CallState.READY])
