"""Calls of a channel with policies behave like calls of a channel without policies."""

import asyncio
import contextlib
import itertools
import threading

import grpc
import pytest
from scenarios.calls import KINDS, MESSAGES, SCENARIOS, answer_of, policy_of, request_of

from fixtures.aio_channels import PolicyChannels
from fixtures.shop import Hang
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.interceptors import FailbackQueues, intercept_channel
from rpcwheel.interceptors import aio as aio_interceptors

MARK = {"with": "policies"}
"""Metadata of the calls with policies; calls without it may reach the server late."""

STYLES = ("blocking", "with_call", "future", "iterator", "held")
"""Ways to make a call of grpc: three for one response, two for a stream of them."""

AIO_STYLES = ("await", "ask", "write-await", "iterate", "read", "write-read")
"""Ways to make a call of grpc.aio: three for one response, three for a stream of them.

`ask`: for the status before the response. `write`: the requests too.
"""

HANGS_S = 0.1
"""How long to wait for a writer that grpc.aio (1.85) never wakes, if a call is canceled before its
metadata is sent. `tests/interop/grpcio/test_canaries_aio.py` has the canary.
"""


def check(shop, scenario, kind, queues, bare, seen) -> None:
    """Check what the caller saw of both calls."""
    assert seen["code"] == scenario.code
    assert scenario.min_attempts <= shop.count_calls(**MARK) <= scenario.attempts
    if scenario.default:
        assert seen["answer"] == answer_of(kind, default=True)
        assert queues.pending == 1
        if "trailing_metadata" in seen:
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


def prepare(shop, kind, scenario, *, bare):
    """What the server does, and the options of the call."""
    deeds = (scenario.bare if bare and scenario.bare else scenario.deeds)()
    shop.then(*deeds)
    began = next((deed.begun for deed in deeds if isinstance(deed, Hang)), None)
    timeout = scenario.bare_timeout if bare else scenario.timeout
    return began, {"timeout": timeout, "metadata": None if bare else tuple(MARK.items())}


# --- grpc ---


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


@pytest.mark.parametrize(("kind", "style", "scenario", "common"), [*rows()])
def test_a_call_ends_as_on_a_channel_without_policies(
    shop, shop_channel, *, kind, style, scenario, common
):
    bare = play(shop, shop_channel, kind, style, scenario, bare=True)
    shop.reset()
    with FailbackQueues() as queues:
        with_policies = intercept_channel(shop_channel, policy_of(scenario, common), queues=queues)
        seen = play(shop, with_policies, kind, style, scenario)
        check(shop, scenario, kind, queues, bare, seen)
        queues.close(0)


def play(shop, channel, kind, style, scenario, *, bare=False):
    """Make the call and return everything that a caller can see of it."""
    began, given = prepare(shop, kind, scenario, bare=bare)
    member = getattr(channel, kind.replace("-", "_"))(KINDS[kind])
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


# --- grpc.aio ---


