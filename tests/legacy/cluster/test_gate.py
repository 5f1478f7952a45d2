"""The requests of a try wait until there is a connection, and are nobody's if there was none."""

import threading

import grpc
import pytest

from fixtures.waiting import wait_until
from rpcwheel.cluster._gate import Gate

STATES = grpc.ChannelConnectivity


class Link:
    """A connection as a gate sees it."""

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state


class At:
    """A member as a gate sees it."""

    def __init__(self, state=STATES.CONNECTING):
        self.link = Link(state)


def read(gate):
    got = []
    thread = threading.Thread(target=lambda: got.extend(gate))
    thread.start()
    return thread, got


@pytest.mark.parametrize("state", [STATES.READY, None])
def test_where_there_is_a_connection_all_pass_at_once(state):
    gate = Gate(iter("abc"), At(state))
    assert list(gate) == ["a", "b", "c"]
    assert gate.shut()


def test_they_wait_for_a_connection():
    at = At()
    gate = Gate(iter("abc"), at)
    thread, got = read(gate)
    thread.join(0.1)
    assert got == []
    at.link.state = STATES.READY
    thread.join(20)
    assert got == ["a", "b", "c"]


def test_one_that_is_shut_ends_and_leaves_them_to_another():
    requests = iter("abc")
    gate = Gate(requests, At(STATES.TRANSIENT_FAILURE))
    thread, got = read(gate)
    assert not gate.shut()
    thread.join(20)
    assert got == []
    assert list(Gate(requests, At(STATES.READY))) == ["a", "b", "c"]


def test_a_member_that_has_no_channel_yet_has_no_connection():
    at = At()
    link, at.link = at.link, None
    thread, got = read(Gate(iter("a"), at))
    link.state, at.link = STATES.READY, link
    assert wait_until(lambda: got == ["a"])
    thread.join(20)
