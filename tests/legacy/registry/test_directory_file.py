"""A directory and the file of an earlier run: who is believed, and when."""

import threading

import pytest

from fixtures.seen_worlds import REGISTRY, SERVICE, Listener, instances, keys, shows, view
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.observe.events import SnapshotFailed
from rpcwheel.registry import directory as module
from rpcwheel.registry.directory import Directory
from rpcwheel.registry.snapshots import Snapshots


@pytest.fixture
def make(timer):
    """Make directories; closed at the end."""
    made = []

    def make(**others):
        made.append(Directory(SERVICE, REGISTRY, **{"timer": timer} | others))
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
    snapshots = Snapshots(tmp_path / "shop.json", REGISTRY, timer=timer)
    yield snapshots
    snapshots.close()


def test_what_it_sees_is_what_the_next_one_remembers_when_the_registry_is_down(
    make, snapshots, timer, listener
):
    first = make(snapshots=snapshots)
    first.saw(view("ab"))
    assert shows(first, "ab")
    first.close()
    snapshots.close()
    again = Snapshots(snapshots.path, REGISTRY, timer=timer)
    second = make(snapshots=again)
    second.add(listener)
    assert second.snapshot is None
    second.suspect("it can't be reached")
    assert wait_until(lambda: listener.keys == ["ab"])
    assert listener.told[0].source == "cache"
    second.saw(view("abc"))
    assert wait_until(lambda: listener.keys == ["ab", "abc"])
    assert listener.told[1].source == "live"
    second.close()
    again.close()


def test_without_an_answer_the_file_serves_after_a_second(make, snapshots, timer):
    snapshots.keep(SERVICE, instances("a"))
    directory = make(snapshots=snapshots)
    assert wait_until(lambda: timer.pending == 2)  # of the directory, and of the file
    assert directory.snapshot is None
    timer.advance(1)
    assert keys(directory.wait(WAIT_S)) == "a"
    assert directory.snapshot.source == "cache"


def test_the_file_is_read_before_the_registry_is_heard_however_soon_it_answers(make, snapshots):
    snapshots.keep(SERVICE, instances("a", "b"))
    for _ in range(20):
        directory = make(snapshots=snapshots)
        directory.saw(view())
        assert keys(directory.wait(WAIT_S)) == "ab"
        assert directory.snapshot.source == "held"


def test_a_file_that_hangs_does_not_keep_the_registry_from_being_heard(
    make, monkeypatch, tmp_path, timer
):
    gate = threading.Event()
    monkeypatch.setattr(module, "LOAD_S", 0.01)

    class Hangs(Snapshots):
        def load(self, service):
            gate.wait(3 * WAIT_S)

    snapshots = Hangs(tmp_path / "shop.json", REGISTRY, timer=timer)
    directory = make(snapshots=snapshots)
    directory.saw(view("a"))
    assert keys(directory.wait(WAIT_S)) == "a"
    gate.set()
    directory.close()
    snapshots.close()


def test_a_file_that_cannot_be_read_is_told_and_all_goes_on(make, tmp_path, timer, events):
    torn = tmp_path / "torn.json"
    torn.write_text('{"v": 1, "serv')
    snapshots = Snapshots(torn, REGISTRY, timer=timer)
    directory = make(snapshots=snapshots)
    directory.saw(view("a"))
    assert keys(directory.wait(WAIT_S)) == "a"
    assert wait_until(lambda: any(isinstance(one, SnapshotFailed) for one in events))
    directory.close()
    snapshots.close()


def test_what_comes_from_the_file_alone_is_not_written_as_if_it_were_news(make, snapshots):
    snapshots.keep(SERVICE, instances("a"))
    written = snapshots._kept[SERVICE]
    directory = make(snapshots=snapshots)
    directory.suspect("it can't be reached")
    assert shows(directory, "a")
    directory.close()
    assert snapshots._kept[SERVICE] is written


def test_at_close_the_file_is_told_that_the_registry_still_agrees(make, snapshots):
    directory = make(snapshots=snapshots)
    directory.saw(view("a"))
    assert wait_until(lambda: SERVICE in snapshots._kept)
    written = snapshots._kept[SERVICE]
    directory.close()
    assert snapshots._kept[SERVICE] is not written
