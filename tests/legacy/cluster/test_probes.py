"""However many members are down, few of them are waited for at once, and all of them come back."""

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.waiting import wait_until
from rpcwheel.cluster import ClusterPolicy
from rpcwheel.cluster._probes import MOST_WAIT, Probes

MANY = MOST_WAIT + 14
STATES = grpc.ChannelConnectivity


@pytest.fixture
def asked(monkeypatch):
    """The probes that were sent, by whether each waits for a connection."""
    seen = []
    ask = Probes._takes

    def takes(self, most):
        taken = ask(self, most)
        if taken:
            seen.append(most == MOST_WAIT)
        return taken

    monkeypatch.setattr(Probes, "_takes", takes)
    return seen


def down(channel):
    for member in channel.members:
        member.down("the test says so")


def crowd(port):
    return [instance(port, id=f"m{number:02}") for number in range(MANY)]


def test_of_many_that_are_away_only_some_are_waited_for(dead, open_cluster, timer, asked):
    channel = open_cluster(policy=ClusterPolicy(probe=1.0, probe_timeout=3600))
    channel.update(crowd(dead))
    down(channel)
    timer.advance(1.1)
    late = lambda: [one for one in channel.members if one.probes]  # noqa: E731
    assert wait_until(lambda: len(late()) == MANY - MOST_WAIT)
    assert asked == [True] * MOST_WAIT
    assert wait_until(lambda: timer.pending == MANY - MOST_WAIT)
    assert wait_until(lambda: all(one.link.get_state() is not STATES.IDLE for one in late()))


def test_all_come_back_when_they_are_there(shops, open_cluster, timer, asked):
    channel = open_cluster(policy=ClusterPolicy(probe=1.0))
    channel.update(crowd(shops[0]))
    down(channel)

    def all_are_up():
        timer.advance(1.1)
        return all(one.state == "UP" for one in channel.members)

    assert wait_until(all_are_up)
    assert timer.pending == 0
    assert wait_until(lambda: channel._fleet._probes._running == 0)


def test_one_whose_connect_fails_takes_nobodys_place(open_cluster, timer, events):
    def connect(one, options):
        raise RuntimeError("no certificate")

    channel = open_cluster(policy=ClusterPolicy(probe=1.0), connect=connect)
    channel.update(crowd(1))
    down(channel)
    for failed in (1, 2):
        timer.advance(1.1)
        assert wait_until(lambda failed=failed: all(m.probes == failed for m in channel.members))
        assert wait_until(lambda: timer.pending == MANY)
    assert channel._fleet._probes._running == 0
