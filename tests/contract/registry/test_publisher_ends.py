"""A server's end has an order, and no engine, servicer or caller can keep it from coming."""

import os
import threading
import time

import grpc
import grpc_health.v1.health as grpc_health
import pytest
from grpc_health.v1 import health_pb2

from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.observe import ListenerFailed, ServingEnds
from rpcwheel.registry.named import channel
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers.memory import MemoryProvider
from rpcwheel.registry.publisher import Publisher
from rpcwheel.registry.sync import FailbackRegistry, open_registry
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import FlakyProvider

QUICK = {"port": 0, "lame_duck": 0.05, "grace": 5.0}
ALL = ["withdraw", "not serving", "wait", "stop", "closed"]


@pytest.fixture
def registry(memory):
    with open_registry(memory) as registry:
        yield registry


@pytest.fixture
def shop(make_shop):
    return make_shop()


def ids(registry):
    return [one.id for one in registry.lookup(SERVICE).instances]


def steps(events):
    return [one.step for one in events if isinstance(one, ServingEnds)]


# The order


def test_the_end_goes_step_by_step_and_each_is_told_with_its_reason(shop, memory, events):
    with Publisher(shop.server, memory, SERVICE, **QUICK) as published:
        port = published.port
        published.stop(reason="enough")
    assert wait_until(lambda: steps(events) == ALL)
    told = [one for one in events if isinstance(one, ServingEnds)]
    assert {(one.server, one.reason) for one in told} == {
        (f"{SERVICE} at 127.0.0.1:{port}", "enough")
    }


def test_while_clients_hear_of_its_end_a_server_goes_on_and_is_not_found(
    shop, memory, registry, timer, events
):
    settings = QUICK | {"lame_duck": 60.0}
    published = Publisher(shop.server, registry, SERVICE, timer=timer, **settings)
    published.start()
    with grpc.insecure_channel(f"127.0.0.1:{published.port}") as held:
        ask = held.unary_unary(WHO)
        assert ask(b"", timeout=WAIT_S) == b"a"
        assert published.wait_published(WAIT_S)
        published.begin_stop()
        assert wait_until(lambda: "wait" in steps(events))
        assert wait_until(lambda: timer.pending)
        assert ids(registry) == []
        assert ask(b"", timeout=WAIT_S) == b"a"
        assert "stop" not in steps(events)
        timer.advance(60.0)
        assert published.wait(WAIT_S)
    assert wait_until(lambda: steps(events) == ALL)
    assert timer.pending == 0


def test_who_follows_the_service_is_told_that_it_drains_before_it_is_gone(
    shop, memory, registry, monkeypatch
):
    monkeypatch.setattr("rpcwheel.registry.publisher.NOTICED_S", WAIT_S)
    seen = []

    def note(snapshot):
        seen.append([one.status for one in snapshot.instances])

    settings = QUICK | {"lame_duck": 60.0}
    with (
        registry.subscribe(SERVICE, note),
        Publisher(shop.server, memory, SERVICE, **settings) as published,
    ):
        assert wait_until(lambda: seen[-1:] == [["UP"]])
        published.begin_stop()
        assert wait_until(lambda: seen[-1] == ["DRAINING"])
        published.stop(grace=0)
        assert wait_until(lambda: seen[-1] == [])
    assert [statuses for statuses in seen if statuses] == [["UP"], ["DRAINING"]]


def test_that_it_drains_stands_there_for_a_while_for_those_who_look_now_and_then(shop, memory):
    times = []

    class Noting(MemoryProvider):
        def publish(self, instances):
            super().publish(instances)
            times.append((instances[0].status, time.monotonic()))

        def withdraw(self, instances):
            times.append(("gone", time.monotonic()))
            super().withdraw(instances)

    noting = Noting(parse_url(memory), Settings(lease_s=15.0, timeout_s=3.0))
    with (
        FailbackRegistry(noting) as registry,
        Publisher(shop.server, registry, SERVICE, **QUICK) as published,
    ):
        assert published.wait_published(WAIT_S)
    (_, _), (draining, since), (gone, until) = times
    assert (draining, gone) == ("DRAINING", "gone")
    assert until - since > 0.2


def test_no_call_fails_while_a_server_of_two_is_replaced(make_shop, memory):
    def serve(name):
        settings = {"port": 0, "lame_duck": 1.0}
        return Publisher(make_shop(name).server, memory, SERVICE, **settings)

    with serve("a"), channel(f"{memory}/{SERVICE}") as to_service:
        who = to_service.unary_unary(WHO)
        answers, over = [], threading.Event()

        def call():
            while not over.is_set():
                answers.append(who(b"", timeout=WAIT_S))

        def replace():
            for name in "bc":
                with serve(name) as published:
                    assert published.wait_published(WAIT_S)
                    assert wait_until(lambda: name.encode() in answers)  # noqa: B023
            over.set()

        run_threads(call, call, replace)
    assert set(answers) == {b"a", b"b", b"c"}


