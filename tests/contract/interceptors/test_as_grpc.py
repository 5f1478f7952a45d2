"""Calls of a channel with policies behave like calls of a channel without policies.

Each scenario, with each style of call, is played on a plain channel and on one with policies, and
all that the caller can see of the two calls is compared. The call with policies and its attempts
are counted once each.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial

import grpc
import pytest

from fixtures.call_counts import codes_of
from fixtures.shop import Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import METHODS, WORLDS
from rpcwheel.call import CallPolicy, DeadlinePolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy

MARK = {"with": "policies"}
"""Metadata of the calls with policies; calls without it may reach the server late."""

MESSAGES = (b"a", b"b")
"""The messages of a request stream; a unary request has all of them."""

DEFAULT = b"later"
"""The default of failback; a response stream has one message for each byte."""

SOON = 0.05
"""The timeout of calls that the server does not answer."""

HANGS_S = 0.1
"""How long to wait for a writer that grpc.aio (1.85) never wakes, if a call is canceled before its
metadata is sent. `tests/interop/grpcio/test_canaries_aio.py` has the canary.
"""

COMMON = {
    "plain": {"timeout": DeadlinePolicy(timeout=WAIT_S, slow_call_threshold=WAIT_S / 2)},
    "all": {
        "timeout": DeadlinePolicy(
            timeout=WAIT_S, slow_call_threshold=WAIT_S / 2, message_timeout=WAIT_S / 3
        ),
        "retry": RetryPolicy(retry_on="UNAVAILABLE", backoff=0.01, retry_budget=None),
        "idempotent": True,
    },
}
"""The settings of all scenarios: once so few that calls are gRPC's own, once all."""


@dataclass(frozen=True)
class Scenario:
    """What the server does, which policies are set, and what the caller gets."""

    name: str
    code: str
    """The code that the caller gets."""
    deeds: Callable[[], tuple] = tuple
    """What the server does with the attempts of the call, in order; further ones are echoed."""
    bare: Callable[[], tuple] | None = None
    """The same for the plain channel, if it differs."""
    policy: dict = field(default_factory=dict)
    """Settings in addition to `COMMON`."""
    timeout: float | None = None
    """The timeout that the caller sets."""
    bare_timeout: float | None = None
    """The same for the plain channel."""
    cancel: bool = False
    """Whether the caller cancels once the call has reached the server."""
    attempts: int = 1
    """The number of attempts that the server gets while the caller waits."""
    default: bool = False
    """Whether the response is `DEFAULT`."""

    def __str__(self) -> str:
        return self.name


CANCELED_THERE = "Locally cancelled by application!"
"""gRPC's details of a call that its client has canceled; a server may pass on those of its own."""

BROKEN = Fail("NOT_FOUND", "no such thing", (("why", "sold"), ("raw-bin", b"\x00\x01")))


def hangs() -> tuple:
    """Also for calls before that reach the server only after their deadline."""
    return Hang(), Hang(), Hang()


SCENARIOS = (
    Scenario("success", "OK"),
    Scenario("error", "NOT_FOUND", lambda: (BROKEN,)),
    Scenario("timeout", "DEADLINE_EXCEEDED", hangs, timeout=SOON, bare_timeout=SOON),
    Scenario("cancel by caller", "CANCELLED", lambda: (Hang(),), cancel=True),
    Scenario("cancel by server", "CANCELLED", lambda: (Fail("CANCELLED", CANCELED_THERE),)),
    Scenario("deadline", "DEADLINE_EXCEEDED", hangs, policy={"timeout": SOON}, bare_timeout=SOON),
    Scenario(
        "retry then success",
        "OK",
        lambda: ("UNAVAILABLE",),
        bare=tuple,
        policy={k: COMMON["all"][k] for k in ("retry", "idempotent")},
        attempts=2,
    ),
    Scenario(
        "failback",
        "OK",
        lambda: ("UNAVAILABLE",),
        bare=tuple,
        policy={
            "retry": None,
            "failback": FailbackPolicy(retry_on="UNAVAILABLE", backoff=30.0, default=DEFAULT),
        },
        default=True,
    ),
)

STYLES = {
    "sync": ("blocking", "with_call", "result", "iterate", "read"),
    "aio": ("result", "ask", "write-result", "iterate", "read", "write-read"),
}
"""Ways to make a call. `ask`: for the status before the response. `write`: the requests too."""

BLOCKING = ("blocking", "with_call")


