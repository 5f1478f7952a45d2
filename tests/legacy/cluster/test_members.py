"""The multi-callables of a channel of many members take what grpc's own take."""

import inspect

import grpc
import pytest

from fixtures.shop import UNARY_UNARY, Fail
from fixtures.waiting import WAIT_S
from rpcwheel.cluster import ClusterChannel, _members

KINDS = {
    "unary_unary": (_members.UnaryUnary, grpc.UnaryUnaryMultiCallable),
    "unary_stream": (_members.UnaryStream, grpc.UnaryStreamMultiCallable),
    "stream_unary": (_members.StreamUnary, grpc.StreamUnaryMultiCallable),
    "stream_stream": (_members.StreamStream, grpc.StreamStreamMultiCallable),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_takes_the_arguments_of_grpcs_own(kind):
    own, of_grpc = KINDS[kind]
    with ClusterChannel("s") as channel:
        assert type(getattr(channel, kind)("/s/M")) is own
    for name in ("__call__", "with_call", "future"):
        if hasattr(of_grpc, name):
            theirs = inspect.signature(getattr(of_grpc, name)).parameters
            assert list(inspect.signature(getattr(own, name)).parameters) == list(theirs)


def test_what_is_given_reaches_the_server(shops, open_cluster):
    channel = open_cluster(shops[0])
    answer, call = channel.unary_unary(
        UNARY_UNARY, lambda text: text.encode(), lambda data: data.decode()
    ).with_call("ab", 20, (("k", "v"),), None, None, grpc.Compression.Gzip)
    seen = shops[0].calls[0]
    assert (answer, call.code(), seen.requests) == ("ab", grpc.StatusCode.OK, [b"ab"])
    assert seen.metadata["k"] == "v"
    assert seen.time_remaining is not None


def test_what_a_server_says_of_a_failure_reaches_the_caller(shops, open_cluster):
    shops[0].then(Fail("NOT_FOUND", "no such order", (("k", "v"),)))
    channel = open_cluster(shops[0])
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert caught.value.details() == "no such order"
    assert dict(caught.value.trailing_metadata()) == {"k": "v"}


def test_what_can_not_be_sent_is_the_callers(shops, open_cluster):
    channel = open_cluster(shops[0])
    call = channel.unary_unary(UNARY_UNARY, lambda _: 1 / 0)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"x", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
