"""`RecordedEvents`, `wait_until` and `aio_wait_until`."""

import pytest

from rpcwheel.events import CallSlow, LateResponse, TaskSlow, emit
from rpcwheel.testing import RecordedEvents, aio_wait_until, wait_until

SLOW = CallSlow("/shop.Orders/Get", "client", 2.0)


def test_events_are_recorded_until_the_end_of_the_block():
    with RecordedEvents() as events:
        emit(SLOW)
        assert events == [SLOW]
    emit(SLOW)
    assert events.of(CallSlow) == [SLOW]
    assert events.of(LateResponse) == []


def test_slow_tasks_are_left_out(rpcwheel_events):
    emit(TaskSlow("timer", "task", 2.0))
    assert rpcwheel_events == []


async def test_waiting_returns_the_true_value_of_the_condition():
    values = [[], [], ["sync"], [], ["aio"]]
    assert wait_until(lambda: values.pop(0)) == ["sync"]
    assert await aio_wait_until(lambda: values.pop(0)) == ["aio"]


async def test_waiting_raises_assertion_error_after_the_timeout():
    with pytest.raises(AssertionError, match=r"not true within 0\.01 s"):
        wait_until(lambda: False, timeout=0.01)
    with pytest.raises(AssertionError, match=r"not true within 0\.01 s"):
        await aio_wait_until(lambda: False, timeout=0.01)
