"""A file that says how old it truly is, and what its writer does when it ends or can't write."""

import json
import os
import sys
import threading
import time
from contextlib import closing

import pytest

from fixtures.seen_worlds import REGISTRY, SERVICE, instances, shows, view
from fixtures.waiting import wait_until
from rpcwheel.observe.events import SnapshotFailed
from rpcwheel.registry import snapshots as module
from rpcwheel.registry.directory import Directory
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.snapshots import FORGET_S, REFRESH_S, Snapshots, open_snapshots
from rpcwheel.registry.url import parse_url
from rpcwheel.timer import WheelTimer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "orders.json"


@pytest.fixture
def make(path, timer):
    """Make snapshots on the same file, as another process would; closed at the end."""
    made = []

    def make(**others):
        made.append(Snapshots(path, REGISTRY, **{"timer": timer} | others))
        return made[-1]

    yield make
    for snapshots in made:
        snapshots.close()


@pytest.fixture
def pass_time(timer, monkeypatch):
    """Let time pass by the timer and by the calendar."""
    real, gone = time.time, []
    monkeypatch.setattr(module.time, "time", lambda: real() + sum(gone))

    def pass_time(seconds):
        gone.append(seconds)
        timer.advance(seconds)

    return pass_time


def services(path):
    return json.loads(path.read_text())["services"]


def age_s(path, service=SERVICE):
    return module.time.time() - services(path)[service]["written"]


# What has not changed


def test_while_it_is_so_it_is_written_that_it_is(make, path, pass_time, timer):
    make().keep(SERVICE, instances("a"), lambda: True)
    pass_time(1)
    assert wait_until(lambda: path.exists() and timer.pending == 1)
    for _ in range(4):
        pass_time(REFRESH_S)
        assert wait_until(lambda: age_s(path) < REFRESH_S and timer.pending == 1)


def test_what_is_followed_for_a_month_is_not_left_out(make, path, pass_time):
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"), lambda: True)
    pass_time(FORGET_S + 1)
    snapshots.keep("shop.Bills", instances("b"))
    pass_time(1)
    assert wait_until(lambda: path.exists() and "shop.Bills" in services(path))
    assert SERVICE in services(path)


def test_while_the_registry_does_not_agree_it_grows_old(make, path, pass_time, timer):
    agrees = [True]
    make().keep(SERVICE, instances("a"), lambda: agrees[0])
    pass_time(1)
    assert wait_until(lambda: path.exists() and timer.pending == 1)
    agrees[0] = False
    for _ in range(3):
        pass_time(REFRESH_S)
        assert wait_until(lambda: timer.pending == 1)
    assert age_s(path) > 3 * REFRESH_S


def test_who_follows_it_no_more_is_not_asked_again(make, path, pass_time, timer):
    asked = []
    make().keep(SERVICE, instances("a"), lambda: asked.append(1))
    pass_time(1)
    assert wait_until(path.exists)
    assert wait_until(lambda: timer.pending == 0)
    assert len(asked) == 1


def test_of_several_processes_one_writes_it(make, path, pass_time, timer):
    make().keep(SERVICE, instances("a"), lambda: True)
    pass_time(1)
    assert wait_until(path.exists)
    pass_time(REFRESH_S / 2)
    other = make()
    other.keep(SERVICE, instances("a"), lambda: True)
    pass_time(0.5)
    assert wait_until(lambda: age_s(path) < 1)
    before = path.stat().st_ino
    assert wait_until(lambda: timer.pending == 2)
    pass_time(REFRESH_S / 2 - 0.5)  # of the first
    assert wait_until(lambda: timer.pending == 2)
    assert path.stat().st_ino == before


def test_a_directory_that_is_live_keeps_its_entry_young_and_one_that_doubts_does_not(
    make, path, pass_time, timer
):
    with closing(Directory(SERVICE, REGISTRY, timer=timer, snapshots=make())) as directory:
        directory.saw(view("a"))
        assert shows(directory, "a")
        pass_time(1)
        assert wait_until(path.exists)
        pass_time(100)
        assert wait_until(lambda: age_s(path) < 1)
        directory.suspect("the connection was lost")
        assert wait_until(lambda: directory._shown.since_ns is not None)
        pass_time(100)
        assert age_s(path) > 99
        directory.saw(view("a"))
        assert wait_until(lambda: directory._shown.since_ns is None)
        pass_time(100)
        assert wait_until(lambda: age_s(path) < 1)


@pytest.mark.parametrize(("policy", "seconds"), [({}, 15.0), ({"hold": 6}, 3.0), ({"hold": 1}, 1)])
def test_it_is_written_twice_within_the_hold(tmp_path, policy, seconds):
    policy = RegistryPolicy(snapshot=str(tmp_path / "a.json"), **policy)
    assert open_snapshots(parse_url("etcd://a"), policy)._refresh_s == seconds


def test_what_another_process_wrote_later_is_what_is_known(make, timer):
    first, second = make(), make()
    first.keep(SERVICE, instances("a"))
    timer.advance(1)
    assert wait_until(lambda: not first._serial._running)
    second.keep(SERVICE, instances("b"))
    timer.advance(1)
    assert wait_until(lambda: first.load(SERVICE).instances == instances("b"))


# The end, and trouble


def test_close_waits_for_a_write_that_is_on_its_way(make, path, timer, monkeypatch):
    entered, gate, real = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor):
        entered.set()
        gate.wait(20)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(module, "CLOSE_S", 20.0)
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    timer.advance(1)
    assert entered.wait(20)
    threading.Timer(0.05, gate.set).start()
    snapshots.close()
    assert set(services(path)) == {SERVICE}


def test_a_file_that_cannot_be_written_costs_no_processor_when_the_timer_was_stopped(
    make, path, timer, events
):
    path.mkdir()
    timer.stop()
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    assert wait_until(lambda: [one for one in events if isinstance(one, SnapshotFailed)])
    assert wait_until(lambda: not snapshots._serial._running)
    time.sleep(0.05)
    assert not snapshots._serial._running


def test_a_timer_that_is_full_keeps_nothing_from_being_written(make, path):
    with WheelTimer(max_pending=1) as full:
        full.new_timeout(print, 1000)
        path.with_name(f"{path.name}.lock").mkdir()
        snapshots = make(timer=full)
        snapshots.keep(SERVICE, instances("a"))
        assert wait_until(lambda: not snapshots._serial._running)
        path.with_name(f"{path.name}.lock").rmdir()
        snapshots.keep("shop.Bills", instances("b"))
        assert wait_until(path.exists)
        snapshots.close()


if sys.platform == "win32":
    pytestmark = pytest.mark.skip(reason="locks of POSIX")
