"""`JournalWorker`: the calls of a journal are delivered without the program that stored them."""

import asyncio
import itertools
import json
import threading
from unittest.mock import Mock

import grpc
import pytest

from fixtures.journals import stored_rpc
from fixtures.shop import UNARY_STREAM, Fail, Hang
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel.call.idempotency import IDEMPOTENCY_KEY
from rpcwheel.call.metadata import RETRY_KEY
from rpcwheel.errors import ConfigurationError, JournalFull, JournalRefused
from rpcwheel.events import CallbackFailed, JournalFailed, JournalRecovered, TaskFailed
from rpcwheel.failback import JournalWorker, with_failback
from rpcwheel.failback.stored import StoredFunction
from rpcwheel.journal import CallState, Filter, NewCall
from rpcwheel.journal.backend import Route
from rpcwheel.journal.journal import open_journal
from rpcwheel.rpc import Kind
from rpcwheel.telemetry import components

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def look_often(set_limit):
    set_limit("failback.worker.LOOK_INTERVAL_S", 0.02)


@pytest.fixture
def url(worker_url):
    return worker_url


def requests_of(shop):
    return sorted(b"".join(seen.requests) for seen in shop.calls)


def calls_of(backend, *states):
    return backend.select(Filter(states=states or None))


def wait_empty(backend):
    wait_until(lambda: not calls_of(backend))


def test_the_calls_of_all_queues_and_targets_are_delivered(url, backend, shop):
    backend.append(
        [
            stored_rpc(shop.target, b"1"),
            stored_rpc(shop.target, b"2", queue="mail"),
            stored_rpc("orders", b"3", method=UNARY_STREAM, kind=Kind.UNARY_STREAM),
        ]
    )
    addresses = {"orders": shop.target}
    connected = []

    def connect(target):
        connected.append(target)
        return grpc.insecure_channel(addresses.get(target, target))

    with JournalWorker(url, connect=connect) as worker:
        wait_empty(backend)
        assert {name: one.redelivered for name, one in worker.stats().items()} == {
            "audit": 2,
            "mail": 1,
        }
        assert worker.skipped == {}
        assert worker.url == url.partition("?")[0]
    assert requests_of(shop) == [b"1", b"2", b"3"]
    assert sorted(connected) == sorted([shop.target, "orders"])  # one channel for each target
    assert {seen.metadata[IDEMPOTENCY_KEY] for seen in shop.calls} == {"1", "2", "3"}


@pytest.mark.parametrize(
    ("selection", "delivered"),
    [({"queues": ["mail"]}, [b"2"]), ({"targets": ["orders"]}, [b"3"])],
    ids=["queues", "targets"],
)
def test_only_the_selected_calls_are_delivered(selection, delivered, url, backend, shop):
    backend.append(
        [
            stored_rpc(shop.target, b"1"),
            stored_rpc(shop.target, b"2", queue="mail"),
            stored_rpc("orders", b"3"),
        ]
    )
    connect = lambda _: grpc.insecure_channel(shop.target)  # noqa: E731
    with JournalWorker(url, connect=connect, once=True, **selection) as worker:
        assert worker.wait(WAIT_S)
    assert requests_of(shop) == delivered
    assert len(calls_of(backend, CallState.READY)) == 2


@pytest.mark.parametrize(
    ("named", "retry_on", "code"),
    [([], "ABORTED", "ABORTED"), (["ABORTED"], None, "ABORTED"), ([], None, "DEADLINE_EXCEEDED")],
    ids=["retry_on", "named by the program", "the server is busy"],
)
def test_an_attempt_is_repeated(named, retry_on, code, url, backend, shop):
    backend.append([stored_rpc(shop.target, retry_on=named)])
    shop.then(Fail(code), Fail(code))
    with JournalWorker(url, retry_on=retry_on, backoff=0.01):
        wait_empty(backend)
    assert [seen.metadata.get(RETRY_KEY) for seen in shop.calls] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("failure", "limit", "reason"),
    [
        (Fail("INTERNAL"), None, "its error is not one that `retry_on` names"),
        (Fail("UNAVAILABLE"), 2, "no attempts left"),
    ],
)
def test_other_failures_make_a_dead_letter(failure, limit, reason, url, backend, shop):
    backend.append([stored_rpc(shop.target)])
    shop.then(failure)
    with JournalWorker(url, max_attempts=limit):
        wait_until(lambda: calls_of(backend, CallState.DEAD))
    (dead,) = calls_of(backend)
    assert (dead.reason, dead.attempts) == (reason, 2)
    assert dead.error.startswith(failure.code)


