"""Calls of `grpc` in a journal."""

import itertools

import grpc
import pytest
from tenacity import wait_fixed

from fixtures.grpc_servers import IMPATIENT
from fixtures.journaled_clients import LATER, key_of, push, queue_of
from fixtures.journals import (
    BODY,
    dead,
    paused,
    store,
    stored,
    wait_for_dead,
    wait_for_none,
    wait_until_quiet,
)
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang, Shop
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import Kit, call_options
from rpcwheel.call import CallPolicy, HedgingPolicy, MethodPolicy, RetryPolicy
from rpcwheel.call.idempotency import IDEMPOTENCY_KEY
from rpcwheel.errors import (
    ConfigurationError,
    FailbackFull,
    JournalFull,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
)
from rpcwheel.events import (
    CallbackFailed,
    FailbackDelivered,
    FailbackDropped,
    FailbackGaveUp,
    FailbackLeaseLost,
    FailbackQueued,
    FailbackRejected,
    JournalFailed,
    JournalRecovered,
)
from rpcwheel.failback import FailbackPolicy
from rpcwheel.failback.journaled import JournaledQueue
from rpcwheel.failback.queued_call import QueuedCallState
from rpcwheel.failback.stored import StoredRpc, decode
from rpcwheel.interceptors import FailbackQueues, client_interceptors, intercept_channel
from rpcwheel.journal.backend import CallState
from rpcwheel.rpc import Kind

SECRETS = (("authorization", "Bearer x"), ("cookie", "x"), ("proxy-authorization", "x"))

KINDS = dict(zip((UNARY_UNARY, UNARY_STREAM, STREAM_UNARY, STREAM_STREAM), Kind, strict=True))


# --- What is stored ---

