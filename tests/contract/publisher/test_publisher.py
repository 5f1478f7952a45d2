"""A server is published while it serves, where clients reach it, and stops in order.

Both worlds have the same publisher with another adapter of the server. What an adapter does is
tested with `world`; what the publisher decides, with a server of `grpc`. What only the adapter of
grpc.aio has is tested with a server on the loop of the test: cancellation of tasks, and the signal
handlers of the loop.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc_health.v1.health as grpc_health
import pytest
from grpc_health.v1 import health_pb2

from fixtures.forks import holds_in_child
from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, aio_wait_until, in_thread, wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import (
    CallbackFailed,
    ShutdownStep,
    WithdrawalFailed,
    add_sink,
    remove_sink,
)
from rpcwheel.publisher import Publisher, aio
from rpcwheel.registry import Registry, RegistryPolicy, open_registry
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.testing import FlakyBackend

QUICK = {"port": 0, "lame_duck": 0.05, "grace": 60.0}
ALL = ["withdraw", "not serving", "wait", "stop", "closed"]
SERVING, NOT_SERVING = 1, 2
ENDED = {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
LONG = RegistryPolicy(lease_ttl=10**6, timeout=600.0)
"""Neither a lease nor a request ends within a test."""


@pytest.fixture
def registry(memory):
    with open_registry(memory, registry_policy=LONG) as registry:
        yield registry


@pytest.fixture
def shop(make_shop):
    return make_shop()


@pytest.fixture
def flaky(memory):
    """A backend whose engine fails on command, and a registry over it."""
    settings = Settings(lease_s=10**6, timeout_s=600.0)
    backend = FlakyBackend(open_backend(f"{memory}-flaky", settings))
    with Registry(backend, registry_policy=LONG) as registry:
        yield backend, registry
        backend.up()


@contextlib.contextmanager
def serving(shop, *args, **settings):
    """Publish a server; stop it at once, as the stop is not what is tested."""
    published = Publisher(shop.server, *args, **{"port": 0} | settings)
    published.start()
    try:
        yield published
    finally:
        published.stop(grace=0)


def started(shop, *args, **settings):
    """A publisher whose server serves and is in all registries."""
    published = Publisher(shop.server, *args, **QUICK | settings)
    published.start()
    assert published.wait_published(WAIT_S)
    return published


@pytest.fixture
def publish(world):
    """Publish and start a server of this world; it is stopped after the test."""

    def publish(shop, *args, **settings):
        published = world.api.Publisher(shop.server, *args, **QUICK | settings)
        world.at_end(published.stop, 0)
        world.do(published.start)
        return published

    return publish


def ids(registry, service=SERVICE):
    return [one.id for one in registry.lookup(service).instances]


def ask(port, method=WHO):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as to_server:
        return to_server.unary_unary(method)(b"", timeout=WAIT_S)


def steps(events):
    return [one.step for one in events.of(ShutdownStep)]


# Start


def test_a_server_without_a_port_is_bound_published_and_stopped_in_order(
    world, make_world_shop, publish, memory, registry, events
):
    shop = make_world_shop()
    published = publish(shop, memory, SERVICE)
    assert world.do(published.wait_published, WAIT_S)
    where = f"127.0.0.1:{published.port}"
    assert ids(registry) == [where]
    assert repr(published) == f"<Publisher of {SERVICE} at {where}: serving>"
    assert ask(published.port) == b"a"
    world.do(published.stop, reason="enough")
    assert wait_until(lambda: ids(registry) == [])
    assert wait_until(lambda: steps(events) == ALL)
    shutdown_steps = events.of(ShutdownStep)
    assert {(one.server, one.reason) for one in shutdown_steps} == {
        (f"{SERVICE} at {where}", "enough")
    }
    assert world.do(shop.server.wait_for_termination, WAIT_S) is False


def test_a_running_server_is_published_with_its_port(
    world, make_world_shop, publish, memory, registry
):
    shop = make_world_shop()
    port = world.do(shop.listen)
    world.do(shop.server.start)
    published = publish(shop, memory, SERVICE, port=port)
    assert world.do(published.wait_published, WAIT_S)
    assert ask(port) == b"a"
    assert [one.address for one in published.instances] == [f"127.0.0.1:{port}"]
    world.do(published.stop)
    assert wait_until(lambda: ids(registry) == [])
    with pytest.raises(grpc.RpcError):
        ask(port)


def test_the_services_default_to_those_that_the_server_has_handlers_for(
    make_shop, memory, registry
):
    not_published = ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
    shop = make_shop(services=["shop.Orders", "shop.Audit", *not_published])
    with serving(shop, memory) as published:
        assert published.wait_published(WAIT_S)
        assert registry.services() == ["shop.Audit", "shop.Orders"]


def test_a_server_whose_services_are_unknown_is_not_started(world, make_world_shop, memory):
    """A server of grpc.aio does not show the services that it has handlers for."""
    options = {"services": ["grpc.health.v1.Health"]} if world.name == "sync" else {}
    shop = make_world_shop(**options)
    port = world.do(shop.listen)
    published = world.api.Publisher(shop.server, memory, port=port)
    with pytest.raises(ConfigurationError, match="or name the services that are published"):
        world.do(published.start)
    assert published.state == "closed"
    world.do(shop.server.start)
    assert ask(port, f"/{options.get('services', [SERVICE])[0]}/Who") == b"a"


def test_the_settings_of_an_instance_are_published(shop, memory, registry):
    settings = {
        "id": "worker-1",
        "weight": 7,
        "zone": "eu-1",
        "metadata": {"commit": "abc"},
        "version": "2.0",
    }
    before = time.time()
    url = f"{memory}/{SERVICE}?group=blue&version=1.0"
    with serving(shop, url, **settings) as published:
        assert published.wait_published(WAIT_S)
        (instance,) = registry.lookup(SERVICE).instances
    expected = settings | {"group": "blue"}  # of the URL
    assert expected == {name: getattr(instance, name) for name in expected}
    assert before - 1 <= instance.started_at <= time.time()


@pytest.mark.parametrize("metadata", [{"commit": "abc"}, [("commit", "abc")]])
def test_the_metadata_is_a_copy_of_a_mapping_or_of_pairs(shop, memory, metadata):
    published = Publisher(shop.server, memory, SERVICE, port=0, metadata=metadata)
    metadata.clear()
    published.start()
    assert published.instances[0].metadata == {"commit": "abc"}
    published.stop(grace=0)


def test_a_server_is_published_in_several_registries_and_those_of_the_user_stay_open(
    world, make_world_shop, publish, memory, registry
):
    """A registry that the publisher opens has the API of the publisher's world."""
    users = world.keep(world.do(world.api.open_registry, memory, registry_policy=LONG))
    other = f"{memory}-other"
    with open_registry(other) as looking:
        published = publish(make_world_shop(), [users, other], SERVICE)
        assert world.do(published.wait_published, WAIT_S)
        assert ids(registry) == ids(looking) == [published.instances[0].id]
        of_user, opened = published.registries
        assert of_user is users
        assert isinstance(opened, world.module("registry").Registry)
        assert published.registrations[0] == users.registrations[0]
        assert world.do(published.registrations[1].wait_published, WAIT_S)
        world.do(published.stop)
        assert wait_until(lambda: ids(registry) == ids(looking) == [])
    assert not users.closed
    assert opened.closed


