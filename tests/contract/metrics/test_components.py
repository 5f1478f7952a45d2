"""Metrics that are read from the running components at each scrape."""

import grpc
import prometheus_client
import pytest
from tenacity import wait_fixed

from fixtures.call_counts import codes_of
from fixtures.small_servers import ECHOING, METHOD, running
from fixtures.waiting import WAIT_S, Gate, wait_until
from fixtures.worlds import SyncWorld
from rpcwheel import BreakerPolicy, Kit, LimitPolicy, with_breaker
from rpcwheel.balancer import BalancedChannel
from rpcwheel.errors import JournalRefused
from rpcwheel.events import ConnectionReplaced, emit
from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.instance import ServiceInstance
from rpcwheel.metrics import Collector
from rpcwheel.registry import Registry
from rpcwheel.status.snapshot import snapshot
from rpcwheel.telemetry import components
from rpcwheel.testing import FlakyServer
from rpcwheel.timer import ManualTimer, WheelTimer


@pytest.fixture
def scrape():
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector())

    def read(name: str, **labels: str) -> float | None:
        """Return the value of one series; None if it is not there."""
        return registry.get_sample_value(name, labels)

    return read


def test_a_timer(scrape):
    with WheelTimer(name="scraped") as timer:
        label = {"timer": "scraped"}
        timer.new_timeout(lambda _: None, 3600.0)
        timer.new_timeout(lambda _: None, 3600.0).cancel()
        timer.new_timeout(lambda _: None, 0.001)
        wait_until(lambda: scrape("rpcwheel_timer_fired_total", **label) == 1)
        assert scrape("rpcwheel_timer_pending", **label) == 1
        assert scrape("rpcwheel_timer_started_total", **label) == 3
        assert scrape("rpcwheel_timer_canceled_total", **label) == 1
        assert scrape("rpcwheel_timer_lateness_seconds_count", **label) == 1
        assert scrape("rpcwheel_timer_tasks_failed_total", **label) == 0
        assert scrape("rpcwheel_timer_max_lateness_seconds", **label) > 0
    assert scrape("rpcwheel_timer_pending", **label) is None


def test_timers_of_the_same_name_are_added_and_their_counters_stay_when_they_end(scrape):
    label = {"timer": "twice"}
    with WheelTimer(name="twice") as one, WheelTimer(name="twice") as other:
        for timer in (one, one, other):
            timer.new_timeout(lambda _: None, 3600.0)
        assert scrape("rpcwheel_timer_pending", **label) == 3
        assert scrape("rpcwheel_timer_started_total", **label) == 3
    with WheelTimer(name="twice") as timer:
        timer.new_timeout(lambda _: None, 3600.0)
        assert scrape("rpcwheel_timer_started_total", **label) == 4
    assert scrape("rpcwheel_timer_started_total", **label) == 4
    assert scrape("rpcwheel_timer_canceled_total", **label) == 4


def test_breakers_of_functions_and_of_targets_have_their_names_as_labels(scrape):
    breaker = BreakerPolicy(minimum_calls=1, per="target", health_check=False)

    @with_breaker(failures=LookupError, minimum_calls=1)
    def fetch():
        raise LookupError

    with pytest.raises(LookupError):
        fetch()
    of_function = {"grpc_service": "function", "grpc_method": fetch.breaker.method}
    with (
        FlakyServer() as server,
        Kit(breaker=breaker) as kit,
        kit.channel(server.target) as channel,
    ):
        server.fail(1)
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(METHOD)(b"", timeout=WAIT_S)
        of_target = {"grpc_service": server.target, "grpc_method": "*"}
        for labels in (of_function, of_target):
            assert scrape("rpcwheel_breakers", state="open", **labels) == 1
            wait_until(lambda labels=labels: scrape("rpcwheel_breaker_opened_total", **labels) == 1)


def test_a_failback_queue(scrape):
    timer = ManualTimer()
    policy = FailbackPolicy(
        retry_on=OSError, backoff=wait_fixed(10), name="scraped", default=None, max_pending=7
    )
    label = {"queue": "scraped"}
    answers = [OSError(), OSError(), None]

    def push() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    with FailbackInvoker(policy, timer=timer) as invoker:
        assert scrape("rpcwheel_failback_lost_total", **label) == 0
        assert scrape("rpcwheel_failback_queued_total", **label) == 0
        assert scrape("rpcwheel_failback_oldest_age_seconds", **label) == 0
        invoker.invoke(push)
        assert scrape("rpcwheel_failback_pending", **label) == 1
        assert scrape("rpcwheel_failback_max_pending", **label) == 7
        timer.advance(5.0)
        assert scrape("rpcwheel_failback_oldest_age_seconds", **label) == 5.0
        timer.advance(5.0)
        wait_until(lambda: scrape("rpcwheel_failback_attempts_failed_total", **label) == 1)
        timer.advance(10.0)
        wait_until(lambda: scrape("rpcwheel_failback_pending", **label) == 0)
        wait_until(lambda: scrape("rpcwheel_failback_delivered_total", **label) == 1)
        assert scrape("rpcwheel_failback_delivery_seconds_sum", **label) == 20.0
        assert scrape("rpcwheel_failback_queued_total", **label) == 1