MAKE = {
    "blocking": lambda channel, **given: channel.unary_unary(UNARY_UNARY)(b"ab", **given),
    "with_call": lambda channel, **given: channel.unary_unary(UNARY_UNARY).with_call(
        b"ab", **given
    )[0],
    "future": lambda channel, **given: (
        channel.unary_unary(UNARY_UNARY).future(b"ab", **given).result(WAIT_S)
    ),
    "unary_stream": lambda channel, **given: next(
        channel.unary_stream(UNARY_STREAM)(b"ab", **given)
    ),
    "stream_unary": lambda channel, **given: channel.stream_unary(STREAM_UNARY)(
        iter([b"a", b"b"]), **given
    ),
    "stream_future": lambda channel, **given: (
        channel.stream_unary(STREAM_UNARY).future(iter([b"a", b"b"]), **given).result(WAIT_S)
    ),
    "stream_stream": lambda channel, **given: next(
        channel.stream_stream(STREAM_STREAM)(iter([b"a", b"b"]), **given)
    ),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_call_is_stored_before_its_caller_is_answered_and_then_delivered(
    make, shop, client, url, events
):
    shop.then(Fail("UNAVAILABLE", read=True))
    channel = client()
    metadata = (("k", "v"), ("k-bin", b"\xff"), *SECRETS)
    assert make(channel, timeout=WAIT_S, metadata=metadata) == LATER
    (call,) = stored(url)
    first = shop.calls[0]
    assert (call.queue, call.target, call.method) == ("*", shop.target, first.method)
    assert (call.key, call.attempts, call.order_key) == (key_of(first), 1, None)
    assert 0 < call.due_s <= 60
    assert call.error == f"UNAVAILABLE: scripted for {first.method}"
    body = decode(call.body)
    assert (body.requests, body.kind) == (tuple(first.requests), KINDS[first.method])
    assert body.metadata == (("k", "v"), ("k-bin", b"\xff"))
    assert body.timeout_s == WAIT_S
    assert client.queues.flush(WAIT_S)
    second = shop.calls[1]
    assert (second.requests, second.method) == (first.requests, first.method)
    assert (second.metadata["k"], second.metadata["k-bin"]) == ("v", b"\xff")
    assert not dict(SECRETS).keys() & second.metadata.keys()
    assert key_of(second) == key_of(first)
    assert second.metadata["grpc-previous-rpc-attempts"] == "1"
    wait_for_none(url)
    assert [type(event) for event in events] == [FailbackQueued, FailbackDelivered]


def through_a_kit(shop, failback, kits):
    kits.append(Kit(failback=failback))
    return kits[-1].channel(shop.target)


def through_a_kit_and_a_channel(shop, failback, kits):
    kits.append(Kit(failback=failback))
    return kits[-1].intercept_channel(grpc.insecure_channel(shop.target, options=IMPATIENT))


def through_an_intercepted_channel(shop, failback, kits):
    kits.append(FailbackQueues())
    own = grpc.intercept_channel(grpc.insecure_channel(shop.target, options=IMPATIENT), Own())
    return intercept_channel(own, CallPolicy(failback=failback), queues=kits[-1])


class Own(grpc.UnaryUnaryClientInterceptor):
    """An interceptor of the user's."""

    def intercept_unary_unary(self, continuation, details, request):
        metadata = [*(details.metadata or ()), ("token", "fresh")]
        return continuation(details._replace(metadata=metadata), request)


@pytest.mark.parametrize(
    "through", [through_a_kit, through_a_kit_and_a_channel, through_an_intercepted_channel]
)
def test_each_kind_of_channel_stores_calls_and_delivers_those_of_an_earlier_process(
    through, shop, policy, url
):
    shop.then("UNAVAILABLE")
    kits = []
    channel = through(shop, policy(), kits)
    assert push(channel) == LATER
    assert kits[0].close(0) == []
    channel.close()
    assert [call.target for call in stored(url)] == [shop.target]
    with through(shop, policy(), kits), kits[1]:
        assert kits[1].flush(WAIT_S)
    assert [seen.requests for seen in shop.calls] == [[b"order"]] * 2
    if through is through_an_intercepted_channel:
        assert [seen.metadata["token"] for seen in shop.calls] == ["fresh"] * 2


def test_calls_of_an_earlier_process_are_pending_at_once(shop, client):
    shop.then("UNAVAILABLE")
    with client() as channel:
        assert push(channel) == LATER
    client.queues.close(0)
    with client():
        assert client.queues.pending == 1


def test_a_message_is_stored_as_its_serializer_writes_it(shop, client, url):
    shop.then("UNAVAILABLE")
    call = client().unary_unary(UNARY_UNARY, request_serializer=str.encode)
    assert call("text", timeout=WAIT_S) == LATER
    assert decode(stored(url)[0].body).requests == (b"text",)
    assert client.queues.flush(WAIT_S)
    assert shop.calls[1].requests == [b"text"]


def test_metadata_that_the_policy_does_not_list_is_not_stored(shop, client, policy, url):
    shop.then("UNAVAILABLE")
    push(client(policy(metadata=("a*",))), metadata=(("abc", "1"), ("b", "2")))
    assert decode(stored(url)[0].body).metadata == (("abc", "1"),)


def test_the_target_of_the_policy_replaces_that_of_the_channel(shop, client, policy, url):
    shop.then("UNAVAILABLE")
    push(client(policy(target="orders")))
    assert [call.target for call in stored(url)] == ["orders"]
    assert client.queues.flush(WAIT_S)
    assert len(shop.calls) == 2


def test_calls_without_a_timeout_are_stored_with_that_of_the_policy_or_a_minute(shop, client, url):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    client(timeout=5.0).unary_unary(UNARY_UNARY)(b"")
    client().unary_unary(UNARY_UNARY)(b"")
    assert [decode(call.body).timeout_s for call in stored(url)] == [5.0, 60.0]


def test_an_infinite_backoff_ends_with_max_age(shop, client, policy, url):
    shop.then("UNAVAILABLE")
    push(client(policy(backoff=float("inf"), max_age=100)))
    assert 90 < stored(url)[0].due_s <= 100


def test_a_policy_with_a_journal_is_refused_where_it_would_have_no_effect(
    shop, client, policy, url, events
):
    with pytest.raises(ConfigurationError, match="no effect with client_interceptors"):
        client_interceptors(CallPolicy(failback=policy()))
    shop.then("UNAVAILABLE")
    channel = client(policy(), methods={UNARY_UNARY: MethodPolicy(failback=None)})
    with call_options(failback=policy()), pytest.raises(grpc.RpcError) as caught:
        push(channel)
    assert "no effect in call_options()" in caught.value.__notes__[0]
    assert stored(url) == []


# --- The idempotency key ---


def test_the_key_is_the_same_in_retries_and_deliveries(shop, client, policy, url):
    shop.then(*["UNAVAILABLE"] * 4)
    settings = {"retry": RetryPolicy(retry_on="UNAVAILABLE", backoff=0, max_attempts=3)}
    channel = client(policy(), idempotent=True, **settings)
    push(channel)
    assert len(shop.calls) == 3
    client.queues.flush(0)
    wait_until(lambda: stored(url)[0].attempts == 2)
    assert client.queues.flush(WAIT_S)
    assert len({key_of(seen) for seen in shop.calls}) == 1
    assert len(shop.calls) == 5


def test_the_key_is_the_same_in_hedges_and_deliveries(shop, client, policy):
    shop.then(*["UNAVAILABLE"] * 2)
    hedging = HedgingPolicy(delay=0, max_attempts=2, non_fatal_codes={"UNAVAILABLE"})
    push(client(policy(), idempotent=True, hedging=hedging))
    assert client.queues.flush(WAIT_S)
    assert len({key_of(seen) for seen in shop.calls}) == 1
    assert len(shop.calls) == 3


def test_calls_have_different_keys_and_a_key_of_the_user_is_kept(shop, client, url):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = client()
    push(channel)
    push(channel, metadata=((IDEMPOTENCY_KEY, "mine"),))
    push(channel)
    first, second, third = (call.key for call in stored(url))
    assert second == "mine"
    assert first != third
    assert [key_of(seen) for seen in shop.calls] == [first, "mine", third]
    assert decode(stored(url)[1].body).metadata == ()


def test_calls_of_policies_without_a_journal_have_no_key(shop, client):
    shop.then("UNAVAILABLE")
    channel = client(FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0))
    push(channel)
    assert client.queues.flush(WAIT_S)
    assert [IDEMPOTENCY_KEY in seen.metadata for seen in shop.calls] == [False, False]


