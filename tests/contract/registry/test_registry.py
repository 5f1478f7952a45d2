"""`Registry`: registrations, lookups and subscriptions, also while the engine fails.

The registry of aio awaits the blocking one; rules of its methods are tested with `world`.
"""

import gc
import os
import random
import threading
import warnings
import weakref

import pytest
from tenacity.wait import wait_base

from fixtures.flaky_backends import POLICY, HangingBackend, flaky_backend, instance, published_ids
from fixtures.forks import holds_in_child
from fixtures.leaks import no_garbage_collector
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel.errors import (
    ConfigurationError,
    InstanceIdConflict,
    NotPublished,
    RegistryClosed,
    RegistryRefused,
    RegistryUnavailable,
    TimerStopped,
)
from rpcwheel.events import (
    CallbackFailed,
    InstancePublished,
    RecordSkipped,
    RegistryFailed,
    TaskSlow,
    add_sink,
    remove_sink,
)
from rpcwheel.registry import Registry, RegistryPolicy, open_registry
from rpcwheel.registry.backend import View
from rpcwheel.timer import ManualTimer


@pytest.fixture
def registry(backend, timer):
    with Registry(backend, registry_policy=POLICY.replace(snapshot=False)) as registry:
        yield registry
        backend.up()
    assert timer.pending == 0


@pytest.fixture
def world_registry(world, backend, timer):
    """The registry of the API of each world."""
    kind = world.module("registry").Registry
    registry = world.do(kind, backend, registry_policy=POLICY.replace(snapshot=False))
    yield registry
    backend.up()
    world.do(registry.close)
    assert timer.pending == 0


def advance_until(timer, condition):
    """Let time pass until it is true."""
    return wait_until(lambda: timer.advance(0.02) >= 0 and condition())


def requests(backend, method):
    return sum(name == method for name, _ in backend.requests)


def test_a_registered_instance_can_be_looked_up_changed_and_withdrawn(world, world_registry):
    registration = world.do(world_registry.register, instance(), wait=WAIT_S)
    assert (registration.state, registration.error) == ("PUBLISHED", None)
    assert world_registry.registrations == (registration,)
    assert world.do(world_registry.lookup, "shop.Orders").instances == (instance(),)
    changes = {"weight": 7, "status": "DRAINING", "metadata": {"zone": "a"}, "group": "g"}
    registration.update(**changes)
    assert world.do(registration.wait_published, WAIT_S)
    assert world.do(world_registry.lookup, "shop.Orders").instances == (instance(**changes),)
    assert world.do(world_registry.services) == ["shop.Orders"]
    world.do(registration.unregister, wait=float("inf"))
    assert registration.state == "GONE"
    empty = world.do(world_registry.lookup, "shop.Orders")
    assert (empty.instances, empty.source) == ((), "live")


def test_a_key_has_one_registration_until_it_is_unregistered(registry):
    first = registry.register(instance())
    assert registry.register(instance(weight=3), wait=float("inf")) == first
    assert (registry.registrations, first.instance.weight) == ((first,), 3)
    registry.unregister(first, wait=WAIT_S)
    second = registry.register(instance(), wait=WAIT_S)
    first.unregister(wait=WAIT_S)
    assert (first.state, second.state) == ("GONE", "PUBLISHED")


def test_an_unavailable_engine_is_an_error_only_for_callers_that_wait(
    world, world_registry, backend
):
    backend.down("the cable is cut")
    registration = world.do(world_registry.register, instance())
    assert wait_until(lambda: registration.error)
    with pytest.raises(NotPublished, match=r"not published at memory://.* within 0.05 s") as raised:
        world.do(world_registry.register, instance(), wait=0.05)
    assert isinstance(raised.value.__cause__, RegistryUnavailable)
    assert (registration.state, world_registry.up) == ("PENDING", False)
    assert world.do(registration.wait_published, 0) is False
    with pytest.raises(RegistryUnavailable, match="not withdrawn") as raised:
        world.do(registration.unregister, wait=0.05)
    assert isinstance(raised.value.__cause__, RegistryUnavailable)
    assert registration.state == "WITHDRAWING"