def test_nothing_is_published_before_the_start(world, make_world_shop, memory):
    published = world.api.Publisher(make_world_shop().server, memory, SERVICE, **QUICK)
    try:
        assert not world.do(published.wait_published, WAIT_S)
    finally:
        world.do(published.stop, 0)


def test_a_registry_that_is_down_at_the_start_gets_the_instance_later(shop, flaky):
    backend, registry = flaky
    backend.down()
    with serving(shop, registry, SERVICE) as published:
        assert ask(published.port) == b"a"
        assert not published.wait_published(0.01)
        backend.up()
        assert published.wait_published(None)


# Where the server listens


@pytest.fixture(scope="module")
def port_of_another_process():
    """A port at which another process listens, on the loopback, and which it would share."""
    code = (
        "import socket; listener = socket.create_server(('127.0.0.1', 0), reuse_port=True); "
        "print(listener.getsockname()[1], flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield int(process.stdout.readline())
    process.communicate("\n")


def test_an_address_that_does_not_reach_the_server_is_refused(make_shop, memory, registry):
    shop = make_shop()
    port = shop.listen()
    message = (
        rf"nothing accepts connections at 127\.0\.0\.2:{port} .*listens at 127\.0\.0\.1:{port}"
    )
    with pytest.raises(ConfigurationError, match=message):
        Publisher(shop.server, memory, SERVICE, port=port, host="127.0.0.2").start()
    shop = make_shop()
    port = shop.listen()
    shop.server.start()
    with pytest.raises(ConfigurationError, match="the server runs already"):
        Publisher(shop.server, memory, SERVICE, port=port + 1).start()
    assert ask(port) == b"a"  # it is the user's, and runs on
    assert ids(registry) == []


def test_a_port_of_another_process_is_refused_unless_the_server_has_bound_it(
    memory, port_of_another_process
):
    """Though both processes allow to share it, which is gRPC's default."""
    port = port_of_another_process
    server = grpc.server(ThreadPoolExecutor(1))
    with pytest.raises(ConfigurationError, match="another process listens there"):
        Publisher(server, memory, SERVICE, port=port).start()
    assert server.add_insecure_port(f"[::]:{port}") == port
    with Publisher(server, memory, SERVICE, port=port, grace=0, lame_duck=0) as published:
        assert published.instances[0].port == port


def test_the_address_of_a_proxy_is_published_unchecked(
    make_shop, memory, port_of_another_process, set_limit
):
    set_limit("publisher.netinfo.CONNECT_TIMEOUT_S", 0.01)
    for host, port in (("127.0.0.1", port_of_another_process), ("192.0.2.7", 50051)):
        shop = make_shop()
        shop.listen()
        with serving(shop, memory, SERVICE, port=port, host=host) as published:
            assert published.instances[0].address == f"{host}:{port}"
            assert published.listening_port is None


def test_a_server_over_tls_is_published_as_one_if_it_has_its_port(make_shop, memory, certificates):
    shop = make_shop()
    message = r"call add_secure_port\('\[::\]:0', credentials\)"
    with pytest.raises(ConfigurationError, match=message):
        Publisher(shop.server, memory, SERVICE, port=0, protocol="grpcs").start()
    shop = make_shop()
    port = shop.server.add_secure_port("127.0.0.1:0", certificates.server_credentials())
    with serving(shop, memory, SERVICE, port=port, protocol="grpcs") as published:
        assert published.instances[0].protocol == "grpcs"


# The order of the stop


def test_a_lame_duck_serves_and_is_withdrawn(shop, registry, timer, events):
    published = started(shop, registry, SERVICE, lame_duck=60.0, grace=0, timer=timer)
    published.begin_stop()
    assert wait_until(lambda: "wait" in steps(events))
    assert wait_until(lambda: ids(registry) == [])
    assert ask(published.port) == b"a"
    timer.advance(60.0)
    assert published.wait(WAIT_S)
    assert wait_until(lambda: steps(events) == ALL)
    assert timer.pending == 0


def test_an_instance_is_draining_for_a_while_before_it_is_withdrawn(shop, memory, timer):
    """So that clients of a polled registry see it, too."""
    inner = open_backend(memory, Settings(lease_s=10**6, timeout_s=600.0))
    times = []

    class Noting(FlakyBackend):
        def publish(self, instances):
            super().publish(instances)
            times.append((instances[0].status, time.monotonic()))

        def withdraw(self, instances):
            times.append(("gone", time.monotonic()))
            super().withdraw(instances)

    with Registry(Noting(inner), registry_policy=LONG) as registry:
        published = started(shop, registry, SERVICE, timer=timer)
        published.begin_stop()
        assert wait_until(lambda: len(times) == 3)
        published.stop(grace=0)
    assert [status for status, _ in times] == ["UP", "DRAINING", "gone"]
    assert times[2][1] - times[1][1] > 0.2


@pytest.fixture
def held_call():
    """Hold a call of a server that is published; returns the call, and the event that ends it."""
    with contextlib.ExitStack() as channels:

        def hold(shop, published):
            target = f"127.0.0.1:{published.port}"
            channel = channels.enter_context(grpc.insecure_channel(target))
            call = channel.unary_unary(HOLD).future(b"", timeout=WAIT_S)
            assert wait_until(shop.held.is_set)
            return call

        yield hold


def test_calls_in_flight_may_end_within_the_grace(
    world, make_world_shop, publish, held_call, memory, events
):
    shop = make_world_shop()
    published = publish(shop, memory, SERVICE)
    call = held_call(shop, published)
    published.begin_stop()
    assert wait_until(lambda: "stop" in steps(events))
    world.do(shop.release.set)
    assert call.result() == b"a"


@pytest.mark.parametrize(("setting", "step"), [("lame_duck", "wait"), ("grace", "stop")])
def test_stop_with_grace_0_hurries_a_running_stop(
    world, make_world_shop, publish, held_call, memory, setting, step, events
):
    shop = make_world_shop()
    published = publish(shop, memory, SERVICE, **{setting: 600})
    call = held_call(shop, published)
    published.begin_stop()
    assert wait_until(lambda: steps(events)[-1:] == [step])
    run_threads(*[lambda: world.do(published.stop, grace=0)] * 3)
    assert published.state == "closed"
    assert call.code() in ENDED


def test_a_smaller_grace_shortens_a_running_stop(
    world, make_world_shop, publish, held_call, memory, timer, monkeypatch
):
    shop = make_world_shop()
    published = publish(shop, memory, SERVICE, timer=timer, lame_duck=0, grace=600)
    call = held_call(shop, published)
    stopping, stop = threading.Event(), shop.server.stop

    def noted_stop(grace):
        stopping.set()
        return stop(grace)

    monkeypatch.setattr(shop.server, "stop", noted_stop)
    published.begin_stop()
    assert stopping.wait(WAIT_S)
    published.begin_stop(grace=100)
    published.begin_stop(grace=200)
    timer.advance(100)
    assert wait_until(lambda: published.state == "closed")
    assert call.code() in ENDED


def test_start_and_stop_are_idempotent(world, make_world_shop, publish, memory, events):
    published = publish(make_world_shop(), memory, SERVICE)
    world.do(published.start)
    run_threads(*[lambda: world.do(published.stop)] * 4)
    world.do(published.stop)
    assert wait_until(lambda: steps(events) == ALL)
    with pytest.raises(RuntimeError, match="can't start again"):
        world.do(published.start)


def test_a_server_that_was_stopped_before_is_refused(make_shop):
    ended = make_shop().server
    ended.start()
    ended.stop(None)
    with pytest.raises(ConfigurationError, match="the server was stopped before"):
        Publisher(ended, "memory://", SERVICE, port=50051)


def test_a_publisher_that_was_never_started_leaves_the_server_alone_and_closes_its_registries(
    shop, memory
):
    published = Publisher(shop.server, memory, SERVICE, **QUICK)
    published.stop()
    assert published.registries[0].closed
    port = shop.listen()
    shop.server.start()
    assert ask(port) == b"a"


def test_a_served_call_may_begin_the_stop(make_shop, memory):
    class Ending(grpc.ServerInterceptor):
        def intercept_service(self, continuation, details):
            published.begin_stop("a call asked for it")
            return continuation(details)

    shop = make_shop(interceptors=[Ending()])
    with Publisher(shop.server, memory, SERVICE, **QUICK) as published:
        assert ask(published.port) == b"a"
        assert not shop.server.wait_for_termination(WAIT_S)


def test_on_serving_and_its_result_are_called_where_the_server_runs(
    world, make_world_shop, publish, memory
):
    shop, seen = make_world_shop(), []

    def running_loop():
        with contextlib.suppress(RuntimeError):
            return asyncio.get_running_loop()

    def on_serving(published):
        seen.append((published.state, running_loop()))
        return lambda: seen.append(("stopped", running_loop()))

    published = publish(shop, memory, SERVICE, on_serving=on_serving)
    loop = world.do(running_loop)
    assert (seen, loop is None) == ([("starting", loop)], world.name == "sync")
    world.do(published.stop, grace=0)
    assert wait_until(lambda: seen[1:] == [("stopped", loop)])


def test_stop_in_a_forked_child_does_nothing(shop, memory, registry):
    with serving(shop, memory, SERVICE) as published:
        assert published.wait_published(WAIT_S)
        assert holds_in_child(lambda: published.stop() or published.state == "serving")
        assert len(ids(registry)) == 1
        assert ask(published.port) == b"a"


def test_a_stop_during_the_start_undoes_the_start(world, make_world_shop, memory, events):
    class Health:
        def set(self, service, status):
            if status == SERVING:
                return published.stop(reason="enough")  # in aio a coroutine, which is awaited
            return None

    shop = make_world_shop()
    published = world.api.Publisher(shop.server, memory, SERVICE, health=Health(), **QUICK)
    world.do(published.start)
    assert published.state == "closed"
    assert published.registrations == ()
    assert world.do(shop.server.wait_for_termination, WAIT_S) is False
    assert wait_until(lambda: steps(events) == ["not serving", "stop", "closed"])


@pytest.mark.parametrize(("fails", "ran_before"), [("health", False), ("on_serving", True)])
def test_a_failed_start_leaves_only_a_server_running_that_ran_before(
    shop, memory, registry, fails, ran_before
):
    class Broken:
        def set(self, service, status):
            raise LookupError(service)

        def __call__(self, published):
            raise LookupError("no such thing")

    port = shop.listen()
    if ran_before:
        shop.server.start()
    published = Publisher(shop.server, memory, SERVICE, **QUICK | {"port": port, fails: Broken()})
    with pytest.raises(LookupError):
        published.start()
    assert published.state == "closed"
    assert wait_until(lambda: ids(registry) == [])
    if ran_before:
        assert ask(port) == b"a"
    else:
        assert shop.server.wait_for_termination(WAIT_S) is False


# Registries at the stop


def test_a_hurried_stop_does_not_wait_for_a_frozen_registry(shop, flaky, timer, events):
    """The clock stands still, so only the grace of 0 can end the wait."""
    backend, frozen = flaky
    published = started(shop, frozen, SERVICE, timer=timer)
    backend.freeze()
    published.begin_stop()
    assert wait_until(lambda: steps(events) == ["withdraw"])
    timer.advance(0.6)  # more than it may take without grace
    published.stop(grace=0)
    assert wait_until(lambda: steps(events) == ALL)
    (failed,) = events.of(WithdrawalFailed)
    assert failed.registry == frozen.url


def test_hanging_registries_delay_neither_the_stop_nor_other_registries(
    make_shop, memory, registry, timer, events
):
    goes_on, statuses = threading.Event(), []

    class Health:
        def set(self, service, status):
            statuses.append((self, status))

    class Hanging(Registry):
        """A user's registry that does not answer to withdrawals."""

        def unregister(self, what, *, wait=None):
            goes_on.wait()

    settings = QUICK | {"timer": timer}
    hanging = [Hanging(memory) for _ in range(6)]
    every = [
        Publisher(make_shop().server, [one, memory], f"{SERVICE}{n}", health=Health(), **settings)
        for n, one in enumerate(hanging)
    ]
    try:
        for one in every:
            one.start()
            one.begin_stop()
        assert wait_until(lambda: steps(events).count("withdraw") == 6)
        assert wait_until(
            lambda: timer.advance(1.0) >= 0 and all(one.state == "closed" for one in every)
        )
        assert len({health for health, status in statuses if status == NOT_SERVING}) == 6
        assert wait_until(lambda: all(one.registries[1].closed for one in every))
    finally:
        goes_on.set()
        for one in hanging:
            one.close()


def test_a_failed_withdrawal_is_an_event_and_a_closed_registry_is_not(
    shop, registry, memory, events
):
    class Broken(Registry):
        def unregister(self, what, *, wait=None):
            raise LookupError("no such thing")

    with (
        Broken(memory) as broken,
        Publisher(shop.server, [registry, broken], SERVICE, **QUICK),
    ):
        registry.close()
    assert wait_until(lambda: steps(events) == ALL)
    (failed,) = events.of(CallbackFailed)
    assert isinstance(failed.error, LookupError)


def test_a_hanging_sink_does_not_delay_the_stop(shop, memory, set_limit):
    set_limit("publisher.publisher.FLUSH_TIMEOUT_S", 0.01)
    goes_on = threading.Event()

    def hang(event):
        if isinstance(event, ShutdownStep):
            goes_on.wait()

    add_sink(hang)
    try:
        published = started(shop, memory, SERVICE)
        published.begin_stop()
        assert published.wait(WAIT_S)
    finally:
        remove_sink(hang)
        goes_on.set()


def test_the_stop_keeps_what_the_user_has_changed_or_unregistered(shop, registry, memory):
    published = started(shop, registry, SERVICE, "shop.Other")
    published.registrations[0].update(weight=7)
    published.registrations[1].unregister(wait=WAIT_S)
    shown = {SERVICE: [], "shop.Other": []}

    def listener(snapshot):
        shown[snapshot.service].append([(one.weight, one.status) for one in snapshot.instances])

    with (
        open_registry(memory) as other,
        other.subscribe(SERVICE, listener),
        other.subscribe("shop.Other", listener),
    ):
        assert wait_until(lambda: shown[SERVICE][-1:] == [[(7, "UP")]] and shown["shop.Other"])
        published.stop()
        assert wait_until(lambda: shown[SERVICE][-1] == [])
        assert other.lookup("shop.Other").instances == ()
    assert {weight for [(weight, _)] in filter(None, shown[SERVICE])} == {7}
    assert shown["shop.Other"] == [[]]
    assert wait_until(lambda: {one.state for one in published.registrations} == {"GONE"})


# Health


def test_health_is_serving_before_it_is_published_and_not_serving_once_it_is_withdrawn(
    shop, memory, registry, timer, events
):
    statuses = []

    class Health:
        def set(self, service, status):
            statuses.append((service, status, len(ids(registry))))

    published = started(shop, memory, SERVICE, health=Health(), timer=timer, registry_policy=LONG)
    published.begin_stop()  # the time that it has to withdraw does not pass
    assert wait_until(lambda: "wait" in steps(events))
    assert statuses == [("", 1, 0), (SERVICE, 1, 0), ("", 2, 0), (SERVICE, 2, 0)]
    published.stop(grace=0)


def test_the_health_servicer_of_grpc_stays_not_serving(world, make_world_shop, publish, memory):
    """A server of grpc.aio may have that of grpc, too."""
    for module in (grpc_health, grpc_health.aio)[: 1 + (world.name == "aio")]:
        health = module.HealthServicer()

        def statuses(health=health):
            requests = [health_pb2.HealthCheckRequest(service=one) for one in (SERVICE, "")]
            return {world.do(health.Check, request, None).status for request in requests}

        published = publish(make_world_shop(), memory, SERVICE, health=health)
        assert statuses() == {SERVING}
        world.do(published.stop, grace=0)
        world.do(health.set, SERVICE, SERVING)
        assert statuses() == {NOT_SERVING}


def test_a_health_servicer_that_hangs_and_fails_does_not_delay_the_stop(
    shop, memory, events, set_limit
):
    set_limit("publisher.publisher.HEALTH_TIMEOUT_S", 0.01)
    goes_on = threading.Event()

    class Broken:
        def set(self, service, status):
            if status == NOT_SERVING:
                goes_on.wait()
                raise LookupError(service)

        def __repr__(self):
            raise ZeroDivisionError

    with Publisher(shop.server, memory, SERVICE, health=Broken(), **QUICK):
        pass
    assert wait_until(lambda: steps(events) == ALL)
    goes_on.set()
    assert wait_until(lambda: events.of(CallbackFailed))


def test_wait_ends_after_a_signal_that_does_not_interrupt_the_main_thread(shop, memory):
    published = started(shop, memory, SERVICE, signals=True)
    main = threading.main_thread().ident

    def receive_a_signal():
        wait_until(lambda: sys._current_frames()[main].f_code is threading.Condition.wait.__code__)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    receiving = in_thread(receive_a_signal)
    assert published.wait(WAIT_S)
    receiving.result(WAIT_S)


# grpc.aio only


async def test_a_server_and_a_registry_of_the_sync_api_are_refused(
    make_aio_shop, shop, memory, registry
):
    with pytest.raises(TypeError, match="registry must be"):
        aio.Publisher(make_aio_shop().server, registry, SERVICE, port=1)
    with pytest.raises(TypeError, match=r"there is rpcwheel\.Publisher"):
        aio.Publisher(shop.server, memory, SERVICE, port=1)


@pytest.mark.parametrize("ran_before", [False, True])
async def test_a_canceled_start_is_undone(make_aio_shop, memory, ran_before, set_limit):
    set_limit("publisher.shutdown.HURRIED_TIMEOUT_S", 0.01)
    called, shop = asyncio.Event(), make_aio_shop()

    class Hanging:
        async def set(self, service, status):
            called.set()
            await asyncio.Event().wait()

    port = shop.listen()
    if ran_before:
        await shop.server.start()
    settings = QUICK | {"port": port, "health": Hanging()}
    published = aio.Publisher(shop.server, memory, SERVICE, **settings)
    starting = asyncio.create_task(published.start())
    await asyncio.wait_for(called.wait(), WAIT_S)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await published.wait(WAIT_S)
    assert published.registrations == ()
    if ran_before:
        assert await asyncio.to_thread(ask, port) == b"a"
    else:
        assert await shop.server.wait_for_termination(WAIT_S) is False


async def test_a_start_that_is_canceled_between_two_calls_of_user_code_is_undone(
    make_aio_shop, memory
):
    shop = make_aio_shop()

    class Hanging:
        async def set(self, service, status):
            if status == SERVING and service:
                await asyncio.Event().wait()
            if status == SERVING:
                starting.cancel()

    settings = QUICK | {"port": shop.listen(), "health": Hanging()}
    published = aio.Publisher(shop.server, memory, SERVICE, **settings)
    starting = asyncio.create_task(published.start())
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await published.wait(WAIT_S)
    assert published.registrations == ()


async def test_canceling_stop_does_not_cancel_the_shutdown(make_aio_shop, memory, events, timer):
    async with aio.Publisher(
        make_aio_shop().server, memory, SERVICE, timer=timer, **QUICK
    ) as published:
        stopping = asyncio.create_task(published.stop())
        await aio_wait_until(lambda: steps(events))
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await aio_wait_until(lambda: timer.advance(1.0) >= 0 and published.state == "closed")
        await aio_wait_until(lambda: steps(events) == ALL)


async def test_a_signal_handler_of_the_loop_is_refused(make_aio_shop, memory):
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, print)
    published = aio.Publisher(make_aio_shop().server, memory, SERVICE, signals=True, **QUICK)
    try:
        with pytest.raises(ConfigurationError, match=r"SIGTERM has a handler of loop\.add_signal"):
            await published.start()
        assert published.state == "new"
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        await published.stop()
