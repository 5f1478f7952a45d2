"""Which calls run, wait and are refused: `Limiter`, without a server."""

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rpcwheel.limit.limiter import LimitedCall, LimitedMethod, Limiter, RefusalReason
from rpcwheel.limit.policy import LimitPolicy
from rpcwheel.limit.rate import TokenBucket
from rpcwheel.rpc import Criticality

MS = 1_000_000
CRITICAL_PLUS, CRITICAL, _, SHEDDABLE = Criticality


class Server:
    """A limiter whose calls have names, at a time that tests set."""

    def __init__(self, **policy):
        self.refused = []
        self.limiter = Limiter(LimitPolicy(**policy) if policy else None, refuse=self._refuse)
        self.get = LimitedMethod(is_stream=False, maximum=math.inf)
        self.watch = LimitedMethod(is_stream=True, maximum=math.inf)
        self.now_ms = 1000
        self._names = {}

    def _refuse(self, call, reason):
        self.refused.append((self._names[call], reason))

    def arrive(self, name, method=None, level=CRITICAL, *, deadline_ms=None, must_wait=False):
        """Let a call arrive; returns it, and whether it runs."""
        call = LimitedCall(None, method or self.get, level, "")
        self._names[call] = name
        if deadline_ms is not None:
            call.deadline_ns = deadline_ms * MS
        return call, self.limiter.arrive(call, self.now_ms * MS, must_wait=must_wait)

    def running(self, name, method=None):
        """Let a call arrive that runs at once."""
        call, runs = self.arrive(name, method)
        assert runs
        return call

    def waiting(self, *names, **options):
        """Let calls arrive that wait."""
        calls = []
        for name in names:
            call, runs = self.arrive(name, **options)
            assert not runs
            calls.append(call)
        assert not self.refused
        return calls

    def end(self, call, *, after_ms=0):
        """End a call that has run so long; returns the names of those that run instead."""
        started_ns = self.now_ms * MS
        self.now_ms += after_ms
        self.limiter.ended(call, started_ns, self.now_ms * MS, 0)
        return self.take()

    def take(self):
        names = []
        while (call := self.limiter.take(self.now_ms * MS)) is not None:
            names.append(self._names[call])
        return names

    def order(self, call):
        """The names of the waiting calls in the order in which they run, each in turn."""
        names = []
        for _ in range(self.limiter.waiting):
            self.limiter.ended(call, 0, self.now_ms * MS, 0)
            call = self.limiter.take(self.now_ms * MS)
            if call is None:
                break
            names.append(self._names[call])
        return names

    def expire(self, now_ms):
        self.now_ms = now_ms
        self.limiter.refuse_late(now_ms * MS)


# Order


def test_equally_critical_calls_run_in_the_order_of_their_arrival():
    server = Server(max_concurrent=1, max_wait=9.0)
    first = server.running("first")
    server.waiting("a", "b", "c")
    assert server.order(first) == ["a", "b", "c"]


def test_the_newest_of_the_least_critical_calls_run_first_once_a_call_has_waited_for_too_long():
    server = Server(max_concurrent=1, max_wait=1.0)
    first = server.running("first")
    server.waiting("at the begin")
    server.now_ms += 950
    server.waiting("a", "b", level=CRITICAL_PLUS)
    server.waiting("c", "d", "e")
    server.now_ms += 60  # "at the begin" has waited for too long
    assert server.order(first) == ["a", "b", "e", "d", "c"]
    assert server.refused == [("at the begin", RefusalReason.WAITED)]


def test_the_newest_call_that_may_run_is_taken_past_newer_ones_that_wait_for_their_own_method():
    server = Server(max_concurrent=2, max_wait=1.0)
    rare = LimitedMethod(is_stream=False, maximum=1)
    server.running("rare", rare)
    second = server.running("second")
    server.waiting("at the begin")
    server.now_ms += 950
    server.waiting("a", "b")
    server.waiting("c", method=rare)
    server.now_ms += 51
    assert server.end(second) == ["b"]


def test_the_end_of_a_call_costs_the_same_however_many_wait_for_the_limit_of_another_method():
    server, looks = Server(max_concurrent=3), []
    rare = LimitedMethod(is_stream=False, maximum=1)
    server.running("rare", rare)
    other = server.running("other")

    class Watched(LimitedCall):
        deadline_ns = property(lambda call: looks.append(call) or math.inf, lambda *_: None)

    for _ in range(100):
        assert not server.limiter.arrive(Watched(None, rare, CRITICAL, ""), server.now_ms * MS)
    looks.clear()
    server.limiter.ended(other, 0, server.now_ms * MS, 0)
    assert server.limiter.take(server.now_ms * MS) is None
    assert not looks


