"""Nothing that lives is given up: late answers, our own standstill, what others said."""

import pytest

from fixtures.heartbeat_driver import Driver, S
from rpcwheel.durations import NEVER
from rpcwheel.heartbeat.core import ENOUGH, MOST
from rpcwheel.heartbeat.rules import Changed, Died, HeartbeatState, Missed, Replace, Send

ALIVE, PROBING, UNUSED = HeartbeatState.ALIVE, HeartbeatState.PROBING, HeartbeatState.UNUSED
SUSPECT, DEAD = HeartbeatState.SUSPECT, HeartbeatState.DEAD


def deaths(driver):
    return [fact for fact in driver.told if isinstance(fact, Died)]


# --- Late answers ---


def test_an_answer_counts_however_late_it_is():
    driver = Driver().called(at=0)
    for _ in range(3):
        driver.step(at=driver.next_at())
    driver.now = 110 * S
    assert driver.core.heard(driver.now, 1, rtt_ns=50 * S, serving=True)
    assert (driver.state, driver.core.misses, driver.core.rtt_ns) == (ALIVE, 0, 50 * S)
    assert driver.core.on_way == {2, 3}
    assert driver.core.missed(111 * S, 3, "UNAVAILABLE")
    assert (driver.state, driver.core.misses, driver.core.on_way) == (ALIVE, 0, {2})


@pytest.mark.parametrize("latency", [0.2, 0.5, 1.5, 4.9])
def test_a_server_that_is_slow_for_ever_is_never_dead(latency):
    driver = Driver(interval=1.0, timeout=6.0).called(at=0)
    due = {}
    while driver.now < 200 * S:
        at = max(driver.now, driver.next_at())
        number = min(due, default=None)
        if number is not None and due[number] <= at:
            driver.now = due.pop(number)
            if driver.core.heard(driver.now, number, rtt_ns=1, serving=None):
                driver.read_at = driver.now
            continue
        step = driver.step(at=at)
        assert not isinstance(step, Replace)
        if isinstance(step, Send):
            due[step.number] = driver.now + int(latency * S)
    assert deaths(driver) == []
    assert driver.core.answered > 20


def test_beyond_the_most_that_may_be_on_their_way_the_youngest_gives_way():
    driver = Driver(timeout=100_000).called(at=0)
    for _ in range(3 * MOST):
        driver.now = driver.next_at()
        driver.step()
    assert driver.core.on_way == {*range(1, MOST), driver.core.sent}


def test_an_answer_in_the_moment_of_the_decision_keeps_the_connection():
    driver = Driver().called(at=0)
    while not isinstance(driver.step(at=driver.next_at()), Replace):
        """Nobody answers."""
    assert driver.core.heard(driver.now, 2, rtt_ns=S, serving=None)
    assert not driver.confirm()
    assert driver.state is ALIVE


# --- How many it takes ---


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("timeout", [120, 130, 180, 1000])
def test_it_takes_two_heartbeats_that_were_waited_for_whatever_the_timeout(timeout, share):
    driver = Driver(share=share, timeout=timeout, grid=True).called(at=0)
    sent = []
    while not isinstance(step := driver.step(at=driver.next_at()), Replace):
        if isinstance(step, Send):
            sent.append(driver.now)
    assert len([at for at in sent if at + driver.rules.tick_ns <= driver.now]) >= ENOUGH
    assert driver.core.misses >= ENOUGH
    assert timeout * S < driver.now <= timeout * S + 2 * driver.rules.grace_ns


def test_misses_of_an_earlier_silence_do_not_count():
    driver = Driver().called(at=0)
    for _ in range(3):
        driver.step(at=driver.next_at())
    driver.now = 101 * S
    driver.read()
    while driver.now < 200 * S:
        assert not isinstance(driver.step(at=driver.next_at()), Replace)
    assert driver.state is SUSPECT
    assert deaths(driver) == []


def test_deaths_are_spread_too():
    driver = Driver(share=0.5, replace=False)
    driver.called(at=0)
    driver.run(until=200 * S, answer="UNAVAILABLE")
    (died,) = deaths(driver)
    assert died.silent_ns == 180 * S + 1 + driver.rules.grace_ns // 2


# --- We stood still ourselves ---


def test_a_miss_from_before_a_standstill_condemns_nobody():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.miss("UNAVAILABLE")
    assert driver.next_at() == 80 * S + 1
    assert isinstance(driver.step(at=3600 * S), Send)
    driver.answer(at=3601 * S)
    assert (driver.state, deaths(driver)) == (ALIVE, [])


