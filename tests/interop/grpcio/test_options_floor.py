"""The preset "any" pings a tenth slower than the minimum of a server, which permits it."""

import grpc

from fixtures.small_servers import METHOD, serving
from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel.options import channel_options

FLOOR = "grpc.http2.min_ping_interval_without_data_ms"


def test_a_ping_interval_a_tenth_longer_than_the_minimum_is_permitted_during_a_call():
    """A call that is silent for 5 s, minima of 1 and 3 s, a ping each 1.1 s."""
    gate = Gate()
    held = grpc.unary_unary_rpc_method_handler(gate)
    pings = channel_options(keepalive=1.1, own_connection=True)
    with (
        serving(held, options=[(FLOOR, 1_000)]) as patient,
        serving(held, options=[(FLOOR, 3_000)]) as strict,
        grpc.insecure_channel(patient, options=pings) as kept,
        grpc.insecure_channel(strict, options=pings) as lost,
    ):
        answer, refused = (each.unary_unary(METHOD).future(b"a") for each in (kept, lost))
        assert wait_until(refused.done)  # at the fourth ping
        gate.opened.set()
        assert (refused.code().name, refused.details()) == ("UNAVAILABLE", "Too many pings")
        assert answer.result(WAIT_S) == b"a"