def test_the_wait_begins_anew_when_no_call_has_waited_for_a_moment():
    server = Server(max_concurrent=1, max_wait=1.0)
    first = server.running("first")
    (second,) = server.waiting("second")
    assert server.end(first, after_ms=900) == ["second"]
    server.waiting("a", "b", "c")
    server.now_ms += 900
    assert server.order(second) == ["a", "b", "c"]


def full_of_polls():
    """A server with an adaptive limit, whose places are all taken by handlers that take long."""
    server = Server(max_wait=10.0)
    poll = LimitedMethod(is_stream=False, maximum=math.inf)
    for _ in range(int(server.limiter.limit)):
        server.running("poll", poll)
    server.waiting("poll", method=poll)
    return server


def test_the_limit_adapts_to_slow_handlers_whatever_runs_in_addition():
    server = Server(max_wait=60.0)
    server.get.took(10 * MS)
    poll = LimitedMethod(is_stream=False, maximum=math.inf)
    limit = server.limiter.limit
    running, waiting, limits = [], [], {limit}
    for _ in range(200):
        call, runs = server.arrive("poll", poll)
        (running if runs else waiting).append(call)
    for _ in range(60):
        for _ in range(20):
            server.limiter.ended(server.running("get"), server.now_ms * MS, server.now_ms * MS, 0)
        server.now_ms += 100
        server.limiter.ended(running.pop(0), (server.now_ms - 800) * MS, server.now_ms * MS, 0)
        while (call := server.limiter.take(server.now_ms * MS)) is not None:
            running.append(call)
        limits.add(server.limiter.limit)
    assert len(limits) > 1  # it tries fewer, because polls wait


@pytest.mark.parametrize(("took_ms", "run"), [(149, ["second", "third"]), (150, [])])
def test_the_first_call_of_a_method_shows_whether_it_is_quick(took_ms, run):
    server = full_of_polls()
    first = server.running("first")
    server.waiting("second", "third")
    assert server.end(first, after_ms=took_ms) == run


def test_waiting_calls_run_when_their_method_becomes_quick():
    server = Server(max_wait=10.0)
    server.get.took(155 * MS)
    first = server.running("first")
    poll = LimitedMethod(is_stream=False, maximum=math.inf)
    for _ in range(int(server.limiter.limit) - 1):
        server.running("poll", poll)
    server.waiting("poll", method=poll)
    server.waiting("later")
    assert server.end(first, after_ms=10) == ["poll", "later"]


def test_first_calls_of_methods_run_in_addition_up_to_the_limit():
    server = full_of_polls()
    methods = [LimitedMethod(is_stream=False, maximum=math.inf) for _ in range(20)]
    runs = [server.arrive("first", method)[1] for method in methods]
    assert sum(runs) == server.limiter.limit


def test_calls_in_addition_to_the_limit_need_threads():
    server = Server(max_wait=10.0)
    server.limiter.set_threads(10)
    poll = LimitedMethod(is_stream=False, maximum=math.inf)
    for _ in range(int(server.limiter.limit)):
        server.running("poll", poll)
    server.get.took(10 * MS)
    calls = [server.running("get") for _ in range(2)]
    server.waiting("later")
    assert server.end(calls[0], after_ms=10) == ["later"]


# Streams


def test_a_stream_waits_for_a_thread_although_the_limit_is_reached():
    server = Server(max_concurrent=1, max_wait=9.0)
    server.limiter.set_threads(2)
    server.running("call")
    stream = server.running("stream", server.watch)
    server.waiting("later")
    server.waiting("later stream", method=server.watch)
    assert server.end(stream) == ["later stream"]


def test_an_adaptive_limit_is_at_most_the_number_of_threads():
    server = Server(max_concurrent="adaptive")
    server.limiter.set_threads(3)
    assert server.limiter.limit == 3


# Rates