NO_CHANNEL = "connect must return a channel of grpc, such as grpc.insecure_channel(target), not"


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ValueError("no such host"), "no such host"),
        (None, f"{NO_CHANNEL} None"),
        (Mock(spec=grpc.aio.Channel), f"{NO_CHANNEL} <Mock spec"),
    ],
    ids=["raises", "None", "grpc.aio"],
)
def test_targets_without_a_channel_of_grpc_are_skipped(result, reason, url, backend):
    targets = ["elsewhere", "nowhere"]
    backend.append([stored_rpc(target) for target in targets])
    connect = Mock(side_effect=itertools.repeat(result))
    with JournalWorker(url, connect=connect, once=True) as worker:
        assert worker.wait(WAIT_S)
        skipped = worker.skipped
    assert sorted(skipped) == [("audit", target) for target in targets]
    for text in skipped.values():
        assert text.startswith(f"there is no channel to it: {reason}")
    assert [call.state for call in calls_of(backend)] == [CallState.READY] * 2


def test_a_target_that_was_skipped_is_connected_at_a_later_look(url, backend, shop):
    backend.append([stored_rpc(shop.target)])
    later = grpc.insecure_channel(shop.target)
    connect = Mock(side_effect=[ValueError("the certificate is being replaced"), None, later])
    with JournalWorker(url, connect=connect) as worker:
        wait_empty(backend)
        assert worker.skipped == {}
    assert len(shop.calls) == 1


def test_once_does_not_connect_a_skipped_target_at_each_look(url, backend, shop, script, set_limit):
    set_limit("failback.worker.LOOK_INTERVAL_S", 2 * WAIT_S)
    looks = threading.Semaphore(0)
    script["routes"] = looks.release
    shop.then(hang := Hang())
    backend.append([stored_rpc("nowhere"), stored_rpc(shop.target)])
    connected = []

    def connect(target):
        connected.append(target)
        if target == "nowhere":
            raise ValueError("no such host")
        return grpc.insecure_channel(target)

    with JournalWorker(url, connect=connect, once=True) as worker:
        assert hang.begun.wait(WAIT_S)
        for _ in range(5):
            assert looks.acquire(timeout=WAIT_S)
        shop.calls[0].ended.set()
        assert worker.wait(WAIT_S)
    assert sorted(connected) == sorted(["nowhere", shop.target])


def test_a_channel_is_closed_when_its_target_has_no_calls_any_more(url, backend, shop, set_limit):
    set_limit("failback.worker.UNUSED_S", 0.0)
    closed = threading.Semaphore(0)

    def connect(target):
        channel = grpc.insecure_channel(target)
        close = channel.close
        channel.close = lambda: (close(), closed.release())
        return channel

    with JournalWorker(url, connect=connect):
        for number in (b"1", b"2"):
            backend.append(
                [stored_rpc(shop.target, number), stored_rpc(shop.target, number, queue="mail")]
            )
            wait_empty(backend)
            assert closed.acquire(timeout=WAIT_S)
    assert requests_of(shop) == [b"1", b"1", b"2", b"2"]


def closing_raises(error):
    """A `connect` whose channels raise an error when they have been closed."""

    def connect(target):
        channel = grpc.insecure_channel(target)
        close = channel.close

        def close_and_raise():
            close()
            raise error

        channel.close = close_and_raise
        return channel

    return connect


