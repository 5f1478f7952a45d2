"""Calls of both worlds in a journal."""

import gc
import itertools
import weakref

import grpc
import pytest
from tenacity import wait_chain, wait_fixed

from fixtures.failback_queues import in_world
from fixtures.grpcio import with_target
from fixtures.journaled_clients import LATER, is_closed, key_of
from fixtures.journals import (
    BODY,
    ScriptedJournal,
    store,
    stored,
    wait_for_dead,
    wait_for_none,
    wait_until_quiet,
)
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, Gate, wait_until
from fixtures.worlds import each_kind
from rpcwheel import call_options
from rpcwheel.admission import BreakerPolicy
from rpcwheel.call import CallPolicy, HedgingPolicy, MethodPolicy, RetryPolicy
from rpcwheel.call.idempotency import IDEMPOTENCY_KEY
from rpcwheel.errors import (
    ConfigurationError,
    FailbackClosed,
    FailbackFull,
    JournalFull,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
)
from rpcwheel.events import (
    CallbackFailed,
    FailbackAttemptFailed,
    FailbackDelivered,
    FailbackDropped,
    FailbackGaveUp,
    FailbackLost,
    FailbackQueued,
    FailbackRejected,
    JournalFailed,
    JournalRecovered,
)
from rpcwheel.failback import FailbackPolicy
from rpcwheel.failback.journaled import NOT_COVERED
from rpcwheel.failback.stored import StoredFunction, StoredRpc, decode
from rpcwheel.journal.backend import CallState
from rpcwheel.journal.journal import Journal
from rpcwheel.rpc import Kind

SECRETS = (("authorization", "Bearer x"), ("cookie", "x"), ("proxy-authorization", "x"))


# --- What is stored ---


@each_kind
def test_a_call_is_stored_before_its_caller_is_answered_and_then_delivered(
    world, kind, shop, client, url, events
):
    shop.then(Fail("UNAVAILABLE", read=True))
    metadata = (("k", "v"), ("k-bin", b"\xff"), *SECRETS)
    messages = [b"ab"] if kind.startswith("unary") else [b"a", b"b"]
    call = world.call(client(), kind, *messages, timeout=WAIT_S, metadata=metadata)
    assert (call.result() if kind.endswith("unary") else call.read()) == LATER
    (call,) = stored(url)
    first = shop.calls[0]
    assert (call.queue, call.target, call.method) == ("*", shop.target, first.method)
    assert (call.key, call.attempts, call.order_key) == (key_of(first), 1, None)
    assert 0 < call.due_s <= 60
    assert call.error == f"UNAVAILABLE: scripted for {first.method}"
    body = decode(call.body)
    assert (list(body.requests), body.kind) == (messages, Kind[kind.upper()])
    assert body.metadata == (("k", "v"), ("k-bin", b"\xff"))
    assert body.timeout_s == WAIT_S
    assert world.do(client.queues.flush, WAIT_S)
    second = shop.calls[1]
    assert (second.requests, second.method) == (messages, first.method)
    assert (second.metadata["k"], second.metadata["k-bin"]) == ("v", b"\xff")
    assert not dict(SECRETS).keys() & second.metadata.keys()
    assert key_of(second) == key_of(first)
    assert second.metadata["grpc-previous-rpc-attempts"] == "1"
    wait_for_none(url)
    assert [type(event) for event in events] == [FailbackQueued, FailbackDelivered]


def test_a_method_may_have_multicallables_with_and_without_a_serializer(world, shop, client, url):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = client()
    typed = channel.unary_unary(UNARY_UNARY, request_serializer=str.encode)
    raw = channel.unary_unary(UNARY_UNARY)
    number = channel.unary_unary(UNARY_UNARY, request_serializer=int.to_bytes)
    for multicallable, request in ((typed, "a"), (raw, b"b"), (number, 3)):
        assert world.do(multicallable, request, timeout=WAIT_S) == LATER
    assert [decode(call.body).requests for call in stored(url)] == [(b"a",), (b"b",), (b"\3",)]
    assert world.do(client.queues.flush, WAIT_S)
    assert sorted(seen.requests for seen in shop.calls[3:]) == [[b"\3"], [b"a"], [b"b"]]