def test_calls_in_flight_may_end_within_the_grace(shop, memory):
    with (
        Publisher(shop.server, memory, SERVICE, **QUICK) as published,
        grpc.insecure_channel(f"127.0.0.1:{published.port}") as held,
    ):
        call = held.unary_unary(HOLD).future(b"", timeout=WAIT_S)
        assert shop.held.wait(WAIT_S)
        published.begin_stop()
        assert not published.wait(0.3)
        shop.release.set()
        assert call.result() == b"a"


def test_calls_that_outlast_the_grace_are_ended(shop, memory):
    with (
        Publisher(shop.server, memory, SERVICE, **QUICK | {"grace": 0.1}) as published,
        grpc.insecure_channel(f"127.0.0.1:{published.port}") as held,
    ):
        call = held.unary_unary(HOLD).future(b"", timeout=WAIT_S)
        assert shop.held.wait(WAIT_S)
        published.stop()
        assert call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("settings", [{"lame_duck": 600}, {"grace": 600}])
def test_whoever_is_in_a_hurry_ends_it_at_once(shop, memory, settings, events):
    published = Publisher(shop.server, memory, SERVICE, **QUICK | settings)
    published.start()
    with grpc.insecure_channel(f"127.0.0.1:{published.port}") as held:
        call = held.unary_unary(HOLD).future(b"", timeout=WAIT_S)
        assert shop.held.wait(WAIT_S)
        published.begin_stop()
        step = "wait" if "lame_duck" in settings else "stop"
        assert wait_until(lambda: steps(events)[-1:] == [step])
        published.stop(grace=0)
        assert call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
    assert published.state == "closed"


# Engines


def test_an_engine_that_hangs_holds_up_no_end(shop, memory, events):
    settings = Settings(lease_s=2.0, timeout_s=30.0)
    dead = FlakyProvider(MemoryProvider(parse_url(memory), settings))
    policy = RegistryPolicy(lease=2.0, timeout=30.0)
    registry = FailbackRegistry(dead, policy=policy)
    with Publisher(shop.server, registry, SERVICE, **QUICK) as published:
        assert published.wait_published(WAIT_S)
        dead.freeze()
        began = time.monotonic()
        published.stop()
        assert time.monotonic() - began < 15.0
    assert wait_until(lambda: steps(events) == ALL)
    dead.up()
    registry.close()


def test_whoever_is_in_a_hurry_waits_for_no_engine(shop, memory, timer, events):
    """By a clock that stands still, only the hurry can end it."""
    dead = FlakyProvider(MemoryProvider(parse_url(memory), Settings(2.0, 30.0)))
    registry = FailbackRegistry(dead, policy=RegistryPolicy(lease=2.0, timeout=30.0))
    published = Publisher(shop.server, registry, SERVICE, timer=timer, **QUICK)
    published.start()
    assert published.wait_published(WAIT_S)
    dead.freeze()
    published.begin_stop()
    assert wait_until(lambda: steps(events) == ["withdraw"])
    timer.advance(0.6)  # more than a hurried one may take
    assert not published.wait(0.2)
    published.stop(grace=0)
    dead.up()
    registry.close()


def test_an_engine_that_works_is_told_while_another_is_dead(shop, memory, registry):
    dead = FlakyProvider(MemoryProvider(parse_url(f"{memory}-dead"), Settings(2.0, 30.0)))
    with FailbackRegistry(dead, policy=RegistryPolicy(lease=2.0, timeout=30.0)) as other:
        with Publisher(shop.server, [other, registry], SERVICE, **QUICK) as published:
            assert published.wait_published(WAIT_S)
            dead.freeze()
        assert ids(registry) == []
        dead.up()


def test_a_registry_that_its_user_has_closed_is_no_matter(shop, registry, events):
    with Publisher(shop.server, registry, SERVICE, **QUICK):
        registry.close()
    assert wait_until(lambda: steps(events) == ALL)
    assert not [one for one in events if isinstance(one, ListenerFailed)]


def test_a_registry_of_the_users_that_raises_is_told_of(shop, memory, events):
    class Broken(FailbackRegistry):
        def unregister(self, what, *, wait=None):
            raise LookupError("no such thing")

    with Broken(memory) as registry, Publisher(shop.server, registry, SERVICE, **QUICK):
        pass
    assert wait_until(lambda: steps(events) == ALL)
    (failed,) = [one for one in events if isinstance(one, ListenerFailed)]
    assert isinstance(failed.error, LookupError)


