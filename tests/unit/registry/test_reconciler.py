"""What is told to a registry, and when: each rule by itself. At random: test_core_model.py."""

import random
from collections import Counter

import pytest

from fixtures.reconciler_worlds import AWAY, REFUSED, SECOND, World, instance
from rpcwheel.durations import NEVER
from rpcwheel.errors import InstanceIdConflict
from rpcwheel.observe import (
    InstancePublished,
    InstanceWithdrawn,
    RegistryFailed,
    RegistryRecovered,
)
from rpcwheel.registry.reconciler import MAX_BATCH, State


@pytest.fixture
def world():
    return World()


def test_what_is_wanted_is_published_at_once(world):
    entry = world.want()
    assert entry.state is State.PENDING
    assert world.make() == ("publish", ["a:1"], [InstancePublished("memory://", "shop", "a:1")])
    assert (entry.state, world.begin()) == (State.PUBLISHED, None)


def test_one_request_is_on_its_way_at_a_time(world):
    world.want()
    world.begin()
    world.want(instance(2))
    assert (world.begin(), world.core.next_wake_ns()) == (None, NEVER)


def test_of_many_so_many_are_published_in_one_request(world):
    for port in range(1, MAX_BATCH + 3):
        world.want(instance(port))
    assert [len(world.make()[1]) for _ in range(2)] == [MAX_BATCH, 2]


def test_what_was_never_sent_is_gone_without_a_request(world):
    entry = world.want()
    world.drop(entry)
    assert (entry.state, world.begin(), world.core.records()) == (State.GONE, None, ())


def test_what_is_published_is_withdrawn_once(world):
    entry = world.published()
    world.drop(entry)
    assert entry.state is State.WITHDRAWING
    assert world.make() == ("withdraw", ["a:1"], [InstanceWithdrawn("memory://", "shop", "a:1")])
    assert (entry.state, world.drop(entry), world.begin()) == (State.GONE, entry, None)


def test_what_another_has_published_can_be_withdrawn(world):
    entry = world.drop(instance(7))
    assert (entry.state, world.make()[:2]) == (State.WITHDRAWING, ("withdraw", ["a:7"]))
    assert entry.state is State.GONE


def test_what_is_unregistered_while_it_is_published_is_withdrawn_then(world):
    entry = world.want()
    step = world.begin()
    world.drop(entry)
    assert world.end(step) == []
    assert (entry.state, world.make()[0], entry.state) == (
        State.WITHDRAWING,
        "withdraw",
        State.GONE,
    )


def test_what_is_registered_again_while_it_is_withdrawn_is_published_then(world):
    entry = world.published()
    world.drop(entry)
    step = world.begin()
    assert world.want() is entry
    assert world.end(step) == []
    assert (entry.state, world.make()[0], entry.state) == (
        State.PENDING,
        "publish",
        State.PUBLISHED,
    )


def test_a_change_while_it_is_published_is_published_next(world):
    entry = world.want()
    step = world.begin()
    world.want(instance(weight=7))
    world.end(step)
    assert entry.state is State.PENDING
    step = world.begin()
    assert step.instances[0].weight == 7


# Failures


def test_what_fails_is_made_again_after_a_wait_without_limit(world):
    entry = world.want()
    for _ in range(50):
        request, _, told = world.make(error=AWAY)
        assert told == [RegistryFailed("memory://", request, AWAY, 1.0)]
        assert (entry.error, world.core.health.up, world.wait()) == (AWAY, False, 1.0)
    told = world.make()[2]
    assert told[0] == RegistryRecovered("memory://", 50.0)
    assert (entry.state, entry.error, world.core.health.up) == (State.PUBLISHED, None, True)


def test_what_is_new_waits_with_what_failed_unless_somebody_waits_for_it(world):
    world.want()
    world.make(error=AWAY)
    world.want(instance(2))
    assert world.begin() is None
    world.core.health.shorten_pause()
    assert world.wait() == 0.2


def test_what_failed_and_is_unregistered_is_withdrawn_for_it_may_be_there(world):
    entry = world.want()
    world.make(error=AWAY)
    world.drop(entry)
    assert (entry.state, entry.error) == (State.WITHDRAWING, AWAY)
    world.wait()
    assert world.make()[0] == "withdraw"


def test_what_was_withdrawn_after_a_failure_is_withdrawn_again_a_lease_later(world):
    """The request that failed may take effect in between: it lies in a frozen engine's buffers."""
    entry = world.want()
    world.make(error=AWAY)
    world.drop(entry)
    assert world.wait() == 1.0
    world.make()
    assert (entry.state, world.core.records()) == (State.GONE, ())
    assert world.wait() == 5.0
    assert world.make() == ("withdraw", ["a:1"], [])
    assert world.core.next_wake_ns() == NEVER


