"""What waits in the timer that a process shares goes on when that was stopped."""

import weakref

from rpcwheel.timer import shared_timer
from rpcwheel.timer.renewal import tell_when_renewed


def test_what_waits_in_the_shared_timer_is_told_when_there_is_another():
    class Waits:
        told = 0

        def timer_renewed(self):
            self.told += 1

    shared_timer()
    one, other = Waits(), Waits()
    tell_when_renewed(one)
    tell_when_renewed(other)
    gone = weakref.ref(other)
    del other
    assert gone() is None  # it is not held
    for times in (1, 2):
        shared_timer().stop()
        assert one.told == times - 1
        shared_timer()
        shared_timer()
        assert one.told == times
