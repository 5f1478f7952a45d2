"""Who is told: in order, one at a time, and nobody can hold up or hurt the others."""

import threading

import pytest

from fixtures.timers import PATIENCE, eventually
from rpcwheel.heartbeat.rules import Changed, Died, HeartbeatState, Missed, Revived
from rpcwheel.heartbeat.teller import Teller, checked_listener
from rpcwheel.observe.events import (
    ConnectionAlive,
    ConnectionDead,
    HeartbeatMissed,
    IdleLimited,
    ListenerFailed,
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
    assert [type(event) for event in events] == [ListenerFailed] * 2
    assert events[0].listener == repr(broken)
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
    other = twin.channel(asked.target)
    stuck, free = manager.attach(channel), manager.attach(other)
    stuck.add_listener(lambda *_: gate.wait(PATIENCE))
    free.add_listener(lambda *args: told.append(args))
    for count in range(1, 6):
        stuck.beat()
        free.beat()
        assert eventually(lambda count=count: stuck.answered == free.answered == count)
    assert eventually(lambda: len(told) == 10)
    gate.set()
    other.close()