# --- Order ---


def by_metadata(policy, **settings):
    return policy(order_key="shop", **settings)


def by_request(policy, **settings):
    return policy(order_key=lambda request: request[:1].decode(), **settings)


@pytest.mark.parametrize("ordered", [by_metadata, by_request])
def test_calls_with_an_order_key_are_delivered_in_order_also_by_the_next_process(
    ordered, shop, client, policy, url
):
    shop.then(*["UNAVAILABLE"] * 4)
    channel = client(ordered(policy))
    for request in (b"a1", b"a2", b"a3", b"b1"):
        push(channel, request, metadata=(("shop", request[:1].decode()),))
    client.queues.close(0)
    assert {call.order_key for call in stored(url)} == {"a", "b"}
    shop.reset()
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    client(ordered(policy, backoff=0.02))
    assert client.queues.flush(WAIT_S)
    delivered = [seen.requests[0] for seen in shop.calls]
    in_order = [one for one, _ in itertools.groupby(sorted_of(delivered, b"a"))]
    assert in_order == [b"a1", b"a2", b"a3"]
    assert b"b1" in delivered


def sorted_of(requests, key):
    return [request for request in requests if request.startswith(key)]


def test_a_long_queue_of_one_order_key_is_delivered_without_waits(
    shop, client, policy, url, manual_time, timer, new_queues
):
    store(url, count=50, target=shop.target, order_key="shop")
    queues = new_queues(timer)
    client(policy(), queues=queues)
    wait_until(lambda: len(shop.calls) == 50)  # without any time
    wait_until_quiet(queue_of(queues))
    assert stored(url) == []