@pytest.mark.parametrize("unused_s", [0.0, HOUR_S], ids=["by a look", "by close"])
def test_a_channel_whose_close_raises_ends_no_look_and_no_close(
    unused_s, url, backend, shop, set_limit, events
):
    set_limit("failback.worker.UNUSED_S", unused_s)
    error = ValueError("no such channel")
    with JournalWorker(url, connect=closing_raises(error)) as worker:
        for number in range(2):
            backend.append([stored_rpc(shop.target)])
            wait_empty(backend)
            if not unused_s:  # each look closes a channel
                wait_until(lambda number=number: len(events.of(CallbackFailed)) > number)
    assert worker.wait(0)
    assert wait_until(lambda: events.of(CallbackFailed))
    subjects = {(event.subject, event.error) for event in events.of(CallbackFailed)}
    assert subjects == {(shop.target, error)}


def test_a_channel_is_kept_while_a_call_runs(url, backend, shop, script, set_limit):
    set_limit("failback.worker.UNUSED_S", 0.0)
    hang, looks = Hang(), threading.Semaphore(0)
    shop.then(hang)
    backend.append([stored_rpc(shop.target)])
    with JournalWorker(url) as worker:
        assert hang.begun.wait(WAIT_S)
        script["routes"] = looks.release
        for _ in range(3):
            assert looks.acquire(timeout=WAIT_S)
        shop.calls[0].ended.set()
        wait_empty(backend)
        assert worker.stats()["audit"].redelivered == 1
    assert len(shop.calls) == 1


# Metadata


def test_metadata_is_read_anew_for_each_attempt(url, backend, shop):
    backend.append([stored_rpc(shop.target)])
    shop.then(Fail("UNAVAILABLE"))
    numbers = iter(range(10))
    with JournalWorker(url, metadata=lambda: [("x-token", str(next(numbers)))], backoff=0.01):
        wait_empty(backend)
    assert [seen.metadata["x-token"] for seen in shop.calls] == ["0", "1"]


@pytest.mark.parametrize(
    "broken",
    [
        [].pop,
        lambda: [("a", "b", "c")],
        lambda: [("a key", "b")],
        lambda: [("a", "b\nc")],
        lambda: [("a-bin", "b")],
    ],
    ids=["raises", "no pairs", "key", "value", "no bytes"],
)
def test_a_call_waits_while_there_is_no_metadata(
    broken, url, backend, shop, rpcwheel_events, set_limit
):
    set_limit("failback.journaled.POLL_INTERVAL_S", 0.05)
    backend.append([stored_rpc(shop.target)])
    tokens = []

    def metadata():
        return [("x-token", tokens[0])] if tokens else broken()

    with JournalWorker(url, metadata=metadata):
        wait_until(lambda: rpcwheel_events.of(CallbackFailed))
        assert calls_of(backend)[0].attempts == 1
        tokens.append("now")
        wait_empty(backend)
    (seen,) = shop.calls
    assert seen.metadata["x-token"] == "now"
    assert seen.metadata[RETRY_KEY] == "1"


def test_a_call_whose_max_age_has_passed_needs_no_metadata(url, backend, shop):
    backend.append([stored_rpc(shop.target, max_age_s=0.0)])
    with JournalWorker(url, metadata=[].pop):
        wait_until(lambda: calls_of(backend, CallState.DEAD))
    assert [call.reason for call in calls_of(backend)] == ["its max_age has passed"]
    assert shop.calls == []


# Once


def test_once_ends_when_each_call_that_was_due_was_attempted(url, backend, shop):
    backend.append([stored_rpc(shop.target, str(number).encode()) for number in range(25)])
    backend.append([stored_rpc(shop.target, b"later", delay_s=1.0)])
    shop.then(Fail("UNAVAILABLE"))
    with JournalWorker(url, once=True, backoff=0.1) as worker:
        assert worker.wait(WAIT_S)
        assert worker.stats()["audit"].attempts == 25
    assert len(shop.calls) == 25
    assert b"later" not in requests_of(shop)
    assert sorted(one.attempts for one in calls_of(backend, CallState.READY)) == [1, 2]


