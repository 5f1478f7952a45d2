"""What a broadcast raises says who failed, and has the answers of the others."""

import grpc

from rpcwheel._grpc.finished import FinishedError
from rpcwheel.cluster import BroadcastFailed
from rpcwheel.cluster.failed import told_apart

GONE = FinishedError(grpc.StatusCode.UNAVAILABLE, "gone", trailing=(("a", "b"),))
SLOW = FinishedError(grpc.StatusCode.DEADLINE_EXCEEDED, "slow")


def test_it_is_an_error_of_grpc_with_answers_and_errors():
    error = BroadcastFailed("/shop.Cache/Drop", {"c:1": b"ok"}, {"b:1": GONE, "d:1": SLOW})
    assert isinstance(error, grpc.RpcError)
    assert (error.answers, error.errors) == ({"c:1": b"ok"}, {"b:1": GONE, "d:1": SLOW})
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert (error.initial_metadata(), error.trailing_metadata()) == ((), (("a", "b"),))


def test_it_says_how_each_failed():
    error = BroadcastFailed("/shop.Cache/Drop", {"c:1": b"ok"}, {"d:1": SLOW, "b:1": GONE})
    said = (
        "/shop.Cache/Drop: 2 of 3 members failed: "
        "b:1: UNAVAILABLE gone; d:1: DEADLINE_EXCEEDED slow"
    )
    assert (str(error), error.details()) == (said, said)
    assert repr(error) == f"BroadcastFailed({said!r})"


def test_what_has_one_name_is_told_apart_by_a_number():
    assert told_apart(["a", "b", "a", "a", "b"]) == ["a", "b", "a #2", "a #3", "b #2"]
    assert told_apart([]) == []
