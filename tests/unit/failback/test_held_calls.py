"""The calls of a queue in the memory."""

import pytest

from rpcwheel.failback.held_calls import HeldCalls
from rpcwheel.failback.queued_call import QueuedCallState


class InterruptedCall:
    """A call that another one follows whenever it is read, as one of a finalizer may."""

    stored = None

    def __init__(self, calls):
        self._calls = calls
        calls.add(self)

    @property
    def state(self):
        InterruptedCall(self._calls)
        return QueuedCallState.WAITING

    def entry(self, now_ns):
        return self.state


@pytest.mark.parametrize(
    "read",
    [
        lambda calls: calls.in_state(QueuedCallState.WAITING),
        lambda calls: calls.entries(),
        lambda calls: [call.state for call in calls],
    ],
    ids=["in_state", "entries", "iteration"],
)
def test_a_finalizer_may_add_a_call_while_the_calls_are_read(read):
    calls = HeldCalls(lambda: 0)
    for _ in range(2):
        InterruptedCall(calls)
    assert len(read(calls)) == 2
    assert len(calls) == 4