def aio_rows():
    """Each scenario in each style; kinds, policies and channels are paired with both."""
    for (i, scenario), (j, style) in itertools.product(enumerate(SCENARIOS), enumerate(AIO_STYLES)):
        requests = "stream" if style.startswith("write") or (i + j) % 2 else "unary"
        responses = "unary" if style.endswith(("await", "ask")) else "stream"
        # What is written while answers come may depend on them: it is not waited for to the end.
        if style == "write-read" and scenario.default:
            continue
        common = "all" if (i + j + i // 4) % 2 else "plain"
        api = "channel" if (i // 2 + j) % 2 else "interceptors"
        if style.startswith("write") and (scenario.attempts > 1 or scenario.default):
            api = "interceptors"  # where grpc.aio makes an iterator of what is written
        kind = f"{requests}-{responses}"
        case = pytest.param(kind, style, scenario, common, api)
        yield case._replace(id=f"{scenario}-{style}-{kind}-{common}-{api}")


@pytest.mark.parametrize(("kind", "style", "scenario", "common", "api"), [*aio_rows()])
async def test_a_call_of_grpc_aio_ends_as_on_a_channel_without_policies(
    shop, own, *, kind, style, scenario, common, api
):
    bare = await aio_play_bare(shop, own, kind, style, scenario)
    shop.reset()
    made = []
    async with aio_interceptors.FailbackQueues() as queues:
        channels = PolicyChannels(api, shop.target, made)
        channel = channels.open(policy_of(scenario, common), queues=queues)
        seen = await aio_play(shop, channel, kind, style, scenario)
        await made[0].close()
        assert seen["called back"]
        # grpc.aio may replace the status later, and then calls back twice
        forget(("called back",), bare, seen)
        if api == "interceptors":
            forget(("read again",), bare, seen)  # grpc.aio's own call round ours says EOF
        check(shop, scenario, kind, queues, bare, seen)
        await queues.close(0)


async def aio_play_bare(shop, own, kind, style, scenario):
    """The same on a bare channel, again while grpc.aio gives a status of its own making.

    It may put that in the place of the server's after the caller has asked for some of it.
    """
    while True:
        shop.reset()
        seen = await aio_play(shop, own.open(), kind, style, scenario, bare=True)
        constant = scenario.cancel or seen["cancelled"] == (seen["code"] == "CANCELLED")
        if constant and "INTERNAL" not in repr(seen):
            return seen


async def aio_play(shop, channel, kind, style, scenario, *, bare=False):
    """Make the call and return everything that a caller can see of it."""
    began, given = prepare(shop, kind, scenario, bare=bare)
    member = getattr(channel, kind.replace("-", "_"))(KINDS[kind])
    request = () if style.startswith("write") else (request_of(kind),)
    call = member(*request, **given)
    ends = []
    call.add_done_callback(ends.append)
    writing = asyncio.ensure_future(write(call)) if style.startswith("write") else None
    seen = {}
    if scenario.cancel:
        await aio_wait_until(began.is_set)
        seen = {"cancel": call.cancel(), "cancel again": call.cancel()}
    if style == "ask":
        seen["first"] = (await call.code()).name
    seen["answer"] = await aio_result_of(aio_answer(call, style, kind))
    if style.endswith("read"):
        seen["read again"] = await aio_result_of(call.read())
    elif kind.endswith("unary") and not bare:  # grpc.aio may replace the status of a bare call
        assert await aio_result_of(call) == seen["answer"]
    if writing is not None:  # who writes to a bare call may wait forever: see `give_up`
        await asyncio.wait([writing], timeout=HANGS_S if scenario.cancel else WAIT_S)
        writing.cancel()
    seen |= await aio_ended(call)
    await aio_wait_until(lambda: ends)
    return seen | {"called back": ends == [call]}


async def write(call):
    """Write the requests, as long as the call takes them."""
    try:
        for message in MESSAGES:
            await call.write(message)
        await call.done_writing()
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError, asyncio.CancelledError):
        return


async def aio_answer(call, style, kind):
    if kind.endswith("unary"):
        return await asyncio.wait_for(call, WAIT_S)
    if style == "iterate":
        return [message async for message in call]
    got = []
    while (message := await call.read()) is not grpc.aio.EOF:
        got.append(message)
    return got


async def aio_result_of(awaitable):
    try:
        return await awaitable
    except asyncio.CancelledError:
        return "cancelled"
    except grpc.aio.AioRpcError as error:
        return error.code().name, tuple(error.trailing_metadata())


async def aio_ended(call):
    """Return what every call that has ended shows."""
    late = []
    call.add_done_callback(late.append)
    assert late == [call]
    assert str(call)
    return {
        "code": (await call.code()).name,
        "details": await call.details(),
        "trailing_metadata": tuple(await call.trailing_metadata() or ()),
        "initial_metadata": tuple(await call.initial_metadata() or ()),
        "cancelled": call.cancelled(),
        "done": call.done(),
        "cancel at the end": call.cancel(),
    }