@pytest.mark.parametrize(
    ("ask", "port", "change", "error", "said"),
    [
        ("register", 1, lambda of: of.close(), RegistryClosed, r"closed before shop\.Orders/"),
        ("register", 1, lambda of: of.unregister(instance()), NotPublished, "unregistered meanwh"),
        ("unregister", 2, lambda of: of.register(instance(2)), RegistryUnavailable, "again meanw"),
    ],
)
def test_the_error_of_a_wait_says_what_ended_it(registry, backend, ask, port, change, error, said):
    registry.register(instance(2), wait=WAIT_S)
    backend.down()

    def end_the_wait():
        assert wait_until(lambda: len(backend.requests) > 1)
        change(registry)

    ending = in_thread(end_the_wait)
    with pytest.raises(error, match=said):
        getattr(registry, ask)(instance(port), wait=WAIT_S)
    ending.result(WAIT_S)


# Lookup


def test_a_failing_lookup_returns_the_last_answer_or_raises(world, world_registry, backend):
    world.do(world_registry.register, instance(), wait=WAIT_S)
    live = world.do(world_registry.lookup, "shop.Orders")
    for fails, error in ((backend.down, RegistryUnavailable), (backend.refuse, RegistryRefused)):
        fails()
        last = world.do(world_registry.lookup, "shop.Orders")
        assert (last.instances, last.source) == (live.instances, "cache")
        with pytest.raises(error):
            world.do(world_registry.lookup, "never.Seen")
        with pytest.raises(error):
            world.do(world_registry.services)


def test_the_error_of_a_lookup_is_freed_without_the_collector(world, world_registry, backend):
    def failed():
        try:
            world.do(world_registry.lookup, "shop.Orders")
        except RegistryUnavailable as error:
            return weakref.ref(error)

    backend.down()
    with no_garbage_collector():
        left = failed()
        assert wait_until(lambda: left() is None)


def test_a_lookup_waits_no_longer_than_its_wait(world, world_registry, backend):
    world.do(world_registry.register, instance(), wait=WAIT_S)
    world.do(world_registry.lookup, "shop.Orders")
    backend.freeze()
    assert world.do(world_registry.lookup, "shop.Orders", wait=0.01).source == "cache"
    with pytest.raises(RegistryUnavailable, match=r"within 0\.01 s"):
        world.do(world_registry.lookup, "never.Seen", wait=0.01)


def test_a_lookup_raises_if_no_record_is_readable(registry, backend, monkeypatch, events):
    monkeypatch.setattr(backend, "lookup", lambda _: View({"a": b"rubbish"}))
    with pytest.raises(RegistryUnavailable, match=r"none of the records of other\.Service"):
        registry.lookup("other.Service")
    assert wait_until(lambda: events.of(RecordSkipped))


# Subscriptions


def test_one_watch_serves_all_subscribers_of_a_service_until_the_last_is_closed(registry, backend):
    subscriptions = [registry.subscribe("shop.Orders") for _ in range(3)]
    assert subscriptions[0].wait(WAIT_S) == subscriptions[2].wait(WAIT_S)
    assert [method for method, _ in backend.requests] == ["watch"]
    for subscription in subscriptions[:2]:
        subscription.close()
    registry.register(instance(), wait=WAIT_S)
    assert wait_until(lambda: subscriptions[2].snapshot.instances)
    subscriptions[2].close()
    subscriptions[2].close()
    with registry.subscribe("shop.Orders") as again:
        assert again.wait(WAIT_S).instances == (instance(),)
    backend.down()
    last = registry.lookup("shop.Orders")
    assert (last.instances, last.source) == ((instance(),), "cache")


def test_a_listener_that_raises_is_an_event_and_is_called_again(world, world_registry, events):
    calls = []

    def listener(snapshot):
        calls.append(snapshot)
        raise ZeroDivisionError

    subscription = world.do(world_registry.subscribe, "shop.Orders", listener)
    assert wait_until(lambda: calls)
    world.do(world_registry.register, instance(), wait=WAIT_S)
    assert wait_until(lambda: len(calls) == 2)
    assert wait_until(lambda: events.of(CallbackFailed))
    world.do(subscription.close)


def test_a_wait_without_a_snapshot_in_time_is_an_error(world, world_registry, backend):
    backend.freeze()
    subscription = world.do(world_registry.subscribe, "shop.Orders")
    assert subscription.snapshot is None
    with pytest.raises(NotPublished, match="nothing is known"):
        world.do(subscription.wait, 0.02)
    world.do(subscription.close)
    with pytest.raises(NotPublished, match="when this subscription ended; subscribe again"):
        world.do(subscription.wait, WAIT_S)


