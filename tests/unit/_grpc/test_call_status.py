"""What is read from the error of a failed call. Over real calls: tests/legacy/_grpc."""

import asyncio

import grpc
import pytest

from rpcwheel._grpc.calls import is_channel_closed
from rpcwheel.call.retry import FORBID_NS, pushback_ns, result_of
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


class Bare(grpc.RpcError):
    """As an inner interceptor might raise it."""


class CodeOnly(grpc.RpcError):
    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code


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
def test_what_has_no_status_is_never_tried_again(error):
    assert result_of(error) == AttemptResult("UNKNOWN", error=error, committed=True)


def test_an_error_that_knows_no_more_than_its_code_is_taken_with_it():
    error = CodeOnly(grpc.StatusCode.UNAVAILABLE)
    assert result_of(error) == AttemptResult("UNAVAILABLE", error=error)


def test_an_outcome_is_committed_if_the_caller_says_so():
    error = CodeOnly(grpc.StatusCode.UNAVAILABLE)
    assert result_of(error, committed=True).committed
    assert not result_of(error).committed


def test_no_other_error_tells_of_a_closed_channel():
    others = (ValueError("no"), grpc.aio.UsageError("no"), RuntimeError("Channel is closed."))
    assert not any(map(is_channel_closed, others))