def test_once_ends_though_calls_cannot_be_made(url, backend, shop):
    backend.append([stored_rpc(shop.target, str(number).encode()) for number in range(25)])
    with JournalWorker(url, metadata=[].pop, once=True) as worker:
        assert worker.wait(WAIT_S)
        assert not worker.failed
    assert [call.attempts for call in calls_of(backend, CallState.READY)] == [1] * 25
    assert shop.calls == []


# Functions


def stored_call(name, **arguments):
    """A call of the function with this name, as an earlier process has left it."""
    body = StoredFunction(json.dumps(arguments).encode()).encoded()
    return NewCall(name, "", name, "key-1", body, 0.0, HOUR_S)


def test_functions_are_delivered_on_threads_and_on_a_loop(url, backend):
    seen = {}

    @with_failback(retry_on=ConnectionError, journal=url, name="plain")
    def record(line: str) -> None:
        seen["plain"] = line, threading.current_thread()

    @with_failback(retry_on=ConnectionError, journal=url, name="aio")
    async def record_aio(line: str) -> None:
        await asyncio.sleep(0)
        seen["aio"] = line, threading.current_thread()

    backend.append([stored_call("plain", line="a"), stored_call("aio", line="b")])
    with JournalWorker(url, functions=[record, record_aio], once=True) as worker:
        assert worker.wait(WAIT_S)
    assert calls_of(backend) == []
    assert {name: line for name, (line, _) in seen.items()} == {"plain": "a", "aio": "b"}
    assert seen["aio"][1].name == "rpcwheel-journal-loop"
    assert seen["plain"][1] is not seen["aio"][1]


def test_calls_of_functions_that_are_not_known_or_not_selected_stay(url, backend, tmp_path):
    other_url = f"sqlite://{tmp_path}/other.db"

    @with_failback(retry_on=ConnectionError, journal=url, name="not-given")
    def not_given() -> None:
        raise AssertionError

    @with_failback(retry_on=ConnectionError, journal=other_url, name="other-journal")
    def other_journal() -> None:
        raise AssertionError

    @with_failback(retry_on=ConnectionError, journal=url, name="not-selected")
    def not_selected() -> None:
        raise AssertionError

    functions = [not_given, other_journal, not_selected]
    names = ["not-given", "other-journal", "not-selected"]
    backend.append([stored_call(name) for name in names])
    with JournalWorker(url, functions=functions[1:], queues=names[:2], once=True) as worker:
        assert worker.wait(WAIT_S)
        assert worker.skipped == {
            ("not-given", ""): "they are calls of a function that was not imported",
            ("other-journal", ""): f"the journal of the function is {other_url}",
        }
    assert len(calls_of(backend, CallState.READY)) == 3
    for function in functions:
        function.failback.close(0)


# Leases


def test_calls_of_a_worker_that_has_died_are_taken_over(url, backend, shop):
    backend.append([stored_rpc(shop.target)])
    (taken,) = backend.take("dead", 0.001, [Route("audit", shop.target, 1)], 0.0)
    assert backend.routes() == []
    with JournalWorker(url):
        wait_empty(backend)
    assert requests_of(shop) == [taken.key.encode()]


def test_close_cancels_attempts_after_the_grace_and_gives_their_calls_back(url, backend, shop):
    shop.then(hang := Hang())
    backend.append([stored_rpc(shop.target)])
    with JournalWorker(url) as worker:
        assert hang.begun.wait(WAIT_S)
        worker.close(0)
        assert shop.calls[0].ended.wait(WAIT_S)
        (call,) = calls_of(backend)
        assert (call.state, call.attempts) == (CallState.READY, 1)


