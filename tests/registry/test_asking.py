"""Questions to the engine, and what was heard last."""

import pytest

from fixtures.registry_worlds import instance
from rpcwheel.errors import RegistryClosed, RegistryUnavailable
from rpcwheel.instance import Snapshot
from rpcwheel.observe import RecordSkipped, RegistryFailed
from rpcwheel.registry.asking import Asking
from rpcwheel.registry.provider import View

SECOND = 1_000_000_000


class World:
    def __init__(self, provider):
        self.now_ns = 0
        self.asking = Asking(provider, "memory://", None, lambda: self.now_ns)

    def answer(self, service):
        future = self.asking.ask(service)
        error = self.asking.carry_out(self.asking.take())
        assert future.exception() is error
        return error or future.result()


@pytest.fixture
def world(provider):
    return World(provider)


def test_those_who_ask_the_same_share_one_question(world, provider):
    asking = world.asking
    assert asking.ask("shop.Orders") is asking.ask("shop.Orders")
    assert asking.ask(None) is asking.ask(None)
    assert asking
    first, second = asking.take(), asking.take()
    assert (first.service, second.service, asking.take(), bool(asking)) == (
        "shop.Orders",
        None,
        None,
        False,
    )
    again = asking.ask("shop.Orders")
    assert again is not first.answer  # its turn had come: what it sees may be older


def test_a_change_is_another_revision_and_no_change_is_none(world, provider):
    provider.publish([instance()])
    first, same = world.answer("shop.Orders"), world.answer("shop.Orders")
    provider.publish([instance(2)])
    other = world.answer("shop.Orders")
    assert (first.revision, same, other.revision) == (1, first, 2)
    assert [one.port for one in other.instances] == [1, 2]


def test_what_was_heard_last_has_an_age(world, provider):
    provider.publish([instance()])
    live = world.answer("shop.Orders")
    world.now_ns = 3 * SECOND
    assert world.asking.last("shop.Orders") == Snapshot(
        "shop.Orders", live.instances, 1, source="cache", age_s=3.0
    )


def test_a_service_that_was_always_empty_is_not_remembered(world):
    assert world.answer("never.Seen") == Snapshot("never.Seen")
    assert world.asking.last("never.Seen") is None
    assert not world.asking._last


def test_a_failure_is_told_and_answers_all_who_ask(world, provider, events):
    provider.down()
    assert isinstance(world.answer("shop.Orders"), RegistryUnavailable)
    assert isinstance(world.answer(None), RegistryUnavailable)
    assert [event.request for event in events if isinstance(event, RegistryFailed)] == [
        "lookup",
        "lookup",
    ]


def test_what_can_not_be_read_is_skipped_and_told_once(world, provider, events, monkeypatch):
    good = instance()
    view = View({good.id: good.encoded(), "b": b"rubbish"})
    monkeypatch.setattr(provider, "lookup", lambda _: view)
    for _ in range(3):
        assert world.answer("shop.Orders").instances == (good,)
    assert len([event for event in events if isinstance(event, RecordSkipped)]) == 1


def test_all_can_be_refused(world):
    futures = [world.asking.ask("shop.Orders"), world.asking.ask(None)]
    world.asking.refuse(RegistryClosed("closed"))
    assert all(isinstance(future.exception(), RegistryClosed) for future in futures)
    assert not world.asking
