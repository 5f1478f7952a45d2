"""Instances of the same name, but of another run: what is taken out is what was given."""

import pytest

from fixtures.reconciler_worlds import World, instance
from rpcwheel.registry.entry import State


@pytest.fixture
def world():
    return World()


def test_taking_out_one_of_a_run_before_leaves_ours(world):
    ours = world.published()
    theirs = world.drop(instance(epoch="before"))
    assert (theirs.state, theirs.wanted, world.begin()) == (State.GONE, False, None)
    assert (ours.state, world.core.entries()) == (State.PUBLISHED, (ours,))


def test_one_that_ours_is_to_replace_is_gone_with_that(world):
    ours = world.want()
    assert world.drop(instance(epoch="before")).state is State.GONE
    assert (ours.wanted, world.make()[:2]) == (True, ("publish", ["a:1"]))


def test_one_that_ours_has_replaced_meanwhile_is_ours(world):
    before = world.published()
    ours = world.want(instance(epoch="later"))
    assert world.drop(before.instance) is ours  # it was sent, and may be there still
    assert ours.wanted is False


def test_one_of_a_run_before_is_taken_out_beside_ours(world):
    ours = world.published()
    world.drop(ours)
    step = world.begin()
    assert world.drop(instance(epoch="before")) is ours
    world.end(step)
    assert ours.state is State.WITHDRAWING
    step = world.begin()
    assert sorted(one.epoch for one in step.instances) == ["before", "e"]
    world.end(step)
    assert (ours.state, world.begin()) == (State.GONE, None)
