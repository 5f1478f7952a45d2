"""The doors for `grpc`: what they make, and the queues of calls that failback has taken over."""

import grpc
import pytest

from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY
from rpcwheel.errors import ConfigurationError, FailbackClosed
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import (
    CallPolicy,
    Queues,
    aio,
    client_interceptors,
    intercept_channel,
    sync,
)
from rpcwheel.interceptors import __all__ as shown
from rpcwheel.observe import HookFailed

PATIENCE = 20
AUDIT = FailbackPolicy(on="UNAVAILABLE", wait=60.0, default=b"later")


@pytest.fixture
def queues(timer):
    queues = Queues(timer)
    yield queues
    queues.close(0)


@pytest.fixture
def client(shop_channel, queues):
    def make(failback=AUDIT, **settings):
        policy = CallPolicy(failback=failback, **settings)
        return intercept_channel(shop_channel, policy, queues=queues)

    return make


def test_both_worlds_show_the_same_names():
    assert sync.__all__ == aio.__all__ == sorted(sync.__all__)
    assert set(sync.__all__) < set(shown)


def test_one_object_is_for_all_four_kinds():
    (one,) = client_interceptors(CallPolicy())
    for kind in ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"):
        assert isinstance(one, getattr(grpc, f"{kind}ClientInterceptor"))


def test_a_parked_call_is_delivered_with_what_the_caller_gave(shop, client, queues, timer):
    shop.then("UNAVAILABLE")
    metadata = (("k", "v"), ("authorization", "stale"))
    assert client().unary_unary(UNARY_UNARY)(b"x", timeout=7.0, metadata=metadata) == b"later"
    assert (queues.pending, len(shop.calls)) == (1, 1)
    timer.advance(60.0)
    assert queues.flush(PATIENCE)
    second = shop.calls[1]
    assert second.requests == [b"x"]
    assert second.metadata["k"] == "v"
    assert "authorization" not in second.metadata
    assert second.metadata["grpc-previous-rpc-attempts"] == "1"
    assert 5.0 < second.time_remaining <= 7.1


def test_a_delivery_has_a_deadline_of_its_own_if_nobody_gave_one(shop, client, queues):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    client().unary_unary(UNARY_UNARY)(b"x")
    client(timeout=5.0).unary_unary(UNARY_UNARY)(b"x")
    assert queues.flush(PATIENCE)
    first, second = sorted(seen.time_remaining for seen in shop.calls[2:])
    assert first < 5.1
    assert 59.0 < second < 60.1


def test_a_delivery_that_fails_is_made_again_in_the_policys_rhythm(shop, client, queues):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert list(client().unary_stream(UNARY_STREAM)(b"x")) == list(b"later")
    assert not queues.flush(0.5)
    assert queues.flush(PATIENCE)
    tries = [seen.metadata.get("grpc-previous-rpc-attempts") for seen in shop.calls]
    assert tries == [None, "1", "2"]


def test_what_failback_does_not_name_is_the_callers(shop, client, queues):
    shop.then("NOT_FOUND")
    with pytest.raises(grpc.RpcError) as caught:
        client().unary_unary(UNARY_UNARY)(b"x")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert queues.pending == 0


def test_a_predicate_of_failback_that_raises_leaves_the_failure_as_it_was(shop, client, events):
    def broken(error):
        raise RuntimeError("no idea")

    shop.then("NOT_FOUND")
    with pytest.raises(grpc.RpcError):
        client(FailbackPolicy(on=broken)).unary_unary(UNARY_UNARY)(b"x")
    assert [type(event) for event in events] == [HookFailed]


# --- Queues ---


def test_a_policy_has_one_queue_named_after_it_or_the_first_method(queues):
    named, other = FailbackPolicy(on="UNAVAILABLE", name="audit"), FailbackPolicy(on="UNAVAILABLE")
    one = queues.of(named, UNARY_UNARY)
    assert queues.of(named, STREAM_UNARY) is one
    assert queues.of(other, UNARY_UNARY) is queues.of(other, STREAM_UNARY) is not one
    queues.of(FailbackPolicy(on="UNAVAILABLE"), UNARY_UNARY)  # equal, but another
    assert list(queues.stats()) == ["audit", UNARY_UNARY, f"{UNARY_UNARY} (2)"]


def test_closing_reports_what_all_queues_could_not_deliver(shop, client, queues):
    shop.then(*["UNAVAILABLE"] * 2)
    client().unary_unary(UNARY_UNARY)(b"x")
    client(FailbackPolicy(on="UNAVAILABLE", name="b")).stream_unary(STREAM_UNARY)(iter([b"y"]))
    assert queues.pending == 2
    assert "pending=2" in repr(queues)
    failed = queues.close(drain=0)
    assert [(call.function, call.args) for call in failed] == [
        (UNARY_UNARY, (b"x",)),
        (STREAM_UNARY, (b"y",)),
    ]
    assert queues.close() == []


def test_closing_delivers_what_it_can(shop, client, queues):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    client().unary_unary(UNARY_UNARY)(b"x")
    client(FailbackPolicy(on="UNAVAILABLE")).unary_unary(UNARY_UNARY)(b"y")
    assert queues.close(PATIENCE) == []
    assert {seen.requests[0] for seen in shop.calls[2:]} == {b"x", b"y"}


def test_a_call_that_fails_after_the_end_says_so(shop, client, queues):
    queues.close()
    shop.then("UNAVAILABLE")
    with pytest.raises(FailbackClosed) as caught:
        client().unary_unary(UNARY_UNARY)(b"x")
    assert caught.value.__cause__.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("wrong", [float("nan"), "soon"])
def test_a_time_that_is_none_is_refused_before_anything_is_closed(shop, client, queues, wrong):
    with pytest.raises((TypeError, ConfigurationError)):
        queues.close(wrong)
    with pytest.raises((TypeError, ConfigurationError)):
        queues.flush(wrong)
    shop.then("UNAVAILABLE")
    assert client().unary_unary(UNARY_UNARY)(b"x") == b"later"


def test_queues_close_as_a_context(shop, shop_channel):
    with Queues() as queues:
        channel = intercept_channel(shop_channel, CallPolicy(failback=AUDIT), queues=queues)
        shop.then("UNAVAILABLE")
        channel.unary_unary(UNARY_UNARY)(b"x")
    assert len(shop.calls) == 2


def test_requests_of_other_kinds_are_kept_as_they_were(shop, shop_channel, queues):
    channel = intercept_channel(shop_channel, CallPolicy(failback=AUDIT), queues=queues)
    member = channel.unary_unary(UNARY_UNARY, request_serializer=bytes)
    shop.then("UNAVAILABLE")
    request = [1, 2]
    member(request)
    request.append(3)
    assert queues.flush(PATIENCE)
    assert shop.calls[1].requests == [b"\x01\x02"]
