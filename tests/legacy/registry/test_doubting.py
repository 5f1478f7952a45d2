"""What a channel's calls are told of a registry that can't be asked."""

import pytest

from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.registry.doubting import tell_why

AWAY, REFUSES = RegistryUnavailable("the cable is cut"), RegistryRefused("wrong password")


class Calls:
    """Of a channel: why they wait, or end."""

    def __init__(self):
        self.told = []

    def doubt(self, reason):
        self.told.append(("they wait", reason))

    def fail(self, reason):
        self.told.append(("they end", reason))


@pytest.fixture
def calls():
    return Calls()


def test_one_that_is_away_is_asked_once_more_and_calls_wait_meanwhile(calls):
    assert tell_why(calls, AWAY, last=False)
    assert not tell_why(calls, AWAY, last=True)
    assert calls.told == [("they wait", "the cable is cut"), ("they end", "the cable is cut")]


def test_one_that_refuses_is_not_asked_again(calls):
    assert not tell_why(calls, REFUSES, last=False)
    assert calls.told == [("they end", "wrong password")]


def test_for_a_channel_that_is_gone_nobody_is_asked():
    assert not tell_why(None, AWAY, last=False)