def rated(*buckets, is_stream=False):
    return LimitedMethod(is_stream=is_stream, maximum=math.inf, buckets=buckets)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_above_the_rate_is_refused_although_it_could_run(is_stream):
    server = Server(max_concurrent=9, max_streams=9)
    method = rated(TokenBucket(10, 2), is_stream=is_stream)
    server.running("1", method)
    server.running("2", method)
    call, runs = server.arrive("3", method)
    assert not runs
    assert server.refused == [("3", RefusalReason.RATE)]
    assert (call.token_wait_ns, server.limiter.waiting) == (100 * MS, 0)
    server.now_ms += 100
    server.running("4", method)


def test_a_call_that_waits_has_its_token():
    server = Server(max_concurrent=1, max_wait=9.0)
    method = rated(TokenBucket(10, 2))
    first = server.running("first", method)
    server.waiting("second", method=method)
    assert not server.arrive("third", method)[1]
    assert server.end(first) == ["second"]
    assert server.refused == [("third", RefusalReason.RATE)]


def test_a_call_takes_a_token_of_its_server_and_one_of_its_method_or_none():
    server = Server(max_concurrent=9)
    of_server, of_method = TokenBucket(10, 3), TokenBucket(1, 1)
    rare, common = rated(of_server, of_method), rated(of_server)
    server.running("1", rare)
    call, _ = server.arrive("2", rare)  # takes none of the server
    assert call.token_wait_ns == 1000 * MS
    server.running("3", common)
    server.running("4", common)
    call, _ = server.arrive("5", common)
    assert call.token_wait_ns == 100 * MS
    assert [name for name, _ in server.refused] == ["2", "5"]


# Refusals


def test_a_call_is_refused_when_it_has_waited_for_longer_than_the_maximum():
    server = Server(max_concurrent=2, max_wait=1.0)
    server.running("first")
    server.running("second")
    server.waiting("a")
    assert server.limiter.expiry_ns() == 2000 * MS
    server.expire(2000)
    assert server.refused == []
    server.expire(2001)
    assert server.refused == [("a", RefusalReason.WAITED)]
    assert server.limiter.refused == {(CRITICAL, RefusalReason.WAITED): 1}
    assert (server.limiter.waiting, server.limiter.expiry_ns()) == (0, None)


def test_the_maximum_wait_is_a_quarter_once_a_call_has_waited_for_too_long():
    server = Server(max_concurrent=1, max_wait=1.0)
    server.running("first")
    server.waiting("a")
    server.now_ms += 700
    server.waiting("b", level=CRITICAL_PLUS)
    server.now_ms += 50
    server.waiting("c", "d")
    server.expire(2001)  # they have waited for 251 ms
    assert [name for name, _ in server.refused] == ["a", "c", "d"]
    server.expire(2700)
    assert len(server.refused) == 3


def test_calls_that_wait_too_long_for_their_own_method_do_not_shorten_the_wait_of_others():
    server = Server(max_concurrent=2, max_wait=1.0)
    rare = LimitedMethod(is_stream=False, maximum=1)
    server.running("rare", rare)
    server.waiting("a", method=rare)
    server.running("second")
    server.now_ms += 850
    server.waiting("b", "c", "d")
    server.expire(2001)  # they have waited for 151 ms
    assert server.refused == [("a", RefusalReason.WAITED)]


def test_calls_wait_for_a_server_that_is_full_although_their_method_is_too():
    server = Server(max_concurrent=1, max_wait=1.0)
    alone = LimitedMethod(is_stream=False, maximum=1)
    server.running("first", alone)
    server.waiting("a", method=alone)
    server.now_ms += 750
    server.waiting("b", "c", method=alone)
    server.expire(2001)  # they have waited for 251 ms
    assert [name for name, _ in server.refused] == ["a", "b"]


def test_the_wait_is_the_whole_time_again_when_calls_wait_for_their_own_method_only():
    server = Server(max_concurrent=2, max_wait=1.0)
    rare = LimitedMethod(is_stream=False, maximum=1)
    server.running("rare", rare)
    second = server.running("second")
    server.waiting("a")
    server.now_ms += 900
    server.waiting("b", method=rare)
    server.expire(2001)
    server.now_ms += 100  # until then, that no call waits for the server may be chance
    assert server.end(second) == []
    server.running("third")
    assert not server.arrive("c")[1]
    assert not server.arrive("d")[1]
    server.expire(2101 + 400)
    assert server.refused == [("a", RefusalReason.WAITED)]