def test_a_watch_that_cannot_begin_is_an_event_and_is_tried_again(
    registry, backend, timer, events, monkeypatch
):
    monkeypatch.setattr(backend, "watch", lambda *_: 1 / 0)
    with registry.subscribe("shop.Orders") as subscription:
        failures = lambda: events.of(RegistryFailed)  # noqa: E731
        assert wait_until(failures)
        assert (failures()[0].request, failures()[0].delay_s) == ("watch", 1.0)
        monkeypatch.undo()
        assert advance_until(timer, lambda: subscription.snapshot)


# The end


def test_close_withdraws_ends_subscriptions_and_refuses_later_calls(
    world, world_registry, backend, timer
):
    registration = world.do(world_registry.register, instance(), wait=WAIT_S)
    subscription = world.do(world_registry.subscribe, "shop.Orders", lambda _: None)
    world.do(world_registry.close, WAIT_S)
    world.do(world_registry.close, WAIT_S)
    assert (registration.state, world_registry.closed) == ("GONE", True)
    assert (published_ids(backend), timer.pending) == ([], 0)
    for late, *arguments in (
        (world_registry.register, instance()),
        (world_registry.unregister, instance()),
        (world_registry.lookup, "shop.Orders"),
        (world_registry.subscribe, "shop.Orders"),
        (lambda: registration.update(weight=1),),
        (world_registry.services,),
    ):
        with pytest.raises(RegistryClosed, match="was closed"):
            world.do(late, *arguments)
    world.do(registration.unregister)
    world.do(subscription.close)
    assert world.do(registration.wait_published) is False


def test_close_returns_in_time_and_ends_lookups_if_the_backend_hangs(timer):
    let_go = threading.Event()
    backend = HangingBackend(flaky_backend(timer).inner, let_go)
    registry = Registry(backend)
    registry.register(instance())
    assert wait_until(lambda: backend.is_called)
    waiting = in_thread(registry.lookup, "shop.Orders", wait=float("inf"))
    registry.close(0.1)
    with pytest.raises(RegistryClosed):
        waiting.result(WAIT_S)
    let_go.set()
    assert wait_until(lambda: timer.pending == 0)


