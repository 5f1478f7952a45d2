"""The connection that a heartbeat watches."""

import gc

import grpc
import pytest

from rpcwheel.heartbeat.rules import Seen
from rpcwheel.heartbeat.watched import Watched, below, seen
from rpcwheel.transport import ReconnectingChannel


class Nothing(grpc.UnaryUnaryClientInterceptor):
    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details, request)


def now():
    return 7


def test_of_a_channel_of_ours_the_traffic_of_its_active_connection_is_seen():
    with ReconnectingChannel("127.0.0.1:1") as channel:
        watched = Watched(channel, now)
        assert (watched.ours, watched.target, watched.calls()) == (True, "127.0.0.1:1", 0)
        assert watched.activity() is channel.activity
        channel.reconnect(force=True)
        assert watched.activity() is channel.activity
        assert watched.is_idle()
        channel.activity.saw_write()
        assert seen(channel.activity).use_ns is not None


def test_a_channel_of_ours_is_not_kept_alive():
    watched = Watched(ReconnectingChannel("127.0.0.1:1"), now)
    gc.collect()
    assert watched.channel is watched.activity() is None
    assert (watched.is_idle(), watched.never_sent(), watched.calls()) == (False, False, 0)


@pytest.mark.parametrize(
    "around", [lambda it: it, lambda it: grpc.intercept_channel(it, Nothing())]
)
def test_of_any_other_channel_nothing_is_seen_but_its_target_and_its_state(around):
    bare = grpc.insecure_channel("127.0.0.1:1")
    watched = Watched(around(bare), now)
    gc.collect()
    assert (watched.ours, watched.target, watched.calls()) == (False, "127.0.0.1:1", 0)
    assert (watched.is_idle(), watched.is_ready(), watched.pure) == (True, False, True)
    assert seen(watched.activity()) == Seen(None, None, None)
    watched.activity().saw_read()
    assert seen(watched.activity()).read_ns == 7
    assert watched.channel is bare
    bare.close()
    assert watched.is_closed()


def test_where_no_target_can_be_found_the_channel_shows_itself():
    class Foreign:
        def __repr__(self):
            return "<foreign>"

    assert Watched(Foreign(), now).target == "<foreign>"
    assert not Watched(Foreign(), now).is_closed()


def test_a_closed_channel_is_not_asked_for_its_target_at_which_grpc_crashes():
    bare = grpc.insecure_channel("127.0.0.1:1")
    bare.close()
    watched = Watched(bare, now)
    assert (watched.target, watched.is_closed()) == (repr(bare), True)


def test_interceptors_on_top_of_a_channel_are_passed_by():
    with ReconnectingChannel("127.0.0.1:1") as channel:
        once = grpc.intercept_channel(channel, Nothing())
        watched = Watched(grpc.intercept_channel(once, Nothing()), now)
        assert watched.channel is below(once) is channel
        assert (watched.ours, watched.pure, watched.target) == (True, True, "127.0.0.1:1")
        del once
        assert watched.channel is channel


def test_a_channel_that_connect_puts_interceptors_on_runs_code_of_the_user_s():
    def connect(options):
        return grpc.intercept_channel(grpc.insecure_channel("127.0.0.1:1", options), Nothing())

    with ReconnectingChannel("127.0.0.1:1", connect=connect) as channel:
        assert not Watched(channel, now).pure


class Connection(ReconnectingChannel):
    """One whose state is what the test says."""

    state = grpc.ChannelConnectivity.READY

    def get_state(self, try_to_connect=False):
        return self.state


@pytest.mark.parametrize(
    ("state", "heard", "never_sent"),
    [
        ("IDLE", False, False),
        ("CONNECTING", False, True),
        ("CONNECTING", True, False),
        ("READY", False, False),
        ("TRANSIENT_FAILURE", True, True),
        ("SHUTDOWN", False, False),
    ],
)
def test_calls_that_can_only_wait_for_a_connection_were_never_sent(state, heard, never_sent):
    with Connection("127.0.0.1:1") as channel:
        channel.state = grpc.ChannelConnectivity[state]
        channel.activity.last_read_ns = 1 if heard else None
        assert Watched(channel, now).never_sent() is never_sent
