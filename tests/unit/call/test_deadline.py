"""`deadline_scope` and `current_deadline`."""

import asyncio
import time
from datetime import timedelta

import pytest

from rpcwheel.call import Deadline, current_deadline, deadline_scope


def test_outside_of_scopes_there_is_no_deadline():
    assert current_deadline() is None


def test_a_scope_has_one_deadline_for_all_code_in_it():
    with deadline_scope(100) as deadline:
        assert current_deadline() == deadline
        assert 99 < current_deadline().remaining() <= 100
        assert not deadline.expired()
    assert current_deadline() is None


@pytest.mark.parametrize(("outer", "inner"), [(10, 100), (100, 10)])
def test_of_two_scopes_the_earlier_deadline_holds(outer, inner):
    with deadline_scope(outer) as first:
        with deadline_scope(inner) as second:
            assert current_deadline() == second == min(first, second)
            assert second.remaining() <= 10
        assert current_deadline() == first


def test_a_scope_ends_with_an_exception():
    with pytest.raises(KeyError), deadline_scope(10):
        raise KeyError
    assert current_deadline() is None


def test_a_deadline_that_has_passed_has_no_time_remaining():
    deadline = Deadline(time.monotonic_ns() - 1)
    assert deadline.expired()
    assert deadline.remaining() == 0.0


@pytest.mark.parametrize(
    ("timeout", "least", "most"),
    [(timedelta(minutes=1), 59.0, 60.0), (0, 0, 0), (-5, 0, 0), (float("inf"), 1e9, 1e10)],
)
def test_the_time_of_a_scope_is_in_seconds_or_a_timedelta(timeout, least, most):
    with deadline_scope(timeout):
        assert current_deadline().expired() is (most == 0)
        assert least <= current_deadline().remaining() <= most


async def test_a_task_has_the_deadline_of_its_creator_and_may_set_its_own():
    async def inner():
        with deadline_scope(10) as own:
            await asyncio.sleep(0)
            return own, current_deadline()

    with deadline_scope(100) as outer:
        own, seen = await asyncio.create_task(inner())
        assert seen == own < outer
        assert current_deadline() == outer
