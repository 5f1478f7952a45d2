"""When a heartbeat is sent, and when a connection is dead: interval 60 s, timeout 180, tick 20."""

import itertools

from fixtures.heartbeat_driver import Driver, S
from rpcwheel.durations import NEVER
from rpcwheel.events import ConnectionAlive, ConnectionDead, HeartbeatMissed
from rpcwheel.heartbeat.core import MISSES_UNTIL_DEAD
from rpcwheel.heartbeat.rules import HeartbeatState, Reconnect, Send, StateChanged

UNUSED, ALIVE, PROBING = HeartbeatState.UNUSED, HeartbeatState.ALIVE, HeartbeatState.PROBING
SUSPECT, DEAD = HeartbeatState.SUSPECT, HeartbeatState.DEAD


def test_a_heartbeat_is_sent_after_the_interval_without_a_read_and_missed_after_a_tick():
    driver = Driver().called(at=0)
    assert driver.next_at() == 60 * S + 1
    assert driver.step(at=60 * S) is None
    assert driver.step(at=60 * S + 1) == Send(1, 180 * S, wait_for_ready=False)
    assert driver.state is PROBING
    assert driver.next_at() == 80 * S + 1
    assert driver.step(at=80 * S) is None
    assert driver.step(at=80 * S + 1) == Send(2, 180 * S, wait_for_ready=False)
    assert driver.reports[-1] == HeartbeatMissed("shop", 1, 80 + 1e-9, "DEADLINE_EXCEEDED")
    assert driver.state is SUSPECT


def test_a_connection_on_which_no_call_was_ever_answered_is_dead():
    driver = Driver()
    driver.now = 7 * S
    driver.wrote()
    driver.next_at()
    assert driver.state is UNUSED
    driver.miss_until_reconnect()
    assert driver.now == 187 * S + 1


def test_a_read_right_before_the_reconnect_keeps_the_connection():
    driver = Driver().called(at=0)
    driver.miss_until_reconnect()
    assert driver.state is DEAD
    driver.read()
    assert not driver.confirm_dead()
    assert driver.state is ALIVE


def test_after_a_reconnect_a_heartbeat_waits_for_the_new_connection():
    driver = Driver().called(at=0)
    driver.miss_until_reconnect()
    driver.replace_connection(by_heartbeat=True)
    assert driver.next_at() <= driver.now
    assert driver.step() == Send(driver.core.sent, 180 * S, wait_for_ready=True)
    assert (driver.state, driver.core.replaced) == (DEAD, 1)
    driver.answer(at=driver.now + S)
    assert driver.state is ALIVE
    assert driver.reports[-1] == ConnectionAlive("shop", driver.now / S, 1.0)


def test_a_refused_reconnect_is_tried_again_after_another_heartbeat():
    driver = Driver().called(at=0)
    driver.miss_until_reconnect()
    began = driver.now
    for _ in range(5):
        driver.core.reconnect_refused()
        driver.miss_until_reconnect()
    assert 4 * 20 * S <= driver.now - began <= 6 * 20 * S
    assert [type(report) for report in driver.reports].count(ConnectionDead) == 1


def test_an_idle_channel_with_a_recent_call_is_about_to_connect():
    driver = Driver().called(at=0)
    driver.now = 60 * S
    driver.wrote()
    driver.idle = True
    assert driver.step(at=60 * S + 1) is None
    assert driver.state is ALIVE
    assert driver.next_at() == 80 * S + 1
    driver.idle = False
    assert isinstance(driver.step(at=80 * S + 1), Send)


def test_a_suspect_idle_channel_gets_no_heartbeats_and_a_dead_one_does():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.miss("UNAVAILABLE")
    driver.idle = True
    assert driver.step(at=81 * S) is None
    assert driver.state is UNUSED
    other = Driver().called(at=0)
    other.miss_until_reconnect()
    other.core.reconnect_refused()
    other.idle = True
    assert isinstance(other.step(at=other.next_at()), Send)


def test_after_a_reconnect_by_the_user_a_used_channel_gets_a_heartbeat_at_once():
    driver = Driver().called(at=0)
    driver.replace_connection(by_heartbeat=False)
    driver.idle = True  # the new one, until it is asked
    assert driver.step() == Send(1, 180 * S, wait_for_ready=True)
    assert driver.core.replaced == 0
    unused = Driver()
    unused.replace_connection(by_heartbeat=False)
    assert unused.step() is None


def test_a_channel_is_not_unused_while_a_heartbeat_makes_it_connect():
    driver = Driver()
    driver.idle = True
    assert driver.core.request()
    assert isinstance(driver.step(), Send)
    assert driver.step(at=driver.next_at()) is None
    assert driver.state is SUSPECT
    assert driver.next_at() == 40 * S
    assert driver.core.record_answer(21 * S, 1, rtt_ns=21 * S, serving=True)
    assert driver.state is ALIVE


