"""When a heartbeat is sent, and when a connection is dead. Interval 60, timeout 180, tick 20."""

import itertools

from fixtures.heartbeat_driver import Driver, S
from rpcwheel.durations import NEVER
from rpcwheel.heartbeat.core import ENOUGH, MOST
from rpcwheel.heartbeat.rules import (
    Changed,
    Died,
    HeartbeatState,
    Missed,
    Reconnect,
    Revived,
    Seen,
    Send,
)

UNUSED, ALIVE, PROBING = HeartbeatState.UNUSED, HeartbeatState.ALIVE, HeartbeatState.PROBING
SUSPECT, DEAD = HeartbeatState.SUSPECT, HeartbeatState.DEAD


def test_a_heartbeat_is_sent_after_more_than_the_interval_without_a_read_and_not_before():
    driver = Driver().called(at=5 * S)
    assert driver.next_at() == 65 * S + 1
    assert driver.step(at=65 * S) is None
    assert driver.step(at=65 * S + 1) == Send(1, 180 * S, patient=False)
    assert driver.state is PROBING


def test_silence_in_one_direction_is_enough():
    for silent in ("read", "write"):
        driver = Driver().called(at=S)
        for second in range(2, 62):
            driver.now = second * S
            driver.wrote() if silent == "read" else driver.read()
            driver.next_at()
        assert driver.step(at=61 * S) is None
        assert isinstance(driver.step(at=61 * S + 1), Send)


def test_what_is_read_and_written_puts_the_heartbeat_off():
    driver = Driver().called(at=0)
    for second in range(0, 600, 59):
        driver.called(at=second * S)
        assert driver.step(at=second * S) is None
        assert driver.next_at() == (second + 60) * S + 1
    assert driver.core.sent == 0


def test_a_busy_connection_is_looked_at_once_an_interval():
    driver, looks = Driver().called(at=0), 0
    at = driver.next_at()
    for ms in range(0, 600_000, 10):
        driver.called(at=ms * 10**6)
        if driver.now >= at:
            looks += 1
            at = driver.next_at()
    assert looks == 9
    assert driver.core.sent == 0


def test_an_unused_connection_is_left_alone_for_ever():
    driver = Driver()
    for _ in range(100):
        driver.now = driver.next_at()
        assert driver.step() is None
    assert driver.now >= 90 * 60 * S
    assert (driver.state, driver.core.sent) == (UNUSED, 0)


def test_the_first_use_is_seen_in_time_for_its_heartbeat():
    driver = Driver(share=0.999)
    driver.next_at()
    driver.called(at=61 * S)
    due = driver.now + 60 * S + 1
    while driver.next_at() < due:
        driver.now = driver.next_at()
    assert due <= driver.next_at() <= due + 60 * S


def test_silence_of_what_is_not_seen_counts_from_the_begin():
    driver = Driver(begun=True)
    assert driver.next_at() == 60 * S + 1
    assert isinstance(driver.step(at=60 * S + 1), Send)


def test_an_answer_makes_it_alive_and_the_next_heartbeat_follows_an_interval_later():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.answer(at=61 * S, serving=True)
    core = driver.core
    assert (driver.state, core.rtt_ns, core.serving) == (ALIVE, S - 1, True)
    assert (core.sent, core.answered, core.misses) == (1, 1, 0)
    assert driver.next_at() == 120 * S + 2  # from when it was written


def test_while_it_is_suspect_heartbeats_follow_each_tick_until_it_is_dead():
    driver = Driver().called(at=0)
    sent = []
    while driver.state is not DEAD:
        driver.now = driver.next_at()
        step = driver.step()
        if isinstance(step, Send):
            sent.append(driver.now)
            driver.miss("UNAVAILABLE")
    assert [round(at / S) for at in sent] == [60, 80, 100, 120, 140, 160]
    assert driver.now == 180 * S + 1