def test_a_registry(scrape, tmp_path):
    url = f"sqlite:///{tmp_path}/registry.db"
    service = "shop.Orders"
    with Registry(url) as registry, registry.subscribe(service) as subscription:
        label = {"registry": registry.url}
        both = {**label, "grpc_service": service}
        registry.register(ServiceInstance(service=service, host="127.0.0.1", port=50051), wait=10.0)
        wait_until(lambda: len(subscription.wait(10.0).instances) == 1)
        assert scrape("rpcwheel_registry_up", **label) == 1
        assert scrape("rpcwheel_registry_registrations", **both, state="PUBLISHED") == 1
        assert scrape("rpcwheel_registry_instances", **both, source="live") == 1
        assert scrape("rpcwheel_registry_stale_seconds", **both) == 0
        assert 0 <= scrape("rpcwheel_registry_lease_age_seconds", **both) < 60
        assert scrape("rpcwheel_registry_published_total", **both, again="") == 1
        with Registry(url) as other:  # up, if all connections to it are
            other.services()
            assert scrape("rpcwheel_registry_up", **label) == 1


def test_beyond_the_limit_components_are_counted_together(scrape, set_limit):
    set_limit("metrics.readings.MAX_SERIES", 0)
    with WheelTimer(name="one") as one, WheelTimer(name="two") as two:
        for timer in (one, two):
            timer.new_timeout(lambda _: None, 3600.0)
        assert scrape("rpcwheel_timer_pending", timer="one") is None
        assert scrape("rpcwheel_timer_pending", timer="_OTHER") >= 2


def test_a_channel_with_heartbeats_to_a_server_with_an_idle_detector(scrape):
    kit = Kit(heartbeat=60.0, idle=600.0)
    interceptors = kit.server_interceptors()
    with (
        running(SyncWorld(), ECHOING, interceptors=interceptors) as (server, port),
        kit,
        kit.detect_idle(server),
        kit.channel(target := f"127.0.0.1:{port}") as channel,
    ):
        echo = channel.unary_unary(METHOD)
        assert echo(b"x", timeout=WAIT_S) == b"x"
        assert scrape("rpcwheel_channel_calls", channel=target) == 0
        # A client may have the response before the server has ended the call.
        wait_until(lambda: scrape("rpcwheel_server_connections", state="idle") == 1)
        # An earlier test may have had a server on the same port.
        before = scrape("rpcwheel_connections_replaced_total", target=target) or 0
        emit(ConnectionReplaced(target, number=2, reason="asked for", calls=0))
        assert scrape("rpcwheel_connections_replaced_total", target=target) == before + 1
        assert kit.heartbeats[0].beat()
        wait_until(lambda: (scrape("rpcwheel_heartbeat_rtt_seconds", target=target) or 0) > 0)
        assert scrape("rpcwheel_heartbeat_connections", state="alive") == 1
    assert scrape("rpcwheel_heartbeat_connections", state="alive") is None
    assert scrape("rpcwheel_server_connections", state="idle") is None


def test_a_balanced_channel(scrape):
    with FlakyServer() as server:
        host, _, port = server.target.rpartition(":")
        instance = ServiceInstance(service="shop.Orders", host=host, port=int(port))
        with BalancedChannel("scraped", [instance]) as channel:
            call = channel.unary_unary("/shop.Orders/Echo")
            call(b"x", timeout=WAIT_S, wait_for_ready=True)
            assert scrape("rpcwheel_subchannels", channel="scraped", state="READY") == 1
            assert scrape("rpcwheel_ejections_total", channel="scraped") == 0
            channel.subchannels[0].mark_unhealthy()
            assert scrape("rpcwheel_subchannels", channel="scraped", state="unhealthy") == 1
            assert scrape("rpcwheel_ejections_total", channel="scraped") == 1
    assert scrape("rpcwheel_subchannels", channel="scraped", state="unhealthy") is None


