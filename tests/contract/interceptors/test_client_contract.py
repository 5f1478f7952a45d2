"""Calls of a channel with policies behave like calls of a channel without policies."""

import contextlib
import itertools
import threading

import grpc
import pytest
from scenarios.calls import KINDS, SCENARIOS, answer_of, policy_of, request_of

from fixtures.shop import Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.interceptors import FailbackQueues, intercept_channel

MARK = {"with": "policies"}
"""Metadata of the calls with policies; calls without it may reach the server late."""

STYLES = ("blocking", "with_call", "future", "iterator", "held")
"""Ways to make a call: three for one response, two for a stream of them."""


def rows():
    """Each scenario in each style; the kinds of requests and the policies are paired with both."""
    for (i, scenario), (j, style) in itertools.product(enumerate(SCENARIOS), enumerate(STYLES)):
        if scenario.cancel and style in ("blocking", "with_call"):
            continue
        requests = "stream" if (i + j) % 2 else "unary"
        responses = "stream" if style in ("iterator", "held") else "unary"
        common = "all" if (i + j + i // 4) % 2 else "plain"
        kind = f"{requests}-{responses}"
        yield pytest.param(kind, style, scenario, common, id=f"{scenario}-{style}-{kind}-{common}")


@pytest.fixture
def queues():
    queues = FailbackQueues()
    yield queues
    queues.close(0)


@pytest.mark.parametrize(("kind", "style", "scenario", "common"), [*rows()])
def test_a_call_ends_as_on_a_channel_without_policies(
    shop, shop_channel, queues, *, kind, style, scenario, common
):
    bare = play(shop, shop_channel, kind, style, scenario, bare=True)
    shop.reset()
    with_policies = intercept_channel(shop_channel, policy_of(scenario, common), queues=queues)
    seen = play(shop, with_policies, kind, style, scenario)
    assert seen["code"] == scenario.code
    assert scenario.min_attempts <= shop.count_calls(**MARK) <= scenario.attempts
    if scenario.default:
        assert seen["answer"] == answer_of(kind, default=True)
        assert queues.pending == 1
        if style != "blocking":
            assert seen["details"].startswith("queued by failback after UNAVAILABLE: scripted")
            assert ("rpcwheel-answer", "failback") in seen["trailing_metadata"]
        forget(("answer", "details", "trailing_metadata"), bare, seen)
    if scenario.code == "DEADLINE_EXCEEDED":
        assert "Deadline Exceeded" in seen["details"]
        forget(("details",), bare, seen)  # grpc's own vary
    if scenario.name == "success":
        assert seen["answer"] == answer_of(kind)
    assert seen == bare


def forget(names, *shown):
    for one in shown:
        for name in names:
            one.pop(name, None)


def play(shop, channel, kind, style, scenario, *, bare=False):
    """Make the call and return everything that a caller can see of it."""
    deeds = (scenario.bare if bare and scenario.bare else scenario.deeds)()
    shop.then(*deeds)
    member = getattr(channel, kind.replace("-", "_"))(KINDS[kind])
    timeout = scenario.bare_timeout if bare else scenario.timeout
    began = next((deed.begun for deed in deeds if isinstance(deed, Hang)), None)
    given = {"timeout": timeout, "metadata": None if bare else tuple(MARK.items())}
    if style in ("blocking", "with_call"):
        return waited_for(member, style, request_of(kind), given)
    call = (member.future if style == "future" else member)(request_of(kind), **given)
    ends = Ends(call)
    if scenario.cancel:
        assert began.wait(WAIT_S)
        seen = {"cancel": call.cancel(), "cancel again": call.cancel()}
    else:
        seen = {}
    return seen | held(call, style) | {"callbacks": ends.all()}


def waited_for(member, style, request, given):
    try:
        if style == "blocking":
            return {"answer": member(request, **given), "code": "OK", "details": ""}
        answer, call = member.with_call(request, **given)
    except grpc.RpcError as error:
        return {"answer": error_of(error)} | ended(error)
    return {"answer": answer} | ended(call)


class Ends:
    """The callbacks that were called at the end of a call."""

    def __init__(self, call) -> None:
        self._call = call
        self._got = []
        self._both = threading.Event()
        self.added = call.add_callback(self._note)
        call.add_done_callback(self._note)

    def _note(self, *args) -> None:
        self._got.append(args)
        if len(self._got) == 1 + self.added:
            self._both.set()

    def all(self):
        assert self._both.wait(WAIT_S)
        shown = sorted(self._got, key=len)
        return shown == [()] * self.added + [(self._call,)]


def held(call, style):
    """Return what a future or stream shows, from its start to its end."""
    seen = {}
    if style == "future":
        seen["answer"] = result_of(call.result)
        seen["exception"] = result_of(lambda: error_of(call.exception(timeout=WAIT_S)))
        seen["traceback"] = result_of(lambda: type(call.traceback()).__name__)
    elif style == "iterator":
        seen["answer"] = result_of(lambda: list(call))
    else:  # the first thing asked for is the server's metadata
        call.initial_metadata()
        seen["answer"] = result_of(lambda: list(call))
        seen["again"] = result_of(lambda: next(call))
    assert call.done()
    return seen | ended(call)


def result_of(give):
    try:
        return give()
    except StopIteration:
        return "end"
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        return error_of(error)


def error_of(error):
    if error is None or isinstance(error, grpc.FutureCancelledError):
        return repr(error)
    assert isinstance(error, grpc.RpcError)
    return error.code().name, tuple(error.trailing_metadata())


def ended(call):
    """Return what every call that has ended shows."""
    shown = {
        "code": call.code().name,
        "details": call.details(),
        "trailing_metadata": tuple(call.trailing_metadata() or ()),
        "initial_metadata": tuple(call.initial_metadata() or ()),
        "cancelled": call.cancelled(),
        "done": call.done(),
        "running": call.running(),
        "cancel at the end": call.cancel(),
    }
    with contextlib.suppress(NotImplementedError):  # by the errors of grpc's blocking calls
        shown["is_active"] = call.is_active()
    assert str(call)
    late = []
    call.add_done_callback(late.append)
    wait_until(lambda: late)
    return shown
