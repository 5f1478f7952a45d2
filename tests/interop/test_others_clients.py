"""Client interceptors of rpcwheel before and behind those of other libraries."""

import grpc
import pytest

from fixtures.callers import CALLERS, REQUESTS, AioChannelCaller, SyncCaller
from fixtures.shop import Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import KINDS
from rpcwheel.call import CallPolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy

ALL = b"".join(REQUESTS)
RETRY = RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=3, backoff=0.01)
PATIENT = CallPolicy(timeout=WAIT_S, retry=RETRY, idempotent=True)

PACKAGES = {"opentelemetry": {"sync", "aio"}, "grpc_interceptor": {"sync"}}
"""Whose, and the worlds for which they have a client."""

PLACES = [
    (package, caller, place)
    for package, worlds in PACKAGES.items()
    for caller in CALLERS
    for place in ("outer", "inner")
    if caller.world in worlds and (place == "inner" or caller is not AioChannelCaller)
]
"""Theirs before or behind ours. (What stands on the channel that ours wraps is behind.)"""


def is_generator(package, caller, place, kind) -> bool:
    """Whether theirs make a bare generator of a call: it has no status, and nothing to cancel."""
    return (package, caller, kind) == ("opentelemetry", SyncCaller, "unary_stream")


def hides_the_end(*way) -> bool:
    """Whether ours, before theirs, can't follow the call."""
    return is_generator(*way) and "inner" in way


def asks_too_early(package, caller, place, kind) -> bool:
    """Whether theirs may get a status that grpc.aio makes up: see the canary, INTERNAL."""
    asks = (package, caller.world, place) == ("opentelemetry", "aio", "inner")
    return asks and kind.startswith("stream")


def loses_cancel(package, caller, place, kind) -> bool:
    """Whether theirs alone keep a cancel from the server (opentelemetry-python-contrib #3271)."""
    forgets = package == "opentelemetry" and caller.world == "aio" and kind.endswith("unary")
    return forgets or is_generator(package, caller, place, kind)


def is_future(_, caller, __, kind) -> bool:
    return caller is SyncCaller and kind.endswith("unary")


def in_each_place(first, *exceptions, wanted=lambda *_: True):
    """Each place with one kind of call that is no exception there.

    The kinds take turns from place to place, beginning with the one of number `first`.
    """
    ways = []
    for number, place in enumerate(PLACES):
        kinds = [KINDS[(first + number + turn) % len(KINDS)] for turn in range(len(KINDS))]
        able = (
            (*place, kind)
            for kind in kinds
            if wanted(*place, kind) and not any(trait(*place, kind) for trait in exceptions)
        )
        ways += [way for way in (next(able, None),) if way is not None]
    names = ["-".join((w[0], w[1].__name__, *w[2:])) for w in ways]
    return pytest.mark.parametrize("position", ways, indirect=True, ids=names)


class Position:
    """Where calls go through ours and theirs."""

    def __init__(self, way, open_caller, target) -> None:
        package, self.caller, self.place, self.kind = way
        self.theirs = pytest.importorskip(f"fixtures.foreign_{package}").Theirs()
        self._open, self._target = open_caller, target

    def open(self, policy: CallPolicy):
        return self._open(self.caller, self._target, policy, **{self.place: self.theirs})

    def saw(self, *, before: list[str], behind: list[str]) -> bool:
        """Whether they come to see the calls that those see who stand there."""
        wanted = before if self.place == "outer" else behind
        return wait_until(lambda: self.theirs.seen == wanted)


@pytest.fixture
def position(request, shop, open_caller):
    return Position(request.param, open_caller, shop.target)


@in_each_place(0)
def test_other_interceptors_see_one_successful_call(position):
    done = position.open(PATIENT).call(position.kind)
    assert (done.answer, done.code) == (ALL, "OK")
    assert position.saw(before=["OK"], behind=["OK"])


@in_each_place(1, asks_too_early)
def test_an_error_reaches_the_caller_unchanged(position, shop):
    shop.then(Fail("NOT_FOUND", "no such order", (("request-id", "7"),)))
    done = position.open(PATIENT).call(position.kind)
    assert (done.messages, done.code, done.details) == ([], "NOT_FOUND", "no such order")
    assert done.trailing["request-id"] == "7"
    assert position.saw(before=["NOT_FOUND"], behind=["NOT_FOUND"])


@in_each_place(2, hides_the_end, asks_too_early)
def test_only_interceptors_behind_rpcwheel_see_each_attempt(position, shop):
    shop.then("UNAVAILABLE")
    done = position.open(PATIENT).call(position.kind)
    assert (done.answer, done.code) == (ALL, "OK")
    assert position.saw(before=["OK"], behind=["UNAVAILABLE", "OK"])
    assert [len(call.requests) for call in shop.calls[1:]] == [3 if position.kind[0] == "s" else 1]


@in_each_place(3)
def test_a_deadline_of_the_policy_ends_the_call_for_other_interceptors(position, shop):
    shop.then(Hang())
    done = position.open(CallPolicy(timeout=1.0)).call(position.kind, timeout=None)
    assert (done.messages, done.code) == ([], "DEADLINE_EXCEEDED")
    assert position.saw(before=["DEADLINE_EXCEEDED"], behind=["DEADLINE_EXCEEDED"])


@in_each_place(0, hides_the_end, asks_too_early)
def test_interceptors_before_rpcwheel_see_a_default_response_as_success(position, shop):
    default = [b"later"] if position.kind.endswith("stream") else b"later"
    shop.then("UNAVAILABLE")
    policy = FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01, default=default)
    caller = position.open(CallPolicy(failback=policy))
    done = caller.call(position.kind)
    assert (done.answer, done.code) == (b"later", "OK")
    assert caller.flush()
    assert b"".join(shop.calls[1].requests) == ALL
    assert position.saw(before=["OK"], behind=["UNAVAILABLE", "OK"])


@in_each_place(1, loses_cancel)
def test_a_cancel_reaches_the_server(position, shop):
    shop.then(hang := Hang())
    done = position.open(PATIENT).cancel(position.kind, lambda: hang.begun.wait(WAIT_S))
    assert done.messages == []
    assert shop.calls[0].ended.wait(WAIT_S)
    assert len(shop.calls) == 1


@in_each_place(0, wanted=is_future)
def test_a_future_calls_back_when_it_is_answered(position, shop):
    shop.then("UNAVAILABLE")
    done_calls = []
    done = position.open(PATIENT).future(position.kind, done_calls.append)
    assert (done.answer, done.code) == (ALL, "OK")
    assert wait_until(lambda: done_calls)
    assert isinstance(done_calls[0], grpc.Future)
    assert (done_calls[0].result(), done_calls[0].code()) == (ALL, grpc.StatusCode.OK)


@in_each_place(2, wanted=is_future)
def test_a_future_calls_back_when_it_has_failed(position, shop):
    shop.then("NOT_FOUND")
    done_calls = []
    done = position.open(PATIENT).future(position.kind, done_calls.append)
    assert (done.messages, done.code) == ([], "NOT_FOUND")
    assert wait_until(lambda: done_calls)
    assert done_calls[0].code() is grpc.StatusCode.NOT_FOUND
