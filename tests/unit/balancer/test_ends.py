"""The ends of calls of `grpc` that a subchannel has begun."""

from unittest.mock import Mock

from rpcwheel._grpc.calls import server_of
from rpcwheel.balancer.channel import report_end


def test_the_server_of_a_call_is_known_before_its_callbacks_run():
    """gRPC tells the caller first, and a refused call then goes to another server."""
    call, subchannel = Mock(), object()
    report_end(call, Mock(), subchannel)
    assert server_of(call) is subchannel
