"""The deadlines of the steps of a stop."""

from rpcwheel.publisher.shutdown import RunningStep, Shutdown
from rpcwheel.timer import ManualTimer


def test_a_step_ends_when_the_smaller_grace_is_over():
    timer = ManualTimer()
    shutdown = Shutdown(lambda: "shop", timer, lame_duck_s=0.0, grace_s=600.0)
    step = RunningStep(shutdown, None)
    shutdown.grace_s = 100.0
    timer.advance(99)
    assert step.left_s() == 1.0
    timer.advance(1)
    assert step.left_s() == 0.0