def test_as_many_calls_as_run_may_wait_for_the_whole_time():
    server = Server(max_concurrent=2, max_wait=1.0)
    server.running("first")
    server.running("second")
    server.waiting("a")
    server.now_ms += 700
    server.waiting("b", "c")
    server.expire(2001)
    assert [name for name, _ in server.refused] == ["a"]


def late_server(level=CRITICAL):
    """A server that was late for a call of this level; it runs two calls of 100 ms."""
    server = Server(max_concurrent=2, max_wait=1.0)
    server.end(server.running("a call that takes"), after_ms=100)
    server.running("first")
    server.running("second")
    server.waiting("late", level=level)
    server.expire(server.now_ms + 1001)
    assert server.refused.pop() == ("late", RefusalReason.WAITED)
    return server


def refused_at_once(server):
    """Let four calls arrive, which can be started in a tenth of the maximum wait, and another."""
    server.waiting("a", "b", "c", "d")
    _, runs = server.arrive("e")
    assert not runs
    return [name for name, _ in server.refused]


@pytest.mark.parametrize("level", [CRITICAL_PLUS, CRITICAL])
def test_a_late_server_refuses_a_call_at_once_if_as_many_wait_as_can_be_started_in_time(level):
    server = late_server(level)
    assert refused_at_once(server) == ["e"]
    _, reason = server.refused.pop()
    assert reason is RefusalReason.FULL
    assert reason.label == "full"
    assert reason.details.endswith(": as many calls wait as can be started soon")
    assert server.limiter.waiting == 4
    server.waiting("f", "g", level=CRITICAL_PLUS)  # they are more critical


def test_calls_wait_for_the_whole_time_if_the_server_was_late_for_less_critical_ones_only():
    server = late_server(SHEDDABLE)
    assert refused_at_once(server) == []
    server.expire(server.now_ms + 1000)
    assert server.refused == []


def test_calls_that_wait_for_the_number_of_their_method_are_not_refused_at_once():
    server = late_server()
    rare = LimitedMethod(is_stream=False, maximum=0)
    server.waiting(*map(str, range(9)), method=rare)
    assert refused_at_once(server) == ["e"]  # they do not count for others


def test_quick_calls_are_not_refused_at_once_because_others_wait_for_their_method():
    server = Server(max_concurrent="adaptive", max_wait=1.0)
    server.end(server.running("a call that takes"), after_ms=100)
    for number in range(8):
        server.running(str(number))
    server.waiting("late")
    server.expire(server.now_ms + 1001)
    server.refused.clear()
    rare = LimitedMethod(is_stream=False, maximum=1)
    rare.took(10 * MS)
    rare.running = 1
    server.waiting(*map(str, range(20)), method=rare)
    server.waiting("a")


def test_calls_that_have_gone_or_are_too_old_do_not_count_for_those_that_arrive():
    server = late_server()
    for call in server.waiting("a", "b", "c", "d"):
        server.limiter.forget(call)
    assert refused_at_once(server) == ["e"]
    server.now_ms += 101
    assert not server.arrive("f")[1]
    assert ("f", RefusalReason.FULL) not in server.refused


def test_quick_calls_are_not_refused_at_once_because_slow_ones_wait():
    server = Server(max_concurrent="adaptive")
    server.end(server.running("a call that takes"), after_ms=10)
    slow = LimitedMethod(is_stream=False, maximum=math.inf)
    slow.took(1000 * MS)
    for number in range(8):
        server.running(f"slow {number}", slow)
    for number in range(8):
        server.running(f"quick {number}")
    server.waiting("late", method=slow)
    server.expire(server.now_ms + 10_000)
    assert server.refused.pop() == ("late", RefusalReason.WAITED)
    while not server.refused:
        server.arrive("slow", slow)
    assert server.refused.pop() == ("slow", RefusalReason.FULL)
    server.waiting("quick")


def test_a_call_that_had_too_little_time_when_it_arrived_does_not_make_the_server_late():
    server = Server(max_concurrent=2, max_wait=1.0)
    server.end(server.running("a call that takes"), after_ms=100)
    first = server.running("first")
    server.running("second")
    server.waiting("hopeless", deadline_ms=server.now_ms + 100)
    assert server.end(first, after_ms=100) == []
    assert server.refused.pop() == ("hopeless", RefusalReason.SHORT)
    server.running("third")
    assert refused_at_once(server) == []