# Health


class Health:
    """Notes what it is told, and whether the service was published then."""

    def __init__(self, registry) -> None:
        self.registry = registry
        self.told = []

    def set(self, service, status):
        self.told.append((service, status, len(ids(self.registry))))


def test_health_says_serving_before_it_is_published_and_not_once_it_is_withdrawn(
    shop, memory, registry
):
    health = Health(registry)
    with Publisher(shop.server, memory, SERVICE, health=health, **QUICK) as published:
        assert published.wait_published(WAIT_S)
    assert health.told == [("", 1, 0), (SERVICE, 1, 0), ("", 2, 0), (SERVICE, 2, 0)]


def test_grpcs_own_servicer_says_so_for_good(shop, memory):
    health = grpc_health.HealthServicer()

    def says(service):
        request = health_pb2.HealthCheckRequest(service=service)
        return health.Check(request, None).status

    with Publisher(shop.server, memory, SERVICE, health=health, **QUICK):
        assert says(SERVICE) == says("") == health_pb2.HealthCheckResponse.SERVING
    health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    assert says(SERVICE) == says("") == health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_that_fails_at_the_start_has_all_undone(shop, memory, registry):
    class Broken:
        def set(self, service, status):
            raise LookupError(service)

    published = Publisher(shop.server, memory, SERVICE, health=Broken(), **QUICK)
    with pytest.raises(LookupError):
        published.start()
    assert published.state == "closed"
    assert ids(registry) == []
    assert shop.server.wait_for_termination(timeout=0) is False


@pytest.mark.parametrize("hangs", [False, True])
def test_health_that_fails_at_the_end_holds_up_nothing(shop, memory, hangs, events):
    ends = threading.Event()

    class Broken:
        def set(self, service, status):
            if status == 2:
                ends.wait(WAIT_S if hangs else 0)
                raise LookupError(service)

    with Publisher(shop.server, memory, SERVICE, health=Broken(), **QUICK):
        pass
    assert wait_until(lambda: steps(events) == ALL)
    ends.set()
    assert wait_until(lambda: [one for one in events if isinstance(one, ListenerFailed)])


# Who ends it


def test_it_ends_once_whoever_asks_and_however_often(shop, memory, events):
    published = Publisher(shop.server, memory, SERVICE, **QUICK)
    published.start()
    published.start()
    run_threads(*[published.stop] * 4)
    published.stop()
    assert wait_until(lambda: steps(events) == ALL)
    with pytest.raises(RuntimeError, match="can't start again"):
        published.start()


def test_what_was_never_started_leaves_the_server_alone_and_lets_go_of_its_registries(shop, memory):
    published = Publisher(shop.server, memory, SERVICE, **QUICK)
    published.stop()
    assert published.registries[0].closed
    port = shop.listen()
    shop.server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as held:
        assert held.unary_unary(WHO)(b"", timeout=WAIT_S) == b"a"


def test_it_can_be_ended_by_a_call_that_it_serves(make_shop, memory):
    class Ending:
        def intercept_service(self, continuation, details):
            published.begin_stop("a call asked for it")
            return continuation(details)

    class Interceptor(Ending, grpc.ServerInterceptor):
        pass

    shop = make_shop(interceptors=[Interceptor()])
    with Publisher(shop.server, memory, SERVICE, **QUICK) as published:
        with grpc.insecure_channel(f"127.0.0.1:{published.port}") as held:
            assert held.unary_unary(WHO)(b"", timeout=WAIT_S) == b"a"
        assert not shop.server.wait_for_termination(WAIT_S)


def test_it_ends_too_when_its_block_is_left_by_an_error(shop, memory, registry):
    with pytest.raises(KeyboardInterrupt), Publisher(shop.server, memory, SERVICE, **QUICK):
        raise KeyboardInterrupt
    assert ids(registry) == []


def test_what_goes_on_beside_it_begins_when_it_serves_and_ends_after_it_has_stopped(shop, memory):
    seen = []

    def beside(published):
        seen.append(published.state)
        return lambda: seen.append(shop.server.wait_for_termination(0))

    with Publisher(shop.server, memory, SERVICE, beside=beside, **QUICK):
        assert seen == ["starting"]
    assert seen == ["starting", False]  # it had ended


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_ends_nothing(shop, memory, registry):
    with Publisher(shop.server, memory, SERVICE, **QUICK) as published:
        assert published.wait_published(WAIT_S)
        child = os.fork()
        if not child:
            published.stop()
            os._exit(7 if published.state == "serving" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(ids(registry)) == 1
        with grpc.insecure_channel(f"127.0.0.1:{published.port}") as held:
            assert held.unary_unary(WHO)(b"", timeout=WAIT_S) == b"a"