def test_a_heartbeat_that_is_not_answered_for_a_tick_is_missed_and_the_next_one_follows():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    assert driver.next_at() == 80 * S + 1
    assert driver.step(at=80 * S) is None
    assert driver.step(at=80 * S + 1) == Send(2, 180 * S, patient=False)
    assert driver.told[-1] == Missed(1, 80 * S + 1, "DEADLINE_EXCEEDED")
    assert driver.state is SUSPECT


def test_dead_is_more_than_the_timeout_without_a_read_however_much_is_written():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.miss("UNAVAILABLE")
    for _ in range(5):
        driver.now = driver.next_at()
        driver.wrote()
        driver.step()
        driver.miss("UNAVAILABLE")
    assert driver.next_at() == 180 * S + 1
    assert not isinstance(driver.step(at=180 * S), Reconnect)
    assert driver.step(at=180 * S + 1) == Reconnect("no answer to heartbeats for 180.0 s")
    assert driver.state is DEAD
    assert driver.told[-1] == Died(180 * S + 1, 6)


def test_a_connection_that_never_answered_a_call_is_dead_too():
    driver = Driver()
    driver.now = 7 * S
    driver.wrote()
    driver.next_at()
    assert driver.state is UNUSED
    driver.starve()
    assert driver.now == 187 * S + 1


def test_a_process_that_stood_still_gives_a_heartbeat_its_chance_first():
    driver = Driver().called(at=0)
    driver.next_at()
    assert driver.step(at=1000 * S) == Send(1, 180 * S, patient=False)
    driver.answer(at=1001 * S)
    assert driver.state is ALIVE


def test_an_answer_that_came_while_the_process_stood_still_is_waited_for():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.next_at()
    assert driver.step(at=1000 * S) is None
    assert driver.next_at() == 1020 * S
    assert driver.core.misses == 0
    driver.answer(at=1001 * S)
    assert driver.state is ALIVE


def test_what_calls_read_meanwhile_makes_a_missed_heartbeat_harmless():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.now = 61 * S
    driver.read()
    driver.miss("DEADLINE_EXCEEDED", at=79 * S)
    assert (driver.state, driver.core.misses) == (ALIVE, 0)
    assert not [fact for fact in driver.told if isinstance(fact, Missed)]


def test_a_read_in_the_moment_of_the_decision_keeps_the_connection():
    driver = Driver().called(at=0)
    driver.starve()
    assert driver.state is DEAD
    driver.read()
    assert not driver.confirm()
    assert driver.state is ALIVE


def test_a_replaced_connection_is_asked_at_once_and_patiently():
    driver = Driver().called(at=0)
    driver.starve()
    driver.renew(by_us=True)
    assert driver.next_at() <= driver.now
    assert driver.step() == Send(driver.core.sent, 180 * S, patient=True)
    assert (driver.state, driver.core.replaced) == (DEAD, 1)
    driver.answer(at=driver.now + S)
    assert driver.state is ALIVE
    assert driver.told[-1] == Revived(driver.now, S)


def test_a_replaced_connection_that_is_silent_for_the_timeout_is_dead_again():
    driver = Driver().called(at=0)
    driver.starve()
    driver.renew(by_us=True)
    since = driver.now
    driver.starve()
    assert driver.now == since + 180 * S + 1
    assert [type(fact) for fact in driver.told].count(Died) == 2


def test_as_long_as_it_is_dead_heartbeats_wait_for_a_connection():
    driver = Driver().called(at=0)
    driver.starve()
    driver.core.refused()
    assert driver.step(at=driver.next_at()).patient


def test_a_refused_replacement_is_tried_again_after_another_heartbeat_each_tick():
    driver = Driver().called(at=0)
    driver.starve()
    began = driver.now
    for _ in range(5):
        driver.core.refused()
        driver.starve()
    assert 4 * 20 * S <= driver.now - began <= 6 * 20 * S
    assert [type(fact) for fact in driver.told].count(Died) == 1


