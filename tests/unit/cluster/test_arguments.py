"""What channels of many members are given is checked, and completed."""

import grpc
import pytest

from rpcwheel.cluster import ClusterPolicy
from rpcwheel.cluster.arguments import (
    checked_on_member,
    checked_policy,
    credentials_for,
    member_options,
    whole_state,
)

State = grpc.ChannelConnectivity


def test_without_a_policy_it_is_the_default():
    assert checked_policy(None) == ClusterPolicy()
    with pytest.raises(TypeError, match="policy must be a ClusterPolicy"):
        checked_policy(5.0)


def test_who_is_told_of_members_can_be_called():
    assert checked_on_member(print) is print
    assert checked_on_member(None) is None
    with pytest.raises(TypeError, match="on_member must be callable"):
        checked_on_member("print")


def test_a_lost_server_is_looked_for_every_three_seconds_unless_it_is_told_otherwise():
    name = "grpc.max_reconnect_backoff_ms"
    assert dict(member_options([]))[name] == 3_000
    assert dict(member_options([(name, 50)]))[name] == 50
    assert dict(member_options([]))["grpc.use_local_subchannel_pool"] == 1
    with pytest.raises(TypeError, match="options must be pairs"):
        member_options({"a": 1})


def test_tls_is_for_those_that_want_it_or_all():
    own = grpc.ssl_channel_credentials()
    assert credentials_for("grpc", None) is None
    assert credentials_for("grpcs", None) is not None
    assert credentials_for("grpcs", own) is credentials_for("grpc", own) is own


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        ("READY CONNECTING", "READY"),
        ("IDLE CONNECTING TRANSIENT_FAILURE", "CONNECTING"),
        ("TRANSIENT_FAILURE IDLE", "IDLE"),
        ("TRANSIENT_FAILURE", "TRANSIENT_FAILURE"),
        ("SHUTDOWN", "TRANSIENT_FAILURE"),
        ("", "TRANSIENT_FAILURE"),
    ],
)
def test_the_best_state_is_that_of_the_whole(states, whole):
    assert whole_state(State[name] for name in states.split()) is State[whole]
