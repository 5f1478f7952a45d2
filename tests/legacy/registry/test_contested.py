"""Two processes that publish under one id are told, and do not fight for it at each renewal."""

import pytest

from fixtures.reconciler_worlds import SECOND
from fixtures.registry_worlds import POLICY, flaky, instance
from fixtures.waiting import wait_until
from rpcwheel.errors import InstanceContested
from rpcwheel.observe import RegistryFailed
from rpcwheel.registry.contested import Contest, told_apart
from rpcwheel.registry.entry import Entry, State
from rpcwheel.registry.rules import RegistryRules
from rpcwheel.registry.session import Session

RULES = RegistryRules.of(POLICY)
OURS, THEIRS = instance(epoch="ours"), instance(epoch="theirs")
MISSING = {OURS.key: "missing"}


@pytest.fixture
def beside(provider, timer):
    """Another process at the same engine."""
    beside = flaky(timer, name=str(provider.url).removeprefix("memory://"))
    yield beside
    beside.close()


def test_the_first_time_it_is_taken_back_at_once_then_ever_later_up_to_two_leases():
    contest, now_ns, waits = Contest(), 0, []
    for _ in range(5):
        waits.append(contest.delay_ns(now_ns, RULES))
        now_ns += waits[-1] + 2 * SECOND
    assert waits == [0, 4 * SECOND, 8 * SECOND, 12 * SECOND, 12 * SECOND]


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


def test_a_process_whose_id_is_taken_is_told_so_and_waits(provider, beside, timer, events):
    session = Session(provider, POLICY, timer=timer)
    entry = session.want(OURS, hasty=False)
    assert session.when(entry, State.PUBLISHED).result(5)

    def taken():
        return [one for one in events if isinstance(one, RegistryFailed)]

    for count, wait in ((1, 0.0), (2, 4.0)):
        beside.publish([THEIRS])
        timer.advance(2.3)
        assert wait_until(lambda count=count: len(taken()) == count)
        told = taken()[-1]
        assert (told.request, told.delay_s, type(told.error)) == ("renew", wait, InstanceContested)
        timer.advance(wait + 0.1)
        assert wait_until(lambda: entry.state is State.PUBLISHED)
    assert session.close().result(5)
