"""What a failed call tells, of real calls of both worlds."""

import asyncio
import socket

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Fail, Hang
from fixtures.small_servers import METHOD, Gate, serving
from rpcwheel._grpc.status import (
    FORBID_NS,
    is_channel_closed,
    is_unprocessed,
    outcome_of_error,
    pushback_ns,
)
from rpcwheel.call import Outcome
from rpcwheel.deadline.core import SURE

PUSHBACK = "grpc-retry-pushback-ms"
REFUSED = "Concurrent RPC limit exceeded!"
NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: ..."


def yes():
    """The channel has no connection."""
    return True


@pytest.fixture
def nowhere():
    """An address where nothing listens: it is taken, so nobody else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def failure(target, method=UNARY_UNARY):
    """How a call fails."""
    with (
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        make(channel, method)
    return caught.value


def make(channel, method):
    """Make a call of the method's kind, and read it to its end."""
    kind = method.rpartition("/")[2]
    if kind == "UnaryStream":
        list(channel.unary_stream(method)(b"ab", timeout=30))
    elif kind == "StreamUnary":
        channel.stream_unary(method)(iter([b"a"]), timeout=30)
    elif kind == "StreamStream":
        list(channel.stream_stream(method)(iter([b"a"]), timeout=30))
    else:
        channel.unary_unary(method)(b"a", timeout=30)


def future_of_failure(target, method=UNARY_UNARY):
    """A finished call that has failed."""
    with grpc.insecure_channel(target, options=IMPATIENT) as channel:
        call = channel.unary_unary(method).future(b"a", timeout=30)
        assert call.exception() is not None
        return call


async def aio_failure(target, method=UNARY_UNARY):
    """How a call of grpc.aio fails."""
    async with grpc.aio.insecure_channel(target, options=IMPATIENT) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await aio_make(channel, method)
    return caught.value


async def aio_make(channel, method):
    kind = method.rpartition("/")[2]
    if kind == "UnaryStream":
        [_ async for _ in channel.unary_stream(method)(b"ab", timeout=30)]
    elif kind == "StreamUnary":
        await channel.stream_unary(method)(iter([b"a"]), timeout=30)
    elif kind == "StreamStream":
        [_ async for _ in channel.stream_stream(method)(iter([b"a"]), timeout=30)]
    else:
        await channel.unary_unary(method)(b"a", timeout=30)


ALL_KINDS = pytest.mark.parametrize(
    "method", [UNARY_UNARY, UNARY_STREAM, STREAM_UNARY, STREAM_STREAM]
)

# --- What the server asks for ---


@pytest.mark.parametrize(
    ("trailing", "asked_ns"),
    [
        (None, None),
        ((), None),
        ([("other", "5"), ("grpc-retry-pushback", "5")], None),
        ([(PUSHBACK, "0")], 0),
        ([(PUSHBACK, "250")], 250_000_000),
        ([(PUSHBACK, b"250")], 250_000_000),
        ([("other", "5"), (PUSHBACK, "7"), (PUSHBACK, "8")], 7_000_000),
        ([(PUSHBACK, "-1")], FORBID_NS),
        ([(PUSHBACK, "")], FORBID_NS),
        ([(PUSHBACK, " 5")], FORBID_NS),
        ([(PUSHBACK, "+5")], FORBID_NS),
        ([(PUSHBACK, "1_000")], FORBID_NS),
        ([(PUSHBACK, "2.5")], FORBID_NS),
        ([(PUSHBACK, "soon")], FORBID_NS),
        ([(PUSHBACK, "²")], FORBID_NS),
        ([(PUSHBACK, "٣")], FORBID_NS),
        ([(PUSHBACK, b"\xff\xfe")], FORBID_NS),
        ([(PUSHBACK, "9" * 12)], (10**12 - 1) * 1_000_000),
        ([(PUSHBACK, "9" * 13)], FORBID_NS),
        ([(PUSHBACK, "9" * 6000)], FORBID_NS),
        (grpc.aio.Metadata((PUSHBACK, "250")), 250_000_000),
    ],
)
def test_a_pushback_is_milliseconds_and_what_is_no_number_means_never(trailing, asked_ns):
    assert pushback_ns(trailing) == asked_ns


def test_never_is_negative_as_the_plan_takes_it():
    assert FORBID_NS < 0


@pytest.mark.parametrize(
    ("sent", "asked_ns"), [("250", 250_000_000), ("-1", FORBID_NS), ("9" * 5000, FORBID_NS)]
)
async def test_a_real_server_asks_for_it_in_both_worlds(shop, sent, asked_ns):
    shop.then(*[Fail("UNAVAILABLE", trailing=((PUSHBACK, sent),))] * 2)
    here, there = failure(shop.target), await aio_failure(shop.target)
    assert outcome_of_error(here).pushback_ns == asked_ns
    assert outcome_of_error(there).pushback_ns == asked_ns


# --- Whether a server can have seen it ---