def test_even_when_it_was_about_to_die():
    driver = Driver().called(at=0)
    while driver.now < 160 * S:
        driver.step(at=driver.next_at())
    assert driver.next_at() == 180 * S + 1
    assert driver.step(at=3600 * S) is None  # one is on its way
    driver.answer(at=3601 * S)
    assert (driver.state, deaths(driver)) == (ALIVE, [])


def test_a_deadline_of_grpc_s_own_that_ends_in_a_standstill_is_one_miss_and_no_death():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.next_at()
    driver.miss("DEADLINE_EXCEEDED", at=3600 * S)
    assert isinstance(driver.step(at=3600 * S + 1), Send)
    driver.answer(at=3601 * S)
    assert (driver.state, deaths(driver)) == (ALIVE, [])


def test_after_a_standstill_a_dead_server_is_still_found_dead():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.next_at()
    driver.step(at=3600 * S)
    while not isinstance(driver.step(at=driver.next_at()), Replace):
        """Nobody answers."""
    assert driver.now == (180 + 3600 - 80) * S  # it was to look at 80


@pytest.mark.parametrize("latency", [0.5, 1.5, 4.0])
def test_after_a_standstill_a_slow_server_has_all_its_time(latency):
    driver = Driver(interval=1.0, timeout=6.0).called(at=0)
    driver.next_at()
    driver.step(at=1000 * S)
    until = 1000 * S + int(latency * S)
    while (at := driver.next_at()) < until:
        assert not isinstance(driver.step(at=at), Replace)
    driver.now = until
    assert driver.core.heard(driver.now, 1, rtt_ns=int(latency * S), serving=None)
    assert deaths(driver) == []


def test_whoever_is_a_little_late_did_not_stand_still():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    assert isinstance(driver.step(at=driver.next_at() + driver.rules.grace_ns), Send)
    assert driver.core.misses == 1


def test_what_came_while_a_loop_was_blocked_has_a_moment_to_be_read():
    driver = Driver(share=1.0, timeout=120).called(at=0)
    driver.step(at=driver.next_at())
    driver.step(at=driver.next_at())
    driver.step(at=driver.next_at() + driver.rules.grace_ns)
    assert driver.core.misses == ENOUGH
    assert driver.next_at() >= driver.now + driver.rules.grace_ns


# --- What others said ---


def test_what_somebody_said_is_a_miss_but_condemns_nobody():
    driver = Driver().called(at=0)
    while driver.now < 1000 * S:
        step = driver.step(at=driver.next_at())
        assert not isinstance(step, Replace)
        if isinstance(step, Send):
            driver.miss("UNAVAILABLE", condemning=False)
    assert driver.state is SUSPECT
    assert driver.core.misses > 40
    assert isinstance(driver.told[-1], Missed)


def test_what_somebody_said_late_takes_back_the_misses_before():
    driver = Driver().called(at=0)
    while driver.now < 160 * S:
        driver.step(at=driver.next_at())
    assert driver.core.missed(170 * S, 1, "UNAVAILABLE", condemning=False)
    assert driver.next_at() == 180 * S + 1
    assert isinstance(driver.step(at=180 * S + 1), Send)


# --- Channels whose traffic is not seen ---


def test_an_unseen_channel_without_connection_is_left_alone_until_it_has_one():
    driver = Driver(begun=True)
    driver.idle = True
    assert driver.run(until=1000 * S, answer=None) == []
    assert (driver.state, driver.core.sent) == (UNUSED, 0)
    driver.idle = False
    assert len(driver.run(until=driver.now + 130 * S, answer=None)) in {1, 2}
    driver.idle = True
    driver.run(until=driver.now + 130 * S, answer=None)
    assert driver.state is UNUSED
    assert Changed(PROBING, ALIVE) in driver.told


# --- Together ---


def test_heartbeats_of_many_share_moments_and_none_is_early_or_much_later():
    moments = set()
    for nth in range(1000):
        driver = Driver(share=nth / 1000, grid=True)
        driver.called(at=nth)
        bare = Driver(share=nth / 1000)
        bare.called(at=nth)
        moments.add(driver.next_at())
        assert 0 <= driver.next_at() - bare.next_at() < driver.rules.grid_ns
    assert 25 <= len(moments) <= 34
    assert NEVER not in moments
