"""Reads of the state for the subscribers of a balanced channel."""

import itertools

from fixtures.forks import holds_in_child
from fixtures.subchannel_pools import FAILING, READY
from fixtures.waiting import wait_until
from rpcwheel.balancer.subscriptions import BalancerSubscriptions
from rpcwheel.timer import WheelTimer


def test_a_forked_child_reads_the_state_again_although_its_parent_does():
    states = itertools.cycle((FAILING, READY))
    with WheelTimer() as timer:
        subscriptions = BalancerSubscriptions("shop.Orders", lambda _: next(states), timer)
        subscriptions.add(lambda _: None, try_to_connect=False)
        assert wait_until(lambda: subscriptions._timeout is not None)

        def sees_changes():
            seen = []
            subscriptions.add(seen.append, try_to_connect=False)
            return wait_until(lambda: len(seen) > 1)

        assert holds_in_child(sees_changes)
        subscriptions.close()
