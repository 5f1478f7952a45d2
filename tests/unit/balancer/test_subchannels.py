"""Which subchannels there are, and which of them gets a call."""

import random
from collections import Counter
from contextlib import contextmanager

import grpc
import pytest

from fixtures.subchannel_pools import (
    CALL,
    CONNECTING,
    FAILING,
    IDLE,
    READY,
    SECOND,
    SHUTDOWN,
    FakeConnection,
    at,
)
from rpcwheel.balancer import Picker, RingHash, RoundRobin, subchannels


class First(Picker):
    """Picks the first subchannel, and records the arguments of `prepare`."""

    def __init__(self):
        self.seen = []

    def prepare(self, subchannels, weights):
        self.seen.append(([one.instance.port for one in subchannels], list(weights)))
        return lambda *_: subchannels[0]


UNKNOWN = "no instance of shop.Orders is known"


def ports(subchannels):
    return [one.instance.port for one in subchannels]


# Instances


def test_before_instances_are_known_calls_wait_unless_an_error_refuses_them(pool):
    assert (pool.pick(*CALL), pool.refusal(), pool.whole_state()) == (None, None, CONNECTING)
    late = (grpc.StatusCode.UNAVAILABLE, f"{UNKNOWN} yet", False)
    assert pool.timed_out(7, 5) == late
    assert pool.timed_out(5, 5).code is grpc.StatusCode.DEADLINE_EXCEEDED
    pool.report_error("the registry is away", wait=True)
    assert (pool.refusal(), pool.whole_state()) == (None, CONNECTING)
    assert pool.timed_out(7, 5).details == f"{UNKNOWN} yet: the registry is away"
    pool.report_error("the registry is away", wait=False)
    refused = (grpc.StatusCode.UNAVAILABLE, f"{UNKNOWN}: the registry is away")
    assert (pool.refusal()[:2], pool.whole_state()) == (refused, FAILING)
    pool.update([at(1)])
    pool.report_error("the registry is away", wait=False)
    assert pool.refusal() is None


def test_without_instances_calls_are_refused(pool):
    pool.update([])
    assert pool.refusal()[:2] == (grpc.StatusCode.UNAVAILABLE, UNKNOWN)
    assert (pool.pick(*CALL), pool.whole_state()) == (None, FAILING)


def test_a_removed_subchannel_is_known_until_its_connection_is_closed(pool):
    pool.update([at(1), at(2), at(3)])
    used, unused = pool.subchannel(1), pool.subchannel(2)
    used.connection = FakeConnection()
    pool.update([at(3)])
    assert (pool.connections.leaving, pool.drained, unused.state) == ([used], [1], SHUTDOWN)
    pool.connections.has_left(used)
    assert pool.connections.leaving == []


def test_a_listener_that_is_added_while_a_subchannel_connects_is_called_once(pool):
    pool.update([at(1)])
    pool.connections.new_connection = lambda _: FakeConnection()
    begun, lock = [], pool.lock

    @contextmanager
    def add_listener_after_release():
        with lock:
            yield
        pool.lock = lock
        pool.connections.add_listener(begun.append, begun.append)

    pool.lock = add_listener_after_release()
    pool.connections.connection_of(pool.subchannel(1))
    assert ports(begun) == [1]


def test_a_closed_pool_does_not_change(pool):
    pool.update_ready([at(1)])
    one = pool.subchannel(1)
    assert pool.close_all() == [one.connection]
    assert pool.close_all() == []
    pool.update([at(2)])
    pool.checker.mark_unhealthy(one, "late")
    assert (pool.subchannels, pool.pick(*CALL), pool.whole_state()) == ((), None, SHUTDOWN)
    assert (one.state, one.healthy, pool.checks) == (SHUTDOWN, True, [])


# TLS


def test_without_credentials_a_service_with_tls_instances_is_refused(pool):
    pool.update([at(1), at(2, protocol="grpcs")])
    assert pool.subchannels == ()
    refusal = pool.refusal()
    assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION
    assert pool.rules.refusal(pool.subchannels, wait_for_ready=True) == refusal
    assert refusal.details.startswith("1 of 2 instances of shop.Orders require TLS")
    assert "secure_channel" in refusal.details
    pool.update([at(1)])
    assert (pool.refusal(), ports(pool.subchannels)) == (None, [1])


