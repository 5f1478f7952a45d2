"""A queue that is made while the same thread makes another one."""

import itertools
import sys

import pytest

from rpcwheel.failback import FailbackInvoker, FailbackPolicy
from rpcwheel.interceptors.sync import FailbackQueues

ORDERS, MAIL = (FailbackPolicy(retry_on="UNAVAILABLE") for _ in range(2))
STORED = {"retry_on": "UNAVAILABLE", "journal": "sqlite:///missing/calls.db"}


@pytest.mark.parametrize("nth", range(11))
@pytest.mark.parametrize(
    ("policy", "other", "names"),
    [
        (ORDERS, ORDERS, ["/a/*"]),
        (ORDERS, MAIL, ["/a/*", "/a/* (2)"]),
        (FailbackPolicy(**STORED), FailbackPolicy(**STORED), ["/a/*"]),
    ],
    ids=["same policy", "other policy", "equal policy with a journal"],
)
def test_a_signal_handler_may_need_a_queue_while_one_is_made(policy, other, names, nth, timer):
    made, places = [], itertools.count()

    class Recorded(FailbackInvoker):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            made.append(self)

    def interrupt(frame, event, _):  # a handler may run when a call begins or has returned
        caller = frame.f_back if event in ("call", "return") else frame
        is_adding = event != "c_call" and caller.f_code is FailbackQueues._add.__code__
        if is_adding and next(places) == nth:
            queues.queue_for(other, "/a/*")

    with FailbackQueues(timer) as queues:
        queues._invoker_class = Recorded
        sys.setprofile(interrupt)
        try:
            invoker = queues.queue_for(policy, "/a/*")
        finally:
            sys.setprofile(None)
        assert (queues.queue_for(other, "/a/*") is invoker) is (len(names) == 1)
        assert queues.queue_for(policy, "/a/*") is invoker
        assert list(queues.stats()) == names
        assert [each._queue.calls.closed for each in made].count(False) == len(names)