@pytest.mark.parametrize(("left_ms", "refused"), [(0, []), (1, ["e"])])
def test_a_call_refused_when_it_starts_makes_the_server_late_if_it_had_enough_time(
    left_ms, refused
):
    """In `grpc.aio` its deadline is not known before."""
    server = Server(max_concurrent=2, max_wait=1.0)
    server.end(server.running("a call that takes"), after_ms=100)
    first = server.running("first")
    server.running("second")
    (call,) = server.waiting("started")
    assert server.end(first, after_ms=100) == ["started"]
    call.deadline_ns = (server.now_ms + left_ms) * MS
    server.limiter.refuse_without_time(call, server.now_ms * MS)
    assert server.refused.pop()[0] == "started"
    assert refused_at_once(server) == refused


def test_a_server_is_not_late_for_calls_that_are_more_critical_than_those_refused_since():
    server = late_server()
    server.waiting("late", level=SHEDDABLE)
    server.now_ms += 500
    (gone,) = server.waiting("gone", level=SHEDDABLE)
    server.expire(server.now_ms + 501)
    assert server.refused.pop() == ("late", RefusalReason.WAITED)
    server.limiter.forget(gone)
    assert refused_at_once(server) == []


def test_a_server_whose_durations_are_not_known_refuses_no_call_at_once():
    server = Server(max_concurrent=1, max_wait=1.0)
    server.running("first")
    server.waiting("late")
    server.expire(server.now_ms + 1001)
    server.refused.clear()
    assert refused_at_once(server) == []


@pytest.mark.parametrize(("after_ms", "refused"), [(99, ["e"]), (100, [])])
def test_a_server_is_late_for_at_least_a_tenth_of_a_second(after_ms, refused):
    server = late_server()
    server.now_ms += after_ms
    assert server.take() == []
    assert refused_at_once(server) == refused


def test_the_maximum_wait_follows_the_durations_of_handlers_of_all_methods():
    server = Server(max_concurrent=1)
    slow = LimitedMethod(is_stream=False, maximum=math.inf)
    server.end(server.running("slow", slow), after_ms=1000)
    server.running("first")
    server.waiting("a")
    assert server.limiter.expiry_ns() == (server.now_ms + 4000) * MS


def test_a_shorter_duration_shortens_the_maximum_wait_unless_its_client_gave_up():
    server = Server(max_concurrent=1)
    server.end(server.running("slow"), after_ms=1600)
    gone = server.running("gone")
    server.limiter.ended(gone, server.now_ms * MS, server.now_ms * MS, 0, is_answered=False)
    assert server.get.least_ns == 1600 * MS
    server.end(server.running("short"), after_ms=0)
    server.running("first")
    server.waiting("a")
    assert server.limiter.expiry_ns() == (server.now_ms + 4 * 1500) * MS


def test_the_least_wait_is_that_of_short_handlers():
    server = Server(max_concurrent=1)
    server.end(server.running("short"), after_ms=1)
    server.running("first")
    server.waiting("a")
    assert server.limiter.expiry_ns() == (server.now_ms + 300) * MS


@pytest.mark.parametrize("is_late", [False, True])
def test_a_call_with_less_time_left_than_its_method_takes_does_not_run(is_late):
    server = Server(max_concurrent=1, max_wait=9.0)
    server.end(server.running("a call that takes"), after_ms=100)
    first = server.running("first", LimitedMethod(is_stream=False, maximum=math.inf))
    server.waiting("too late", deadline_ms=server.now_ms + 150)
    server.waiting("in time", deadline_ms=server.now_ms + 151)
    assert server.end(first, after_ms=50 + is_late) == ([] if is_late else ["in time"])
    late = [("too late", RefusalReason.DEADLINE), ("in time", RefusalReason.DEADLINE)]
    assert server.refused == late[: 1 + is_late]


@pytest.mark.parametrize(("least_ms", "after_ms"), [(100, 1000), (300, 1200)])
def test_a_method_whose_calls_were_refused_for_long_is_measured_again(least_ms, after_ms):
    """Else one whose handlers were once slower than the timeouts of callers is refused for ever."""
    server = Server(max_concurrent=1, max_wait=9.0)
    server.end(server.running("a call that takes"), after_ms=least_ms)

    def runs_after(ms):
        """Whether a call that waits for so long runs, with 1 ms left."""
        other = server.running("other", LimitedMethod(is_stream=False, maximum=math.inf))
        (late,) = server.waiting("late", deadline_ms=server.now_ms + ms + 1)
        runs = server.end(other, after_ms=ms) == ["late"]
        if runs:
            late.is_gone = True  # its handler tells nothing
            server.end(late)
        server.refused.clear()
        return runs

    server.now_ms += 9000
    assert not runs_after(1)
    assert not runs_after(after_ms - 1)
    assert runs_after(1)
    assert not runs_after(after_ms - 1)