def test_what_was_published_after_a_failure_is_published_again_a_lease_later(world):
    entry = world.published()
    world.drop(entry)
    world.make(error=AWAY)
    world.want()
    world.wait()
    world.make()
    repeated = []
    while world.wait() < 100 and world.now_ns < 120 * SECOND:
        repeated.append(world.make()[0])
    assert (repeated.count("publish"), entry.state) == (1, State.PUBLISHED)


def test_registered_anew_after_such_a_withdrawal_the_old_request_is_still_thought_of(world):
    world.want(instance(epoch="old"))
    world.make(error=AWAY)
    gone = world.drop(instance())
    world.wait()
    world.make()
    entry = world.want(instance(epoch="new"))
    assert (gone.state, entry is gone) == (State.GONE, False)
    world.make()
    world.drop(entry)
    step = world.begin()
    assert {one.epoch for one in step.instances} == {"old", "new"}


def test_a_late_withdrawal_is_not_made_again_for_what_was_registered_meanwhile(world):
    world.want()
    world.make(error=AWAY)
    world.drop(instance())
    world.wait()
    world.make()
    world.wait()
    step = world.begin()  # of what is gone, once more
    entry = world.want()
    world.end(step, error=AWAY)
    world.wait()
    assert (step.kind, world.make()[0], world.begin()) == ("withdraw", "publish", None)
    assert entry.doubt_ns > world.now_ns  # as that withdrawal may come later


# Renewals


def test_it_is_looked_after_each_third_of_a_lease_give_or_take_a_tenth():
    for chance, seconds in ((0.0, 1.8), (0.5, 2.0), (1.0, 2.2)):
        world = World(random_fraction=lambda chance=chance: chance)
        world.published()
        assert [(round(world.wait(), 3), world.make()[0]) for _ in range(3)] == [
            (seconds, "renew")
        ] * 3


def test_what_can_not_be_changed_is_renewed_as_it_was(world):
    entry = world.published()
    world.want(instance(weight=7))
    requests = []
    for _ in range(8):
        step = world.begin()
        world.end(step, error=REFUSED if step.kind == "publish" else None)
        requests.append(step.kind)
        world.wait()
    assert {"publish", "renew"} == set(requests)
    assert entry.state is State.PENDING


def test_what_was_lost_while_it_is_changed_says_so_when_it_is_back(world):
    world.published()
    entry = world.want(instance(weight=7))
    for _ in range(2):
        world.make(error=REFUSED)
        world.wait()
    assert world.make(lost={entry.instance.key: "wiped"})[0] == "renew"
    assert entry.state is State.PENDING
    told = world.make()[2]
    assert told == [InstancePublished("memory://", "shop", "a:1", "wiped", 2.0)]


def test_nothing_is_renewed_if_nothing_is_published(world):
    entry = world.published()
    world.drop(entry)
    world.make()
    world.wait()
    assert (world.begin(), world.core.next_wake_ns()) == (None, NEVER)


def test_what_is_lost_is_published_again_at_once_or_within_the_jitter():
    for why, seconds in (("missing", 0.0), ("lease", 1.0), ("session", 1.0), ("wiped", 1.0)):
        world = World()
        entry = world.published()
        world.wait()
        world.make(lost={entry.instance.key: why})
        assert (entry.state, world.wait()) == (State.LOST, seconds)
        told = world.make()[2]
        assert told == [InstancePublished("memory://", "shop", "a:1", why, 2.0 + seconds)]
        assert entry.state is State.PUBLISHED


