"""The limit of a server, without the server: decisions, pauses, and what is an overload."""

from types import SimpleNamespace

import grpc
import pytest

from fixtures.timers import FullTimer
from fixtures.waiting import wait_until
from rpcwheel.events import OverloadBegan
from rpcwheel.limit.limiter import UNLIMITED, RefusalReason
from rpcwheel.limit.pause import ACCEPT_EVERY_NS
from rpcwheel.limit.policy import LimitPolicy
from rpcwheel.limit.server import ServerLimit
from rpcwheel.rpc import NONCE_KEY, REFUSED_KEY

BEGAN = 10**12
HANDLER = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
DETAILS = SimpleNamespace(method="/shop.Orders/Get", invocation_metadata=())


def test_handlers_that_compute_without_the_interpreter_lock_need_no_pause():
    policy = LimitPolicy()
    limit = ServerLimit(policy, lambda _: policy, timer=None)
    call = limit.call(DETAILS, HANDLER)
    for number in range(100):  # each uses two processors for 10 ms
        now = BEGAN + number * 10_000_000
        assert limit.limiter.arrive(call, now)
        limit.limiter.ended(call, now, now + 10_000_000, number * 20_000_000)
    limit.begin_pause(BEGAN, ACCEPT_EVERY_NS)  # the first time, whatever was used before
    assert not limit.begin_pause(BEGAN + ACCEPT_EVERY_NS, 3 * ACCEPT_EVERY_NS)


def test_a_pause_is_shared_with_handlers_that_run_in_addition_to_the_limit():
    policy = LimitPolicy()
    limit = ServerLimit(policy, lambda _: policy, timer=None)
    limit.limiter.extra = 1
    assert limit.status().running == 1
    now, used = BEGAN + ACCEPT_EVERY_NS, 2 * ACCEPT_EVERY_NS
    limit.begin_pause(BEGAN, ACCEPT_EVERY_NS)
    assert limit.begin_pause(now, used)
    for calls, has_ended in ((0, False), (9, False), (0, False), (0, True)):  # two without any
        now += 1_000_000
        limit.pause.arrivals += calls
        assert limit.end_pause(now, used) == has_ended


@pytest.mark.parametrize(("waiting", "ends"), [(0, True), (1, False)])
def test_a_pause_goes_on_while_handlers_end_if_calls_wait(waiting, ends):
    policy = LimitPolicy(max_concurrent=8)
    limit = ServerLimit(policy, lambda _: policy, timer=None)
    for _ in range(8 + waiting):
        limit.limiter.arrive(limit.call(DETAILS, HANDLER), BEGAN)
    now, used = BEGAN + ACCEPT_EVERY_NS, 2 * ACCEPT_EVERY_NS
    limit.begin_pause(BEGAN, ACCEPT_EVERY_NS)
    assert limit.begin_pause(now, used)
    limit.limiter.running -= 1
    assert not limit.end_pause(now + 20_000_000, used)
    assert limit.end_pause(now + 40_000_000, used) == ends


def test_a_decision_is_scheduled_again_if_its_time_has_passed():
    """It was scheduled on a loop that has ended."""
    policy = LimitPolicy(max_concurrent=1, max_wait=1.0)
    limit = ServerLimit(policy, lambda _: policy, timer=None)
    second_ns = 1_000_000_000
    for number in range(3):
        limit.limiter.arrive(limit.call(DETAILS, HANDLER), BEGAN + number * second_ns // 2)
    expires_ns = BEGAN + second_ns // 2 + second_ns
    assert limit.decide(BEGAN + second_ns).expires_ns == expires_ns
    assert limit.decide(BEGAN + second_ns).expires_ns is None
    again_ns = BEGAN + 2 * second_ns
    assert limit.decide(expires_ns + 1).expires_ns == again_ns
    limit.has_expired(expires_ns)  # it was only late
    assert limit.decide(expires_ns + 2).expires_ns is None
    limit.has_expired(again_ns)
    assert limit.decide(expires_ns + 3).expires_ns == again_ns


def test_calls_above_a_rate_are_not_reported_as_an_overload(events):
    policy = LimitPolicy(name="rated", rate=1)
    limit = ServerLimit(policy, lambda _: policy, timer=None)
    calls = [limit.call(DETAILS, HANDLER) for _ in range(2)]
    assert [limit.limiter.arrive(call, BEGAN) for call in calls] == [True, False]
    (refused,) = limit.decide(BEGAN, starts=False).refused
    assert refused == (calls[1], RefusalReason.RATE)
    limit.report_refused([refused])
    assert limit.status().problem == ""
    limit.report_refused([(calls[1], RefusalReason.WAITED)])
    assert wait_until(lambda: [event.server for event in events.of(OverloadBegan)] == ["rated"])


def test_the_rate_of_the_server_applies_to_methods_with_a_rate_of_their_own():
    limit = ServerLimit(LimitPolicy(rate=1), lambda _: LimitPolicy(rate=2), timer=None)
    calls = [limit.call(DETAILS, HANDLER) for _ in range(2)]
    assert [limit.limiter.arrive(call, BEGAN) for call in calls] == [True, False]


def test_an_overload_of_which_the_timer_cannot_report_the_end_is_not_reported():
    policy, timer = LimitPolicy(), FullTimer()
    limit = ServerLimit(policy, lambda _: policy, timer=timer)
    refused = [(UNLIMITED, RefusalReason.WAITED)]
    limit.report_refused(refused)
    assert limit.status().problem == ""
    timer.is_full = False
    limit.report_refused(refused)
    assert limit.status().problem == "overloaded: it has refused 1 call"


@pytest.mark.parametrize("nonce", ["a\x80b", "é", "a\nb", "\x7f", b"a"])
def test_a_nonce_that_grpc_would_not_send_is_not_returned(nonce):
    """The trailing metadata would be invalid, and the call would end with INTERNAL."""
    policy = LimitPolicy()
    limit = ServerLimit(policy, lambda _: policy, timer=None)
    details = SimpleNamespace(method=DETAILS.method, invocation_metadata=((NONCE_KEY, nonce),))
    _, _, metadata = limit.refusal(limit.call(details, HANDLER), RefusalReason.WAITED)
    assert dict(metadata)[REFUSED_KEY] == ""
