"""One connection, one call on it, and what users see of them."""

import dataclasses

import pytest

from rpcwheel.idle.core import Due, Reason
from rpcwheel.idle.entry import Call, Entry
from rpcwheel.idle.table import Connections

S = 1_000_000_000


def test_a_fresh_entry_shows_what_is_not_known_as_none():
    one = Entry("ipv4:10.0.0.1:1", ("10.0.0.1", 1), 5 * S).connection()
    assert (one.first, one.calls, one.heartbeats) == (5.0, 0, 0)
    assert (one.last_read, one.last_write, one.local_port) == (None, None, None)
    assert (one.bytes_in, one.bytes_out) == (None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.calls = 1


def test_the_same_is_said_once_until_something_moves():
    entry = Entry("ipv4:10.0.0.1:1", ("10.0.0.1", 1), 0)
    idle, read = Due(Reason.IDLE, 1, 2), Due(Reason.READ, 1, 2)
    assert entry.is_news(idle, 1)
    assert not entry.is_news(idle, 1)
    assert entry.is_news(read, 1)
    assert entry.is_news(read, 2)


def test_connections_that_came_together_have_shares_of_their_own():
    shares = {Entry("a", None, 0).seen.share for _ in range(20)}
    assert len(shares) > 10
    assert all(0 <= share <= 1 for share in shares)


def test_the_end_of_a_call_stands_for_the_last_that_was_seen(timer):
    table = Connections(timer=timer)
    call = Call(table, "ipv4:10.0.0.1:1", streams=True, heartbeat=True)
    timer.advance(3)
    call.ended()
    assert call.entry.last_ns() == 3 * S
    assert table.snapshot()[0].heartbeats == 1
