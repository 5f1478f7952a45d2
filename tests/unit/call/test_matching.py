"""Which errors `retry_on` names."""

import grpc
import pytest
import tenacity

from rpcwheel.call.matching import Matcher

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class RpcFailed(grpc.RpcError):
    """An error with a status code, as those of grpc and grpc.aio."""

    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code


def matches(on, error, attempt=1, elapsed_ns=0):
    return Matcher(on)(error, attempt=attempt, elapsed_ns=elapsed_ns)


def test_a_type_matches_its_errors_and_those_of_its_subclasses():
    assert matches(OSError, ConnectionError())
    assert not matches(ConnectionError, OSError())
    assert matches(grpc.RpcError, RpcFailed(UNAVAILABLE))


def test_a_code_may_be_given_as_itself_or_by_its_name():
    for on in [UNAVAILABLE, "UNAVAILABLE"]:
        assert matches(on, RpcFailed(UNAVAILABLE))
        assert not matches(on, RpcFailed(grpc.StatusCode.NOT_FOUND))


def test_an_error_with_another_kind_of_code_does_not_match_a_status_code():
    class Coded(Exception):
        code = "UNAVAILABLE"

    class CodedByNumber(Exception):
        def code(self):
            return 14

    assert not matches("UNAVAILABLE", Coded())
    assert not matches("UNAVAILABLE", CodedByNumber())
    assert not matches("UNAVAILABLE", ValueError())


def test_a_predicate_sees_the_error():
    error = ValueError("busy")
    assert matches(lambda seen: seen is error, error)
    assert not matches(lambda seen: "free" in str(seen), error)


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


def test_tenacity_objects_and_their_sums_are_obeyed():
    on = tenacity.retry_if_exception_type(OSError) | tenacity.retry_if_exception_message("busy")
    assert matches(on, ConnectionError())
    assert matches(on, ValueError("busy"))
    assert not matches(on, ValueError("free"))


def test_sets_tuples_and_lists_mix_kinds():
    for of in [set, tuple, list, frozenset]:
        for error in [
            ConnectionError(),
            RpcFailed(UNAVAILABLE),
            RpcFailed(grpc.StatusCode.ABORTED),
        ]:
            assert matches(of([ConnectionError, UNAVAILABLE, "ABORTED"]), error)
            assert not matches(of([ConnectionError, UNAVAILABLE, "ABORTED"]), ValueError())


def test_collections_may_be_nested():
    assert matches([{"ABORTED"}, (ConnectionError, [TimeoutError])], TimeoutError())


def test_any_one_that_matches_is_enough():
    on = [ValueError, lambda error: False, tenacity.retry_if_exception_type(KeyError)]
    assert matches(on, ValueError())
    assert matches(on, KeyError())
    assert not matches(on, OSError())


def test_what_ends_a_program_or_a_task_never_matches():
    for error in [KeyboardInterrupt(), SystemExit(), GeneratorExit()]:
        assert not matches([Exception, lambda error: True, tenacity.retry_always], error)


async def coroutine_function(error):
    return True


def test_a_coroutine_function_is_refused():
    with pytest.raises(TypeError, match="coroutine function; give a plain one"):
        Matcher(coroutine_function)
