"""When unhealthy and stale subchannels are checked, and the consequences of the result."""

import gc
from unittest.mock import Mock

import grpc
import pytest

from fixtures.subchannel_pools import CALL, FAILING, IDLE, READY, FakePool, at
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.balancer.health import HealthChecker, connect_failure
from rpcwheel.errors import TimerStopped
from rpcwheel.events import CallbackFailed, ExecutorRejected


class Checked:
    """A pool with two READY subchannels, its health checks, and the first subchannel."""

    def __init__(self, pool, timer):
        self.pool, self._timer = pool, timer
        self.prober = pool.connections
        pool.checker = HealthChecker(pool, timer)
        pool.update_ready([at(1), at(2)])
        self.one = pool.subchannel(1)

    def mark_unhealthy(self):
        self.pool.checker.mark_unhealthy(self.one, "the test")

    def probe_as_unhealthy(self):
        """Mark the first as unhealthy, and let the wait for its first probe pass."""
        self.mark_unhealthy()
        self._timer.advance(1.1)


@pytest.fixture
def make_checked(make_pool, timer):
    return lambda **policy: Checked(
        make_pool(**{"health_check_backoff": lambda state: float(state.attempt_number)} | policy),
        timer,
    )


@pytest.fixture
def checked(make_checked):
    return make_checked()


def test_an_unhealthy_subchannel_is_checked_with_a_growing_wait_until_it_answers(checked, timer):
    checked.prober.answers = [False, False, True]
    checked.mark_unhealthy()
    for wait_s, count in ((1, 1), (2, 2), (3, 3)):
        timer.advance(wait_s - 0.3)
        assert len(checked.prober.probes) == count - 1
        timer.advance(0.4)
        assert checked.prober.probes == [1] * count
    assert (checked.one.healthy, timer.pending) == (True, 0)
    checked.probe_as_unhealthy()
    assert len(checked.prober.probes) == 4  # the wait begins anew


def test_the_late_result_of_an_earlier_check_is_ignored(checked):
    checked.probe_as_unhealthy()
    checked.pool.checker.mark_healthy(checked.one)
    checked.mark_unhealthy()
    checked.prober.done(True)
    assert not checked.one.healthy


def test_the_late_result_of_an_earlier_check_ends_no_later_check(checked):
    checked.probe_as_unhealthy()
    late = checked.prober.done
    checked.pool.checker.mark_healthy(checked.one)
    cancel(checked, 5)
    late(True)
    checked.prober.done(False)
    assert not checked.one.healthy


def test_a_suspicion_ends_when_the_subchannel_becomes_unhealthy(checked):
    cancel(checked, 5)
    checked.mark_unhealthy()
    checked.prober.done(True)
    checked.pool.checker.mark_healthy(checked.one)
    cancel(checked, 5)
    checked.prober.done(False)
    assert not checked.one.healthy


def test_a_check_of_an_earlier_generation_that_still_waits_for_a_worker_is_not_made(checked):
    queued = []
    checked.prober.run_soon = queued.append
    cancel(checked, 5)
    checked.mark_unhealthy()
    (check,) = queued
    check()
    assert checked.prober.probes == []


def test_a_subchannel_that_becomes_stale_during_a_check_is_checked_anew(checked):
    checked.probe_as_unhealthy()
    queued = []
    checked.prober.run_soon = queued.append
    checked.pool.update([])
    queued.clear()
    checked.pool.checker.check_stale(checked.one)
    assert len(queued) == 1


def test_an_earlier_check_of_a_stale_subchannel_leads_to_no_second_one(checked):
    checked.probe_as_unhealthy()
    late = checked.prober.done
    checked.pool.update([])
    late(False)
    checked.pool.checker.check_stale(checked.one)
    assert checked.prober.probes == [1, 1, 2]


def test_a_check_that_is_not_wanted_any_more_when_it_runs_is_not_made(checked, timer):
    queued = []
    checked.prober.run_soon = queued.append
    checked.probe_as_unhealthy()
    checked.pool.checker.mark_healthy(checked.one)
    (check,) = queued
    check()
    assert (checked.prober.probes, timer.pending) == ([], 0)


def test_without_a_connection_an_unhealthy_subchannel_connects_before_it_is_probed(checked, timer):
    checked.one.connection.state = IDLE
    checked.probe_as_unhealthy()
    assert (checked.pool.connected, checked.prober.probes) == ([1], [])
    checked.one.connection.state = READY
    checked.prober.answers = [True]
    timer.advance(1.1)
    assert (checked.one.healthy, checked.prober.probes) == (True, [1])