def test_with_credentials_only_tls_instances_are_used(make_pool):
    pool = make_pool(protocol="grpcs")
    pool.update([at(1), at(2, protocol="grpcs")])
    assert (pool.refusal(), ports(pool.subchannels)) == (None, [2])
    pool.update([at(1)])
    assert pool.refusal().code is grpc.StatusCode.FAILED_PRECONDITION
    assert "no instance of shop.Orders is published with TLS" in pool.refusal().details


# Picking


def test_the_first_call_connects_all_and_waits_and_later_ones_what_lost_its_connection(pool):
    pool.update([at(1), at(2)])
    assert pool.connected == []
    assert (pool.pick(*CALL), pool.connected, pool.refusal()) == (None, [1, 2], None)
    pool.all_ready()
    pool.subchannel(1).connection.state = IDLE
    assert (pool.picked(), pool.connected) == ({2}, [1, 2, 1])
    pool.all_ready()
    pool.subchannel(2).connection.accepts_calls = False  # closed or drained by the user
    assert (pool.subchannel(2).state, pool.picked()) == (IDLE, {1})
    assert pool.connected == [1, 2, 1, 2]
    pool.set_states(p2=None)  # hidden by a channel that `connect` made
    assert pool.subchannel(2).state is READY


def test_if_all_have_failed_calls_are_refused_with_the_reasons(pool):
    pool.update([at(port) for port in (1, 2, 3, 4)])
    pool.set_states(p1=FAILING, p2=FAILING, p3=FAILING, p4=FAILING)
    assert pool.refusal()[1:] == ("none of 4 servers of shop.Orders can be reached", True)
    for one in pool.subchannels:
        one.error_text = "Connection refused"
    assert pool.refusal().details.endswith(
        "10.0.0.7:1: Connection refused; 10.0.0.7:2: Connection refused; "
        "10.0.0.7:3: Connection refused and 1 more"
    )
    assert pool.timed_out(5, 5).details == pool.refusal().details
    pool.set_states(p3=IDLE)
    assert pool.refusal() is None
    details = "no connection to a server of shop.Orders became ready in time"
    assert pool.timed_out(5, 5).details == details


def test_a_server_whose_connect_raised_counts_as_failed_for_a_while(pool, clock):
    pool.update([at(1)])
    pool.subchannel(1).connect_after_ns = clock.now_ns + SECOND
    assert (pool.pick(*CALL), pool.connected, pool.refusal().unreachable) == (None, [], True)
    clock.pass_(1)
    assert (pool.pick(*CALL), pool.connected) == (None, [1])


def test_the_next_level_connects_when_all_of_the_first_have_failed(make_pool):
    pool = make_pool(zone="near")
    pool.update([at(1, zone="near"), at(2, zone="near"), at(3, zone="far"), at(4, weight=0)])
    pool.pick(*CALL)
    assert pool.connected == [1, 2]
    pool.set_states(p1=FAILING)
    assert pool.connected == [1, 2]
    pool.set_states(p2=FAILING)
    assert pool.connected == [1, 2, 3]
    pool.set_states(p3=READY)
    assert (pool.picked(), pool.connected) == ({3}, [1, 2, 3])


def test_the_next_level_connects_when_the_first_takes_longer_than_a_second(make_pool, clock):
    pool = make_pool(zone="near")
    pool.update([at(1, zone="near"), at(2, zone="far")])
    pool.pick(*CALL)
    clock.pass_(0.9)
    pool.pick(*CALL)
    assert pool.connected == [1]
    clock.pass_(0.1)
    pool.pick(*CALL)
    assert pool.connected == [1, 2]


def test_the_first_call_connects_the_first_level_however_late_it_comes(make_pool, clock):
    pool = make_pool(zone="near")
    pool.update([at(1, zone="near"), at(2, zone="far"), at(3, weight=0), at(4, status="DRAINING")])
    clock.pass_(5)
    pool.pick(*CALL)
    assert pool.connected == [1]
    clock.pass_(0.9)
    pool.update([at(1, zone="near"), at(2, zone="far")])
    clock.pass_(0.1)
    pool.pick(*CALL)  # the second begins at the first call, and not anew at an update
    assert pool.connected == [1, 2]


