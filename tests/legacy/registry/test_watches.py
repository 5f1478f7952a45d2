"""One watch for each service that is followed, begun and ended off every caller's thread."""

import threading

import pytest

from fixtures.registry_worlds import POLICY
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.observe import RegistryFailed
from rpcwheel.registry.watches import WatchManager


class World:
    def __init__(self, backend, timer):
        self.told, self.events, self.left = [], [], []
        self.watches = WatchManager(
            backend,
            POLICY,
            timer=timer,
            snapshots=None,
            on_view=lambda: self.told.append("saw"),
            on_contact_lost=self.told.append,
            emit=lambda *events: self.events.extend(events),
            on_unused=self.left.append,
        )

    def follow(self, name="me"):
        return name, self.watches.acquire("shop.Orders", name)

    def leave(self, follower):
        self.watches.release(follower[1], follower[0])


@pytest.fixture
def world(backend, timer):
    world = World(backend, timer)
    yield world
    world.watches.close()
    assert timer.pending == 0


def test_when_the_last_has_gone_nothing_is_watched(world, backend):
    followers = [world.follow("first"), world.follow("second")]
    directory = followers[0][1]
    assert directory.wait(WAIT_S)
    for follower in followers:
        world.leave(follower)
        world.leave(follower)
    assert world.watches._jobs.wait(WAIT_S)
    assert world.follow()[1] is not directory


def test_what_was_known_of_a_service_that_nobody_follows_any_more_is_handed_on(world, backend):
    follower = world.follow()
    assert follower[1].wait(WAIT_S).instances == ()
    world.leave(follower)
    assert [one.service for one in world.left] == ["shop.Orders"]


def test_a_watch_that_can_not_be_begun_is_tried_again(world, backend, timer, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(backend, "watch", fail)
    _, directory = world.follow()
    failed = lambda: [event for event in world.events if isinstance(event, RegistryFailed)]  # noqa: E731
    assert wait_until(failed)
    assert (failed()[0].request, failed()[0].delay_s) == ("watch", 1.0)
    monkeypatch.undo()
    assert wait_until(lambda: timer.pending)
    timer.advance(1.1)
    assert directory.wait(WAIT_S).instances == ()


def test_a_watch_that_hangs_holds_up_no_caller(world, backend, monkeypatch):
    let_go, watch = threading.Event(), backend.watch

    def hang(*arguments):
        let_go.wait(WAIT_S)
        return watch(*arguments)

    monkeypatch.setattr(backend, "watch", hang)
    follower = world.follow()
    world.leave(follower)
    world.watches.close()
    let_go.set()
    assert world.watches._jobs.wait(WAIT_S)