def rows():
    """Each scenario in each style; kinds, policies and channels are paired with both."""
    for name, styles in STYLES.items():
        for (i, scenario), (j, style) in itertools.product(enumerate(SCENARIOS), enumerate(styles)):
            if scenario.cancel and style in BLOCKING:
                continue
            # What is written while answers come may depend on them: it is not waited for.
            if scenario.default and style == "write-read":
                continue
            written = style.startswith("write")
            requests = "stream" if written or (i + j) % 2 else "unary"
            responses = "stream" if style.endswith(("iterate", "read")) else "unary"
            common = "all" if (i + j + i // 4) % 2 else "plain"
            api = "channel" if name == "sync" or (i // 2 + j) % 2 else "interceptors"
            if written and (scenario.attempts > 1 or scenario.default):
                api = "interceptors"  # where grpc.aio makes an iterator of what is written
            if written and scenario.code == "DEADLINE_EXCEEDED":
                api = "channel"  # an intercepted call that ends during a write leaves a task behind
            row = WORLDS[name], api, f"{requests}_{responses}", style, scenario, common
            yield pytest.param(*row, id="-".join(map(str, (name, *row[1:]))))


@pytest.mark.parametrize(
    ("world", "api", "kind", "style", "scenario", "common"), [*rows()], indirect=["world"]
)
def test_a_call_ends_as_on_a_channel_without_policies(
    shop, world, call_counts, *, api, kind, style, scenario, common
):
    bare = play_bare(shop, world, kind, style, scenario)
    shop.reset()
    queues = world.do(world.interceptors.FailbackQueues)
    policy = CallPolicy(**COMMON[common] | scenario.policy)
    if api == "channel":
        channel = world.intercepted(shop.target, policy, queues=queues)
    else:
        ours = world.do(world.interceptors.client_interceptors, policy, queues=queues)
        channel = world.channel(shop.target, interceptors=ours)
    seen = play(shop, world, channel, kind, style, scenario)
    if api == "interceptors":
        forget(("read again",), bare, seen)  # grpc.aio's own call round ours says EOF
    check(shop, scenario, kind, queues, bare, seen)
    check_counts(call_counts, scenario)
    world.do(queues.close, 0)


def check(shop, scenario, kind, queues, bare, seen) -> None:
    """Check what the caller saw of both calls."""
    assert seen["code"] == scenario.code
    # A deadline may pass before the first attempt has reached the server.
    least = 0 if scenario.code == "DEADLINE_EXCEEDED" else scenario.attempts
    assert least <= shop.count_calls(**MARK) <= scenario.attempts
    answer = DEFAULT if scenario.default else b"".join(MESSAGES)
    if kind.endswith("stream"):
        answer = [DEFAULT] if scenario.default else list(MESSAGES)
    if scenario.default or scenario.name == "success":
        assert seen["answer"] == answer
    if scenario.default:
        assert queues.pending == 1
        if "trailing_metadata" in seen:
            assert seen["details"].startswith("queued by failback after UNAVAILABLE: scripted")
            assert ("rpcwheel-answer", "failback") in seen["trailing_metadata"]
        forget(("answer", "details", "trailing_metadata"), bare, seen)
    if scenario.code == "DEADLINE_EXCEEDED":
        assert "Deadline Exceeded" in seen["details"]
        forget(("details",), bare, seen)  # grpc's own vary
    assert seen == bare


def check_counts(counts, scenario) -> None:
    """Check the codes of the call and of its attempts."""
    assert codes_of(counts.client) == {scenario.code: 1}
    attempts = {"UNAVAILABLE": 1, "OK": 1} if scenario.attempts == 2 else {scenario.code: 1}
    if scenario.default:
        attempts = {"UNAVAILABLE": 1}
    # A deadline may pass before the first attempt begins.
    if scenario.code != "DEADLINE_EXCEEDED":
        assert codes_of(counts.attempts) == attempts


def forget(names, *shown) -> None:
    for one in shown:
        for name in names:
            one.pop(name, None)


def play_bare(shop, world, kind, style, scenario):
    """Make the call on a bare channel, again while grpc.aio gives a status of its own making.

    It may put that in the place of the server's after the caller has asked for some of it.
    """
    while True:
        shop.reset()
        seen = play(shop, world, world.channel(shop.target), kind, style, scenario, bare=True)
        constant = scenario.cancel or seen.get("cancelled") == (seen["code"] == "CANCELLED")
        if world.name == "sync" or (constant and "INTERNAL" not in repr(seen)):
            return seen


def play(shop, world, channel, kind, style, scenario, *, bare=False):
    """Make the call and return everything that a caller can see of it."""
    deeds = (scenario.bare if bare and scenario.bare else scenario.deeds)()
    shop.then(*deeds)
    began = next((deed.begun for deed in deeds if isinstance(deed, Hang)), None)
    timeout = scenario.bare_timeout if bare else scenario.timeout
    given = {"timeout": timeout, "metadata": None if bare else tuple(MARK.items())}
    messages = MESSAGES if kind.startswith("stream") else (b"".join(MESSAGES),)
    if style in BLOCKING:
        request = iter(messages) if kind.startswith("stream") else messages[0]
        return waited_for(getattr(channel, kind)(METHODS[kind]), style, request, given)
    written = style.startswith("write")
    call = world.call(channel, kind, *messages, open_requests=written, **given)
    ends = [[], []]
    call.on_done(ends[0].append)
    if world.name == "sync" and not call.grpc_call.add_callback(partial(ends[1].append, "end")):
        ends[1].append("end")  # it has ended
    if written:
        (writing,) = world.do(lambda: [asyncio.ensure_future(write(call.grpc_call))])
    seen = {}
    if scenario.cancel:
        assert began.wait(WAIT_S)
        seen = {"cancel": call.cancel(), "cancel again": call.cancel()}
    seen |= answers(world, call, kind, style, bare=bare)
    if written:  # who writes to a bare call may wait forever: see `HANGS_S`
        world.do(asyncio.wait, [writing], timeout=HANGS_S if scenario.cancel else WAIT_S)
        world.do(lambda: [writing.cancel()])
    seen |= ended(call.grpc_call, call.ask, call.on_done)
    wait_until(lambda: ends[0] and (ends[1] or world.name == "aio"))
    # grpc.aio may replace the status of a bare call later, and then calls back twice.
    assert bare or ends == [[call.grpc_call], ["end"] if world.name == "sync" else []]
    return seen


def waited_for(member, style, request, given):
    """Make a blocking call."""
    try:
        if style == "blocking":
            return {"answer": member(request, **given), "code": "OK", "details": ""}
        answer, call = member.with_call(request, **given)
    except grpc.RpcError as error:
        answer, call = error_of(error), error
    return {"answer": answer} | ended(
        call, lambda name: getattr(call, name)(), call.add_done_callback
    )


async def write(call) -> None:
    """Write the requests, as long as the call takes them."""
    try:
        for message in MESSAGES:
            await call.write(message)
        await call.done_writing()
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError, asyncio.CancelledError):
        return


def answers(world, call, kind, style, *, bare):
    """Return what a call shows from its start to its end."""
    seen = {}
    if style == "ask":
        seen["first"] = call.code().name
    if style.endswith("read"):
        if world.name == "sync":
            call.initial_metadata()  # the first that is asked for
        seen["answer"] = result_of(lambda: list(iter(call.read, None)))
        seen["read again"] = result_of(call.read)
        return seen
    seen["answer"] = result_of(call.result)
    if kind.endswith("unary") and not bare:  # grpc.aio may replace the status of a bare call
        assert result_of(call.result) == seen["answer"]
    if kind.endswith("unary") and world.name == "sync":
        future = call.grpc_call
        seen["exception"] = result_of(lambda: error_of(future.exception(timeout=WAIT_S)))
        seen["traceback"] = result_of(lambda: type(future.traceback()).__name__)
    return seen


def result_of(give):
    try:
        return give()
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        return error_of(error)
    except (asyncio.CancelledError, futures.CancelledError):
        return "cancelled"


def error_of(error):
    if not isinstance(error, grpc.RpcError):
        return repr(error)
    return error.code().name, tuple(error.trailing_metadata())


def ended(call, ask, on_done):
    """Return what every call that has ended shows."""
    shown = {name: ask(name) for name in ("details", "cancelled", "done")}
    shown["code"] = ask("code").name
    for name in ("trailing_metadata", "initial_metadata"):
        shown[name] = tuple(ask(name) or ())
    for name in ("running", "is_active"):
        # not by the errors of grpc's blocking calls
        with contextlib.suppress(AttributeError, NotImplementedError):
            shown[name] = ask(name)
    shown["cancel at the end"] = ask("cancel")
    assert shown["done"]
    assert str(call)
    late = []
    on_done(late.append)
    assert late == [call]  # at once
    return shown
