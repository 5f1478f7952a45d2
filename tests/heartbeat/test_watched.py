"""The connection that a heartbeat watches."""

import gc

import grpc
import pytest

from rpcwheel.channel import ReconnectingChannel
from rpcwheel.heartbeat.rules import Seen
from rpcwheel.heartbeat.watched import Watched, seen


class Nothing(grpc.UnaryUnaryClientInterceptor):
    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)


def now():
    return 7


def test_of_a_channel_of_ours_the_traffic_of_its_active_connection_is_seen():
    with ReconnectingChannel("127.0.0.1:1") as channel:
        watched = Watched(channel, now)
        assert (watched.ours, watched.target, watched.calls()) == (True, "127.0.0.1:1", 0)
        assert watched.traffic() is channel.traffic
        channel.replace(force=True)
        assert watched.traffic() is channel.traffic
        assert watched.is_idle()
        channel.traffic.saw_write()
        assert seen(channel.traffic).use_ns is not None


def test_a_channel_of_ours_is_not_kept_alive():
    watched = Watched(ReconnectingChannel("127.0.0.1:1"), now)
    gc.collect()
    assert watched.channel is watched.traffic() is None
    assert (watched.is_idle(), watched.calls()) == (False, 0)


@pytest.mark.parametrize(
    "around", [lambda it: it, lambda it: grpc.intercept_channel(it, Nothing())]
)
def test_of_any_other_channel_nothing_is_seen_but_its_target(around):
    bare = grpc.insecure_channel("127.0.0.1:1")
    watched = Watched(around(bare), now)
    gc.collect()
    assert (watched.ours, watched.target, watched.calls()) == (False, "127.0.0.1:1", 0)
    assert not watched.is_idle()
    assert seen(watched.traffic()) == Seen(None, None, None)
    watched.traffic().saw_read()
    assert seen(watched.traffic()).read_ns == 7
    assert watched.channel is not None
    bare.close()


def test_where_no_target_can_be_found_the_channel_shows_itself():
    class Foreign:
        def __repr__(self):
            return "<foreign>"

    assert Watched(Foreign(), now).target == "<foreign>"
