"""The result of a failed attempt: its status code, and the pushback of the server."""

import asyncio

import grpc
import pytest

from fixtures.rpc_errors import CodeOnly
from fixtures.shop import UNARY_UNARY, Fail
from fixtures.waiting import WAIT_S
from rpcwheel.call.metadata import FORBID_NS, pushback_ns, result_of
from rpcwheel.rpc import AttemptResult

PUSHBACK = "grpc-retry-pushback-ms"


@pytest.mark.parametrize(
    ("trailing", "asked_ns"),
    [
        (None, None),
        ((), None),
        ([("other", "5"), ("grpc-retry-pushback", "5")], None),
        ([(PUSHBACK, "0")], 0),
        ([(PUSHBACK, "250")], 250_000_000),
        ([(PUSHBACK, b"250")], 250_000_000),
        ([(PUSHBACK, 250)], 250_000_000),  # in an error of an interceptor
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
def test_pushback_is_in_milliseconds_and_an_invalid_value_forbids_retries(trailing, asked_ns):
    assert pushback_ns(trailing) == asked_ns


class Bare(grpc.RpcError):
    """An error of an interceptor, without a code."""


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
        Plain(),
        CodeOnly(None),
        CodeOnly(14),
        None,
    ],
)
def test_an_error_without_a_status_is_not_retried(error):
    assert result_of(error) == AttemptResult("UNKNOWN", error=error, committed=True)


def test_an_error_may_have_a_code_and_nothing_else():
    error = CodeOnly(grpc.StatusCode.UNAVAILABLE)
    assert result_of(error) == AttemptResult("UNAVAILABLE", error=error)


def test_a_call_that_has_ended_is_read_as_its_error(shop, shop_channel):
    shop.then(Fail("ABORTED", "again", ((PUSHBACK, "5"),)))
    call = shop_channel.unary_unary(UNARY_UNARY).future(b"a", timeout=WAIT_S)
    assert call.exception() is not None
    assert result_of(call) == AttemptResult("ABORTED", error=call, pushback_ns=5_000_000)