def test_a_channel_does_not_keep_the_serializers_of_dropped_multicallables(client):
    class Serializer:
        def __call__(self, message):
            return message

    channel, serializer = client(), Serializer()
    kept = weakref.ref(serializer)
    channel.unary_unary("/test.Shop/Rare", request_serializer=serializer)
    del serializer
    gc.collect()
    assert kept() is None


def test_the_policy_says_which_metadata_target_and_timeout_are_stored(
    world, shop, client, policy, push, url
):
    shop.then("UNAVAILABLE")
    metadata = (("abc", "1"), ("b", "2"), ("rpcwheel-criticality", "sheddable"))
    push(client(policy(metadata=("a*",), target="orders")), metadata=metadata)
    (call,) = stored(url)
    assert (call.target, decode(call.body).metadata) == ("orders", (("abc", "1"), metadata[-1]))
    assert world.do(client.queues.flush, WAIT_S)
    assert len(shop.calls) == 2
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    for settings in ({"timeout": 5.0}, {}):
        world.do(client(**settings).unary_unary(UNARY_UNARY), b"")
    assert [decode(call.body).timeout_s for call in stored(url)] == [5.0, 60.0]


@pytest.mark.parametrize("make", ["channel", "intercept_channel"])
def test_a_channel_of_a_kit_delivers_the_calls_of_an_earlier_process(
    world, make, shop, policy, url
):
    store(url, target=shop.target)
    kit = world.do(world.api.Kit, failback=policy())
    target = shop.target
    base = target if make == "channel" else with_target(world.channel(target), target)
    channel = world.do(getattr(kit, make), base)
    assert world.do(kit.flush, WAIT_S)
    assert world.do(kit.close) == []
    world.do(channel.close)
    assert [seen.requests for seen in shop.calls] == [[b"order"]]


def test_attempts_that_a_circuit_breaker_refuses_do_not_count(world, shop, policy, url, events):
    store(url, target=shop.target)
    failback = policy(backoff=0.0, max_attempts=1)  # which allows a stored call one more
    breaker = BreakerPolicy(health_check=False)
    kit = world.do(world.api.Kit, failback=failback, breaker=breaker)
    kit.breakers.force_open()
    world.keep(world.do(kit.channel, shop.target))
    wait_until(lambda: sum(type(event) is FailbackAttemptFailed for event in events) >= 3)
    (call,) = stored(url)
    assert call.attempts == 1
    kit.breakers.reset()
    wait_for_none(url)
    assert [seen.requests for seen in shop.calls] == [[b"order"]]
    world.do(kit.close)


def test_an_infinite_backoff_ends_with_max_age(shop, client, policy, push, url):
    shop.then("UNAVAILABLE")
    push(client(policy(backoff=float("inf"), max_age=100)))
    assert 90 < stored(url)[0].due_s <= 100


def test_a_policy_with_a_journal_is_refused_where_it_would_have_no_effect(world, policy):
    with pytest.raises(ConfigurationError, match="no effect with client_interceptors"):
        world.interceptors.client_interceptors(CallPolicy(failback=policy()))
    with (
        pytest.raises(ConfigurationError, match="no effect in call_options"),
        call_options(failback=policy()),
    ):
        pytest.fail("the options must be refused before the block")


def test_a_program_may_keep_only_a_stub(world, shop, policy, new_queues, url):
    shop.then("UNAVAILABLE")
    bare = with_target(world.channel(shop.target), shop.target)
    settings = CallPolicy(failback=policy(backoff=0.01))
    intercept = world.interceptors.intercept_channel
    channel = world.do(intercept, bare, settings, queues=new_queues())
    call = channel.unary_unary(UNARY_UNARY)
    del bare, channel
    gc.collect()
    assert world.do(call, b"order", timeout=WAIT_S) == LATER
    wait_for_none(url)
    assert len(shop.calls) == 2


def test_a_call_that_is_being_stored_does_not_end_with_its_channel(
    world, shop, client, url, script
):
    script["append"] = gate = Gate()
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.01, max_attempts=2)
    channel = client(idempotent=True, retry=retry)  # the call has waited for an attempt before
    call = world.call(channel, timeout=WAIT_S)
    assert gate.entered.wait(WAIT_S)
    world.do(channel.close)
    gate.opened.set()
    assert call.result() == LATER
    assert len(stored(url)) == 1