def test_a_picker_is_prepared_again_only_after_a_change(make_pool):
    pool = make_pool(picker := First())
    pool.update_ready([at(1, weight=7, started_at=1000.0), at(2), at(3, weight=0)])
    pool.picked()
    pool.update([at(1, weight=7, started_at=1000.0), at(2), at(3, weight=0)])
    assert picker.seen == [([1, 2], [7, 100])]
    pool.set_states(p1=FAILING)
    assert picker.seen[1:] == [([2], [100])]


def test_an_exception_of_prepare_is_raised_by_calls_until_a_change(make_pool):
    class Broken(First):
        def prepare(self, subchannels, weights):
            if 1 in ports(subchannels):
                raise RuntimeError("not with the server at port 1")
            return super().prepare(subchannels, weights)

    pool = make_pool(Broken())
    pool.update_ready([at(1), at(2)])
    frames = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not with") as raised:
            pool.pick(*CALL)
        frames.append(len(raised.traceback))
    assert frames[0] == frames[1]  # it does not keep those of earlier calls
    pool.update([at(2)])
    assert (pool.drained, pool.picked()) == ([1], {2})


def test_a_picker_may_return_nothing_or_one_that_is_not_ready(make_pool):
    class Fixed(Picker):
        def prepare(self, subchannels, weights):
            return lambda *_: chosen

    pool = make_pool(Fixed())
    pool.update([at(1), at(2)])
    pool.set_states(p1=READY, p2=CONNECTING)
    for chosen in (None, pool.subchannel(2)):  # noqa: B007 - read by the picker
        assert pool.pick(*CALL) is None


def test_another_attempt_goes_to_another_subchannel_if_there_is_one(pool):
    pool.update([at(1), at(2), at(3)])
    pool.set_states(p1=READY, p2=READY, p3=FAILING)
    tried = []
    picked = [pool.pick_other(tried, *CALL, waited_s=0) for _ in range(2)]
    assert (sorted(ports(picked)), tried) == ([1, 2], picked)
    assert pool.pick_other(tried, *CALL, waited_s=0) in picked


def test_another_attempt_waits_a_while_for_a_connecting_subchannel_of_its_level(pool):
    pool.update([at(1), at(2), at(3, status="DRAINING")])
    pool.set_states(p1=READY, p2=CONNECTING, p3=CONNECTING)
    tried = []
    picked = pool.pick_other(tried, *CALL, waited_s=0)
    assert pool.pick_other(tried, *CALL, waited_s=0) is None
    assert pool.pick_other(tried, *CALL, waited_s=subchannels.OTHER_TIMEOUT_S) is picked
    pool.set_states(p1=READY, p2=READY)
    assert ports([pool.pick_other(tried, *CALL, waited_s=0)]) == [2]
    assert pool.pick_other(tried, *CALL, waited_s=0) is not None  # p3 is of a lower level


def test_the_other_subchannel_is_the_one_that_follows(make_pool):
    pool = make_pool(First())
    pool.update_ready([at(1), at(2), at(3)])
    tried = []
    assert ports(pool.pick_other(tried, *CALL, waited_s=0) for _ in range(4)) == [1, 2, 3, 1]


# Ring hash sees all states


@pytest.mark.parametrize("picker", [RoundRobin(), RingHash("x-user")])
def test_calls_that_wait_do_not_read_the_states_of_all_subchannels(make_pool, picker, monkeypatch):
    pool = make_pool(picker)
    pool.update([at(port) for port in range(1, 33)])
    assert pool.pick(*CALL) is None
    reads = []
    monkeypatch.setattr(FakeConnection, "get_state", lambda one: reads.append(one) or one.state)
    assert [pool.pick_again(*CALL) for _ in range(10)] == [None] * 10
    assert len(reads) <= 10  # that of the one picked, at most
    pool.all_ready()
    reads.clear()
    assert pool.pick_again(*CALL) in pool.subchannels
    assert len(reads) <= 1


