"""When no handler is started because gRPC must accept calls first."""

from rpcwheel.limit.policy import LimitPolicy
from rpcwheel.limit.server import ACCEPT_EVERY_NS, ServerLimit

BEGAN = 10**12


def test_grpc_must_accept_calls_when_handlers_have_computed_without_much_of_a_pause():
    policy = LimitPolicy()
    limit = ServerLimit(policy, lambda _: policy, timer=None)
    limit.has_accepted(BEGAN, 0)
    used = ACCEPT_EVERY_NS
    assert not limit.needs_pause(BEGAN + used, used - 1)
    assert limit.needs_pause(BEGAN + 2 * used - 1, used)
    assert not limit.needs_pause(BEGAN + 2 * used, used)  # it had half of the time
    assert not limit.needs_pause(BEGAN + 3 * used, 2 * used - 1)  # counted from then
    assert limit.needs_pause(BEGAN + 3 * used, 2 * used)