def test_one_call_of_an_order_key_is_attempted_at_a_time(shop, client, url):
    shop.then(hang := Hang())
    store(url, count=2, target=shop.target, order_key="a")
    client()
    assert hang.begun.wait(WAIT_S)
    assert [call.state for call in stored(url)] == [CallState.TAKEN, CallState.BLOCKED]


@pytest.mark.parametrize(
    ("order_key", "note"),
    [
        (lambda request: 1 / 0, "division by zero"),
        (lambda request: 1.5, "order_key must give a str, an int or None, not 1.5"),
        (lambda request: "\udcff", "surrogates not allowed"),
        ("k-bin", "order_key must give a str"),
    ],
)
def test_a_call_whose_order_key_cannot_be_had_fails_with_its_own_error(
    order_key, note, shop, client, policy, url, events
):
    shop.then("UNAVAILABLE")
    with pytest.raises(grpc.RpcError) as caught:
        push(client(policy(order_key=order_key)), metadata=(("k-bin", b"x"),))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert note in caught.value.__notes__[0]
    assert [type(event) for event in events] == [CallbackFailed]
    assert stored(url) == []


# --- Dead letters ---


def test_a_call_is_attempted_when_it_is_due_before_the_next_look(
    shop, client, policy, timer, new_queues
):
    shop.then("UNAVAILABLE")
    channel = client(policy(backoff=0.3), queues=new_queues(timer))
    push(channel)
    timer.advance(0.3)
    wait_until(lambda: len(shop.calls) == 2)


def test_a_call_without_attempts_left_is_a_dead_letter(shop, client, policy, url, events):
    shop.then(*["UNAVAILABLE"] * 3)
    letters = []
    push(client(policy(backoff=0.01, max_attempts=3, dead_letter=letters.append)))
    (call,) = wait_for_dead(url)
    assert (call.attempts, call.reason) == (3, "no attempts left")
    assert call.error.startswith("UNAVAILABLE: scripted for")
    (gave_up,) = events.of(FailbackGaveUp)
    assert (gave_up.attempts, gave_up.reason, gave_up.function) == (3, call.reason, UNARY_UNARY)
    (letter,) = letters
    assert (letter.args, letter.attempts, letter.function) == ((b"order",), 3, UNARY_UNARY)
    assert len(shop.calls) == 3


def test_a_stop_object_limits_the_attempts(shop, client, policy, url):
    shop.then(*["UNAVAILABLE"] * 2)
    push(client(policy(backoff=0.01, stop=lambda state: state.attempt_number >= 2)))
    assert wait_for_dead(url)[0].attempts == 2


def test_only_max_age_limits_the_attempts_by_default(shop, client, policy, url):
    shop.then(*["UNAVAILABLE"] * 8)
    push(client(policy(backoff=0.001)))
    wait_for_none(url)
    assert len(shop.calls) == 9


def test_an_error_that_retry_on_does_not_name_makes_a_dead_letter(shop, client, policy, url):
    shop.then("UNAVAILABLE", "INVALID_ARGUMENT")
    push(client(policy(backoff=0.01)))
    (call,) = wait_for_dead(url)
    assert call.reason == "its error is not one that `retry_on` names"
    assert call.error.startswith("INVALID_ARGUMENT: ")


def test_a_call_that_has_reached_its_max_age_is_a_dead_letter(
    shop, client, policy, url, manual_time, timer, new_queues
):
    shop.then(*["UNAVAILABLE"] * 100)
    queues = new_queues(timer)
    push(client(policy(backoff=wait_fixed(4), max_age=10.0), queues=queues))
    manual_time(12, queue_of(queues))
    (call,) = dead(url)
    assert call.reason == "its max_age has passed"
    assert [seen.metadata.get("grpc-previous-rpc-attempts") for seen in shop.calls] == [
        None,
        "1",
        "2",
        "3",
    ]


@pytest.mark.parametrize("hook_of", ["raises", "none"])
def test_a_dead_letter_hook_that_raises_changes_nothing(hook_of, shop, client, policy, url):
    def hook(_):
        raise RuntimeError(hook_of)

    shop.then("UNAVAILABLE", "INVALID_ARGUMENT")
    push(client(policy(backoff=0.01, dead_letter=hook if hook_of == "raises" else None)))
    assert wait_for_dead(url)[0].attempts == 2