def test_close_lets_attempts_end_within_the_grace(url, backend, shop):
    shop.then(hang := Hang())
    backend.append([stored_rpc(shop.target)])
    with JournalWorker(url) as worker:
        assert hang.begun.wait(WAIT_S)
        closing = in_thread(worker.close, WAIT_S)
        shop.calls[0].ended.set()
        closing.result(WAIT_S)
    assert calls_of(backend) == []


def hanging(url):
    """Return a coroutine function that waits until it is canceled, and events for both."""
    begun, canceled = threading.Event(), threading.Event()

    @with_failback(retry_on=ConnectionError, journal=url, name="record")
    async def record() -> None:
        begun.set()
        try:
            await asyncio.sleep(HOUR_S)
        except asyncio.CancelledError:
            canceled.set()
            raise

    return record, begun, canceled


def test_close_cancels_coroutines_after_the_grace(url, backend):
    record, begun, canceled = hanging(url)
    backend.append([stored_call("record")])
    with JournalWorker(url, functions=[record]) as worker:
        assert begun.wait(WAIT_S)
        worker.close(0)
    assert canceled.is_set()
    assert [call.state for call in calls_of(backend)] == [CallState.READY]


def test_a_coroutine_that_ends_after_close_is_not_cut_off(url, backend, set_limit):
    for module in ("sync", "worker"):
        set_limit(f"failback.{module}.CANCEL_TIMEOUT_S", 0.01)
    begun, closed, ended = threading.Event(), threading.Event(), threading.Event()

    @with_failback(retry_on=ConnectionError, journal=url, name="record")
    async def record() -> None:
        begun.set()
        try:
            await asyncio.sleep(HOUR_S)
        finally:
            await asyncio.to_thread(closed.wait, WAIT_S)
            ended.set()

    backend.append([stored_call("record")])
    with JournalWorker(url, functions=[record]) as worker:
        assert begun.wait(WAIT_S)
        worker.close(0)
    assert [call.state for call in calls_of(backend)] == [CallState.READY]
    closed.set()
    assert ended.wait(WAIT_S)


# Start and end


def test_close_inside_an_attempt_is_refused_and_closes_nothing(url, backend):
    errors = []

    @with_failback(retry_on=ConnectionError, journal=url, name="record")
    def record() -> None:
        with pytest.raises(RuntimeError) as caught:
            worker.close()
        errors.append(caught.value)

    with JournalWorker(url, functions=[record]) as worker:
        worker.start()  # idempotent
        backend.append([stored_call("record")])
        wait_empty(backend)
        assert "would wait for itself" in str(errors[0])
        assert not worker.wait(0)
        backend.append([stored_call("record")])
        wait_empty(backend)
    assert worker.wait(0)
    with pytest.raises(RuntimeError, match="was closed"):
        worker.start()


@pytest.mark.parametrize(("grace", "error"), [("5", TypeError), (float("nan"), ConfigurationError)])
def test_close_with_a_wrong_grace_closes_nothing(grace, error, url, backend, shop):
    with JournalWorker(url) as worker:
        with pytest.raises(error, match="grace"):
            worker.close(grace)
        backend.append([stored_rpc(shop.target)])
        wait_empty(backend)
    assert worker.wait(0)


class Interrupted(BaseException):
    """What Ctrl-C raises, for example."""


def journals_at(url):
    """The open journals of this process with the URL."""
    return [journal for journal in components.of_kind("journal") if journal.url.text == url]


def test_a_close_that_is_interrupted_ends_all_the_same(url, backend, shop):
    record, begun, canceled = hanging(url)
    worker = JournalWorker(url, connect=closing_raises(Interrupted()), functions=[record])
    worker.start()
    backend.append([stored_rpc(shop.target)])
    wait_empty(backend)
    backend.append([stored_call("record")])
    assert begun.wait(WAIT_S)
    with pytest.raises(Interrupted):
        worker.close(0)
    assert worker.wait(0)
    assert canceled.wait(WAIT_S)
    assert journals_at(url) == []