def test_after_close_a_new_connection_is_ignored():
    driver = Driver().called(at=0)
    driver.core.close()
    driver.core.connection_replaced(driver.now, by_heartbeat=True)
    assert (driver.state, driver.core.replaced) == (HeartbeatState.CLOSED, 0)


def test_the_first_heartbeat_after_a_use_has_a_longer_random_delay_than_later_ones():
    driver = Driver(jitter=0.5).called(at=0)
    assert driver.next_at() == 90 * S + 1
    driver.step(at=90 * S + 1)
    driver.answer(at=91 * S)
    assert driver.next_at() == (90 + 60 + 10) * S + 2
    driver.called(at=100 * S)
    assert driver.next_at() == (100 + 60 + 30) * S + 1


def test_reports_of_an_answered_and_of_a_missed_heartbeat():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.answer(at=60 * S + 2)
    driver.step(at=driver.next_at())
    driver.miss("UNAVAILABLE")
    driver.step(at=driver.next_at())
    driver.answer()
    assert driver.reports == [
        StateChanged(UNUSED, ALIVE),
        *(StateChanged(ALIVE, PROBING), StateChanged(PROBING, ALIVE)),
        *(StateChanged(ALIVE, PROBING), StateChanged(PROBING, SUSPECT)),
        HeartbeatMissed("shop", 1, 60.0, "UNAVAILABLE"),
        *(StateChanged(SUSPECT, ALIVE), ConnectionAlive("shop", 80.0, 0.0)),
    ]


# --- How many misses ---


def test_two_heartbeats_are_missed_before_death_at_every_timeout():
    for share, timeout in itertools.product((0.0, 0.5, 0.999), (120, 130, 180, 1000)):
        driver = Driver(jitter=share, timeout=timeout, grid=True).called(at=0)
        sent = []
        while not isinstance(step := driver.step(at=driver.next_at()), Reconnect):
            if isinstance(step, Send):
                sent.append(driver.now)
        missed = [at for at in sent if at + driver.rules.tick_ns <= driver.now]
        assert len(missed) >= MISSES_UNTIL_DEAD
        assert driver.core.misses >= MISSES_UNTIL_DEAD
        assert timeout * S < driver.now <= timeout * S + 2 * driver.rules.grace_ns


def test_death_has_a_random_delay_within_the_grace():
    driver = Driver(jitter=0.5, reconnect=False)
    driver.called(at=0)
    driver.run(until=200 * S, answer="UNAVAILABLE")
    (died,) = (report for report in driver.reports if isinstance(report, ConnectionDead))
    assert died.silent_s * S == 180 * S + 1 + driver.rules.grace_ns // 2


# --- This process stalled ---


def test_after_a_stall_a_silent_server_is_still_found_dead():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.next_at()
    driver.step(at=3600 * S)
    while not isinstance(driver.step(at=driver.next_at()), Reconnect):
        """No answer."""
    assert driver.now == (180 + 3600 - 80) * S  # it was to look at 80


def test_death_waits_for_the_grace_after_the_last_miss():
    driver = Driver(jitter=1.0, timeout=120).called(at=0)
    driver.step(at=driver.next_at())
    driver.step(at=driver.next_at())
    driver.step(at=driver.next_at() + driver.rules.grace_ns)
    assert driver.core.misses == MISSES_UNTIL_DEAD
    assert driver.next_at() >= driver.now + driver.rules.grace_ns


# --- Channels with unknown activity ---


def test_an_idle_channel_with_unknown_activity_gets_no_heartbeats():
    driver = Driver(silent_from_start=True)
    driver.idle = True
    assert driver.run(until=1000 * S, answer=None) == []
    assert (driver.state, driver.core.sent) == (UNUSED, 0)
    driver.idle = False
    assert len(driver.run(until=driver.now + 130 * S, answer=None)) in {1, 2}
    driver.idle = True
    driver.run(until=driver.now + 130 * S, answer=None)
    assert driver.state is UNUSED
    assert StateChanged(PROBING, ALIVE) in driver.reports


# --- Many connections ---


def test_heartbeats_of_a_thousand_connections_share_about_thirty_times():
    moments = set()
    for nth in range(1000):
        driver = Driver(jitter=nth / 1000, grid=True)
        driver.called(at=nth)
        bare = Driver(jitter=nth / 1000)
        bare.called(at=nth)
        moments.add(driver.next_at())
        assert 0 <= driver.next_at() - bare.next_at() < driver.rules.grid_ns
    assert 25 <= len(moments) <= 34
    assert NEVER not in moments
