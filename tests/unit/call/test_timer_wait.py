"""The wait of a call of `grpc.aio` for its next attempt."""

import asyncio
from contextvars import copy_context
from types import SimpleNamespace

import pytest

from rpcwheel.call.aio_call import _TimerWait
from rpcwheel.durations import NEVER


class LateTimer:
    """A client's state whose timer never calls. The time is that of the loop's checks."""

    def __init__(self):
        self.timer = SimpleNamespace(stopped=False)
        self.now_s = 0.0
        self.checks = []
        self.canceled_checks = 0

    def now_ns(self):
        return round(self.now_s * 1e9)

    def schedule(self, *_):
        return SimpleNamespace(cancel=lambda: None)

    def call_later(self, delay_s, check, *, context):
        self.checks.append((delay_s, check))
        return SimpleNamespace(cancel=self.cancel_check)

    def cancel_check(self):
        self.canceled_checks += 1

    def run_checks(self):
        while self.checks:
            delay_s, check = self.checks.pop(0)
            self.now_s += delay_s
            check()


@pytest.mark.parametrize(("deadline_s", "end_s"), [(2.7, 2.7), (9.0, 3.0), (None, 3.0)])
async def test_a_wait_whose_timer_is_late_ends_before_the_deadline(monkeypatch, deadline_s, end_s):
    late, ends = LateTimer(), []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", late.call_later)
    wait = _TimerWait(late, copy_context(), lambda: ends.append(late.now_s), ends.clear)
    wait.start(2_500_000_000, NEVER if deadline_s is None else round(deadline_s * 1e9))
    late.run_checks()
    assert ends == [end_s]


async def test_a_wait_that_is_canceled_on_another_thread_leaves_its_check_to_the_loop(monkeypatch):
    """A garbage collection may run there, and handles of a loop are not thread-safe."""
    late, ends = LateTimer(), []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", late.call_later)
    wait = _TimerWait(late, copy_context(), lambda: ends.append(late.now_s), ends.clear)
    wait.start(9_000_000_000, NEVER)
    (first_check_s, _), *_ = late.checks
    await asyncio.to_thread(wait.cancel)
    assert late.canceled_checks == 0
    late.run_checks()
    assert (ends, late.now_s) == ([], first_check_s)


async def test_a_wait_that_is_canceled_on_its_loop_cancels_its_check(monkeypatch):
    late = LateTimer()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", late.call_later)
    wait = _TimerWait(late, copy_context(), lambda: None, lambda: None)
    wait.start(9_000_000_000, NEVER)
    for _ in range(2):
        wait.cancel()
        assert late.canceled_checks == 1
