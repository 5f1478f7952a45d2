"""Calls that wait for a READY subchannel."""

import threading

import grpc
import pytest

from fixtures.subchannel_pools import CALL, CONNECTING, FAILING, IDLE, READY, at
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.balancer.health import HealthChecker
from rpcwheel.balancer.pending import CLOSED_MEANWHILE, WaitRules
from rpcwheel.balancer.subchannel import SubchannelBase

UNAVAILABLE, LATE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("timeout_s", "wait_for_ready", "limit_s", "code"),
    [
        (None, False, 5.0, UNAVAILABLE),
        (9.0, False, 5.0, UNAVAILABLE),
        (2.0, False, 2.0, LATE),
        (9.0, True, 9.0, LATE),
        (None, True, None, LATE),
    ],
)
def test_a_call_waits_for_pick_timeout_or_with_wait_for_ready_until_its_deadline(
    timeout_s, wait_for_ready, limit_s, code
):
    rules = WaitRules("shop.Orders", 5.0)
    pending = rules.begin(*CALL, timeout_s, wait_for_ready, now_s=100.0)
    assert (pending.limit_s, pending.late_code) == (limit_s, code)
    assert pending.wait_left_s(101.0) == (None if limit_s is None else limit_s - 1)
    assert pending.timeout_left_s(101.0) == (None if timeout_s is None else timeout_s - 1)
    assert pending.timeout_left_s(200.0) == (None if timeout_s is None else 0)


def test_a_waiting_call_gets_a_subchannel_or_its_end(pool):
    pending = pool.rules.begin(*CALL, None, False, now_s=100.0)
    assert pool.try_pick(pending, 104.9) is None
    assert pool.try_pick(pending, 105.0).code is UNAVAILABLE
    pool.update([at(1)])
    pool.set_states(p1=CONNECTING)
    assert pool.try_pick(pending, 104.9) is None
    pool.set_states(p1=READY)
    assert pool.try_pick(pending, 104.9) is pool.subchannel(1)
    pool.close_all()
    assert pool.try_pick(pending, 104.9) is CLOSED_MEANWHILE


class ObservedLock:
    """A lock for `with` that knows whether a thread has waited for it."""

    def __init__(self):
        self._lock = threading.RLock()
        self.was_awaited = False

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self.was_awaited = True
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


@pytest.mark.parametrize("subject", ["call", "state"])
def test_during_the_first_update_no_call_is_refused_and_the_state_is_no_failure(pool, subject):
    pending = pool.rules.begin(*CALL, None, False, now_s=100.0)
    pool.lock, pool.pick = ObservedLock(), lambda *_: None  # the call has just picked in vain
    updates, results = threading.Event(), []

    class Subchannel(SubchannelBase):
        """Is created during the update, which goes on when the reader has its result or waits."""

        def __init__(self, *args):
            super().__init__(*args)
            updates.set()
            wait_until(lambda: results or pool.lock.was_awaited)

    pool.subchannel_class = Subchannel
    updating = in_thread(pool.update, [at(1)])
    assert updates.wait(WAIT_S)
    results.append(pool.try_pick(pending, 100.1) if subject == "call" else pool.whole_state())
    updating.result(WAIT_S)
    assert results == [None if subject == "call" else IDLE]


def test_a_call_waits_until_probes_have_found_out_why_servers_cannot_be_reached(pool):
    def probe(subchannel, timeout_s, done):
        probes.append((subchannel.instance.port, done))

    probes, pool.connections.probe = [], probe
    pool.checker = HealthChecker(pool, None)
    pool.update([at(port) for port in range(1, 6)])
    pool.set_states(p1=FAILING, p2=FAILING, p3=FAILING, p4=FAILING, p5=FAILING)
    pending = pool.rules.begin(*CALL, None, False, now_s=100.0)
    patient = pool.rules.begin(*CALL, None, True, now_s=100.0)
    for _ in range(2):
        assert (pool.try_pick(pending, 100.1), pool.try_pick(patient, 100.1)) == (None, None)
    assert [port for port, _ in probes] == [1, 2, 3]
    changes = pool.changes
    for _, done in probes:
        assert pool.changes == changes
        done(None, FinishedError(UNAVAILABLE, "last error: refused"))
    assert pool.changes == changes + 1
    assert pool.try_pick(pending, 101.0).details.endswith("10.0.0.7:3: refused")
    assert (pool.try_pick(patient, 101.0), len(probes)) == (None, 3)
    assert pool.try_pick(pending, 101.2) is None  # the result is used for a second
    assert len(probes) == 6


def test_only_servers_that_the_call_may_use_are_probed(pool):
    def probe(subchannel, timeout_s, done):
        done(None, FinishedError(UNAVAILABLE, f"last error: refused by {subchannel.id}"))

    pool.connections.probe, pool.checker = probe, HealthChecker(pool, None)
    dubbo = {"dubbo.interface": "com.example.Orders"}
    gray = at(4, metadata=dubbo | {"dubbo.tag": "gray"})
    pool.update([*(at(port, metadata=dubbo) for port in (1, 2, 3)), gray])
    pool.set_states(p1=FAILING, p2=FAILING, p3=FAILING, p4=FAILING)
    method, message, _ = CALL
    metadata = (("dubbo.tag", "gray"),)
    pending = pool.rules.begin(method, message, metadata, None, False, now_s=100.0)
    assert pool.try_pick(pending, 100.1).details.endswith("10.0.0.7:4: refused by 10.0.0.7:4")


def test_a_status_has_the_results_of_probes_that_end_while_it_is_made(pool):
    def probe(subchannel, timeout_s, done):
        done(None, FinishedError(UNAVAILABLE, "last error: refused"))

    pool.connections.probe, pool.checker = probe, HealthChecker(pool, None)
    pool.update([at(1)])
    pool.set_states(p1=FAILING)
    pending = pool.rules.begin(*CALL, None, False, now_s=100.0)
    assert pool.try_pick(pending, 100.1).details.endswith("10.0.0.7:1: refused")