@pytest.mark.parametrize("request_name", ["watch", "lookup"])
def test_close_does_not_wait_for_a_first_request_that_hangs(backend, monkeypatch, request_name):
    entered, let_go, results = threading.Event(), threading.Event(), []
    send = getattr(backend, request_name)

    def hang(*arguments):
        entered.set()
        results.append(let_go.wait(WAIT_S))
        return send(*arguments)

    monkeypatch.setattr(backend, request_name, hang)
    registry = Registry(backend)
    if request_name == "watch":
        registry.subscribe("shop.Orders")
    else:
        with pytest.raises(RegistryUnavailable):
            registry.lookup("shop.Orders", wait=0)
    assert entered.wait(WAIT_S)
    registry.close(2 * WAIT_S)
    let_go.set()
    assert wait_until(lambda: results == [True])  # else it was waited for


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_registry_is_closed_in_a_forked_child_and_unchanged_in_the_parent(registry, backend):
    registration = registry.register(instance(), wait=WAIT_S)
    subscription = registry.subscribe("shop.Orders")
    assert subscription.wait(WAIT_S).instances
    ended = threading.Event()

    def take_locks():
        while not ended.is_set():
            registration.update(weight=7)
            registry.subscribe("shop.Orders").close()

    traffic = in_thread(take_locks)

    def is_closed():
        with pytest.raises(RegistryClosed):
            registry.register(instance(2))
        registry.close()
        return [one.id for one in subscription.snapshot.instances] == [instance().id]

    for _ in range(10):
        assert holds_in_child(is_closed)
    ended.set()
    traffic.result(WAIT_S)
    assert registration.wait_published(WAIT_S)
    assert published_ids(backend) == ["10.0.0.1:1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_an_instance_of_before_a_fork_can_be_changed_and_unregistered_in_the_child():
    before = instance()

    def is_withdrawn():
        with open_registry("memory://child") as registry:
            registration = registry.register(before)
            registration.update(weight=7)
            assert registration.wait_published(WAIT_S)
            assert registration.instance == before.replace(weight=7, epoch=before.epoch)
            registry.unregister(before, wait=WAIT_S)
            return registry.lookup(before.service).instances == ()

    assert holds_in_child(is_withdrawn)


def test_a_registry_that_is_dropped_without_close_warns(timer):
    backend = flaky_backend(timer)
    registry = Registry(backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del registry
        gc.collect()
    assert any("was dropped and not closed" in str(one.message) for one in caught)
    backend.close()


# While the engine fails


def test_a_timer_that_is_stopped_is_reported_once_and_closing_still_withdraws(events):
    timer, backend = ManualTimer(), flaky_backend(None)
    registry = Registry(backend, timer=timer)
    registry.register(instance(), wait=WAIT_S)
    timer.stop()
    registry.register(instance(2), wait=WAIT_S)
    stopped = lambda: [  # noqa: E731
        one for one in events if isinstance(getattr(one, "error", None), TimerStopped)
    ]
    assert wait_until(stopped)
    other = flaky_backend(None, backend.url.hosts[0][0])
    registry.close()
    assert published_ids(other) == []
    assert len(stopped()) == 1
    other.close()


def id_conflicts(events):
    return [one for one in events if isinstance(getattr(one, "error", None), InstanceIdConflict)]


def test_two_registries_of_a_process_with_one_id_are_an_id_conflict_too(
    registry, backend, timer, events
):
    beside = flaky_backend(timer, backend.url.hosts[0][0])
    ours = registry.register(instance(), wait=WAIT_S)
    beside.publish([instance()])
    timer.advance(2.2)
    again = lambda: {one.again for one in events.of(InstancePublished)}  # noqa: E731
    assert wait_until(lambda: "missing" in again())
    assert not id_conflicts(events)  # somebody may have changed it by hand
    beside.publish([instance()])
    assert advance_until(timer, lambda: id_conflicts(events))
    assert wait_until(lambda: ours.state == "PUBLISHED" and ours.error is None)
    beside.close()


def test_a_backend_that_raises_another_error_is_an_event_and_is_tried_again(
    registry, backend, timer, events, monkeypatch
):
    monkeypatch.setattr(backend, "publish", lambda _: 1 / 0)
    registration = registry.register(instance())
    assert wait_until(lambda: isinstance(registration.error, ZeroDivisionError))
    monkeypatch.undo()
    assert advance_until(timer, lambda: registration.state == "PUBLISHED")
    assert wait_until(lambda: events.of(RegistryFailed))


def test_a_successful_lookup_ends_the_backoff(registry, backend):
    backend.down()
    registration = registry.register(instance())
    assert wait_until(lambda: registration.error)
    backend.up()
    assert registry.lookup("shop.Orders").source == "live"
    assert registration.wait_published(WAIT_S)  # and no time has passed


def test_a_caller_that_waits_ends_the_backoff(backend, timer):
    policy = POLICY.replace(backoff=3600.0, snapshot=False)
    with Registry(backend, registry_policy=policy) as registry:
        backend.down()
        registration = registry.register(instance())
        assert wait_until(lambda: registration.error)
        backend.up()
        register = threading.Thread(
            target=registry.register, args=(instance(2),), kwargs={"wait": float("inf")}
        )
        register.start()
        assert advance_until(timer, lambda: registration.state == "PUBLISHED")
        assert timer.now < 3600
        register.join(WAIT_S)


class CustomBackoff(wait_base):
    """A user's strategy that calls a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, retry_state):
        self.function()
        return 0.02


def test_a_backoff_that_hangs_delays_no_caller():
    hangs, goes_on, results = threading.Event(), threading.Event(), []
    backoff = CustomBackoff(lambda: hangs.set() or results.append(goes_on.wait(WAIT_S)))
    backend = flaky_backend(None)
    with Registry(
        backend, registry_policy=POLICY.replace(backoff=backoff, snapshot=False)
    ) as registry:
        backend.down()
        registration = registry.register(instance())
        assert hangs.wait(WAIT_S)
        registry.register(instance(2))
        assert len(registry.registrations) == 2
        registry.subscribe("shop.Orders").close()
        backend.up()
        goes_on.set()
        assert registration.wait_published(WAIT_S)
    assert all(results)  # else a caller has waited


def test_requests_are_made_one_at_a_time_on_worker_threads(backend, timer, monkeypatch):
    names, running = set(), threading.Lock()

    def watched(method):
        def call(*arguments):
            assert running.acquire(blocking=False)
            names.add(threading.current_thread().name)
            result = method(*arguments)
            running.release()
            return result

        return call

    for method in ("publish", "renew", "lookup", "withdraw"):
        monkeypatch.setattr(backend, method, watched(getattr(backend, method)))
    with Registry(backend, registry_policy=POLICY.replace(snapshot=False)) as registry:
        for port in range(1, 30):
            registry.register(instance(port))
            registry.lookup("shop.Orders")
            timer.advance(0.5)
        assert advance_until(timer, lambda: {one.error for one in registry.registrations} == {None})
    assert all(name.startswith("rpcwheel-worker") for name in names)
    assert published_ids(backend) == []


def test_a_sink_that_hangs_delays_neither_renewals_nor_close(registry, backend, timer):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(event):
        if not isinstance(event, TaskSlow):  # emitted on the thread of the test, if it stalls
            hangs.set()
            goes_on.wait(2 * WAIT_S)

    add_sink(hang)
    try:
        registry.register(instance(), wait=WAIT_S)
        assert hangs.wait(WAIT_S)
        assert advance_until(timer, lambda: requests(backend, "renew"))
        registry.close(WAIT_S)
        assert published_ids(backend) == []
    finally:
        remove_sink(hang)
        goes_on.set()


def test_after_random_faults_the_last_registrations_are_published(timer):
    backend = flaky_backend(timer, timeout_s=0.01)
    registry = Registry(
        backend, registry_policy=POLICY.replace(timeout=0.01, backoff=0.05, snapshot=False)
    )
    ended = threading.Event()
    last = {}

    def change_minds(port):
        chance = random.Random(port)
        for number in range(100):
            if chance.random() < 0.5:
                registry.register(instance(port, weight=number))
                last[port] = number
            else:
                registry.unregister(instance(port))
                last[port] = None
            ended.wait(chance.random() * 0.003)

    def trouble():
        chance = random.Random("engine")
        troubles = ("down", "up", "refuse", "lose_answers", "forget", "freeze", "up")
        while not ended.is_set():
            getattr(backend, chance.choice(troubles))()
            timer.advance(chance.random() * 0.5)
            ended.wait(chance.random() * 0.005)

    engine = threading.Thread(target=trouble, daemon=True)
    engine.start()
    run_threads(*(lambda port=port: change_minds(port) for port in range(1, 5)))
    ended.set()
    engine.join(WAIT_S)
    backend.up()
    wanted = {f"10.0.0.1:{port}": number for port, number in last.items() if number is not None}

    def is_settled():
        ours = {one.instance.id: one.instance.weight for one in registry.registrations}
        states = {one.state for one in registry.registrations}
        return (
            published_ids(backend) == sorted(wanted) and ours == wanted and states <= {"PUBLISHED"}
        )

    assert advance_until(timer, is_settled)
    timer.advance(20)  # a late request is corrected
    assert advance_until(timer, is_settled)
    registry.close()
    assert timer.pending == 0


# Arguments


def test_open_registry_contacts_no_server():
    with open_registry(
        "memory://somewhere", registry_policy=RegistryPolicy(lease_ttl=1)
    ) as registry:
        assert (registry.url, registry.up) == ("memory://somewhere", False)
        assert registry.policy.lease_ttl == 1
        assert repr(registry) == "<Registry memory://somewhere: down, 0 registered>"


def test_the_lease_of_a_custom_backend_must_be_that_of_the_policy(backend):
    with Registry(backend) as registry:
        assert (registry.policy.lease_ttl, registry.policy.timeout) == (6.0, 600.0)
    with pytest.raises(ConfigurationError, match="for a lease of 6 s, the policy has 15 s"):
        Registry(backend, registry_policy=RegistryPolicy())


def test_a_registration_of_another_registry_is_refused(registry):
    with open_registry("memory://elsewhere") as other:
        registration = other.register(instance())
        with pytest.raises(ConfigurationError, match="another registry"):
            registry.unregister(registration)


def test_an_invalid_update_changes_nothing(registry):
    registration = registry.register(instance(), wait=WAIT_S)
    for change, said in (
        ({"weight": -1}, "weight"),
        ({"wait": 1}, "no setting"),
        ({"service": "other"}, "service can't be changed"),
        ({"id": "other"}, "id can't be changed"),
        ({"epoch": "other"}, "epoch can't be changed"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            registration.update(**change)
    assert registration.instance == instance()
    registration.unregister()
    with pytest.raises(NotPublished, match="register it again"):
        registration.update(weight=1)


def test_a_registry_leaves_the_random_numbers_of_the_program_alone(registry, timer):
    state = random.getstate()
    registration = registry.register(instance(), wait=WAIT_S)
    with registry.subscribe("shop.Orders") as subscription:
        subscription.wait(WAIT_S)
    registration.unregister(wait=WAIT_S)
    assert random.getstate() == state