def test_a_method_that_was_measured_since_is_not_measured_again():
    server = Server(max_concurrent=1, max_wait=9.0)
    server.get.took(100 * MS)
    server.get.refused_ns = 1
    server.now_ms += 5000
    running = server.running("a call that takes")
    server.waiting("late", deadline_ms=server.now_ms + 101)
    assert server.end(running, after_ms=100) == []
    assert server.refused == [("late", RefusalReason.DEADLINE)]


def test_only_a_call_that_runs_measures_a_method_again():
    server = Server(max_wait=9.0)
    slow = LimitedMethod(is_stream=False, maximum=math.inf)
    slow.took(1000 * MS)
    slow.refused_ns = 1
    server.now_ms += 4000
    first, *_ = [server.running(str(number), slow) for number in range(8)]
    server.waiting("again", method=slow, deadline_ms=server.now_ms + 500)
    server.waiting("quick", must_wait=True)
    assert server.take() == ["quick"]
    first.is_gone = True  # its duration does not count
    assert server.end(first) == ["again"]


def test_a_server_whose_handlers_do_not_answer_in_time_is_overloaded():
    """Not the deadlines of its callers are too short."""
    server = Server(max_concurrent=1, max_wait=9.0)
    hangs = server.running("hangs")
    server.now_ms += 5000
    server.limiter.ended(hangs, 1000 * MS, server.now_ms * MS, 0, is_answered=False)
    other = server.running("other", LimitedMethod(is_stream=False, maximum=math.inf))
    server.waiting("late", deadline_ms=server.now_ms + 1000)
    assert server.end(other) == []
    assert server.refused == [("late", RefusalReason.DEADLINE)]


def test_a_deadline_that_has_passed_measures_nothing():
    server = Server(max_concurrent=1, max_wait=9.0)
    other = server.running("other", LimitedMethod(is_stream=False, maximum=math.inf))
    server.waiting("late", deadline_ms=server.now_ms + 5000)
    assert server.end(other, after_ms=5000) == []
    assert server.refused == [("late", RefusalReason.DEADLINE)]


def test_calls_of_a_method_above_its_own_number_are_refused_if_they_would_wait_in_vain():
    server = Server(max_concurrent=3, max_wait=0.1)
    rare = LimitedMethod(is_stream=False, maximum=2)
    server.end(server.running("a call that takes", rare), after_ms=50)
    first = server.running("first", rare)
    server.running("second", rare)
    server.waiting(*"abcdef", method=rare)  # four in the time of two handlers, and two of the next
    assert not server.arrive("full", rare)[1]
    assert server.refused.pop() == ("full", RefusalReason.FULL)
    server.waiting("critical", method=rare, level=CRITICAL_PLUS)
    server.running("other")
    server.waiting("sheddable", level=SHEDDABLE)  # of another method
    assert not server.arrive("full", rare)[1]
    assert server.refused.pop() == ("full", RefusalReason.FULL)
    assert server.end(first, after_ms=50) == ["critical"]
    assert refused_at_once(server) == []


def test_calls_that_wait_for_their_method_do_not_count_after_their_deadlines():
    server = Server(max_concurrent=3, max_wait=0.1)
    rare = LimitedMethod(is_stream=False, maximum=1)
    server.end(server.running("a call that takes", rare), after_ms=100)
    server.running("hangs", rare)
    server.waiting("a", "b", method=rare, deadline_ms=server.now_ms + 50)
    server.now_ms += 50
    assert server.take() == []
    server.refused.clear()
    server.waiting("c", "d", method=rare)


def test_streams_that_wait_for_the_number_of_their_method_are_bounded():
    server = Server(max_concurrent=1, max_wait=0.6)
    rare = LimitedMethod(is_stream=True, maximum=1)
    server.running("open", rare)
    server.waiting("a", "b", method=rare)
    assert not server.arrive("full", rare)[1]
    assert server.refused == [("full", RefusalReason.FULL)]