def test_lost_instances_are_spread_evenly_over_the_jitter():
    world = World(jitter=5.0, random_fraction=random.Random(7).random)
    records = [world.want(instance(port)) for port in range(1, 1001)]
    while step := world.begin():
        world.end(step)
    world.now_ns += 3 * SECOND
    assert world.make(lost={record.instance.key: "wiped" for record in records})[0] == "renew"
    per_second = Counter((record.due_ns - world.now_ns) // SECOND for record in records)
    assert sorted(per_second) == [0, 1, 2, 3, 4]
    assert min(per_second.values()) > 150


def test_what_another_process_has_taken_is_told_and_taken_back_less_and_less_often(world):
    entry = world.published()
    waits = []
    for _ in range(5):
        world.wait()
        (told,) = world.make(lost={entry.instance.key: "taken"})[2]
        assert (told.request, type(told.error)) == ("renew", InstanceIdConflict)
        assert "shop/a:1: another process publishes under this id" in str(entry.error)
        waits.append(told.delay_s)
        before_ns = world.now_ns
        while (step := world.begin()) is None:
            world.wait()
        assert (world.now_ns - before_ns) / SECOND == told.delay_s
        assert world.end(step) == [
            InstancePublished("memory://", "shop", "a:1", "taken", 2.0 + told.delay_s)
        ]
        assert entry.error is None
    assert waits == [0.0, 4.0, 8.0, 12.0, 12.0]  # two leases at most


def test_what_is_changed_while_it_is_lost_is_published_at_once(world):
    entry = world.published()
    world.wait()
    world.make(lost={entry.instance.key: "wiped"})
    world.want(instance(weight=7))
    assert (entry.state, world.wait()) == (State.LOST, 0.0)


def test_what_is_unregistered_while_it_is_lost_does_not_come_back(world):
    entry = world.published()
    world.wait()
    world.make(lost={entry.instance.key: "wiped"})
    world.drop(entry)
    assert world.make()[0] == "withdraw"
    assert (world.begin(), entry.state) == (None, State.GONE)


def test_a_renewal_that_tells_of_what_was_unregistered_meanwhile_brings_nothing_back(world):
    entry = world.published()
    world.wait()
    step = world.begin()
    world.drop(entry)
    world.end(step, lost={entry.instance.key: "wiped"})
    assert (entry.state, world.make()[0], entry.state) == (
        State.WITHDRAWING,
        "withdraw",
        State.GONE,
    )


def test_renewals_that_fail_take_turns_with_what_is_due(world):
    world.published()
    world.wait()
    world.make(error=AWAY)
    world.want(instance(2))
    world.wait()
    assert [world.make()[0], world.make()[0]] == ["publish", "renew"]


# Refusals


@pytest.mark.parametrize("error", [REFUSED, TypeError("a backend of the user's")])
def test_one_that_is_refused_is_found_and_holds_up_no_other(world, error):
    good, bad = [instance(port) for port in range(1, 8)], instance(9)
    entries = [world.want(one) for one in (*good[:3], bad, *good[3:])]
    for _ in range(40):
        world.wait()
        step = world.begin()
        refused = step.kind == "publish" and bad in step.instances
        world.end(step, error=error if refused else None)
    states = {entry.instance.id: entry.state for entry in entries}
    assert states.pop("a:9") is State.PENDING
    assert set(states.values()) == {State.PUBLISHED}


def test_one_that_is_refused_alone_waits_by_itself(world):
    world.want()
    world.make(error=REFUSED)
    world.core.health.request_succeeded(world.now_ns)  # by a question of the user's
    world.want(instance(2))
    assert world.make()[:2] == ("publish", ["a:2"])
    assert (world.wait(), world.make()[1]) == (1.0, ["a:1"])


def test_one_that_is_refused_alone_pauses_nothing_else(world):
    world.want()
    told = world.make(error=REFUSED)[2]
    assert (told[0].delay_s, world.core.health.error) == (1.0, REFUSED)
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
    world = World(backoff=60.0)
    world.published()
    world.wait()
    assert world.make(error=error)[0] == "renew"
    assert (world.wait(), world.make()[0]) == (2.0, "renew")
    world.want(instance(2))
    world.make(error=AWAY)
    assert (world.wait(), world.make()[0]) == (2.0, "renew")
    assert world.make()[:2] == ("publish", ["a:2"])  # it answers again


# Instances of another process


def test_taking_out_one_of_a_run_before_leaves_ours(world):
    ours = world.published()
    theirs = world.drop(instance(epoch="before"))
    assert (theirs.state, theirs.wanted, world.begin()) == (State.GONE, False, None)
    assert (ours.state, world.core.records()) == (State.PUBLISHED, (ours,))


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


# The end


def test_closing_withdraws_all_at_once_whatever_was_to_be_waited_for(world):
    world.published()
    failed = world.want(instance(2))
    world.make(error=AWAY)
    never_sent = world.want(instance(3))
    world.core.close(world.now_ns)
    assert never_sent.state is State.GONE
    assert world.make()[:2] == ("withdraw", ["a:1", "a:2"])
    assert (failed.state, world.begin(), world.core.next_wake_ns()) == (State.GONE, None, NEVER)


def test_closing_does_not_wait_for_what_was_refused(world):
    entry = world.published()
    world.drop(entry)
    world.make(error=REFUSED)
    world.core.close(world.now_ns)
    assert world.make()[:2] == ("withdraw", ["a:1"])


def test_closing_tries_twice(world):
    entry = world.published()
    world.core.close(world.now_ns)
    assert world.make(error=AWAY)[2][0].delay_s is not None
    assert world.make(error=AWAY)[2][0].delay_s is None
    assert (world.begin(), entry.state, entry.error) == (None, State.WITHDRAWING, AWAY)


def test_what_is_being_published_when_it_is_closed_is_withdrawn(world):
    world.want()
    step = world.begin()
    world.core.close(world.now_ns)
    world.end(step)
    assert world.make()[0] == "withdraw"
    assert world.core.next_wake_ns() == NEVER


def test_a_failure_after_giving_up_is_no_event(world):
    world.published()
    world.core.close(world.now_ns)
    step = world.begin()
    world.core.give_up()
    assert world.end(step, error=AWAY) == []
