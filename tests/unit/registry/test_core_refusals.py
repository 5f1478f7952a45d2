"""What an engine refuses, and how long is waited after any failure: it holds up nothing else."""

import pytest

from fixtures.reconciler_worlds import AWAY, REFUSED, World, instance
from rpcwheel.registry.entry import State


@pytest.fixture
def world():
    return World()


@pytest.mark.parametrize("error", [REFUSED, TypeError("a provider of the user's")])
def test_one_that_is_refused_is_found_and_holds_up_no_other(world, error):
    good, bad = [instance(port) for port in range(1, 8)], instance(9)
    entries = [world.want(one) for one in (*good[:3], bad, *good[3:])]
    for _ in range(40):
        world.wait()
        step = world.begin()
        refused = step.request == "publish" and bad in step.instances
        world.end(step, error=error if refused else None)
    states = {entry.instance.id: entry.state for entry in entries}
    assert states.pop("a:9") is State.PENDING
    assert set(states.values()) == {State.PUBLISHED}


def test_one_that_is_refused_alone_waits_by_itself(world):
    world.want()
    world.make(error=REFUSED)
    world.core.contact.heard(world.now_ns)  # by a question of the user's
    world.want(instance(2))
    assert world.make()[:2] == ("publish", ["a:2"])
    assert (world.wait(), world.make()[1]) == (1.0, ["a:1"])


def test_one_that_is_refused_alone_pauses_nothing_else(world):
    world.want()
    told = world.make(error=REFUSED)[2]
    assert (told[0].delay_s, world.core.contact.error) == (1.0, REFUSED)
    world.want(instance(2))
    assert world.make()[:2] == ("publish", ["a:2"])


def test_a_refusal_leaves_nothing_that_could_arrive_later(world):
    entry = world.want()
    world.make(error=REFUSED)
    world.wait()
    world.make()
    assert entry.doubt_ns == 0
    assert world.wait() == 2.0  # the renewal


@pytest.mark.parametrize("error", [AWAY, REFUSED])
def test_however_long_a_policy_waits_after_a_failure_it_is_renewed_within_its_lease(error):
    world = World(retry=60.0)
    world.published()
    world.wait()
    assert world.make(error=error)[0] == "renew"
    assert (world.wait(), world.make()[0]) == (2.0, "renew")
    world.want(instance(2))
    world.make(error=AWAY)
    assert (world.wait(), world.make()[0]) == (2.0, "renew")
    assert world.make()[:2] == ("publish", ["a:2"])  # it answers again