# --- The idempotency key ---

RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=0, max_attempts=2)
HEDGING = HedgingPolicy(delay=0, max_attempts=2, non_fatal_codes={"UNAVAILABLE"})


@pytest.mark.parametrize(
    "settings", [{"retry": RETRY}, {"hedging": HEDGING}], ids=["retry", "hedge"]
)
def test_the_key_is_the_same_in_retries_hedges_and_deliveries(
    world, settings, shop, client, push, url
):
    shop.then(*["UNAVAILABLE"] * 3)
    push(client(idempotent=True, **settings))
    assert len(shop.calls) == 2
    world.do(client.queues.flush, 0)
    wait_until(lambda: stored(url)[0].attempts == 2)
    assert world.do(client.queues.flush, WAIT_S)
    assert len({key_of(seen) for seen in shop.calls}) == 1
    assert len(shop.calls) == 4


def test_calls_have_different_keys_and_a_key_of_the_user_is_kept(shop, client, push, url):
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


def test_calls_of_policies_without_a_journal_have_no_key(world, shop, client, push):
    shop.then("UNAVAILABLE")
    push(client(FailbackPolicy(retry_on="UNAVAILABLE", backoff=60.0)))
    assert world.do(client.queues.flush, WAIT_S)
    assert [IDEMPOTENCY_KEY in seen.metadata for seen in shop.calls] == [False, False]


# --- Order ---


@pytest.mark.parametrize(
    "order_key", ["Shop", lambda request: request[:1].decode()], ids=["metadata", "request"]
)
def test_calls_with_an_order_key_are_delivered_in_order_also_by_the_next_process(
    world, order_key, shop, client, policy, push, url
):
    shop.then(*["UNAVAILABLE"] * 4)
    channel = client(policy(order_key=order_key))
    for request in (b"a1", b"a2", b"a3", b"b1"):
        push(channel, request, metadata=(("shop", request[:1].decode()),))
    world.do(client.queues.close, 0)
    assert {call.order_key for call in stored(url)} == {"a", "b"}
    shop.reset()
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    client(policy(order_key=order_key, backoff=0.02))
    assert world.do(client.queues.flush, WAIT_S)
    delivered = [seen.requests[0] for seen in shop.calls]
    of_a = [request for request in delivered if request.startswith(b"a")]
    assert [request for request, _ in itertools.groupby(of_a)] == [b"a1", b"a2", b"a3"]
    assert b"b1" in delivered


@pytest.mark.parametrize(
    ("order_key", "note"),
    [
        (lambda request: 1 / 0, "not queued by failback: division by zero"),
        ("k-bin", "order_key must give a str"),
    ],
)
def test_a_call_whose_order_key_cannot_be_had_fails_with_its_own_error(
    order_key, note, shop, client, policy, push, url, events
):
    shop.then("UNAVAILABLE")
    with pytest.raises(grpc.RpcError) as caught:
        push(client(policy(order_key=order_key)), metadata=(("k-bin", b"x"),))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert note in caught.value.__notes__[0]
    assert [type(event) for event in events] == [CallbackFailed]
    assert stored(url) == []


# --- Dead letters ---


def test_a_call_without_attempts_left_is_a_dead_letter_though_the_hook_raises(
    world, shop, client, policy, push, url, events
):
    shop.then(*["UNAVAILABLE"] * 3)
    letters = []

    def note(letter):
        letters.append(letter)
        raise RuntimeError

    push(client(policy(backoff=0.01, max_attempts=3, dead_letter=in_world(world, note))))
    (call,) = wait_for_dead(url)
    assert (call.attempts, call.reason) == (3, "no attempts left")
    assert call.error.startswith("UNAVAILABLE: scripted for")
    (gave_up,) = events.of(FailbackGaveUp)
    assert (gave_up.attempts, gave_up.reason, gave_up.function) == (3, call.reason, UNARY_UNARY)
    (letter,) = letters
    assert (letter.args, letter.attempts, letter.function) == ((b"order",), 3, UNARY_UNARY)
    assert len(shop.calls) == 3


