"""`WatchManager`: one watch of the backend for each service with subscribers."""

import random
import threading

import pytest

from fixtures.flaky_backends import POLICY
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.registry import watches as module
from rpcwheel.registry.policy import RegistryRules
from rpcwheel.registry.watches import WatchManager
from rpcwheel.timer import ManualTimer


class RegistryBackend:
    """A backend whose watches fail to begin and to end at random."""

    url = "test://engine"

    def __init__(self, chance):
        self.chance, self.open, self.most, self.fails = chance, [], 0, True

    def watch(self, service, watcher):
        if self.fails and self.chance.random() < 0.5:
            raise ConnectionError
        return Watch(self, service)


class Watch:
    def __init__(self, backend, service):
        self.backend, self.service = backend, service
        backend.open.append(service)
        backend.most = max(backend.most, backend.open.count(service))

    def close(self):
        self.backend.open.remove(self.service)
        if self.backend.fails:
            raise OSError


def watches_of(backend, timer, snapshots=None):
    callbacks = dict.fromkeys(("on_answer", "on_loss", "emit", "on_unused"), lambda *_: None)
    rules = RegistryRules.from_policy(POLICY)
    return WatchManager(backend, rules, timer=timer, snapshots=snapshots, **callbacks)


class SnapshotFiles:
    """Files whose disk hangs until they may be read."""

    def __init__(self):
        self.may_be_read = threading.Event()

    def load(self, service):
        self.may_be_read.wait()


@pytest.mark.parametrize("timeout_s", [WAIT_S, 0.01])
def test_a_watch_begins_when_the_snapshot_file_was_read_or_after_a_short_time(
    timer, monkeypatch, timeout_s
):
    """The first view must not overtake the file."""
    monkeypatch.setattr(module, "FILE_TIMEOUT_S", timeout_s)
    backend, files = RegistryBackend(random.Random(7)), SnapshotFiles()
    backend.fails = False
    watches = watches_of(backend, timer, files)
    watches.acquire("a", "user")
    if timeout_s == WAIT_S:
        assert not watches._jobs.wait(0.05)
        assert backend.open == []
        files.may_be_read.set()
    assert wait_until(lambda: backend.open == ["a"])
    files.may_be_read.set()
    watches.close()
    assert watches._jobs.wait(WAIT_S)


def test_each_service_with_subscribers_has_one_watch_despite_failures():
    chance, timer = random.Random(7), ManualTimer()
    backend = RegistryBackend(chance)
    watches = watches_of(backend, timer)
    subscribers = []
    for _ in range(500):
        if subscribers and chance.random() < 0.5:
            watch, user = subscribers.pop(chance.randrange(len(subscribers)))
            watches.release(watch, user)
        else:
            user = object()
            subscribers.append((watches.acquire(chance.choice("abcd"), user), user))
        timer.advance(chance.random())
        if chance.random() < 0.2:
            assert watches._jobs.wait(WAIT_S)
    backend.fails = False
    wanted = sorted({watch.service for watch, _ in subscribers})
    assert wait_until(lambda: timer.advance(1.0) >= 0 and sorted(backend.open) == wanted)
    watches.close()
    assert watches._jobs.wait(WAIT_S)
    assert (backend.open, backend.most, timer.pending) == ([], 1, 0)