@pytest.mark.parametrize("connected", [True, False])
def test_an_ejected_server_is_taken_back_after_its_time(make_checked, timer, connected):
    checked = make_checked(outlier_ejection=1)
    checked.prober.answers = [True]
    checked.pool.checker.failed(checked.one, "UNAVAILABLE")
    if not connected:
        checked.one.connection.state = FAILING
    timer.advance(9)
    assert not checked.one.healthy
    timer.advance(1.1)
    assert checked.one.healthy
    assert checked.prober.probes == [1] * connected


def test_a_stale_subchannel_is_checked_every_five_seconds_until_it_does_not_answer(checked, timer):
    checked.prober.answers = [True, True]  # of both
    checked.pool.update([])
    assert checked.prober.probes == [1, 2]
    checked.prober.answers = [True, False, True]
    timer.advance(5.1)
    assert checked.pool.subchannels == (checked.one,)
    timer.advance(5.1)
    assert checked.prober.probes[4:] == [1]
    assert timer.pending == 1


def test_a_stale_subchannel_is_still_checked_after_the_user_marked_it_healthy(checked, timer):
    checked.prober.answers = [True, True]  # of both
    checked.pool.update([])
    checked.mark_unhealthy()
    checked.pool.checker.mark_healthy(checked.one)
    checked.prober.answers = [False, False]
    timer.advance(5.1)
    assert checked.pool.subchannels == ()


def test_a_stale_subchannel_is_not_connected_to_be_checked(checked, timer):
    """Calls connect it. A channel with thousands of instances does not connect to all of them."""
    checked.one.connection.state = IDLE
    checked.pool.update([])
    timer.advance(5.1)
    assert (checked.one.stale, checked.pool.connected, checked.prober.probes) == (True, [], [2])
    checked.one.connection.state = FAILING
    timer.advance(5.1)
    assert checked.one.removed


def test_an_unhealthy_stale_subchannel_that_answers_is_healthy_and_stale(checked, timer):
    checked.mark_unhealthy()
    checked.prober.answers = [True, True]
    checked.pool.update([])
    assert (checked.one.healthy, checked.one.stale) == (True, True)
    checked.pool.update([at(1), at(2)])
    timer.advance(60)
    assert len(checked.prober.probes) == 2


def test_removed_subchannels_and_closed_pools_are_not_checked(checked, timer):
    checked.mark_unhealthy()
    checked.pool.update([at(2)])
    assert timer.pending == 0
    checked.pool.checker.mark_unhealthy(checked.pool.subchannel(2), "the test")
    checked.pool.close_all()
    checked.pool.checker.close()
    assert timer.pending == 0


def test_at_the_end_of_the_process_an_unhealthy_subchannel_becomes_healthy(checked, timer):
    checked.probe_as_unhealthy()
    checked.prober.done(None)
    assert (checked.one.healthy, timer.pending) == (True, 0)


def test_a_wait_object_that_raises_is_reported_and_a_second_is_used(make_checked, timer, events):
    checked = make_checked(health_check_backoff=Mock(side_effect=RuntimeError("no")))
    checked.prober.answers = [True]
    checked.mark_unhealthy()
    failure = events[1]
    assert isinstance(failure, CallbackFailed)
    assert failure.callback == "health_check_backoff"
    timer.advance(1.1)
    assert checked.one.healthy


def test_with_a_stopped_timer_subchannels_become_healthy_at_once(checked, timer, events):
    timer.stop()
    checked.mark_unhealthy()
    assert checked.one.healthy
    rejected = events[1]
    assert isinstance(rejected, ExecutorRejected)
    assert (rejected.timer, rejected.task) == ("manual-timer", "health check of shop.Orders")
    assert isinstance(rejected.error, TimerStopped)


def test_a_dropped_pool_is_not_kept_by_its_checks(checked, timer, make_pool):
    checked.mark_unhealthy()
    assert timer.pending == 1
    probes = checked.prober.probes
    del checked.pool, checked.prober, checked.one
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is FakePool]
    timer.advance(60)
    assert (probes, timer.pending) == ([], 0)


def test_the_reason_of_a_failed_connection_is_taken_from_grpcs_details():
    def text(details, code=grpc.StatusCode.UNAVAILABLE):
        return connect_failure(FinishedError(code, details))

    failed = "failed to connect to all addresses; last error: UNKNOWN: "
    refused = "ipv4:10.0.0.7:1: Failed to connect to remote host: connect: Connection refused (111)"
    assert text(failed + refused) == "connect: Connection refused (111)"
    assert text(failed + "name resolution failed") == "UNKNOWN: name resolution failed"
    assert text("Socket closed") == "Socket closed"
    assert text("Deadline Exceeded", grpc.StatusCode.DEADLINE_EXCEEDED) == ""


# --- Subchannels whose calls are canceled ---


