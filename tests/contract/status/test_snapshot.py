"""`snapshot()` against components of both worlds."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import asdict, fields

import grpc
import pytest

from fixtures.certificates import mutual_credentials
from fixtures.flaky_backends import flaky_backend
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.shops import SERVICE, WHO
from fixtures.small_servers import ECHOING, METHOD, running
from fixtures.waiting import WAIT_S, in_thread, wait_until
from fixtures.worlds import SyncWorld, only_aio
from rpcwheel import FailbackPolicy, Kit, aio
from rpcwheel.balancer import BalancedChannel
from rpcwheel.failback.queue import MAX_STATUS_ENTRIES
from rpcwheel.journal import Depth
from rpcwheel.publisher import Publisher
from rpcwheel.registry import Registry, RegistryPolicy, ServiceInstance
from rpcwheel.status.snapshot import snapshot
from rpcwheel.telemetry import components
from rpcwheel.telemetry.call_counts import CallCounts
from rpcwheel.timer import WheelTimer

FAILBACK = FailbackPolicy(retry_on="UNAVAILABLE", backoff=600.0, default=b"later", name="orders")


def row(rows, **values):
    """The only row with these values."""
    (found,) = (
        one for one in rows if all(getattr(one, key) == value for key, value in values.items())
    )
    return found


def tables_with(**values):
    """The names of the tables that have a row with these values."""
    status = snapshot()
    tables = {one.name: getattr(status, one.name) for one in fields(status)}
    return [
        name
        for name, rows in tables.items()
        for one in (rows if isinstance(rows, tuple) else ())
        if all(getattr(one, key, None) == value for key, value in values.items())
    ]


def instance_of(shop, **others):
    return ServiceInstance(service="shop.Here", host="127.0.0.1", port=shop.port, **others)


@contextmanager
def watched(world, kit, credentials=None):
    """A server with an idle detector of the kit; yields its address."""
    options = {"interceptors": kit.server_interceptors(), "credentials": credentials}
    with running(world, ECHOING, **options) as (server, port):
        world.do(kit.detect_idle, server, port)
        yield f"127.0.0.1:{port}"


def test_a_status_is_json():
    status = snapshot()
    text = json.dumps(asdict(status), allow_nan=False)
    assert json.loads(text)["pid"] == status.pid
    assert status.grpcio == grpc.__version__
    assert status.version
    assert status.started is None or 0 < status.started <= status.now


def test_a_timer_is_described_until_it_is_stopped():
    with WheelTimer(name="described") as timer:
        timer.new_timeout(print, 600.0)
        found = row(snapshot().timers, name="described")
        kind = type(timer._timer_state.queue).__name__
        assert (found.queue, found.stats.pending, found.late_s) == (kind, 1, 0.0)
        assert not found.problem
    assert tables_with(name="described") == []


def test_a_timer_whose_event_loop_is_blocked_is_late():
    async def block():
        async with aio.AsyncWheelTimer() as timer:
            timer.name = "blocked"
            timer.new_timeout(lambda _: None, 0.01)
            wait_until(lambda: row(snapshot().timers, name="blocked").late_s > 0.1)
            return row(snapshot().timers, name="blocked").problem

    assert "should have woken up" in asyncio.run(block())


def test_a_failback_queue_lists_its_oldest_calls(world, shop):
    shop.kill()
    kit = world.keep(world.do(world.api.Kit, failback=FAILBACK))
    channel = world.keep(world.do(kit.channel, shop.target))
    for _ in range(MAX_STATUS_ENTRIES + 1):
        assert world.call(channel).result() == b"later"
    found = row(snapshot().queues, name="orders")
    assert found.stats.pending == MAX_STATUS_ENTRIES + 1
    assert len(found.entries) == MAX_STATUS_ENTRIES
    first, last = found.entries[0], found.entries[-1]
    assert (first.function, first.attempts, first.error_kind) == (UNARY_UNARY, 1, "UNAVAILABLE")
    assert first.error.startswith("UNAVAILABLE: ")
    assert 0 < first.next_attempt_s <= 600.0
    assert found.oldest_age_s == first.age_s >= last.age_s
    assert found.problem == f"{MAX_STATUS_ENTRIES + 1} calls wait"
    world.do(kit.close, 0)
    world.do(channel.close)
    assert tables_with(name="orders") == []


def test_an_attempt_that_is_never_due_is_json_and_its_channel_has_a_problem(shop):
    shop.kill()
    policy = FAILBACK.replace(backoff=float("inf"))
    with Kit(failback=policy) as kit, kit.channel(shop.target) as channel:
        assert channel.unary_unary(UNARY_UNARY)(b"a") == b"later"
        status = snapshot()
        assert row(status.queues, name="orders").entries[0].next_attempt_s is None
        found = row(status.channels, target=shop.target)
        assert found.problem == "its servers cannot be reached"
        json.dumps(asdict(status), allow_nan=False)
        kit.close(0)


def test_heartbeats_and_channels_of_a_kit(world, shop, timer):
    kit = world.keep(world.do(world.api.Kit, heartbeat=10.0, timer=timer))
    channel = world.keep(world.do(kit.channel, shop.target))
    assert row(snapshot().heartbeats, target=shop.target).state == "unused"
    assert world.call(channel).result() == b"x"
    timer.advance(2.0)
    status = snapshot()
    beat = row(status.heartbeats, target=shop.target)
    assert (beat.silence_s, beat.sent, beat.problem) == (2.0, 0, "")
    found = row(status.channels, target=shop.target)
    assert (found.state, found.connection, found.calls) == ("READY", 1, 0)
    assert not found.balanced
    shop.then(hang := Hang())
    call = world.call(channel)
    assert hang.begun.wait(WAIT_S)
    assert row(snapshot().channels, target=shop.target).calls == 1
    call.cancel()
    world.do(channel.close)
    assert tables_with(target=shop.target) == []


def test_subchannels_of_a_balanced_channel(world, shop):
    here = instance_of(shop, weight=7, zone="z")
    away = ServiceInstance(service="shop.Here", host="127.0.0.1", port=1, id="away")
    kind = world.module("balancer").BalancedChannel
    channel = world.keep(world.do(kind, "shop.Here", instances=[here, away]))
    assert world.call(channel, wait_for_ready=True).result() == b"x"
    subchannel = next(one for one in channel.subchannels if one.id == here.id)
    world.do(subchannel.mark_unhealthy, "a test")
    found = row(snapshot().channels, target="shop.Here")
    assert (found.balanced, found.state, found.stale) == (True, "READY", False)
    mine = row(found.subchannels, id=here.id)
    assert (mine.address, mine.weight, mine.zone) == (shop.target, 7, "z")
    assert (mine.healthy, mine.problem) == (False, "unhealthy: a test")
    assert row(found.subchannels, id="away").address == "127.0.0.1:1"
    assert tables_with(target=here.target) == []  # it is no channel of its own


def test_a_channel_that_keeps_the_instances_of_a_failed_registry_is_stale(shop):
    with BalancedChannel("shop.Here", instances=[instance_of(shop)]) as channel:
        assert channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
        channel.update([])
        found = row(snapshot().channels, target="shop.Here")
        assert found.stale
        assert found.subchannels[0].problem.startswith("stale")


def test_connections_of_a_server():
    server, client = mutual_credentials("client.example", "orders.example")
    with (
        Kit(idle=600.0) as kit,
        watched(SyncWorld(), kit, server) as address,
        grpc.secure_channel(address, client) as channel,
    ):
        assert channel.unary_unary(METHOD)(b"a") == b"a"

        def found():
            return row(snapshot().connections, local_address=f"ipv4:{address}")

        wait_until(lambda: found().state == "idle")
        one = found()
        assert "grpc-python" in one.user_agent
        assert "client.example" in one.tls_subject
        assert "orders.example" in one.tls_names
        assert (one.calls_total, one.calls, one.streams) == (1, 0, 0)
        assert one.idle_s >= 0.0
        assert one.connected_at <= snapshot().now


def test_connections_are_listed_while_the_detector_checks_them():
    with Kit(idle=600.0) as kit, watched(SyncWorld(), kit) as address:
        (detector,) = kit._detectors
        with grpc.insecure_channel(address) as channel:
            assert channel.unary_unary(METHOD)(b"a") == b"a"
            with detector._round_lock:
                connections = in_thread(snapshot).result(WAIT_S).connections
            assert any(one.calls_total == 1 for one in connections)


@only_aio
def test_aio_components_are_described_while_their_event_loop_is_blocked(world):
    def snapshot_meanwhile():
        return in_thread(snapshot).result(WAIT_S)

    kit = world.keep(world.do(aio.Kit, idle=600.0))
    with watched(world, kit) as address:
        channel = world.keep(world.do(kit.channel, address))
        assert world.call(channel, method=METHOD).result() == b"x"
        status = world.do(snapshot_meanwhile)
        assert status.errors == ()
        assert row(status.connections, local_address=f"ipv4:{address}")
        assert row(status.channels, target=address).state == "READY"


def test_registrations_and_subscriptions_of_a_registry(world, memory, timer):
    instance = ServiceInstance(service="shop.Orders", host="10.0.0.1", port=50051)
    policy = RegistryPolicy(lease_ttl=9.0)
    registry = world.keep(
        world.do(world.api.open_registry, memory, timer=timer, registry_policy=policy)
    )
    world.do(registry.register, instance, wait=WAIT_S)
    followed = world.keep(world.do(registry.subscribe, "shop.Orders"))
    world.do(followed.wait, WAIT_S)
    timer.advance(1.0)
    found = row(snapshot().registries, url=memory)
    assert (found.up, found.lease_ttl_s, found.error) == (True, 9.0, "")
    (registered,) = found.registrations
    assert (registered.id, registered.state) == (instance.id, "PUBLISHED")
    assert (registered.address, registered.lease_age_s) == ("10.0.0.1:50051", 1.0)
    (subscribed,) = found.subscriptions
    assert (subscribed.instances, subscribed.source) == (1, "live")
    world.do(registry.close)
    assert tables_with(url=memory) == []


def test_a_registry_that_fails_has_a_problem_without_its_password(timer):
    with Registry("redis://user:secret@127.0.0.1:1", timer=timer):
        assert "secret" not in json.dumps(asdict(snapshot()))
    backend = flaky_backend(timer)
    instance = ServiceInstance(service="shop.Orders", host="10.0.0.1", port=1)
    policy = RegistryPolicy(lease_ttl=6.0)
    with Registry(backend, registry_policy=policy, timer=timer) as registry:
        registry.register(instance, wait=WAIT_S)
        backend.down()
        registry.register(instance.replace(weight=3))
        wait_until(lambda: row(snapshot().registries, url=registry.url).problem)
        found = row(snapshot().registries, url=registry.url)
        assert not found.up
        assert found.problem.startswith("RegistryUnavailable: ")
        assert found.registrations[0].problem == found.problem
        backend.up()


def test_a_published_server_and_its_clients(make_shop, memory):
    shop = make_shop()
    port = shop.listen()
    with Publisher(shop.server, memory, port=port):
        found = row(snapshot().publishers, port=port)
        assert (found.state, found.services, found.problem) == ("serving", (SERVICE,), "")
        with Kit() as kit, kit.channel(f"{memory}/{SERVICE}") as channel:
            call = channel.unary_unary(WHO)
            # The instance may not be published yet.
            assert call(b"", timeout=WAIT_S, wait_for_ready=True) == b"a"
            (subchannel,) = row(snapshot().channels, target=SERVICE).subchannels
            assert subchannel.state == "READY"
    assert tables_with(port=port) == []


def test_calls_by_method_and_code(monkeypatch):
    counts = CallCounts()
    monkeypatch.setattr(components._COMPONENTS, "counts", counts)
    get = counts.client.method("/shop.Orders/Get", "unary")
    served = counts.server.method("/shop.Orders/Get", "unary")
    for code in ("OK", "OK", "OK", "NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED"):
        get.end(get.begin(), code)
        served.end(served.begin(), code)
    get.begin()
    status = snapshot()
    assert status.calls_counted
    found, on_server = status.methods
    assert (found.failed, on_server.failed) == (2, 1)
    assert (found.side, found.method, found.kind) == ("client", "/shop.Orders/Get", "unary")
    assert (found.started, found.in_flight) == (7, 1)
    codes = {one.code: one.count for one in found.codes}
    assert codes == {"OK": 3, "NOT_FOUND": 1, "UNAVAILABLE": 1, "DEADLINE_EXCEEDED": 1}
    assert 0 < found.p50_s <= found.p99_s


def test_without_metrics_no_calls_are_reported(monkeypatch):
    monkeypatch.setattr(components._COMPONENTS, "counts", None)
    status = snapshot()
    assert (status.calls_counted, status.methods) == (False, ())


class Broken:
    """A component whose attributes raise."""

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}\x1b[31m")


@pytest.mark.parametrize(
    "name",
    ["timer", "failback", "heartbeat", "channel", "detector", "limit", "registry", "publisher"],
)
def test_a_component_that_raises_is_reported_and_hides_no_other(name):
    broken = Broken()
    components.add(name, broken)
    try:
        with WheelTimer(name="intact"):
            status = snapshot()
        assert row(status.timers, name="intact")
        (error,) = status.errors
        assert error.startswith(f"{name}: RuntimeError: no ")
        assert r"\x1b[31m" in error
    finally:
        components.remove(name, broken)


def test_components_may_be_made_and_closed_during_a_snapshot(shop):
    ended = threading.Event()

    def make_and_close():
        while not ended.is_set():
            with Kit(heartbeat=10.0, failback=FAILBACK) as kit, kit.channel(shop.target):
                pass
            with WheelTimer() as timer:
                timer.new_timeout(print, 100.0)

    making = in_thread(make_and_close)
    for _ in range(200):
        assert snapshot().errors == ()
    ended.set()
    making.result(WAIT_S)


def test_a_journal_is_described(tmp_path):
    url = f"sqlite://{tmp_path}/journal.db"
    policy = FailbackPolicy(retry_on="UNAVAILABLE", journal=url, name="audit", backoff=3600.0)
    with Kit(failback=policy, timeout=WAIT_S) as kit:
        with kit.channel("127.0.0.1:1") as channel:
            channel.unary_unary("/shop.Audit/Push")(b"x")
        components.of_kind("journal")[0].counts.count()
        status = snapshot()
        (journal,) = status.journals
        (depth,) = journal.depths
        assert (journal.url, journal.up, journal.problem) == (url, True, "")
        assert (depth.queue, depth.waiting, depth.taken, depth.dead) == ("audit", 1, 0, 0)
        assert depth.target.endswith("127.0.0.1:1")
        assert depth.problem == "1 call waits"
        queue = row(status.queues, name="audit")
        assert (queue.pending, queue.stats.pending, queue.problem) == (1, 0, "1 call waits")
    assert snapshot().journals == ()


def test_the_problems_of_a_journal(tmp_path, monkeypatch):
    policy = FailbackPolicy(retry_on="UNAVAILABLE", journal=f"sqlite://{tmp_path}/none/journal.db")
    with Kit(failback=policy, timeout=WAIT_S) as kit, kit.channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/shop.Audit/Push")(b"x")
        (journal,) = components.of_kind("journal")
        counts = [("a", 2, 1, 1200), ("b", 0, 0, 1), ("c", 0, 0, 0)]
        depths = [Depth("orders", *one, 1.0) for one in counts]
        monkeypatch.setattr(journal.counts, "depths", depths)
        (found,) = snapshot().journals
    assert (found.up, found.problem) == (False, "it stores nothing")
    problems = [one.problem for one in found.depths]
    assert problems == ["1,200 dead letters, 3 calls wait", "1 dead letter", ""]
