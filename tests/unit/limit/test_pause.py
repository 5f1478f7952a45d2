"""When a server starts no handler, so that gRPC accepts calls."""

import pytest

from rpcwheel.limit.pause import (
    ACCEPT_EVERY_NS,
    GIVEN_UP_NS,
    MAX_NO_END_NS,
    MAX_PAUSE_NS,
    MAX_ROUND_NS,
    MAX_SHARED_PAUSE_NS,
    AcceptPause,
)

BEGAN = 10**12
MS = 1_000_000


class Server:
    """A server whose handlers compute all the time, except in pauses."""

    def __init__(self):
        self.pause = AcceptPause()
        self.now = BEGAN
        self.cpu = 0
        assert not self.begins(cpu=ACCEPT_EVERY_NS)  # the first one: it had enough time before

    @property
    def is_on(self):
        return self.pause.is_on(self.now)

    def begins(
        self,
        cpu=ACCEPT_EVERY_NS,
        ns=None,
        calls=0,
        running=0,
        *,
        must_wait=True,
        is_beyond_lock=False,
    ):
        """After handlers have computed; it takes as long if nothing else is said."""
        self.cpu += cpu
        self.now += cpu if ns is None else ns
        self.pause.arrivals += calls
        return self.pause.begin(
            self.now, self.cpu, running, must_wait=must_wait, is_beyond_lock=is_beyond_lock
        )

    def ends(self, calls=0, ns=MS, running=0):
        """After a round in which gRPC has accepted so many calls."""
        self.now += ns
        self.pause.arrivals += calls
        return self.pause.end(self.now, self.cpu, running)

    def ends_after(self, calls, ns=MS, running=0):
        """The time of the pause if each round has so many calls."""
        began = self.now
        while not self.ends(calls, ns, running):
            pass
        return self.now - began


@pytest.fixture
def server():
    return Server()


def test_handlers_that_compute_most_of_the_time_need_pauses(server):
    used = ACCEPT_EVERY_NS
    assert not server.begins(cpu=used - 1, ns=used)
    assert not server.begins(cpu=1, ns=used)  # half of the time is enough
    assert not server.begins(cpu=used - 1, ns=used)  # counted from then
    assert server.begins(cpu=1, ns=used - 1)
    assert server.is_on
    assert not server.begins()  # it has begun
    assert server.ends()
    assert not server.is_on
    assert not server.begins(cpu=used - 1, ns=used)  # counted from its end
    assert not server.begins(cpu=0, ns=0)
    assert server.begins(cpu=1)


def test_handlers_on_many_processors_need_no_more_pauses(server):
    used = ACCEPT_EVERY_NS
    assert not server.begins(cpu=16 * used, ns=used - 1)
    assert server.begins(cpu=0, ns=1)


def test_handlers_that_compute_without_the_interpreter_lock_need_none(server):
    assert not server.begins(is_beyond_lock=True)
    assert not server.is_on


def test_a_pause_ends_when_grpc_accepts_no_more_calls_than_arrive(server):
    """One arrives each millisecond, and five have been accepted while handlers computed."""
    assert server.begins(calls=5)
    accepted = [7, 8, 7, 8, 8, 7, 5, 2, 1]
    assert [server.ends(calls) for calls in accepted] == [False] * 8 + [True]


def test_a_pause_of_a_server_to_which_few_calls_come_ends_after_a_round_without_any(server):
    assert server.begins(calls=4)
    assert not server.ends(calls=1)
    assert server.ends(calls=0)


def test_a_pause_ends_although_grpc_goes_on_accepting_calls(server):
    assert server.begins()
    assert server.ends_after(9) == MAX_PAUSE_NS
    assert not server.begins(cpu=ACCEPT_EVERY_NS - 1)


def test_a_long_round_shows_nothing_while_handlers_run(server):
    """Also the round in which the last one has ended."""
    assert server.begins(running=2)
    assert not server.ends(ns=MAX_ROUND_NS + 1, running=1)
    assert not server.ends(ns=MAX_ROUND_NS + 1, running=0)
    assert server.ends(ns=MAX_ROUND_NS + 1, running=0)  # the machine is busy


def test_one_round_is_no_proof_while_handlers_run(server):
    assert server.begins(running=1)
    assert not server.ends(running=1)
    assert not server.ends(calls=8, running=1)
    assert not server.ends(running=1)
    assert server.ends(running=1)


def test_a_pause_goes_on_while_handlers_end_that_compute(server):
    """And then for as long as if none had run."""
    assert server.begins(running=4)
    for running in (3, 2, 1, 0):
        assert not server.ends(calls=1, ns=MAX_NO_END_NS - 1, running=running)
    assert server.ends_after(9) == MAX_PAUSE_NS


def test_a_pause_is_short_if_no_call_had_to_wait(server):
    assert server.begins(running=9, must_wait=False)
    assert [server.ends(ns=10 * MS, running=running) for running in (8, 7, 6)] == [
        False,
        False,
        True,
    ]
    assert server.begins(running=1, must_wait=False)
    assert not server.ends(ns=MAX_NO_END_NS, calls=9)  # the last one has ended
    assert server.ends_after(9) == MAX_PAUSE_NS


def test_a_pause_does_not_wait_for_handlers_that_do_not_end(server):
    """They may wait for something, while another thread computes."""
    assert server.begins(running=2)
    assert server.ends_after(0, ns=MAX_ROUND_NS + 1, running=2) < MAX_NO_END_NS + 2 * MAX_ROUND_NS


def test_a_pause_ends_although_one_handler_after_the_other_ends(server):
    assert server.begins(running=100)
    rounds = MAX_SHARED_PAUSE_NS // (10 * MS)
    ends = [server.ends(ns=10 * MS, running=99 - number) for number in range(rounds)]
    assert ends == [False] * (rounds - 1) + [True]


def test_a_pause_at_whose_end_nobody_looks_is_given_up(server):
    """Its loop has ended."""
    assert server.begins()
    server.now += GIVEN_UP_NS - 1
    assert server.is_on
    server.now += 1
    assert not server.is_on
    assert not server.begins()  # gRPC had enough time
    assert server.begins()
    assert server.ends()
    assert server.ends()  # a second look: it has ended
    assert server.begins(ns=ACCEPT_EVERY_NS - MS)  # counted from the end


def test_a_server_at_ten_times_its_capacity_computes_most_of_the_time(server):
    """A call arrives each millisecond, and gRPC accepts one in 0.15 ms if nothing computes."""
    accept_ns, arrived, longest, computed = 150_000, 0, 0, 0
    began = server.now

    def accepted(during_ns):
        """How many waiting calls are accepted in this time."""
        nonlocal arrived
        arrived += during_ns // MS
        return min(arrived - server.pause.arrivals, during_ns // accept_ns)

    while computed < 100 * ACCEPT_EVERY_NS:
        arrived += ACCEPT_EVERY_NS // MS
        assert server.begins()
        computed += ACCEPT_EVERY_NS
        while not server.ends(accepted(MS)):
            pass
        longest = max(longest, arrived - server.pause.arrivals)
    assert computed > 0.8 * (server.now - began)
    assert longest <= 1  # none that has arrived is left
