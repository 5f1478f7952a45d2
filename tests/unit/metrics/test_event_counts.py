"""Metrics that are counted from events."""

import gc

import pytest

from fixtures.timers import run_threads
from rpcwheel.events import (
    FailbackDelivered,
    FailbackLost,
    FailbackQueued,
    FailbackRejected,
    RetryScheduled,
    RetryStopped,
)
from rpcwheel.limit import LimitPolicy
from rpcwheel.limit.limiter import RefusalReason
from rpcwheel.limit.server import ServerLimit
from rpcwheel.metrics.prometheus import split_method
from rpcwheel.metrics.readings import (
    EndedComponents,
    EventCounts,
    read,
    start_counting,
)
from rpcwheel.metrics.table import EVENTS, MAX_SERIES, METRICS
from rpcwheel.rpc import Criticality
from rpcwheel.telemetry import components
from rpcwheel.telemetry.call_counts import MAX_NAME, MAX_QUEUED, OTHER

METRIC = {source.metric.name: source.metric for source in EVENTS}
GET, PUT = "/shop.Orders/Get", "/shop.Orders/Put"


@pytest.fixture
def counts():
    return EventCounts()


def queued(name="orders"):
    return FailbackQueued(name, "push", OSError(), 1.0, 1)


def series(counts, name):
    return counts.series(METRIC[f"rpcwheel_{name}"])


def test_events_are_counted_by_the_values_of_the_labels(counts):
    for method in (GET, PUT, GET):
        counts(RetryScheduled(method, 1, "UNAVAILABLE", 0.1))
    assert series(counts, "retries") == {(GET,): 2, (PUT,): 1}
    assert series(counts, "hedges") == {}
    counts(FailbackRejected("orders", "push", OSError(), "the queue is full"))
    assert series(counts, "failback_rejected") == {("orders",): 1}


def test_a_field_of_the_event_may_be_what_is_added(counts):
    for count in (3, 4):
        counts(FailbackLost("orders", ("push",), count, 1.0, "closed"))
    assert series(counts, "failback_lost") == {("orders",): 7}


def test_only_retries_without_budget_are_throttled(counts):
    for reason in ("no attempts left", "the retry budget of the target is used up"):
        counts(RetryStopped(GET, 1, "UNAVAILABLE", reason))
    assert series(counts, "retries_throttled") == {(GET,): 1}


def test_durations_are_counted_in_the_bucket_whose_bound_they_reach(counts):
    for waited_s in (0.5, 1.0, 1.5, 100_000.0):
        counts(FailbackDelivered("orders", "push", 2, waited_s))
    (histogram,) = series(counts, "failback_delivery_seconds").values()
    assert histogram.number == 4
    assert histogram.sum == 100_003.0
    assert histogram.buckets == (2, 1, 0, 0, 0, 0, 0, 0, 0, 1)
    assert series(counts, "failback_delivered") == {("orders",): 4}


def test_beyond_the_limit_the_series_that_was_not_used_for_the_longest_time_is_given_up(counts):
    counts(queued("first"))
    for number in range(MAX_SERIES):
        counts(queued("second"))
        counts(queued(f"queue {number}"))
    known = series(counts, "failback_queued")
    assert len(known) == MAX_SERIES
    assert ("first",) not in known
    assert known["second",] == MAX_SERIES
    assert known[OTHER,] == 3  # of the first, and of the queues 0 and 1
    assert sum(known.values()) == 2 * MAX_SERIES + 1


def test_a_long_name_is_cut(counts):
    counts(queued("x" * 10_000))
    assert series(counts, "failback_queued") == {("x" * MAX_NAME,): 1}


def test_no_event_is_lost_or_kept_if_threads_count_and_read_at_the_same_time(counts):
    def emit():
        for _ in range(2000):
            counts(queued())

    def read_series():
        for _ in range(200):
            series(counts, "failback_queued")

    run_threads(emit, emit, emit, emit, read_series)
    assert series(counts, "failback_queued") == {("orders",): 8000}


def test_a_finalizer_may_emit_while_the_counts_are_read(counts):
    class Emits:
        def __str__(self):  # is called while events are counted
            return "orders"

        def __del__(self):
            counts(queued())

    for _ in range(MAX_QUEUED * 3):
        cycle = [Emits()]
        cycle.append(cycle)
    del cycle
    with counts._lock:
        gc.collect()
    assert series(counts, "failback_queued") == {("orders",): MAX_QUEUED * 3}


def test_a_counted_event_is_not_kept(counts):
    event = queued()
    before = gc.get_referrers(event.error)
    counts(event)
    assert len(gc.get_referrers(event.error)) == len(before)


def test_the_counters_of_a_name_do_not_decrease_but_begin_anew_in_a_forked_child():
    ended = EndedComponents()
    metric = next(one for one in METRICS if one.name == "rpcwheel_timer_started")
    for given, shown in ((5.0, 5.0), (3.0, 5.0), (7.0, 7.0)):
        series = {("timer",): given}
        ended.keep_growing(metric, series)
        assert series == {("timer",): shown}
    ended.reset()  # as in a forked child
    series = {("timer",): 1.0}
    ended.keep_growing(metric, series)
    assert series == {("timer",): 1.0}


def test_the_refused_calls_of_a_server_are_counted_also_when_it_has_ended():
    metric = next(one for one in METRICS if one.name == "rpcwheel_limit_refused")

    def refused():
        counts = dict(read())[metric]
        return {labels[1:]: calls for labels, calls in counts.items() if labels[0] == "ended"}

    start_counting()
    for _ in range(2):
        limit = ServerLimit(LimitPolicy(name="ended"), lambda _: None, timer=None)
        limit.limiter.refused[Criticality.SHEDDABLE, RefusalReason.WAITED] = 3
        alive = refused()
        del limit
        gc.collect()
        assert refused() == alive
    assert alive == {("sheddable", "waited"): 6.0}


@pytest.mark.parametrize("kind", ["failback", "publisher"])  # before and after limits
def test_a_component_that_ends_while_the_metrics_are_read_is_counted_once(kind):
    """A value that is too high would stay, because counters do not decrease."""
    metric = next(one for one in METRICS if one.name == "rpcwheel_limit_refused")
    limits = [ServerLimit(LimitPolicy(name=f"ends with {kind}"), lambda _: None, timer=None)]
    limits[0].limiter.refused[Criticality.SHEDDABLE, RefusalReason.WAITED] = 3

    class EndsIt:
        def status(self):
            limits.clear()
            gc.collect()

    start_counting()
    last = EndsIt()
    components.add(kind, last)
    for _ in range(2):
        counts = dict(read())[metric]
        assert counts[f"ends with {kind}", "sheddable", "waited"] == 3.0
    assert limits == []


@pytest.mark.parametrize(
    ("path", "service_and_method"),
    [
        ("/shop.Orders/Get", ("shop.Orders", "Get")),
        ("/shop.Orders/Get/1", ("shop.Orders", "Get/1")),
        ("Get", ("unknown", "unknown")),
        (OTHER, (OTHER, OTHER)),
    ],
)
def test_a_path_is_split_as_by_go_grpc_prometheus(path, service_and_method):
    assert split_method(path) == service_and_method
