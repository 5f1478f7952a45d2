"""Two processes that publish under one id are told, and do not fight for it at each renewal."""

import pytest

from fixtures.reconciler_worlds import SECOND
from fixtures.registry_worlds import POLICY, flaky, instance
from rpcwheel.registry.contested import Contest, told_apart
from rpcwheel.registry.entry import Entry
from rpcwheel.registry.rules import RegistryRules

RULES = RegistryRules.of(POLICY)
OURS, THEIRS = instance(epoch="ours"), instance(epoch="theirs")
MISSING = {OURS.key: "missing"}


@pytest.fixture
def beside(provider, timer):
    """Another process at the same engine."""
    beside = flaky(timer, name=str(provider.url).removeprefix("memory://"))
    yield beside
    beside.close()


def test_after_a_while_of_peace_it_begins_anew():
    contest = Contest()
    assert [contest.delay_ns(0, RULES), contest.delay_ns(1, RULES)] == [0, 4 * SECOND]
    assert contest.delay_ns(100 * SECOND, RULES) == 0


def test_it_is_taken_only_if_the_record_is_of_another_process(provider, beside):
    entry = Entry(OURS)
    assert told_apart(provider, [entry], MISSING) == MISSING  # nothing is there
    beside.publish([THEIRS])
    assert told_apart(provider, [entry], MISSING) == {OURS.key: "taken"}
    assert told_apart(provider, [entry], {OURS.key: "wiped"}) == {OURS.key: "wiped"}
    entry.sent[THEIRS.epoch] = THEIRS  # it was ours, before it was changed
    assert told_apart(provider, [entry], MISSING) == MISSING


def test_if_the_engine_does_not_say_so_nothing_is_known(provider, beside):
    beside.publish([THEIRS])
    provider.down()
    assert told_apart(provider, [Entry(OURS)], MISSING) == MISSING
