"""Questions to the engine, and what was heard last."""

from types import SimpleNamespace

import pytest

from fixtures.registry_worlds import POLICY, instance
from rpcwheel.errors import RegistryClosed
from rpcwheel.instance import Snapshot
from rpcwheel.registry.policy import RegistryRules
from rpcwheel.registry.session import LookupQueue

SECOND = 1_000_000_000


class World:
    def __init__(self, backend):
        self.now_ns = 0
        self.told = []
        self.asking = LookupQueue(
            backend, RegistryRules.of(POLICY), None, lambda: self.now_ns, self.emit
        )

    def emit(self, *events):
        self.told.extend(events)

    def keep(self):
        """What goes to the file from now on."""
        kept = []
        self.asking._snapshots = SimpleNamespace(keep=lambda _, instances: kept.append(instances))
        return kept

    def answer(self, service):
        future = self.asking.add(service)
        error = self.asking.carry_out(self.asking.take())
        assert future.exception() is error
        return error or future.result()


@pytest.fixture
def world(backend):
    return World(backend)


def test_those_who_ask_the_same_share_one_question(world, backend):
    asking = world.asking
    assert asking.add("shop.Orders") is asking.add("shop.Orders")
    assert asking.add(None) is asking.add(None)
    assert asking
    first, second = asking.take(), asking.take()
    assert (first.service, second.service, asking.take(), bool(asking)) == (
        "shop.Orders",
        None,
        None,
        False,
    )
    again = asking.add("shop.Orders")
    assert again is not first.answer  # its turn had come: what it sees may be older


def test_a_change_is_another_revision_and_no_change_is_none(world, backend):
    backend.publish([instance()])
    first, same = world.answer("shop.Orders"), world.answer("shop.Orders")
    backend.publish([instance(2)])
    other = world.answer("shop.Orders")
    assert (first.revision, same, other.revision) == (1, first, 2)
    assert [one.port for one in other.instances] == [1, 2]


def test_a_question_that_the_end_of_the_registry_has_met_is_no_failure(world, backend):
    backend.close()
    assert isinstance(world.answer("shop.Orders"), RegistryClosed)
    assert world.told == []


def test_a_service_that_was_always_empty_is_not_remembered(world):
    assert world.answer("never.Seen") == Snapshot("never.Seen")
    assert world.asking.last("never.Seen") is None
    assert not world.asking._answers


def ports(snapshot):
    return [one.port for one in snapshot.instances]


def test_an_engine_that_has_lost_its_memory_is_not_believed_at_once(world, backend):
    """Or one process that only looks would empty the file of all that follow."""
    kept = world.keep()
    four = [instance(port) for port in (1, 2, 3, 4)]
    backend.publish(four)
    world.answer("shop.Orders")
    backend.forget()
    held = world.answer("shop.Orders")
    assert (ports(held), held.source, len(held.stale)) == ([1, 2, 3, 4], "stale", 4)
    backend.publish(four[:1])
    world.now_ns = 11 * SECOND
    assert ports(world.answer("shop.Orders")) == [1, 2, 3, 4]
    assert {len(one) for one in kept} == {4}
    world.now_ns = 12 * SECOND  # `hold` is over
    gone = world.answer("shop.Orders")
    assert (ports(gone), gone.source, kept[-1]) == ([1], "live", gone.instances)
    assert [type(one).__name__ for one in world.told] == ["InstancesRetained"]


def test_what_was_heard_long_ago_is_not_held_against_what_is_there_now(world, backend):
    backend.publish([instance(port) for port in (1, 2, 3)])
    world.answer("shop.Orders")
    backend.withdraw([instance(port) for port in (1, 2, 3)])
    backend.publish([instance(4)])
    world.now_ns = 13 * SECOND
    assert ports(world.answer("shop.Orders")) == [4]
    backend.withdraw([instance(4)])
    world.now_ns = 30 * SECOND
    assert ports(world.answer("shop.Orders")) == []  # the one that there was may well have gone


def test_what_was_known_by_a_subscription_is_remembered(world, backend):
    world.now_ns = 10 * SECOND
    known = (instance(1), instance(2), instance(3))
    world.asking.remember(Snapshot("shop.Orders", known, 7, age_s=2.0))
    last = world.asking.last("shop.Orders")
    assert (last.instances, last.source, last.age_s) == (known, "cache", 2.0)
    assert world.answer("shop.Orders").source == "stale"  # the engine has lost them
    world.asking.remember(Snapshot("other"))
    assert world.asking.last("other") is None


def test_all_can_be_refused(world):
    futures = [world.asking.add("shop.Orders"), world.asking.add(None)]
    world.asking.refuse(RegistryClosed("closed"))
    assert all(isinstance(future.exception(), RegistryClosed) for future in futures)
    assert not world.asking