def test_the_limits_of_servers_of_a_name_are_added_and_a_refused_call_is_counted_once(
    world, scrape, call_counts, events
):
    name, stream, gate = f"limited {world.name}", "/test.Small/Watch", Gate()
    limit = LimitPolicy(name=name, max_concurrent=2, max_streams=1, max_wait=4 * WAIT_S)
    kit = world.keep(world.do(world.api.Kit, limit=limit))

    def watch(request, _):
        yield gate(request)

    handlers = {
        "Call": grpc.unary_unary_rpc_method_handler(gate),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }
    service = grpc.method_handlers_generic_handler("test.Small", handlers)
    label = {"server": name}

    def serving():
        executor = {"executor": kit.server_executor} if world.name == "sync" else {}
        return running(world, service, interceptors=kit.server_interceptors(), **executor)

    def gauges():
        names = "limit", "limit_running", "limit_streams", "limit_waiting"
        return [scrape(f"rpcwheel_{gauge}", **label) for gauge in names]

    with serving() as (_, port), serving():
        channel = world.channel(f"127.0.0.1:{port}")
        assert gauges() == [4, 0, 0, 0]
        assert scrape("rpcwheel_overloads_total", **label) == 0
        calls = [world.call(channel, "unary_stream", method=stream)]
        wait_until(lambda: gauges() == [4, 0, 1, 0])
        metadata = (("rpcwheel-criticality", "sheddable"),)
        refused = world.call(channel, "unary_stream", method=stream, metadata=metadata)
        assert refused.error().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls += [world.call(channel, method=METHOD) for _ in range(3)]
        wait_until(lambda: gauges() == [4, 2, 1, 1])
        limits = [row for row in snapshot().limits if row.name == name]
        (row, idle) = sorted(limits, key=lambda row: -row.running)
        assert row.problem == "overloaded: it has refused 1 call"
        assert (idle.limit, idle.refused, idle.problem) == (2, (), "")
        reason = label | {"criticality": "sheddable", "reason": "streams"}
        assert scrape("rpcwheel_limit_refused_total", **reason) == 1
        wait_until(lambda: scrape("rpcwheel_overloads_total", **label) == 1)
        gate.opened.set()
        for call in calls:
            call.result()
    assert codes_of(call_counts.server) == {"OK": 4, "RESOURCE_EXHAUSTED": 1}


LABELS = {"grpc_type": "unary", "grpc_service": "shop.Orders", "grpc_method": "Begun"}


def test_a_call_has_the_labels_of_its_method_and_code(scrape, call_counts):
    for side, name in ((call_counts.client, "client"), (call_counts.server, "server")):
        counts = side.method("/shop.Orders/Begun", "unary")
        counts.begin()
        assert scrape(f"grpc_{name}_started_total", **LABELS) == 1
        assert scrape(f"grpc_{name}_handled_total", **LABELS, grpc_code="OK") == 0
        counts.end(counts.begin(), "NOT_FOUND")
        assert scrape(f"grpc_{name}_handled_total", **LABELS, grpc_code="NOT_FOUND") == 1
        assert scrape(f"grpc_{name}_handling_seconds_count", **LABELS) == 1


def test_a_journal(scrape, tmp_path):
    url = f"sqlite://{tmp_path}/journal.db"
    policy = FailbackPolicy(retry_on="UNAVAILABLE", journal=url, name="audit", backoff=3600.0)
    with Kit(failback=policy, timeout=WAIT_S) as kit:
        with kit.channel("127.0.0.1:1") as channel:
            assert channel.unary_unary("/shop.Audit/Push")(b"x") is None
        states = {"journal": url, "queue": "audit"}
        (journal,) = components.of_kind("journal")
        journal.counts.count()
        assert scrape("rpcwheel_journal_calls", **states, state="waiting") == 1
        assert scrape("rpcwheel_journal_calls", **states, state="taken") == 0
        assert scrape("rpcwheel_journal_calls", **states, state="dead") == 0
        assert scrape("rpcwheel_journal_oldest_age_seconds", **states) < WAIT_S
        assert scrape("rpcwheel_journal_up", journal=url) == 1
        assert scrape("rpcwheel_journal_unstored_results", journal=url) == 0
        assert scrape("rpcwheel_failback_pending", queue="audit") == 0
        assert scrape("rpcwheel_failback_max_pending", queue="audit") == 1_000_000
    assert scrape("rpcwheel_journal_up", journal=url) is None


def test_a_journal_that_cannot_store_calls(scrape, tmp_path):
    url = f"sqlite://{tmp_path}/missing/journal.db"
    policy = FailbackPolicy(retry_on="UNAVAILABLE", journal=url, name="audit")
    before = scrape("rpcwheel_journal_failures_total", journal=url) or 0
    with Kit(failback=policy, timeout=WAIT_S) as kit:
        with kit.channel("127.0.0.1:1") as channel, pytest.raises(JournalRefused):
            channel.unary_unary("/shop.Audit/Push")(b"x")
        assert scrape("rpcwheel_journal_up", journal=url) == 0
        assert scrape("rpcwheel_journal_failures_total", journal=url) == before + 1