def cancel(checked, times):
    for _ in range(times):
        checked.pool.checker.failed(checked.one, "CANCELLED")


def test_five_canceled_calls_in_a_row_lead_to_a_check_and_its_failure_to_unhealthy(checked):
    cancel(checked, 4)
    assert checked.prober.probes == []
    cancel(checked, 6)
    assert checked.prober.probes == [1]  # one check at a time
    checked.prober.done(False)
    assert not checked.one.healthy
    assert "canceled" in checked.one.unhealthy_reason


def test_a_subchannel_whose_calls_are_canceled_stays_healthy_if_it_answers_the_check(checked):
    checked.prober.answers = [True, True]
    cancel(checked, 5)
    cancel(checked, 4)
    assert (checked.prober.probes, checked.one.healthy) == ([1], True)
    cancel(checked, 1)
    assert checked.prober.probes == [1, 1]


def test_canceled_calls_between_answered_ones_lead_to_no_check(checked):
    for _ in range(3):
        cancel(checked, 4)
        checked.one.succeeded()
    assert checked.prober.probes == []


def test_canceled_calls_of_a_subchannel_that_is_not_ready_lead_to_no_probe(checked):
    checked.pool.set_states(p1=FAILING)
    cancel(checked, 5)
    assert (checked.prober.probes, checked.one.healthy) == ([], True)
    checked.pool.set_states(p1=READY)
    cancel(checked, 5)
    assert checked.prober.probes == [1]


def test_canceled_calls_lead_to_no_check_without_outlier_ejection(make_checked):
    checked = make_checked(outlier_ejection=None)
    cancel(checked, 10)
    assert checked.prober.probes == []


def test_calls_do_not_wait_for_an_explanation_after_a_probe_that_could_not_be_begun(checked):
    checked.pool.set_states(p1=FAILING, p2=FAILING)

    def probe(subchannel, timeout_s, done):
        error = SystemExit("the user's connect")
        done(None, error)
        raise error

    checked.prober.probe = probe
    checker = checked.pool.checker
    with pytest.raises(SystemExit):
        checker.is_probing_failures(checked.pool.subchannels, now_s=10.0)
    assert not checker.is_probing_failures(checked.pool.subchannels, now_s=10.5)


def test_calls_wait_for_an_explanation_for_at_most_a_second(checked):
    checked.pool.set_states(p1=FAILING)
    checker = checked.pool.checker
    assert [
        checker.is_probing_failures(checked.pool.subchannels, now_s) for now_s in (10.0, 10.9, 11.0)
    ] == [
        True,
        True,
        False,
    ]
    checked.prober.done(False)
    assert checker.is_probing_failures(checked.pool.subchannels, now_s=11.0)


def test_each_server_is_probed_once_a_second_whichever_calls_may_use_it(checked):
    checked.pool.set_states(p1=FAILING, p2=FAILING)
    checked.prober.answers = [False] * 4
    (one, two), checker = checked.pool.subchannels, checked.pool.checker
    for now_s, subchannel in ((10.0, one), (10.1, two), (10.9, one), (11.0, one), (11.05, two)):
        assert not checker.is_probing_failures([subchannel], now_s)
    assert checked.prober.probes == [1, 2, 1]
    checker.is_probing_failures([one, two], now_s=11.2)
    assert checked.prober.probes == [1, 2, 1, 2]


def test_the_deadline_of_a_call_ends_its_wait_for_an_explanation(checked):
    pool = checked.pool
    pool.set_states(p1=FAILING, p2=FAILING)
    pending = pool.rules.begin(*CALL, 0.5, False, now_s=10.0)
    assert [pool.try_pick(pending, now_s) for now_s in (10.0, 10.4)] == [None, None]
    assert pool.try_pick(pending, 10.5) == pool.refusal()


def test_a_forked_child_calls_what_was_unhealthy_and_checks_it_anew(checked):
    checked.probe_as_unhealthy()
    checked.one.health.checking = True  # the probe does not end in the child
    checked.pool.checker.reset()
    assert checked.one.healthy
    assert not checked.one.health.checking
    checked.prober.answers = [True]
    checked.probe_as_unhealthy()
    assert checked.prober.probes == [1, 1]
    assert checked.one.healthy


def test_a_forked_child_does_not_wait_for_the_probes_of_its_parent(checked):
    checked.pool.set_states(p1=FAILING)
    checker = checked.pool.checker
    assert checker.is_probing_failures(checked.pool.subchannels, now_s=10.0)
    checker.reset()
    assert not checker.is_probing_failures(checked.pool.subchannels, now_s=10.5)
    assert checker.is_probing_failures(checked.pool.subchannels, now_s=11.0)
    assert checked.prober.probes == [1, 1]