@ALL_KINDS
async def test_a_connection_refused_means_that_no_server_has_seen_it(nowhere, method):
    for error in (failure(nowhere, method), await aio_failure(nowhere, method)):
        outcome = outcome_of_error(error, cut_off=yes)
        assert outcome == Outcome("UNAVAILABLE", error=error, unprocessed=True)


async def test_a_name_that_does_not_resolve_means_that_no_server_has_seen_it():
    for error in (failure("nosuch.invalid:50051"), await aio_failure("nosuch.invalid:50051")):
        outcome = outcome_of_error(error, cut_off=yes)
        assert outcome == Outcome("UNAVAILABLE", error=error, unprocessed=True)


def test_a_socket_file_that_is_not_there_means_that_no_server_has_seen_it(tmp_path):
    assert outcome_of_error(failure(f"unix:{tmp_path}/none"), cut_off=yes).unprocessed


def test_a_call_refused_for_too_many_others_is_not_taken_for_sure():
    gate = Gate()
    handler = grpc.unary_unary_rpc_method_handler(gate)
    with (
        serving(handler, maximum_concurrent_rpcs=1) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        first = channel.unary_unary(METHOD).future(b"first")
        assert gate.entered.wait(30)
        error, other = failure(target, METHOD), asyncio.run(aio_failure(target, METHOD))
        gate.opened.set()
        assert first.result() == b"first"
    assert outcome_of_error(error, cut_off=yes) == Outcome("RESOURCE_EXHAUSTED", error=error)
    assert not outcome_of_error(other, cut_off=yes).unprocessed


def test_a_server_that_dies_in_the_middle_of_a_call_may_have_carried_it_out(shop, shop_channel):
    hang = Hang()
    shop.then(hang)
    call = shop_channel.unary_unary(UNARY_UNARY).future(b"order")
    assert hang.begun.wait(30)
    shop.kill()
    outcome = outcome_of_error(call.exception())
    assert (outcome.code, outcome.unprocessed) == ("UNAVAILABLE", False)
    shop.start()


@ALL_KINDS
async def test_a_server_that_says_it_is_unavailable_may_have_carried_it_out(shop, method):
    shop.then(*["UNAVAILABLE", Fail("RESOURCE_EXHAUSTED", "quota")] * 2)
    for _ in range(2):
        assert not outcome_of_error(failure(shop.target, method)).unprocessed
    for _ in range(2):
        assert not outcome_of_error(await aio_failure(shop.target, method)).unprocessed


def test_a_deadline_that_passes_while_it_waits_for_a_connection_is_not_taken_for_sure(nowhere):
    with (
        grpc.insecure_channel(nowhere, options=IMPATIENT) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(UNARY_UNARY)(b"a", timeout=0.2, wait_for_ready=True)
    outcome = outcome_of_error(caught.value)
    assert (outcome.code, outcome.unprocessed) == ("DEADLINE_EXCEEDED", False)


def test_a_server_that_hands_on_such_a_failure_of_its_own_is_told_by_its_channel(shop):
    """By the status alone nobody can tell whose it is (grpcio 1.85)."""
    shop.then(Fail("UNAVAILABLE", NO_CONNECTION))
    error = failure(shop.target)
    assert is_unprocessed("UNAVAILABLE", error.details(), (), ())
    assert not outcome_of_error(error, cut_off=lambda: False).unprocessed
    assert not outcome_of_error(error).unprocessed


def test_the_channel_is_asked_only_after_a_failure_with_grpcs_own_words(shop, nowhere):
    asked = []
    shop.then("UNAVAILABLE", Fail("RESOURCE_EXHAUSTED", REFUSED))
    for target in (shop.target, shop.target, nowhere):
        outcome_of_error(failure(target), cut_off=lambda: bool(asked.append(1)))
    assert asked == [1]


@pytest.mark.parametrize(
    ("code", "details", "trailing", "initial", "sure"),
    [
        ("UNAVAILABLE", NO_CONNECTION, (), (), True),
        ("UNAVAILABLE", NO_CONNECTION, None, None, True),
        ("UNAVAILABLE", NO_CONNECTION, grpc.aio.Metadata(), grpc.aio.Metadata(), True),
        ("UNAVAILABLE", "errors resolving nosuch.invalid:1: ...", (), (), True),
        ("UNAVAILABLE", "DNS resolution failed for nosuch.invalid:1", (), (), True),
        ("UNAVAILABLE", "Name resolution failure", (), (), True),
        ("UNAVAILABLE", "connections to all backends failing; last error: ...", (), (), True),
        ("UNAVAILABLE", "no children in weighted_target policy", (), (), True),
        ("UNAVAILABLE", "empty address list: ", (), (), True),
        ("RESOURCE_EXHAUSTED", REFUSED, (), (), False),
        ("UNAVAILABLE", NO_CONNECTION, (("k", "v"),), (), False),
        ("UNAVAILABLE", NO_CONNECTION, (), (("k", "v"),), False),
        ("UNAVAILABLE", "upstream: " + NO_CONNECTION, (), (), False),
        ("UNAVAILABLE", "Socket closed", (), (), False),
        ("UNAVAILABLE", "GOAWAY received", (), (), False),
        ("UNAVAILABLE", REFUSED, (), (), False),
        ("UNAVAILABLE", "", (), (), False),
        ("UNAVAILABLE", None, (), (), False),
        ("RESOURCE_EXHAUSTED", NO_CONNECTION, (), (), False),
        ("RESOURCE_EXHAUSTED", None, (), (), False),
        ("INTERNAL", NO_CONNECTION, (), (), False),
        ("DEADLINE_EXCEEDED", REFUSED, (), (), False),
    ],
)
def test_only_grpcs_own_words_without_any_metadata_may_mean_never_sent(
    code, details, trailing, initial, sure
):
    assert is_unprocessed(code, details, trailing, initial) is sure
    assert not sure or code in SURE


# --- The outcome of an error ---


def test_a_finished_call_tells_the_same_as_its_error(shop, nowhere):
    shop.then(Fail("ABORTED", "again", ((PUSHBACK, "5"),)))
    call = future_of_failure(shop.target)
    assert outcome_of_error(call) == Outcome("ABORTED", error=call, pushback_ns=5_000_000)
    call = future_of_failure(nowhere)
    outcome = outcome_of_error(call, cut_off=yes)
    assert outcome == Outcome("UNAVAILABLE", error=call, unprocessed=True)


def test_what_was_handed_out_is_told_by_whoever_knows(shop):
    shop.then("UNAVAILABLE")
    error = failure(shop.target)
    assert outcome_of_error(error, committed=True).committed
    assert not outcome_of_error(error).committed


class Bare(grpc.RpcError):
    """As an inner interceptor might raise it."""


class CodeOnly(grpc.RpcError):
    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code


class Foreign(Exception):
    """Of another library, that names its codes as grpc does."""

    def code(self):
        return grpc.StatusCode.UNAVAILABLE


class Plain(grpc.RpcError):
    code = grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bug"),
        asyncio.CancelledError(),
        grpc.FutureTimeoutError(),
        grpc.FutureCancelledError(),
        Bare(),
        Foreign(),
        Plain(),
        CodeOnly(None),
        CodeOnly(14),
        None,
    ],
)
def test_what_has_no_status_is_never_tried_again(error):
    assert outcome_of_error(error) == Outcome("UNKNOWN", error=error, committed=True)


