"""What is told to a registry, and when: each rule by itself. At random: test_core_model.py."""

import pytest

from fixtures.reconciler_worlds import AWAY, REFUSED, SECOND, World, instance
from rpcwheel.durations import NEVER
from rpcwheel.errors import InstanceContested
from rpcwheel.observe import (
    InstancePublished,
    InstanceWithdrawn,
    RegistryFailed,
    RegistryRecovered,
)
from rpcwheel.registry.core import MOST
from rpcwheel.registry.entry import State


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
    for port in range(1, MOST + 3):
        world.want(instance(port))
    assert [len(world.make()[1]) for _ in range(2)] == [MOST, 2]


def test_what_was_never_sent_is_gone_without_a_request(world):
    entry = world.want()
    world.drop(entry)
    assert (entry.state, world.begin(), world.core.entries()) == (State.GONE, None, ())


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
        assert (entry.error, world.core.contact.up, world.wait()) == (AWAY, False, 1.0)
    told = world.make()[2]
    assert told[0] == RegistryRecovered("memory://", 50.0)
    assert (entry.state, entry.error, world.core.contact.up) == (State.PUBLISHED, None, True)


def test_what_is_new_waits_with_what_failed_unless_somebody_waits_for_it(world):
    world.want()
    world.make(error=AWAY)
    world.want(instance(2))
    assert world.begin() is None
    world.core.contact.hasten()
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
    assert (entry.state, world.core.entries()) == (State.GONE, ())
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
    assert (step.request, world.make()[0], world.begin()) == ("withdraw", "publish", None)
    assert entry.doubt_ns > world.now_ns  # as that withdrawal may come later


# Renewals


def test_it_is_looked_after_each_third_of_a_lease_give_or_take_a_tenth():
    for chance, seconds in ((0.0, 1.8), (0.5, 2.0), (1.0, 2.2)):
        world = World()
        world.core._chance = lambda chance=chance: chance
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
        world.end(step, error=REFUSED if step.request == "publish" else None)
        requests.append(step.request)
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


@pytest.mark.parametrize(
    ("why", "seconds"), [("missing", 0.0), ("lease", 1.0), ("session", 1.0), ("wiped", 1.0)]
)
def test_what_is_lost_is_published_again_at_once_or_within_the_jitter(world, why, seconds):
    entry = world.published()
    world.wait()
    world.make(lost={entry.instance.key: why})
    assert (entry.state, world.wait()) == (State.LOST, seconds)
    told = world.make()[2]
    assert told == [InstancePublished("memory://", "shop", "a:1", why, 2.0 + seconds)]
    assert entry.state is State.PUBLISHED


def test_what_another_process_has_taken_is_told_and_taken_back_less_and_less_often(world):
    entry = world.published()
    waits = []
    for _ in range(5):
        world.wait()
        (told,) = world.make(lost={entry.instance.key: "taken"})[2]
        assert (told.request, type(told.error)) == ("renew", InstanceContested)
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
