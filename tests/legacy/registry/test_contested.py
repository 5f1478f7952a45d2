"""Two processes that publish under one id are told, and do not fight for it at each renewal."""

import pytest

from fixtures.reconciler_worlds import SECOND
from fixtures.registry_worlds import POLICY, flaky, instance
from rpcwheel.registry.policy import RegistryRules
from rpcwheel.registry.reconciler import IdConflict, RegistrationRecord, find_id_conflicts

RULES = RegistryRules.of(POLICY)
OURS, THEIRS = instance(epoch="ours"), instance(epoch="theirs")
MISSING = {OURS.key: "missing"}


@pytest.fixture
def beside(backend, timer):
    """Another process at the same engine."""
    beside = flaky(timer, name=str(backend.url).removeprefix("memory://"))
    yield beside
    beside.close()


def test_after_a_while_of_peace_it_begins_anew():
    contest = IdConflict()
    assert [contest.delay_ns(0, RULES), contest.delay_ns(1, RULES)] == [0, 4 * SECOND]
    assert contest.delay_ns(100 * SECOND, RULES) == 0


def test_it_is_taken_only_if_the_record_is_of_another_process(backend, beside):
    entry = RegistrationRecord(OURS)
    assert find_id_conflicts(backend, [entry], MISSING) == MISSING  # nothing is there
    beside.publish([THEIRS])
    assert find_id_conflicts(backend, [entry], MISSING) == {OURS.key: "taken"}
    assert find_id_conflicts(backend, [entry], {OURS.key: "wiped"}) == {OURS.key: "wiped"}
    entry.sent[THEIRS.epoch] = THEIRS  # it was ours, before it was changed
    assert find_id_conflicts(backend, [entry], MISSING) == MISSING


def test_if_the_engine_does_not_say_so_nothing_is_known(backend, beside):
    beside.publish([THEIRS])
    backend.down()
    assert find_id_conflicts(backend, [RegistrationRecord(OURS)], MISSING) == MISSING