POISONED = {
    "damaged": ({"body": BODY[:-1]}, "it cannot be made: its bytes are damaged: "),
    "function": ({"body": StoredFunction(b"{}").encoded()}, "it is the call of a function"),
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


def test_a_full_queue_raises_failback_full_or_drops_the_call(
    shop, client, policy, push, url, events
):
    shop.then(*["UNAVAILABLE"] * 3)
    channel = client(policy(max_pending=1))
    assert push(channel) == LATER
    with pytest.raises(FailbackFull, match=r"max_pending \(1\) calls of '\*'") as caught:
        push(channel)
    assert isinstance(caught.value, JournalFull)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert push(client(policy(max_pending=1, overflow="drop"))) == LATER
    kinds = [type(event) for event in events]
    assert kinds == [FailbackQueued, FailbackRejected, FailbackDropped]
    assert len(stored(url)) == 1
    assert client.queues.stats()["*"].dropped == 1


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (JournalUnavailable, "was not queued, because why"),
        (JournalFull, "was not queued, because why"),
        (JournalRefused, "was not queued, because why"),
        (JournalOutcomeUnknown, "may have been queued or not: why"),
    ],
)
@pytest.mark.parametrize("form", ["call", "future"])
def test_a_call_that_the_journal_does_not_store_is_refused_with_its_code(
    world, form, kind, outcome, shop, client, push, events, script, url
):
    shop.then(*["UNAVAILABLE"] * 2)
    channel = client()
    script["append"] = kind("why")
    with pytest.raises(kind, match=outcome) as caught:
        push(channel) if form == "call" else world.call(channel, timeout=WAIT_S).result()
    assert isinstance(caught.value, grpc.RpcError)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.__cause__.details().startswith("scripted")
    wait_until_quiet()  # reading is no recovery
    del script["append"]
    assert push(channel) == LATER
    kinds = [type(event) for event in events if type(event) is not FailbackRejected]
    assert kinds == [JournalFailed, JournalRecovered, FailbackQueued]
    assert len(stored(url)) == 1


@pytest.mark.parametrize("form", ["call", "future"])
def test_a_call_whose_journal_does_not_answer_ends_after_the_timeout_of_its_url(
    world, form, shop, client, policy, push, script, url, monkeypatch
):
    append = Journal.append

    def begun_append(*args):
        while not gate.entered.is_set():  # on a busy machine it may seem not to answer before
            future = append(*args)
            wait_until(lambda future=future: gate.entered.is_set() or future.done())
        return future

    monkeypatch.setattr(Journal, "append", begun_append)
    monkeypatch.setattr(ScriptedJournal, "is_file", False)
    script["append"] = gate = Gate()
    shop.then("UNAVAILABLE")
    channel = client(policy(journal=f"{url}?timeout=0.2"))
    with pytest.raises(JournalOutcomeUnknown, match=r"has not answered for 0\.2 s") as caught:
        push(channel) if form == "call" else world.call(channel, timeout=WAIT_S).result()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stored(url) == []
    gate.opened.set()
    wait_until(lambda: len(stored(url)) == 1)


WITHOUT_ADMIN = {"/test.Admin/*": MethodPolicy(failback=None)}


def test_stored_calls_of_a_method_without_failback_are_not_made_and_delay_no_others(
    world, shop, client, policy, url
):
    store(url, count=250, target=shop.target, method="/test.Admin/Delete")
    store(url, count=2, target=shop.target)
    client(policy(), methods=WITHOUT_ADMIN)
    assert world.do(client.queues.flush, WAIT_S)  # all that this process can deliver
    assert [call.method for call in shop.calls] == [UNARY_UNARY] * 2
    assert [call.error for call in stored(url)] == [NOT_COVERED] * 250


def test_a_stored_call_of_a_method_without_failback_is_a_dead_letter_after_its_time(
    shop, client, policy, url
):
    store(url, target=shop.target, method="/test.Admin/Delete", max_age_s=0.001)
    client(policy(), methods=WITHOUT_ADMIN)
    (call,) = wait_for_dead(url)
    assert call.reason == "its max_age has passed"
    assert shop.calls == []


