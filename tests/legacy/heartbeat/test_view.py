"""What is known of a heartbeat."""

import pytest

from fixtures.waiting import wait_until
from rpcwheel.heartbeat.view import HeartbeatView

KNOWN = (
    *("target", "state", "last_read", "last_write", "last_use", "rtt", "misses", "sent"),
    *("answered", "replaced", "serving"),
)


def test_it_says_all_there_is_to_know(twin, asked, channel, manager, timer):
    heartbeat = twin.do(manager.attach, channel)
    assert isinstance(heartbeat, HeartbeatView)
    assert {name: getattr(heartbeat, name) for name in KNOWN} == {
        **dict.fromkeys(KNOWN, None),
        **dict.fromkeys(["misses", "sent", "answered", "replaced"], 0),
        "target": asked.target,
        "state": "unused",
    }
    timer.advance(2.5)
    twin.call(channel)
    timer.advance(1.0)
    heartbeat.beat()
    assert wait_until(lambda: heartbeat.answered == 1)
    assert {name: getattr(heartbeat, name) for name in KNOWN} == {
        "target": asked.target,
        "state": "alive",
        "last_read": 3.5,
        "last_write": 3.5,
        "last_use": 2.5,
        "rtt": 0.0,
        "misses": 0,
        "sent": 1,
        "answered": 1,
        "replaced": 0,
        "serving": True,
    }
    assert repr(heartbeat) == f"<Heartbeat of {asked.target}: alive>"


@pytest.mark.parametrize("name", KNOWN[1:])
def test_nothing_of_it_can_be_set(twin, channel, manager, name):
    with pytest.raises(AttributeError):
        setattr(twin.do(manager.attach, channel), name, 1)
