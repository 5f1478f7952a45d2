"""The preset "any" over a real server: a ping a tenth slower than its floor is permitted."""

import grpc

from fixtures.small_servers import METHOD, Gate, serving
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.options import channel_options

FLOOR = "grpc.http2.min_ping_interval_without_data_ms"


def test_a_ping_a_tenth_slower_than_the_floor_is_borne_during_a_call():
    """So that `"any"` is: a call that is silent for 5 s, floors of 1 and 3 s, pings each 1.1 s."""
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
