"""Which errors `retry_on` names."""

import grpc
import pytest
import tenacity

from fixtures.rpc_errors import CodeOnly
from rpcwheel.call.matching import Matcher

UNAVAILABLE, ABORTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED


def matches(on, error, attempt=1, elapsed_ns=0):
    return Matcher(on)(error, attempt=attempt, elapsed_ns=elapsed_ns)


class Coded(Exception):
    code = "UNAVAILABLE"


class CodedByNumber(Exception):
    def code(self):
        return 14


BUSY = ValueError("busy")
MIXED = (ConnectionError, UNAVAILABLE, "ABORTED")


@pytest.mark.parametrize(
    ("on", "matching", "others"),
    [
        (OSError, [ConnectionError()], [ValueError()]),
        (ConnectionError, [], [OSError()]),
        (grpc.RpcError, [CodeOnly(UNAVAILABLE)], []),
        (UNAVAILABLE, [CodeOnly(UNAVAILABLE)], [CodeOnly(ABORTED), ValueError()]),
        ("UNAVAILABLE", [CodeOnly(UNAVAILABLE)], [CodeOnly(ABORTED), Coded(), CodedByNumber()]),
        (lambda error: error is BUSY, [BUSY], [ValueError("busy")]),
        (
            tenacity.retry_if_exception_type(OSError) | tenacity.retry_if_exception_message("busy"),
            [ConnectionError(), BUSY],
            [ValueError("free")],
        ),
        *(
            (of(MIXED), [ConnectionError(), CodeOnly(UNAVAILABLE), CodeOnly(ABORTED)], [BUSY])
            for of in (set, tuple, list, frozenset)
        ),
        ([{"ABORTED"}, (ConnectionError, [TimeoutError])], [TimeoutError()], [BUSY]),
        (
            [ValueError, lambda error: False, tenacity.retry_if_exception_type(KeyError)],
            [BUSY, KeyError()],
            [OSError()],
        ),
        (  # what ends a program or a task
            [Exception, lambda error: True, tenacity.retry_always],
            [BUSY],
            [KeyboardInterrupt(), SystemExit(), GeneratorExit()],
        ),
    ],
)
def test_types_codes_predicates_tenacity_objects_and_their_collections_match(on, matching, others):
    assert [error for error in matching if not matches(on, error)] == []
    assert [error for error in others if matches(on, error)] == []


def test_a_tenacity_object_sees_the_state_of_the_try():
    seen = []

    class Watch(tenacity.retry_base):
        def __call__(self, retry_state):
            seen.append(retry_state)
            return True

    error = ValueError()
    assert matches(Watch(), error, attempt=3, elapsed_ns=2_000_000_000)
    (state,) = seen
    assert state.outcome.exception() is error
    assert state.attempt_number == 3
    assert state.seconds_since_start == pytest.approx(2.0)


async def coroutine_function(error):
    return True


class AsyncPredicate:
    async def __call__(self, error):
        return True


@pytest.mark.parametrize("predicate", [coroutine_function, AsyncPredicate()])
def test_a_coroutine_function_is_refused(predicate):
    with pytest.raises(TypeError, match="coroutine function; give a plain one"):
        Matcher(predicate)