def test_the_worker_goes_on_after_an_error_of_a_look_that_is_no_exception(
    url, backend, shop, script, rpcwheel_events
):
    def fail():
        del script["routes"]
        raise Interrupted

    with JournalWorker(url):
        script["routes"] = fail
        backend.append([stored_rpc(shop.target)])
        wait_empty(backend)
    (failed,) = rpcwheel_events.of(TaskFailed)
    assert isinstance(failed.error, Interrupted)


def test_once_skips_a_target_for_which_connect_raises_an_error_that_is_no_exception(
    url, backend, shop
):
    shop.then(hang := Hang())
    backend.append([stored_rpc(shop.target)])

    def connect(target):
        if target == "nowhere":
            raise SystemExit(3)
        return grpc.insecure_channel(target)

    with JournalWorker(url, connect=connect, once=True) as worker:
        assert hang.begun.wait(WAIT_S)
        backend.append([stored_rpc("nowhere")])
        skipped = {("audit", "nowhere"): "there is no channel to it: SystemExit(3)"}
        wait_until(lambda: worker.skipped == skipped)
        shop.calls[0].ended.set()
        assert worker.wait(WAIT_S)


def test_a_start_that_is_interrupted_leaves_nothing_open(url, backend, shop):
    def connect(target):
        raise Interrupted

    backend.append([stored_rpc(shop.target)])
    worker = JournalWorker(url, connect=connect)
    with pytest.raises(Interrupted):
        worker.start()
    assert journals_at(url) == []
    with pytest.raises(RuntimeError, match="was closed"):
        worker.start()
    worker.close()


def test_a_journal_that_does_not_exist_is_not_created(url, tmp_path):
    worker = JournalWorker(url)
    with pytest.raises(JournalRefused, match="there is no such file"):
        worker.start()
    worker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_is_dropped_warns_and_gives_its_calls_back(url, backend, shop):
    shop.then(hang := Hang())
    backend.append([stored_rpc(shop.target)])
    workers = [JournalWorker(url)]
    workers[0].start()
    assert hang.begun.wait(WAIT_S)

    def drop():
        workers.clear()
        wait_until(lambda: not calls_of(backend, CallState.TAKEN))

    with pytest.warns(ResourceWarning, match="without close"):
        drop()


@pytest.fixture
def fail_routes(script, url):
    """Makes the looks of a worker fail, after the check of `start`. Returns the list of looks.

    Before each, another request to the journal succeeds, as those of queues do.
    """
    journal = open_journal(url)

    def begin(error):
        looks = []

        def look():
            looks.append(error)
            if len(looks) > 1:
                journal.take("another worker", (), 0.0)
                raise error

        script["routes"] = look
        return looks

    yield begin
    journal.close()


@pytest.mark.parametrize("request_name", ["take", "routes"])
def test_once_ends_if_the_journal_fails(
    request_name, url, backend, shop, script, fail_routes, set_limit, events
):
    set_limit("failback.worker.ONCE_FAILURE_S", 0.2)
    backend.append([stored_rpc(shop.target)])
    error = JournalFull("the disk is full")
    if request_name == "take":
        script["take"] = error
    else:
        fail_routes(error)
    with JournalWorker(url, once=True) as worker:
        assert worker.wait(WAIT_S)
        assert worker.failed
    wait_until(lambda: error in [event.error for event in events.of(JournalFailed)])
    script.clear()
    with JournalWorker(url, once=True) as worker:
        assert worker.wait(WAIT_S)
        assert not worker.failed
    assert len(shop.calls) == 1


def test_looks_that_fail_are_one_outage(url, backend, shop, script, fail_routes, events):
    backend.append([stored_rpc(shop.target)])
    looks = fail_routes(JournalRefused("no such table"))
    with JournalWorker(url):
        wait_until(lambda: len(looks) > 5)
        script.clear()
        wait_empty(backend)
        wait_until(lambda: events.of(JournalRecovered))
    assert len(events.of(JournalFailed)) == 1
    assert len(events.of(JournalRecovered)) == 1