def test_the_shortest_duration_of_a_method_grows_slowly_and_falls_at_once():
    method = LimitedMethod(is_stream=False, maximum=1)
    for duration, least in ((640, 640), (1280, 680), (64, 64), (64, 64)):
        method.took(duration)
        assert method.least_ns == least


def test_a_call_that_has_ended_before_its_handler_tells_nothing_of_durations():
    server = Server(max_concurrent=1)
    call = server.running("gone")
    call.is_gone = True
    server.end(call, after_ms=5000)
    assert server.get.least_ns == 0
    server.running("first")
    server.waiting("a")
    assert server.limiter.expiry_ns() == (server.now_ms + 300) * MS


# Any sequence


class Model(RuleBasedStateMachine):
    """A reference that looks at all calls each time: who may run, and who runs first."""

    def __init__(self):
        super().__init__()
        self.now_ms = 1000
        self.calls = []  # those that wait, in the order of their arrival
        self.run = []
        self.refused = []
        self.paused = False

    @initialize(
        limit=st.integers(1, 3),
        streams=st.none() | st.integers(1, 2),
        threads=st.none() | st.integers(1, 4),
    )
    def begin(self, limit, streams, threads):
        policy = LimitPolicy(max_concurrent=limit, max_streams=streams, max_wait=0.1)
        self.limit, self.threads = limit, threads or math.inf
        self.max_streams = streams or math.inf
        self.limiter = Limiter(policy, refuse=self._refuse)
        if threads:
            self.limiter.set_threads(threads)
        self.methods = [
            LimitedMethod(is_stream=False, maximum=math.inf),
            LimitedMethod(is_stream=False, maximum=1),
            LimitedMethod(is_stream=True, maximum=math.inf),
        ]

    def _refuse(self, call, reason):
        assert not call.is_gone
        assert call not in self.run
        assert call not in self.refused
        self.refused.append(call)

    def may_run(self, call):
        streams = sum(each.method.is_stream for each in self.run)
        same = sum(each.method is call.method for each in self.run)
        if len(self.run) >= self.threads or same >= call.method.maximum:
            return False
        if call.method.is_stream:
            return streams < self.max_streams
        return len(self.run) - streams < self.limit

    def live(self):
        gone = {id(call) for call in self.refused}
        return [call for call in self.calls if not call.is_gone and id(call) not in gone]

    @rule(
        number=st.integers(0, 2),
        level=st.sampled_from(Criticality),
        left_ms=st.none() | st.integers(1, 300),
        pauses=st.booleans(),
    )
    def arrive(self, number, level, left_ms, pauses):
        call = LimitedCall(None, self.methods[number], level, "")
        if left_ms is not None:
            call.deadline_ns = (self.now_ms + left_ms) * MS
        self.paused = self.paused or (pauses and not call.method.is_stream)
        may_run = self.may_run(call) and (call.method.is_stream or not self.paused)
        runs = self.limiter.arrive(call, self.now_ms * MS, must_wait=self.paused)
        assert runs == may_run
        if runs:
            self.run.append(call)
        elif call not in self.refused:
            self.calls.append(call)

    @rule()
    def take(self):
        self.paused = False
        while True:
            before = self.live()
            call = self.limiter.take(self.now_ms * MS)
            if call is None:
                break
            live = [each for each in before if each not in self.refused]
            could_run = [each for each in live if self.may_run(each)]
            first = max(each.criticality for each in could_run)
            same = [each for each in could_run if each.criticality == first]
            assert call in (same[0], same[-1])  # the oldest, or the newest
            if call is not same[0]:  # of the least critical calls
                assert first == min(each.criticality for each in live)
            assert call.deadline_ns > self.now_ms * MS
            self.run.append(call)
            self.calls.remove(call)
        assert not [call for call in self.live() if self.may_run(call)]
        waited = [self.now_ms * MS - call.arrived_ns for call in self.live()]
        assert max(waited, default=0) <= 100 * MS

    @precondition(lambda self: self.run)
    @rule(data=st.data(), took_ms=st.integers(0, 50))
    def end(self, data, took_ms):
        call = data.draw(st.sampled_from(self.run), label="call")
        self.run.remove(call)
        self.now_ms += took_ms
        started_ns = (self.now_ms - took_ms) * MS
        self.limiter.ended(call, started_ns, self.now_ms * MS, 0)
        if not self.paused:
            self.take()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def goes(self, data):
        call = data.draw(st.sampled_from(self.calls), label="call")
        call.is_gone = True
        if call.is_waiting:
            self.limiter.forget(call)

    @rule(ms=st.integers(1, 150))
    def wait(self, ms):
        self.now_ms += ms

    @rule()
    def expire(self):
        expires_ns = self.limiter.expiry_ns()
        if expires_ns is not None:
            self.now_ms = max(self.now_ms, expires_ns // MS + 1)
            before = self.limiter.waiting
            self.limiter.refuse_late(self.now_ms * MS)
            assert self.limiter.waiting < before

    @invariant()
    def counts_are_right(self):
        streams = sum(call.method.is_stream for call in self.run)
        assert self.limiter.streams == streams
        assert self.limiter.running == len(self.run) - streams
        assert sum(self.limiter.refused.values()) == len(self.refused)
        assert len(self.live()) <= self.limiter.waiting <= len(self.calls)
        assert (self.limiter.expiry_ns() is None) == (self.limiter.waiting == 0)

    def teardown(self):
        if not hasattr(self, "limiter"):
            return
        self.limiter.refuse_all()
        for call in self.run:
            self.limiter.ended(call, 0, 1, 0)
        assert self.limiter.take(self.now_ms * MS) is None
        limiter = self.limiter
        assert limiter.running == limiter.streams == limiter.waiting == 0
        assert all(method.running == 0 for method in self.methods)


TestModel = Model.TestCase


class QuickAndSlow(RuleBasedStateMachine):
    """An adaptive limit, with methods that become quick and slow."""

    def __init__(self):
        super().__init__()
        self.now_ms, self.running, self.waiting = 1000, [], []
        self.limiter = Limiter(LimitPolicy(max_wait=0.5), refuse=self._refuse)
        self.methods = [
            *(LimitedMethod(is_stream=False, maximum=math.inf) for _ in range(3)),
            LimitedMethod(is_stream=True, maximum=math.inf),
        ]

    def _refuse(self, call, reason):
        self.waiting.remove(call)

    def _arrive(self, method):
        call = LimitedCall(None, method, CRITICAL, "")
        self.waiting.append(call)
        runs = self.limiter.arrive(call, self.now_ms * MS)
        if runs:
            self._started(call)
        return runs

    def _started(self, call):
        self.waiting.remove(call)
        self.running.append((call, self.now_ms))

    def _take(self):
        while (call := self.limiter.take(self.now_ms * MS)) is not None:
            self._started(call)

    @rule(number=st.integers(0, 3), count=st.integers(1, 9))
    def arrive(self, number, count):
        for _ in range(count):
            self._arrive(self.methods[number])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), after_ms=st.sampled_from([0, 10, 149, 150, 400, 2000]))
    def end(self, data, after_ms):
        call, began_ms = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.now_ms = max(self.now_ms, began_ms + after_ms)
        self.limiter.ended(call, began_ms * MS, self.now_ms * MS, 0)
        self._take()

    @rule()
    def refuse_all(self):
        self.limiter.refuse_all()

    @invariant()
    def counts_are_right(self):
        limiter, calls = self.limiter, [call for call, _ in self.running]
        streams = sum(call.method.is_stream for call in calls)
        assert limiter.running + limiter.extra == len(calls) - streams
        assert limiter.streams == streams
        assert limiter.waiting == len(self.waiting)
        assert limiter._quick == sum(call.method.is_quick for call in calls)
        assert limiter._queue.quick == sum(not call.method.is_slow for call in self.waiting)

    def teardown(self):
        """Whatever has happened, an idle server has room for slow calls and as many quick ones."""
        self.limiter.refuse_all()
        for call, began_ms in self.running:
            call.is_gone = True
            self.limiter.ended(call, began_ms * MS, self.now_ms * MS, 0)
        self.running.clear()
        poll, get = (LimitedMethod(is_stream=False, maximum=math.inf) for _ in range(2))
        poll.took(1000 * MS)
        get.took(MS)
        limit = self.limiter.limit
        for method in (poll, get):
            runs = [self._arrive(method) for _ in range(int(limit) + 2)]
            assert sum(runs) == limit
        call, began_ms = self.running.pop()
        self.limiter.ended(call, began_ms * MS, self.now_ms * MS, 0)
        self._take()
        assert self.running[-1][0].method is get


TestQuickAndSlow = QuickAndSlow.TestCase
