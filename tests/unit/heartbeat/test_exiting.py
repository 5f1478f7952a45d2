"""The end of all heartbeats of a process, before the thread pools of its servers are shut down."""

import threading

import pytest

from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.heartbeat.exiting import RunningHeartbeats


class Heartbeat:
    def __init__(self, happened):
        self.happened = happened

    def detach(self):
        self.happened.append("detached")


@pytest.fixture
def running():
    return RunningHeartbeats()


def test_close_waits_for_calls_in_flight_and_then_detaches(running):
    happened = []
    heartbeat = Heartbeat(happened)
    assert running.add(heartbeat)
    assert running.begin_call()
    assert running.begin_call()
    running.end_call()
    closing = threading.Thread(target=running.close, args=(10**6,))
    closing.start()
    assert wait_until(lambda: running.closed)
    happened.append("answered")
    running.end_call()
    closing.join(WAIT_S)
    assert happened == ["answered", "detached"]


def test_close_detaches_though_a_call_does_not_end(running):
    happened = []
    heartbeat = Heartbeat(happened)
    running.add(heartbeat)
    running.begin_call()
    running.close(1)
    assert happened == ["detached"]


def test_a_closed_process_begins_no_call_and_takes_no_heartbeat(running):
    running.close()
    assert not running.begin_call()
    assert not running.add(Heartbeat([]))


def test_a_forked_child_has_no_heartbeats_and_may_begin_some(running):
    happened = []
    heartbeat = Heartbeat(happened)
    running.add(heartbeat)
    running.begin_call()
    running.close(1)
    running.reset()
    assert running.begin_call()
    running.end_call()
    running.close()
    assert happened == ["detached"]  # by the parent
