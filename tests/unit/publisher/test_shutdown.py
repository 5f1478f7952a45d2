"""The deadlines of the steps of a stop."""

import threading

from fixtures.timers import cannot_start
from rpcwheel.publisher.shutdown import RunningStep, Shutdown
from rpcwheel.timer import ManualTimer, WheelTimer


def test_a_step_ends_when_the_smaller_grace_is_over():
    timer = ManualTimer()
    shutdown = Shutdown(lambda: "shop", timer, lame_duck_s=0.0, grace_s=600.0)
    step = RunningStep(shutdown, None)
    shutdown.grace_s = 100.0
    timer.advance(99)
    assert step.left_s() == 1.0
    timer.advance(1)
    assert step.left_s() == 0.0


def test_a_lame_duck_ends_also_if_the_timer_has_no_thread(monkeypatch):
    shutdown = Shutdown(lambda: "shop", WheelTimer(), lame_duck_s=600.0, grace_s=0.0)
    shutdown.hurry()
    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    shutdown.wait_lame_duck()