def test_a_stored_call_is_made_by_a_channel_that_has_failback_for_its_method(
    shop, client, policy, url
):
    failback = policy()
    client(failback, methods={UNARY_UNARY: MethodPolicy(failback=None)})
    client(failback, queues=client.queues)
    store(url, target=shop.target)
    wait_for_none(url)
    assert [call.method for call in shop.calls] == [UNARY_UNARY]


# --- flush and close ---


def test_close_gives_the_calls_back_at_once(world, shop, client, url):
    store(url, count=5, target=shop.target, delay_s=1.9)
    client()
    wait_until(lambda: len(stored(url, CallState.TAKEN)) == 5)
    assert world.do(client.queues.close) == []
    assert len(stored(url, CallState.READY)) == 5
    client()
    assert world.do(client.queues.flush, WAIT_S)  # without waiting for the lease
    assert len(shop.calls) == 5


@pytest.mark.parametrize(
    ("code", "left"),
    [("", []), pytest.param("CANCELLED", [(CallState.READY, 1)], id="canceled")],
)
def test_close_waits_for_running_attempts(world, shop, client, policy, push, url, code, left):
    shop.then("UNAVAILABLE", hang := Hang(code=code))
    push(channel := client(policy(backoff=0.01, max_pending=1)))
    assert hang.begun.wait(WAIT_S)
    queues, seen, ended = client.queues, shop.calls[1], []

    def close():
        lost = world.do(queues.close, drain_timeout=WAIT_S)
        ended.append((lost, [(call.state, call.attempts) for call in stored(url)]))

    def answer():
        wait_until(lambda: is_closed(world, channel, shop))
        assert not ended
        seen.ended.set()

    run_threads(close, answer)
    assert ended == [([], left)]


@pytest.mark.parametrize(
    ("limit", "reasons", "state"),
    [(3, [], CallState.READY), (2, ["no attempts left"], CallState.DEAD)],
)
def test_a_call_that_fails_during_close_waits_for_its_backoff_or_is_a_dead_letter(
    world, shop, client, policy, push, url, limit, reasons, state
):
    shop.then("UNAVAILABLE", hang := Hang(code="UNAVAILABLE"))
    backoff = wait_chain(wait_fixed(0.01), wait_fixed(3600))
    push(channel := client(policy(backoff=backoff, max_attempts=limit, max_pending=1)))
    assert hang.begun.wait(WAIT_S)
    lost = []
    run_threads(
        lambda: lost.extend(world.do(client.queues.close, drain_timeout=WAIT_S)),
        lambda: (wait_until(lambda: is_closed(world, channel, shop)), shop.calls[1].ended.set()),
    )
    assert [call.reason for call in lost] == reasons
    (call,) = stored(url)
    assert (call.state, call.attempts) == (state, 2)
    assert call.state is CallState.DEAD or call.due_s > 1800


def test_close_gives_running_attempts_back_after_the_drain_timeout(
    world, shop, client, policy, push, url, events
):
    shop.then("UNAVAILABLE", hang := Hang())
    push(client(policy(backoff=0.01)))
    assert hang.begun.wait(WAIT_S)
    assert world.do(client.queues.close, drain_timeout=0.05) == []
    assert [call.state for call in stored(url)] == [CallState.READY]
    assert events.of(FailbackLost) == []
    shop.calls[1].ended.set()


def test_close_is_idempotent_and_calls_after_it_are_refused(world, shop, client, push, url):
    channel = client()
    assert world.do(client.queues.close) == world.do(client.queues.close) == []
    for refused in (channel, client(queues=client.queues)):
        shop.then("UNAVAILABLE")
        with pytest.raises(FailbackClosed, match=r"after close\(\)") as caught:
            push(refused)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stored(url) == []
    assert push(channel) == b"order"
    assert world.do(client.queues.flush, WAIT_S)  # nothing to wait for


def test_calls_stay_in_the_journal_if_the_channel_is_closed_first(
    world, shop, client, policy, push, url
):
    shop.then("UNAVAILABLE", hang := Hang(), "UNAVAILABLE", Hang())
    channel = client(policy(backoff=0.01))
    push(channel)
    assert hang.begun.wait(WAIT_S)
    push(channel)
    world.do(channel.close)  # during an attempt
    wait_until(lambda: len(stored(url, CallState.READY)) == 2)
    assert {call.attempts for call in stored(url)} == {1}  # that attempt does not count
