"""A queue that is made while the same thread makes another one."""

import pytest

from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.interceptors.sync import FailbackQueues

ORDERS, MAIL = (FailbackPolicy(retry_on="UNAVAILABLE") for _ in range(2))
STORED = {"retry_on": "UNAVAILABLE", "journal": "sqlite:///missing/calls.db"}


@pytest.mark.parametrize(
    ("policy", "other", "names"),
    [
        (ORDERS, ORDERS, ["/a/*"]),
        (ORDERS, MAIL, ["/a/*", "/a/* (2)"]),
        (FailbackPolicy(**STORED), FailbackPolicy(**STORED), ["/a/*"]),
    ],
    ids=["same policy", "other policy", "equal policy with a journal"],
)
def test_a_finalizer_may_need_a_queue_while_one_is_made(policy, other, names, timer):
    made = []

    class Interrupted(FailbackInvoker):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            made.append(self)
            if len(made) == 1:  # as a finalizer or signal handler whose call fails
                queues.queue_for(other, "/a/*")

    with FailbackQueues(timer) as queues:
        queues._invoker_class = Interrupted
        invoker = queues.queue_for(policy, "/a/*")
        assert list(queues.stats()) == names
        assert queues.queue_for(policy, "/a/*") is invoker
        assert (queues.queue_for(other, "/a/*") is invoker) is (len(names) == 1)
        assert made[0]._queue.calls.closed