POISONED = {
    "unknown method": ({"method": "/test.Shop/Gone", "body": BODY}, "retry_on"),
    "damaged": ({"body": BODY[:-1]}, "it cannot be made: its bytes are damaged: "),
    "empty": ({"body": b""}, "it cannot be made: its bytes are damaged: "),
    "newer format": ({"body": b"\x02" + BODY[1:]}, "it cannot be made: it was stored in format 2"),
    "function": ({"body": b'\x01\0\0\0\x13{"kind":"function"}{}'}, "it is the call of a func"),
    "malformed metadata": (
        {"body": StoredRpc(Kind.UNARY_UNARY, (b"",), (("BAD KEY", "x"),)).encoded()},
        "retry_on",
    ),
}


@pytest.mark.parametrize(("fields", "reason"), POISONED.values(), ids=POISONED)
def test_a_poisoned_entry_is_a_dead_letter_and_stops_nothing(
    fields, reason, shop, client, url, events
):
    store(url, target=shop.target, **fields)
    store(url, target=shop.target)
    client()
    (call,) = wait_for_dead(url)
    assert reason in call.reason
    wait_until(lambda: len(stored(url)) == 1)
    assert [seen.requests for seen in shop.calls] == [[b"order"]]
    assert len(events.of(FailbackGaveUp)) == 1


# --- Calls that are not queued ---


def test_a_request_that_cannot_be_serialized_fails_with_its_own_error(shop, client, policy, url):
    call = client(policy(retry_on="INTERNAL")).unary_unary(
        UNARY_UNARY, request_serializer=lambda message: 1 / 0
    )
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "not queued by failback: division by zero" in caught.value.__notes__[0]
    assert stored(url) == []


def test_a_method_may_have_multicallables_with_and_without_a_serializer(shop, client, url):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    channel = client()
    typed = channel.unary_unary(UNARY_UNARY, request_serializer=str.encode)
    raw = channel.unary_unary(UNARY_UNARY)
    assert typed("a", timeout=WAIT_S) == raw(b"b", timeout=WAIT_S) == LATER
    assert [decode(call.body).requests for call in stored(url)] == [(b"a",), (b"b",)]


def test_a_full_queue_raises_failback_full(shop, client, policy, url, events):
    shop.then(*["UNAVAILABLE"] * 2)
    channel = client(policy(max_pending=1))
    assert push(channel) == LATER
    with pytest.raises(FailbackFull, match=r"max_pending \(1\) calls of '\*'") as caught:
        push(channel)
    assert isinstance(caught.value, JournalFull)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [type(event) for event in events] == [FailbackQueued, FailbackRejected]
    assert len(stored(url)) == 1


def test_a_full_queue_drops_the_call_if_the_policy_says_so(shop, client, policy, url, events):
    shop.then(*["UNAVAILABLE"] * 2)
    channel = client(policy(max_pending=1, overflow="drop"))
    assert [push(channel), push(channel)] == [LATER, LATER]
    assert [type(event) for event in events] == [FailbackQueued, FailbackDropped]
    assert len(stored(url)) == 1
    assert client.queues.stats()["*"].dropped == 1


