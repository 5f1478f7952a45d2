"""The timeout at which calls on an old connection are ended is on the best timer there is."""

import pytest

from fixtures.shop import UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S
from rpcwheel.timer import ManualTimer
from rpcwheel.transport import ReconnectingChannel, _drain
from rpcwheel.transport._drain import timeout_on

SECOND = 1_000_000_000


@pytest.fixture
def shared(monkeypatch):
    """What stands for the timer of this process."""
    timer = ManualTimer()
    monkeypatch.setattr(_drain, "shared_timer", lambda: timer)
    return timer


def test_it_is_on_the_given_timer(timer, shared):
    ran = []
    assert timeout_on(timer, ran.append, 2 * SECOND) is not None
    assert (timer.pending, shared.pending) == (1, 0)
    timer.advance(1.999)
    assert not ran
    timer.advance(0.001)
    assert len(ran) == 1


def test_without_one_it_is_on_the_shared_one(shared):
    assert timeout_on(None, print, SECOND) is not None
    assert shared.pending == 1


def test_in_the_place_of_a_timer_that_was_stopped_too(timer, shared):
    timer.stop()
    timeout = timeout_on(timer, print, SECOND)
    assert shared.pending == 1
    assert timeout.cancel()


def test_where_there_is_no_timer_there_is_no_timeout(timer, shared):
    timer.stop()
    shared.stop()
    assert timeout_on(timer, print, SECOND) is None


def test_what_a_timer_raises_for_other_reasons_comes_out(shared):
    class Wrong:
        def new_timeout(self, *_):
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        timeout_on(Wrong(), print, SECOND)
    assert shared.pending == 0


def test_without_any_timer_calls_end_now(shop, shared):
    shared.stop()
    with ReconnectingChannel(shop.target) as channel:
        shop.then(hang := Hang())
        running = channel.unary_unary(UNARY_UNARY).future(b"x")
        assert hang.begun.wait(WAIT_S)
        assert channel.replace("why", drain=60)
        assert "connection replaced: why" in running.exception(WAIT_S).details()
