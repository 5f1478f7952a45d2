"""Calls of `grpc.aio` with policies behave like calls of a channel without policies."""

import asyncio
import itertools

import grpc
import pytest
from scenarios.calls import KINDS, MESSAGES, SCENARIOS, answer_of, policy_of, request_of

from fixtures.aio_policy_channels import PolicyChannels
from fixtures.shop import Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.interceptors.aio import FailbackQueues

MARK = {"with": "policies"}
"""Metadata of the calls with policies; calls without it may reach the server late."""

STYLES = ("await", "ask", "write-await", "iterate", "read", "write-read")
"""Ways to make a call: three for one response, three for a stream of them.

`ask`: for the status before the response. `write`: the requests too.
"""

HANGS_S = 0.1
"""How long to wait for a writer that grpc.aio (1.85) never wakes, if a call is canceled before its
metadata is sent. `tests/interop/grpcio/test_canaries_aio.py` has the canary.
"""


def rows():
    """Each scenario in each style; kinds, policies and channels are paired with both."""
    for (i, scenario), (j, style) in itertools.product(enumerate(SCENARIOS), enumerate(STYLES)):
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


@pytest.fixture
async def queues():
    queues = FailbackQueues()
    yield queues
    await queues.close(0)


@pytest.mark.parametrize(("kind", "style", "scenario", "common", "api"), [*rows()])
async def test_a_call_ends_as_on_a_channel_without_policies(
    shop, own, queues, *, kind, style, scenario, common, api
):
    bare = await play_bare(shop, own, kind, style, scenario)
    shop.reset()
    channels = PolicyChannels(api, shop.target)
    channel = channels.open(policy_of(scenario, common), queues=queues)
    seen = await play(shop, channel, kind, style, scenario)
    await channels.close()
    assert seen["code"] == scenario.code
    assert scenario.min_attempts <= shop.count_calls(**MARK) <= scenario.attempts
    assert seen["called back"]
    forget(
        ("called back",), bare, seen
    )  # grpc.aio may replace the status later, and then calls back twice
    if scenario.default:
        assert seen["answer"] == answer_of(kind, default=True)
        assert queues.pending == 1
        assert seen["details"].startswith("queued by failback after UNAVAILABLE: scripted")
        assert ("rpcwheel-answer", "failback") in seen["trailing_metadata"]
        forget(("answer", "details", "trailing_metadata"), bare, seen)
    if scenario.code == "DEADLINE_EXCEEDED":
        assert "Deadline Exceeded" in seen["details"]
        forget(("details",), bare, seen)  # grpc's own vary
    if api == "interceptors":
        forget(("read again",), bare, seen)  # grpc.aio's own call round ours says EOF
    if scenario.name == "success":
        assert seen["answer"] == answer_of(kind)
    assert seen == bare


def forget(names, *shown):
    for one in shown:
        for name in names:
            one.pop(name, None)


async def play_bare(shop, own, kind, style, scenario):
    """The same on a bare channel, again while grpc.aio gives a status of its own making.

    It may put that in the place of the server's after the caller has asked for some of it.
    """
    while True:
        shop.reset()
        seen = await play(shop, own.open(), kind, style, scenario, bare=True)
        constant = scenario.cancel or seen["cancelled"] == (seen["code"] == "CANCELLED")
        if constant and "INTERNAL" not in repr(seen):
            return seen


async def play(shop, channel, kind, style, scenario, *, bare=False):
    """Make the call and return everything that a caller can see of it."""
    deeds = (scenario.bare if bare and scenario.bare else scenario.deeds)()
    shop.then(*deeds)
    member = getattr(channel, kind.replace("-", "_"))(KINDS[kind])
    timeout = scenario.bare_timeout if bare else scenario.timeout
    request = () if style.startswith("write") else (request_of(kind),)
    call = member(*request, timeout=timeout, metadata=None if bare else tuple(MARK.items()))
    ends = []
    call.add_done_callback(ends.append)
    writing = asyncio.ensure_future(write(call)) if style.startswith("write") else None
    seen = {}
    if scenario.cancel:
        (began,) = (deed.begun for deed in deeds if isinstance(deed, Hang))
        await aio_wait_until(began.is_set)
        seen = {"cancel": call.cancel(), "cancel again": call.cancel()}
    if style == "ask":
        seen["first"] = (await call.code()).name
    seen["answer"] = await result_of(answer(call, style, kind))
    if style.endswith("read"):
        seen["read again"] = await result_of(call.read())
    elif kind.endswith("unary") and not bare:  # grpc.aio may replace the status of a bare call
        assert await result_of(call) == seen["answer"]
    if writing is not None:  # who writes to a bare call may wait forever: see `give_up`
        await asyncio.wait([writing], timeout=HANGS_S if scenario.cancel else WAIT_S)
        writing.cancel()
    seen |= await ended(call)
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


async def answer(call, style, kind):
    if kind.endswith("unary"):
        return await asyncio.wait_for(call, WAIT_S)
    if style == "iterate":
        return [message async for message in call]
    got = []
    while (message := await call.read()) is not grpc.aio.EOF:
        got.append(message)
    return got


async def result_of(awaitable):
    try:
        return await awaitable
    except asyncio.CancelledError:
        return "cancelled"
    except grpc.aio.AioRpcError as error:
        return error.code().name, tuple(error.trailing_metadata())


async def ended(call):
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