def test_a_ring_passes_over_an_owner_that_has_failed_and_returns_to_it(make_pool):
    pool = make_pool(RingHash("x-user"))
    pool.update([at(1), at(2), at(3)])
    pool.connects_as = READY
    (owner,) = pool.picked() - {None}
    assert pool.connected == [owner]  # the others connect when they are picked
    pool.set_states(**{f"p{owner}": FAILING})
    (other,) = pool.picked() - {None}
    assert other != owner
    pool.set_states(**{f"p{owner}": READY})
    assert pool.picked() == {owner}
    pool.set_states(p1=FAILING, p2=FAILING, p3=FAILING)
    assert (pool.pick(*CALL), pool.refusal().unreachable) == (None, True)


def test_a_ring_has_the_servers_of_the_best_level_that_has_not_failed(make_pool, clock):
    pool = make_pool(RingHash("x-user"))
    pool.update_ready([at(1), at(2)])
    pool.checker.mark_unhealthy(pool.subchannel(1), "the test")
    assert pool.picked() == {2}
    pool.set_states(p2=FAILING)
    clock.pass_(0.1)
    assert pool.picked() <= {1, 2}
    assert pool.router.untagged.chosen[0] == list(pool.subchannels)
    pool.subchannel(2).connection.state = READY
    clock.pass_(0.1)
    assert pool.picked() == {2}
    assert pool.router.untagged.chosen[0] == [pool.subchannel(2)]


def test_a_pick_that_another_thread_takes_away_is_not_called(pool):
    pool.update_ready([at(1)])
    picking = pool.router.untagged
    picks = [picking.pick, None]
    pick = property(lambda _: picks.pop(0))
    picking.__class__ = type("ReplacedPicking", (type(picking),), {"pick": pick})
    assert pool.pick_again(*CALL) is pool.subchannel(1)
    assert pool.pick_again(*CALL) is None


# Slow start


def weights_over(pool, clock, picker, seconds):
    got = []
    for _ in range(seconds):
        pool.pick(*CALL)
        got.append(picker.seen[-1][1][0])
        clock.pass_(1)
    return got


def test_slow_start_lets_the_weight_of_a_young_instance_grow(make_pool, clock):
    pool = make_pool(picker := First(), slow_start=10)
    now_s = clock.now_ns / SECOND
    pool.update_ready([at(1, weight=50, started_at=now_s - 2), at(2)])
    assert weights_over(pool, clock, picker, 10) == [10, 15, 20, 25, 30, 35, 40, 45, 50, 50]
    assert {weights[1] for _, weights in picker.seen} == {100}
    prepared = len(picker.seen)
    clock.pass_(100)
    pool.picked()
    assert len(picker.seen) == prepared


def test_the_warmup_of_a_dubbo_provider_takes_precedence_over_slow_start(make_pool, clock):
    pool = make_pool(picker := First(), slow_start=100)
    now_s = clock.now_ns / SECOND
    dubbo = {"dubbo.interface": "com.example.Orders"}
    pool.update_ready(
        [
            at(1, started_at=now_s - 2, metadata=dubbo | {"dubbo.warmup": "10000"}),
            at(2, started_at=now_s - 2, metadata=dubbo | {"dubbo.warmup": "0"}),
        ]
    )
    assert weights_over(pool, clock, picker, 10) == [20, 30, 40, 50, 60, 70, 80, 90, 100, 100]
    assert {weights[1] for _, weights in picker.seen} == {100}


def test_slow_start_of_an_instance_whose_clock_is_ahead_begins_now(make_pool, clock):
    pool = make_pool(picker := First(), slow_start=10)
    pool.update_ready([at(1, started_at=clock.now_ns / SECOND + 9000)])
    assert weights_over(pool, clock, picker, 3) == [1, 10, 20]


def test_slow_start_begins_again_when_the_server_was_started_again(make_pool, clock):
    pool = make_pool(picker := First(), slow_start=10)
    now_s = clock.now_ns / SECOND
    pool.update_ready([at(1, epoch="a", started_at=now_s - 60), at(2)])
    clock.pass_(1)
    pool.update([at(1, epoch="b", started_at=now_s), at(2)])
    assert (pool.drained, weights_over(pool, clock, picker, 3)) == ([], [10, 20, 30])
    pool.update([at(1, epoch="b", started_at=now_s, weight=50), at(2)])
    assert weights_over(pool, clock, picker, 2) == [20, 25]