def test_what_can_t_be_replaced_is_told_dead_once_and_asked_on():
    driver = Driver(reconnect=False).called(at=0)
    sent = driver.run(until=1000 * S, answer="UNAVAILABLE")
    assert driver.state is DEAD
    assert [type(fact) for fact in driver.told].count(Died) == 1
    assert sent[-1] > 980 * S
    driver.now = driver.next_at()
    driver.step()
    driver.answer()
    assert driver.state is ALIVE


def test_an_idle_channel_is_asked_nothing_until_its_next_use():
    driver = Driver().called(at=0)
    driver.idle = True
    assert driver.run(until=1000 * S, answer=None) == []
    assert driver.state is UNUSED
    driver.idle = False
    driver.called(at=1001 * S)
    assert driver.run(until=1100 * S, answer=None) == [1061 * S + 1]


def test_a_channel_that_was_used_just_now_is_not_idle_but_about_to_connect():
    driver = Driver().called(at=0)
    driver.now = 60 * S
    driver.wrote()
    driver.idle = True
    assert driver.step(at=60 * S + 1) is None
    assert driver.state is ALIVE
    assert driver.next_at() == 80 * S + 1
    driver.idle = False
    assert isinstance(driver.step(at=80 * S + 1), Send)


def test_a_suspect_channel_that_has_lost_its_connection_is_left_alone_a_dead_one_is_not():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.miss("UNAVAILABLE")
    driver.idle = True
    assert driver.step(at=81 * S) is None
    assert driver.state is UNUSED
    other = Driver().called(at=0)
    other.starve()
    other.core.refused()
    other.idle = True
    assert isinstance(other.step(at=other.next_at()), Send)


def test_a_connection_replaced_by_others_is_asked_at_once_if_it_was_used():
    driver = Driver().called(at=0)
    driver.renew(by_us=False)
    driver.idle = True  # the new one, until it is asked
    assert driver.step() == Send(1, 180 * S, patient=True)
    assert driver.core.replaced == 0
    unused = Driver()
    unused.renew(by_us=False)
    assert unused.step() is None


def test_an_answer_nobody_waits_for_changes_nothing():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.renew(by_us=False)
    told = list(driver.told)
    assert not driver.core.heard(61 * S, 1, rtt_ns=S, serving=True)
    assert not driver.core.missed(61 * S, 1, "UNAVAILABLE")
    assert (driver.core.answered, driver.core.misses, driver.core.rtt_ns) == (0, 0, None)
    assert driver.told == told


def test_a_heartbeat_can_be_asked_for_on_an_unused_idle_channel_too():
    driver = Driver()
    driver.idle = True
    assert driver.core.beat()
    assert isinstance(driver.step(), Send)
    assert not driver.core.beat()
    driver.answer()
    assert driver.state is ALIVE


def test_an_idle_channel_is_not_left_alone_while_a_heartbeat_is_about_to_connect_it():
    driver = Driver()
    driver.idle = True
    assert driver.core.beat()
    assert isinstance(driver.step(), Send)
    assert driver.step(at=driver.next_at()) is None
    assert driver.state is SUSPECT
    assert driver.next_at() == 40 * S
    assert driver.core.heard(21 * S, 1, rtt_ns=21 * S, serving=True)
    assert driver.state is ALIVE


def test_an_idle_channel_is_left_alone_though_a_heartbeat_before_the_last_read_is_unanswered():
    driver = Driver().called(at=0)
    assert isinstance(driver.step(at=60 * S + 1), Send)
    driver.called(at=61 * S)
    driver.idle = True
    assert driver.step(at=121 * S + 1) is None
    assert driver.state is UNUSED


def test_a_heartbeat_that_was_asked_for_is_sent_whatever_is_read_meanwhile():
    driver = Driver().called(at=0)
    assert driver.core.beat()
    driver.now = S
    driver.read()
    assert isinstance(driver.step(), Send)


