"""The error of a broadcast has the responses and the errors, by server."""

import grpc

from rpcwheel._grpc.finished import FinishedError
from rpcwheel.balancer.broadcast_base import BroadcastFailed, distinct_names

UNAVAILABLE = FinishedError(grpc.StatusCode.UNAVAILABLE, "gone", trailing=(("a", "b"),))
LATE = FinishedError(grpc.StatusCode.DEADLINE_EXCEEDED, "slow")


def test_broadcast_failed_is_an_rpc_error_with_responses_and_errors():
    errors = {"b:1": UNAVAILABLE, "d:1": LATE}
    error = BroadcastFailed("/shop.Cache/Drop", {"c:1": b"ok"}, errors)
    assert isinstance(error, grpc.RpcError)
    assert (error.responses, error.errors) == ({"c:1": b"ok"}, errors)


def test_code_and_metadata_are_those_of_the_first_error_by_name():
    error = BroadcastFailed("/shop.Cache/Drop", {}, {"d:1": LATE, "b:1": UNAVAILABLE})
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert (error.initial_metadata(), error.trailing_metadata()) == ((), (("a", "b"),))


def test_details_name_the_status_of_each_server_that_failed():
    error = BroadcastFailed("/shop.Cache/Drop", {"c:1": b"ok"}, {"d:1": LATE, "b:1": UNAVAILABLE})
    text = (
        "/shop.Cache/Drop: 2 of 3 servers failed: "
        "b:1: UNAVAILABLE gone; d:1: DEADLINE_EXCEEDED slow"
    )
    assert (str(error), error.details()) == (text, text)
    assert repr(error) == f"BroadcastFailed({text!r})"


def test_equal_names_get_a_number():
    assert distinct_names(["a", "b", "a", "a", "b"]) == ["a", "b", "a #2", "a #3", "b #2"]
    assert distinct_names([]) == []