def test_an_error_that_knows_no_more_than_its_code_is_taken_with_it():
    error = CodeOnly(grpc.StatusCode.UNAVAILABLE)
    assert outcome_of_error(error) == Outcome("UNAVAILABLE", error=error)


# --- Channels that were closed ---


def raised_by(make, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any, it is looked at
        make(*args)
    return caught.value


def begin_future(channel, _):
    channel.unary_unary(UNARY_UNARY).future(b"a")


@pytest.mark.parametrize("method", [UNARY_UNARY, UNARY_STREAM, STREAM_UNARY, STREAM_STREAM])
@pytest.mark.parametrize("begin", [make, begin_future])
def test_a_channel_that_is_closed_is_known_by_what_it_says(shop, method, begin):
    channel = grpc.insecure_channel(shop.target)
    channel.close()
    assert is_channel_closed(raised_by(begin, channel, method))


def test_a_channel_closed_under_a_call_is_known_by_what_it_says(shop):
    hang = Hang()
    shop.then(hang)
    channel = grpc.insecure_channel(shop.target)
    call = channel.unary_unary(UNARY_UNARY).future(b"a")
    assert hang.begun.wait(20)
    channel.close()
    assert is_channel_closed(raised_by(call.result))


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_a_channel_of_grpc_aio_that_is_closed_is_known_by_what_it_says(shop, kind):
    channel = grpc.aio.insecure_channel(shop.target)
    member = getattr(channel, kind)(UNARY_UNARY)
    await channel.close()
    assert is_channel_closed(raised_by(member, b"a" if kind.startswith("unary") else [b"a"]))


async def test_a_call_of_grpc_aio_whose_channel_is_closed_raises_no_more_than_cancelled(shop):
    """Hence the reason of failback that only guesses; with a text it could be sure."""
    hang = Hang()
    shop.then(hang)
    channel = grpc.aio.insecure_channel(shop.target)
    call = channel.unary_unary(UNARY_UNARY)(b"a")
    assert await asyncio.to_thread(hang.begun.wait, 20)
    await channel.close()
    with pytest.raises(asyncio.CancelledError) as caught:
        await call
    assert caught.value.args == ()


def test_no_other_error_tells_of_a_closed_channel(nowhere):
    others = (ValueError("no"), grpc.aio.UsageError("no"), RuntimeError("Channel is closed."))
    assert not any(map(is_channel_closed, (*others, failure(nowhere))))