def test_after_the_end_nothing_is_done():
    for end in ("withdraw", "close"):
        driver = Driver().called(at=0)
        driver.step(at=60 * S + 1)
        getattr(driver.core, end)()
        assert not driver.core.on_way
        assert driver.next_at() == NEVER
        assert driver.step(at=1000 * S) is None
        assert not driver.core.beat()
        assert not driver.core.heard(1000 * S, 1, rtt_ns=1, serving=None)
        assert driver.core.close() is (end == "withdraw")
        assert not driver.core.close()
        driver.core.withdraw()
        assert driver.state is HeartbeatState.CLOSED


def test_switched_off_nothing_is_ever_due():
    driver = Driver(interval=None).called(at=0)
    assert driver.next_at() == NEVER
    assert driver.step(at=10**6 * S) is None
    assert not driver.core.beat()
    assert driver.state is HeartbeatState.OFF


def test_the_first_heartbeat_after_a_use_is_late_by_a_share_of_the_spread_later_ones_of_a_tick():
    driver = Driver(share=0.5).called(at=0)
    assert driver.next_at() == 90 * S + 1
    driver.step(at=90 * S + 1)
    driver.answer(at=91 * S)
    assert driver.next_at() == (90 + 60 + 10) * S + 2
    driver.called(at=100 * S)
    assert driver.next_at() == (100 + 60 + 30) * S + 1


def test_what_is_told_when_all_goes_well_and_when_it_does_not():
    driver = Driver().called(at=0)
    driver.step(at=60 * S + 1)
    driver.answer(at=60 * S + 2)
    driver.step(at=driver.next_at())
    driver.miss("UNAVAILABLE")
    driver.step(at=driver.next_at())
    driver.answer()
    assert driver.told == [
        Changed(UNUSED, ALIVE),
        *(Changed(ALIVE, PROBING), Changed(PROBING, ALIVE)),
        *(Changed(ALIVE, PROBING), Changed(PROBING, SUSPECT), Missed(1, 60 * S, "UNAVAILABLE")),
        *(Changed(SUSPECT, ALIVE), Revived(80 * S, 0)),
    ]


def test_stamps_that_were_forgotten_do_not_count_again():
    driver = Driver().called(at=0)
    driver.idle = True
    driver.step(at=60 * S + 1)
    assert driver.state is UNUSED
    driver.idle = False
    driver.next_at()
    assert driver.core.step(200 * S, Seen(0, 0, 0), idle=False) is None
    assert driver.state is UNUSED


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


def test_a_server_that_is_slow_for_ever_is_never_dead():
    for latency in (0.2, 0.5, 1.5, 4.9):
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
            assert not isinstance(step, Reconnect)
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
    while not isinstance(driver.step(at=driver.next_at()), Reconnect):
        """Nobody answers."""
    assert driver.core.heard(driver.now, 2, rtt_ns=S, serving=None)
    assert not driver.confirm()
    assert driver.state is ALIVE


# --- How many it takes ---


def test_it_takes_two_heartbeats_that_were_waited_for_whatever_the_timeout():
    for share, timeout in itertools.product((0.0, 0.5, 0.999), (120, 130, 180, 1000)):
        driver = Driver(share=share, timeout=timeout, grid=True).called(at=0)
        sent = []
        while not isinstance(step := driver.step(at=driver.next_at()), Reconnect):
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
        assert not isinstance(driver.step(at=driver.next_at()), Reconnect)
    assert driver.state is SUSPECT
    assert deaths(driver) == []


def test_deaths_are_spread_too():
    driver = Driver(share=0.5, reconnect=False)
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
    while not isinstance(driver.step(at=driver.next_at()), Reconnect):
        """Nobody answers."""
    assert driver.now == (180 + 3600 - 80) * S  # it was to look at 80


def test_after_a_standstill_a_slow_server_has_all_its_time():
    for latency in (0.5, 1.5, 4.0):
        driver = Driver(interval=1.0, timeout=6.0).called(at=0)
        driver.next_at()
        driver.step(at=1000 * S)
        until = 1000 * S + int(latency * S)
        while (at := driver.next_at()) < until:
            assert not isinstance(driver.step(at=at), Reconnect)
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
        assert not isinstance(step, Reconnect)
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