def test_a_call_is_refused_if_the_directory_of_the_journal_is_missing(
    shop, client, policy, tmp_path, events
):
    channel = client(policy(journal=f"sqlite://{tmp_path}/missing/calls.db"))
    wait_until(lambda: events.of(JournalFailed))  # the first look for calls
    shop.then(*["UNAVAILABLE"] * 2)
    for _ in range(2):
        with pytest.raises(JournalRefused, match="create its directory") as caught:
            push(channel)
        assert isinstance(caught.value, grpc.RpcError)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(events.of(JournalFailed)) == 1
    (tmp_path / "missing").mkdir()
    shop.then("UNAVAILABLE")
    assert push(channel) == LATER
    wait_until(lambda: events.of(JournalRecovered))
    assert client.queues.stats()["*"].rejected == 2


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (JournalUnavailable, "was not queued, because why"),
        (JournalFull, "was not queued, because why"),
        (JournalRefused, "was not queued, because why"),
        (JournalOutcomeUnknown, "may have been queued or not: why"),
    ],
)
def test_a_call_that_the_journal_does_not_store_is_refused_with_its_code(
    kind, outcome, shop, client, events, script, url
):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = client()
    script["append"] = kind("why")
    for make in (MAKE["blocking"], MAKE["future"]):
        with pytest.raises(kind, match=outcome) as caught:
            make(channel, timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    wait_until_quiet(queue_of(client.queues))  # reading is no recovery
    del script["append"]
    assert push(channel) == LATER
    kinds = [type(event) for event in events if type(event) is not FailbackRejected]
    assert kinds == [JournalFailed, JournalRecovered, FailbackQueued]
    assert len(stored(url)) == 1


def test_results_that_the_journal_refuses_are_stored_later(shop, client, url, events, script):
    script["report"] = JournalUnavailable("locked")
    store(url, count=2, target=shop.target)
    client()
    wait_until(lambda: len(shop.calls) == 2)
    queue = queue_of(client.queues)
    wait_until(lambda: queue.journal.unstored_results == 2)
    assert len(stored(url)) == 2
    del script["report"]
    wait_for_none(url)
    assert len(shop.calls) == 2
    wait_until(lambda: events.of(JournalRecovered))
    assert [len(events.of(kind)) for kind in (JournalFailed, JournalRecovered)] == [1, 1]


# --- Leases ---


@pytest.fixture
def two(client, policy, new_queues, timer, manual_time):
    """Two queues on one journal, with the same manual time."""

    def make(**settings):
        queues = new_queues(timer), new_queues(timer)
        for one in queues:
            client(policy(**settings), queues=one)
        return [queue_of(one) for one in queues]

    return make


def test_two_queues_on_one_journal_share_the_calls_and_make_each_once(shop, two, url, manual_time):
    store(url, count=50, target=shop.target)
    queues = two()
    for _ in range(5):
        manual_time(1, *queues)
    assert stored(url) == []
    assert len(shop.calls) == len({key_of(seen) for seen in shop.calls}) == 50


def test_a_queue_whose_lease_has_ended_starts_no_attempt(
    shop, client, policy, url, manual_time, timer, new_queues, events
):
    store(url, target=shop.target, delay_s=1.5)
    queues = new_queues(timer)
    client(policy(), queues=queues)
    queue = queue_of(queues)
    manual_time(1, queue)
    with paused(queue):  # for as long as its lease
        queue._lease_ends_ns = 1
        timer.advance(1)
        assert [call.state for call in queue._calls] == [QueuedCallState.WAITING]
    manual_time(16, queue)
    assert [seen.metadata["grpc-previous-rpc-attempts"] for seen in shop.calls] == ["1"]
    assert stored(url) == []
    assert events.of(FailbackLeaseLost) == []  # no attempt was running


def test_a_call_that_waited_for_a_thread_while_its_lease_ended_is_not_attempted(
    shop, client, policy, url, manual_time, timer, new_queues, monkeypatch
):
    begin, calls = JournaledQueue.begin_attempt, []

    def pause(queue, call):
        if not calls:  # the process is paused for as long as its lease
            calls.append(call)
            queue._lease_ends_ns = 1
        return begin(queue, call)

    monkeypatch.setattr(JournaledQueue, "begin_attempt", pause)
    timer.advance(1)
    store(url, target=shop.target)
    queues = new_queues(timer)
    client(policy(), queues=queues)
    queue = queue_of(queues)
    wait_until(lambda: calls)
    wait_until_quiet(queue)
    assert shop.calls == []
    manual_time(16, queue)
    assert [seen.metadata["grpc-previous-rpc-attempts"] for seen in shop.calls] == ["1"]


def test_a_late_result_is_ignored(
    shop, client, policy, url, events, manual_time, timer, new_queues
):
    shop.then(hang := Hang())
    store(url, target=shop.target)
    first, second = new_queues(timer), new_queues(timer)
    client(policy(), queues=first)
    assert hang.begun.wait(WAIT_S)
    slow = queue_of(first)
    with paused(slow):  # it does not renew its lease
        timer.advance(16)
        client(policy(), queues=second)
        wait_for_none(url)
    timer.advance(1)
    (lost,) = events.of(FailbackLeaseLost)
    assert (lost.name, lost.journal, lost.count) == ("*", url, 1)
    shop.kill()  # ends the first attempt
    wait_until(lambda: not slow._calls)
    wait_until_quiet(slow)
    assert stored(url) == []
    assert len(events.of(FailbackLeaseLost)) == 1


def test_a_lease_is_renewed_while_an_attempt_runs(
    shop, client, policy, url, events, manual_time, timer, new_queues
):
    shop.then(hang := Hang())
    store(url, target=shop.target)
    queues = new_queues(timer)
    client(policy(journal=f"{url}?lease=1"), queues=queues)
    assert hang.begun.wait(WAIT_S)
    queue = queue_of(queues)
    for _ in range(40):
        timer.advance(0.1)
        wait_until(lambda: not queue._load_requested and not queue._loading.locked())
    assert queue.journal.backend.renew(queue.worker, 1.0)
    assert events.of(FailbackLeaseLost) == []
    shop.kill()


# --- Windows ---


def test_while_the_server_is_down_ten_calls_per_second_are_attempted(
    shop, client, policy, url, manual_time, timer, new_queues
):
    store(url, count=200, target=shop.target)
    shop.then(*["UNAVAILABLE"] * 500)
    queues = new_queues(timer)
    client(policy(backoff=0.1), queues=queues)
    queue = queue_of(queues)
    wait_until_quiet(queue)
    for second in range(1, 6):
        assert len(shop.calls) <= 10 * second
        manual_time(1, queue)
    assert len(shop.calls) >= 50


def test_after_its_recovery_a_server_gets_a_long_queue_fast(
    shop, client, policy, url, manual_time, timer, new_queues
):
    shop.then("UNAVAILABLE")
    store(url, count=300, target=shop.target)
    queues = new_queues(timer)
    client(policy(), queues=queues)
    queue = queue_of(queues)
    wait_until_quiet(queue)
    manual_time(1, queue)
    wait_until(lambda: len(shop.calls) >= 300)  # without another second
    wait_until_quiet(queue)
    assert len(stored(url)) == 1


def test_calls_are_delivered_at_a_rate_of_less_than_one_in_two_seconds(
    shop, client, policy, url, manual_time, timer, new_queues
):
    store(url, count=2, target=shop.target)
    queues = new_queues(timer)
    client(policy(rate=0.1), queues=queues)
    queue = queue_of(queues)
    wait_until_quiet(queue)
    manual_time(20, queue)
    assert len(shop.calls) == 2


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


# --- Attempts that this process has ended ---


def test_an_attempt_that_ends_with_its_channel_does_not_count(shop, client, policy, url):
    shop.then(hang := Hang())
    (number,) = store(url, target=shop.target)
    channel = client(policy(max_attempts=2))
    assert hang.begun.wait(WAIT_S)
    channel.close()
    wait_until(lambda: [call.state for call in stored(url)] == [CallState.READY])
    (call,) = stored(url)
    assert (call.id, call.attempts) == (number, 1)
    shop.kill()


def test_two_policies_with_a_journal_must_have_different_names(shop, policy):
    methods = {"/a/*": MethodPolicy(failback=policy(name="same", backoff=1.0))}
    channel = grpc.insecure_channel(shop.target)
    with channel, pytest.raises(ConfigurationError, match="have the name 'same'"):
        intercept_channel(channel, CallPolicy(failback=policy(name="same"), methods=methods))


def test_equal_policies_with_a_journal_share_a_queue(shop, policy, new_queues):
    queues = new_queues()
    for _ in range(2):
        with intercept_channel(
            grpc.insecure_channel(shop.target), CallPolicy(failback=policy()), queues=queues
        ):
            assert len(queues.stats()) == 1