# Subsets

MANY = [at(port) for port in range(1, 2001)]


def subset(pool, instances):
    pool.update(instances)
    return {one.instance.port for one in pool.subchannels}


def test_with_very_many_instances_a_channel_connects_to_some(pool):
    assert len(subset(pool, MANY)) == 32
    pool.pick(*CALL)
    assert sorted(pool.connected) == sorted(ports(pool.subchannels))
    assert len(subset(pool, MANY[:32])) == 32


def test_an_update_that_concerns_no_subchannel_wakes_no_waiting_call(pool):
    chosen = subset(pool, MANY)
    changes = pool.changes
    outsider = next(one.port for one in MANY if one.port not in chosen)
    pool.update([at(one.port, weight=7) if one.port == outsider else one for one in MANY])
    assert pool.changes == changes
    chosen_one = min(chosen)
    pool.update([at(one.port, weight=7) if one.port == chosen_one else one for one in MANY])
    assert pool.changes == changes + 1
    assert pool.subchannel(chosen_one).instance.weight == 7


def test_subsets_of_many_channels_are_even(make_pool, monkeypatch):
    seeds = random.Random(1)
    monkeypatch.setattr("secrets.token_bytes", seeds.randbytes)
    counts = Counter()
    for _ in range(400):
        counts.update(subset(make_pool(subset_size=8), MANY[:100]))
    # 32 on average, with a standard deviation of 5.4
    assert len(counts) == 100
    assert max(counts.values()) < 32 + 5 * 5.4
    assert min(counts.values()) > 32 - 5 * 5.4


def test_a_subset_takes_the_preferred_zone_and_keeps_some_of_another(make_pool):
    pool = make_pool(zone="near", subset_size=8)
    instances = [at(port, zone="near" if port <= 50 else "far") for port in range(1, 101)]
    chosen = subset(pool, instances)
    assert len([port for port in chosen if port <= 50]) == 6
    assert len(chosen) == 8


def test_ring_hash_and_none_use_all_instances(make_pool):
    assert len(subset(make_pool(RingHash("x-user")), MANY[:100])) == 100
    assert len(subset(make_pool(subset_size=None), MANY[:100])) == 100


# Health


def test_an_unhealthy_subchannel_published_by_another_process_is_checked_now(pool):
    pool.update([at(1, epoch="a"), at(2, epoch="a")])
    one = pool.subchannel(1)
    pool.checker.mark_unhealthy(one, "its heartbeats are missed")
    generation, one.health.checks = one.health.generation, 9
    pool.update([at(1, epoch="b"), at(2, epoch="b")])
    assert pool.checks == [(1, None), (1, 0.0)]
    assert (one.health.checks, one.health.generation) == (0, generation + 1)
    pool.update([at(1, epoch="b"), at(2, epoch="b")])
    assert len(pool.checks) == 2


def test_the_waits_between_checks_follow_the_policy_are_never_zero_and_do_not_overflow(make_pool):
    def delays(*checks, **policy):
        pool = make_pool(**policy)
        pool.update([at(1)])
        one = pool.subchannel(1)
        return [pool.checker.check_delay_ns(one) / SECOND for one.health.checks in checks]

    policy = {"health_check_backoff": lambda state: 10.0 * (state.attempt_number - 1)}
    assert delays(0, 1, 2, **policy) == [0.01, 10, 20]
    assert 0 < delays(100_000)[0] <= 10


# Outlier ejection


def fail(pool, port, times=1, code="UNAVAILABLE"):
    for _ in range(times):
        pool.checker.failed(pool.subchannel(port), code)


def ready_pool(make_pool, count=4):
    pool = make_pool()
    pool.update_ready([at(port) for port in range(1, count + 1)])
    return pool


