"""A directory and the file of an earlier run: who is believed, and when."""

import json
import threading
import time

import pytest

from fixtures.seen_worlds import REGISTRY, SERVICE, Listener, instances, keys, shows, view
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.registry import watches as module
from rpcwheel.registry.snapshot_file import SnapshotFile
from rpcwheel.registry.watches import ServiceWatch


@pytest.fixture
def make(timer):
    """Make directories; closed at the end."""
    made = []

    def make(**others):
        made.append(ServiceWatch(SERVICE, REGISTRY, **{"timer": timer} | others))
        return made[-1]

    yield make
    for directory in made:
        directory.close()
    assert timer.pending == 0


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def snapshots(tmp_path, timer):
    snapshots = SnapshotFile(tmp_path / "shop.json", REGISTRY, timer=timer)
    yield snapshots
    snapshots.close()


def test_the_file_is_read_before_the_registry_is_heard_however_soon_it_answers(make, snapshots):
    snapshots.keep(SERVICE, instances("a", "b"))
    for _ in range(20):
        directory = make(snapshots=snapshots)
        directory.on_view(view())
        assert keys(directory.wait(WAIT_S)) == "ab"
        assert directory.snapshot.source == "stale"


def test_a_file_that_hangs_does_not_keep_the_registry_from_being_heard(
    make, monkeypatch, tmp_path, timer
):
    gate = threading.Event()
    monkeypatch.setattr(module, "FILE_TIMEOUT_S", 0.01)

    class Hangs(SnapshotFile):
        def load(self, service):
            gate.wait(3 * WAIT_S)

    snapshots = Hangs(tmp_path / "shop.json", REGISTRY, timer=timer)
    directory = make(snapshots=snapshots)
    directory.on_view(view("a"))
    assert keys(directory.wait(WAIT_S)) == "a"
    gate.set()
    directory.close()
    snapshots.close()


def test_what_comes_from_the_file_alone_is_not_written_as_if_it_were_news(make, snapshots):
    snapshots.keep(SERVICE, instances("a"))
    written = snapshots._kept[SERVICE]
    directory = make(snapshots=snapshots)
    directory.on_contact_lost("it can't be reached")
    assert shows(directory, "a")
    directory.close()
    assert snapshots._kept[SERVICE] is written


def test_at_close_the_file_is_told_that_the_registry_still_agrees(make, snapshots):
    directory = make(snapshots=snapshots)
    directory.on_view(view("a"))
    assert wait_until(lambda: SERVICE in snapshots._kept)
    written = snapshots._kept[SERVICE]
    directory.close()
    assert snapshots._kept[SERVICE] is not written


def test_while_it_is_live_its_entry_stays_young(make, tmp_path, timer, monkeypatch):
    began, gone = time.time(), []
    monkeypatch.setattr(time, "time", lambda: began + sum(gone))
    path = tmp_path / "shop.json"
    snapshots = SnapshotFile(path, REGISTRY, timer=timer)

    def pass_time(seconds):
        gone.append(seconds)
        timer.advance(seconds)

    def age_s():
        return time.time() - json.loads(path.read_text())["services"][SERVICE]["written"]

    directory = make(snapshots=snapshots)
    directory.on_view(view("a"))
    assert wait_until(lambda: timer.pending)  # the first write, a moment after it is shown
    pass_time(1)
    assert wait_until(path.exists)
    assert wait_until(lambda: timer.pending)  # the next one
    pass_time(100)
    assert wait_until(lambda: age_s() < 1)
    directory.on_contact_lost("the connection was lost")
    assert wait_until(lambda: directory._shown.since_ns is not None)
    pass_time(100)
    assert age_s() >= 100
    directory.close()
    snapshots.close()
