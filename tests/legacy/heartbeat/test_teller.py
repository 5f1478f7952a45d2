"""Who is told: in order, one at a time, and nobody can hold up or hurt the others."""

import contextlib
import threading

import pytest

from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.heartbeat.rules import Changed, Died, HeartbeatState, Missed, Revived
from rpcwheel.heartbeat.teller import MOST, Teller, checked_listener
from rpcwheel.observe.events import (
    CallbackFailed,
    ConnectionAlive,
    ConnectionDead,
    HeartbeatMissed,
    IdleLimited,
)

CHANGE = Changed(HeartbeatState.ALIVE, HeartbeatState.PROBING)


class Owner:
    target = "127.0.0.1:1"


@pytest.fixture
def jobs():
    return []


@pytest.fixture
def teller(jobs):
    return Teller(Owner(), threading.RLock(), jobs.append, lambda: 4)


def test_facts_become_events_of_the_target(teller, jobs, events):
    own = IdleLimited("as it is")
    teller.take(Missed(2, 10**9, "UNAVAILABLE"), Died(3 * 10**9, 3), Revived(10**9, None), own)
    teller.take(Revived(0, 5 * 10**6))
    teller.flush()
    assert events == []
    jobs.pop()()
    assert events == [
        HeartbeatMissed("127.0.0.1:1", 2, 1.0, "UNAVAILABLE"),
        ConnectionDead("127.0.0.1:1", 3.0, 3, 4),
        ConnectionAlive("127.0.0.1:1", 1.0, None),
        own,
        ConnectionAlive("127.0.0.1:1", 0.0, 0.005),
    ]


def test_without_listeners_a_change_of_state_costs_no_job(teller, jobs):
    teller.take(CHANGE)
    teller.flush()
    assert jobs == []


def test_one_job_at_a_time_tells_all_that_comes_meanwhile(teller, jobs):
    told = []
    teller.add(lambda *_: told.append(len(told)) or (len(told) == 1 and more()))

    def more():
        teller.take(CHANGE, CHANGE)
        teller.flush()

    teller.take(CHANGE)
    teller.flush()
    teller.flush()
    assert len(jobs) == 1
    jobs.pop()()
    assert (told, jobs) == ([0, 1, 2], [])
    more()
    assert len(jobs) == 1


def test_a_listener_that_raises_anything_is_told_and_goes_on_being_called(teller, jobs, events):
    def broken(*_):
        raise SystemExit

    teller.add(broken)
    for _ in range(2):
        teller.take(CHANGE)
        teller.flush()
        jobs.pop()()
    assert [type(event) for event in events] == [CallbackFailed] * 2
    assert events[0].callback == repr(broken)
    teller.remove(broken)
    teller.take(CHANGE)
    assert jobs == []


def test_a_coroutine_function_is_no_listener():
    async def listener(*_):
        """Nobody would await it."""

    with pytest.raises(TypeError, match="starts a task of it"):
        checked_listener(listener)


def test_a_listener_that_hangs_holds_up_only_its_own_heartbeat(twin, asked, channel, manager):
    if twin.name == "aio":
        return  # there it would be the loop itself that hangs
    gate, told = threading.Event(), []
    with contextlib.ExitStack() as opened:
        others = [opened.enter_context(twin.channel(asked.target)) for _ in range(6)]
        opened.callback(gate.set)
        free, stuck = manager.attach(channel), [manager.attach(other) for other in others]
        for one in stuck:
            one.add_listener(lambda *_: gate.wait(WAIT_S))
        free.add_listener(lambda *args: told.append(args))
        for count in range(1, 4):
            for one in (*stuck, free):
                one.beat()
            assert wait_until(
                lambda count=count: all(one.answered == count for one in (*stuck, free))
            )
        assert wait_until(lambda: len(told) == 6)


@pytest.mark.parametrize("listener", [lambda: 0, lambda one, two: 0, lambda *, heartbeat: 0])
def test_a_listener_takes_three_arguments(listener):
    with pytest.raises(TypeError, match="a plain function \\(heartbeat, old, new\\)"):
        checked_listener(listener)


@pytest.mark.parametrize("listener", [print, lambda *_: 0, lambda one, two, three, four=4: 0, max])
def test_whatever_else_takes_three_is_a_listener(listener):
    assert checked_listener(listener) is listener


def test_of_too_many_facts_that_wait_the_oldest_are_forgotten(teller, jobs, events):
    for count in range(MOST + 5):
        teller.take(Missed(count, 0, "UNAVAILABLE"))
    teller.flush()
    jobs.pop()()
    assert [event.misses for event in events] == list(range(5, MOST + 5))


def test_one_can_wait_until_all_is_told_but_not_for_ever(teller, jobs):
    teller.wait(WAIT_S)  # nothing is to be told
    teller.take(Revived(0, None))
    teller.flush()
    teller.wait(0.001)
    teller_thread = threading.Thread(target=jobs.pop())
    teller_thread.start()
    teller.wait(WAIT_S)
    assert not teller._facts
    teller_thread.join()