@pytest.mark.parametrize(("count", "share"), [(2, 0.1), (20, 0.3), (3, 0.6)])
def test_failures_that_all_servers_have_eject_none(make_pool, clock, share, count):
    """One that then fails all calls is ejected, later than if the others worked."""
    rng, pool = random.Random(1), ready_pool(make_pool, count)
    for number in range(2000):
        clock.pass_(0.02)
        for port in range(1, count + 1):
            if number >= 100 and rng.random() < share:
                fail(pool, port)
            else:
                pool.subchannel(port).succeeded()
    assert not any(one.ejected for one in pool.subchannels)
    fail(pool, 1, 60)
    assert pool.subchannel(1).ejected


def test_a_server_is_not_compared_with_those_that_get_no_calls(make_pool):
    pool = ready_pool(make_pool, 4)
    for _ in range(20):
        for port in (1, 2, 3, 4):
            pool.subchannel(port).succeeded()
    for port in (3, 4):
        pool.subchannel(port).mark_unhealthy()
    for number in range(200):
        for port in (1, 2):
            fail(pool, port, 1 if number % 10 else 0)
            if not number % 10:
                pool.subchannel(port).succeeded()
    assert not any(one.ejected for one in pool.subchannels)


# The load of a subchannel


def test_the_load_is_the_calls_in_flight_and_what_an_answer_takes(make_pool, clock):
    pool = ready_pool(make_pool)
    one = pool.subchannel(1)
    assert one.load == 0
    for code, load in (("INTERNAL", 1), ("UNAVAILABLE", 2), ("NOT_FOUND", 1), ("CANCELLED", 1)):
        fail(pool, 1, 1, code)
        assert one.load == load
    clock.pass_(0.5)
    assert 0 < one.load < 1
    clock.pass_(0.5)
    assert one.load == 0


def test_the_load_is_a_number_whatever_counts_are_lost(make_pool):
    """Threads may count at the same time."""
    pool = ready_pool(make_pool)
    one = pool.subchannel(1)
    fail(pool, 1, 3, "INTERNAL")
    one.health.successes = 0
    assert one.load == 3
    fail(pool, 1)
    assert one.load == 4


# Self-preservation


def test_a_check_that_ends_after_close_makes_no_subchannels(make_pool, clock):
    pool = make_pool()
    pool.preservation.grace_ns = 10 * SECOND
    pool.update([at(1), at(2)])
    pool.update([at(1)], expired={"10.0.0.7:2"})
    clock.pass_(10)
    pool.close_all()
    assert not pool.expire_stale()
    assert pool.subchannels == ()


def test_stale_subchannels_count_for_the_subset(make_pool):
    pool = make_pool(subset_size=4)
    pool.preservation.grace_ns = 10 * SECOND
    many = [at(port) for port in range(1, 101)]
    pool.update(many)
    lost = {one.id for one in pool.subchannels[:3]}
    pool.update([one for one in many if one.id not in lost], expired=lost)
    assert [one.stale for one in pool.subchannels].count(True) == 3
    assert len(pool.subchannels) == 4
    pool.remove_stale(next(one for one in pool.subchannels if one.stale))
    assert [one.stale for one in pool.subchannels].count(True) == 2
    assert len(pool.subchannels) == 4


def test_a_failed_call_has_a_stale_subchannel_checked_once_at_a_time(pool):
    pool.update_ready([at(1)])
    one = pool.subchannel(1)
    generation = one.health.generation
    pool.update([])
    assert one.health.generation > generation  # checks of the time before count no more
    pool.checks.clear()
    fail(pool, 1, 9)
    assert pool.checks == [(1, 0.0)]
    one.health.checking = False
    fail(pool, 1)
    assert len(pool.checks) == 2


def test_the_representation_shows_the_state_and_what_is_wrong(pool):
    pool.update([at(1)])
    one = pool.subchannel(1)
    assert repr(one) == "<SubchannelBase 10.0.0.7:1 of 'shop.Orders', IDLE>"
    pool.checker.mark_unhealthy(one, "its heartbeats are missed")
    one.stale = True
    assert "IDLE, unhealthy: its heartbeats are missed, stale>" in repr(one)


def test_a_subchannel_that_was_connecting_gets_calls_within_milliseconds(pool, clock):
    pool.update([at(1), at(2)])
    pool.set_states(p1=READY, p2=CONNECTING)
    assert pool.picked() == {1}
    pool.subchannel(2).connection.state = READY
    clock.pass_(0.003)
    assert pool.picked() == {1, 2}
