"""The files of what was known last: whole or not there, for all processes, and never in the way."""

import errno
import json
import os
import stat
import sys
import threading
import time
from unittest.mock import Mock

import pytest

from fixtures.cache_worlds import REGISTRY, SERVICE, instance, instances
from fixtures.forks import holds_in_child
from fixtures.timers import no_new_threads
from fixtures.waiting import WAIT_S, Gate, wait_until
from rpcwheel.events.events import RecordSkipped, SnapshotFailed
from rpcwheel.registry import snapshot_files as module
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.snapshot_files import (
    DEBOUNCE_S,
    FORGET_S,
    REFRESH_S,
    RETRY_S,
    SnapshotFiles,
    open_snapshot_files,
)
from rpcwheel.registry.url import RegistryUrl, parse_url
from rpcwheel.timer import WheelTimer

posix = pytest.mark.skipif(sys.platform == "win32", reason="users and modes of POSIX")
BILLS = "shop.Bills"


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch):
    """Wait for writes as long as it takes. A slow write does not delay the next."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(module, "PAUSE_FACTOR", 0)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "cache" / "orders"


@pytest.fixture
def path(directory):
    """The file of `SERVICE`."""
    return directory / f"{SERVICE}.json"


@pytest.fixture
def make(directory, timer, closed_later):
    """Make snapshots in the same directory, as another process would; closed at the end."""
    return lambda: closed_later(SnapshotFiles(directory, REGISTRY, timer=timer))


@pytest.fixture
def write(make):
    """Write instances as a process does that starts and ends now."""

    def write(ids, service=SERVICE):
        snapshots = make()
        snapshots.keep(service, instances(*ids))
        snapshots.close()

    return write


@pytest.fixture
def clock(timer, monkeypatch):
    """A calendar that the test sets, in seconds from now; `pass_time` also advances the timer."""

    class Clock:
        began, passed = time.time(), 0.0

        def pass_time(self, seconds):
            self.passed += seconds
            timer.advance(seconds)

    clock = Clock()
    monkeypatch.setattr(module.time, "time", lambda: clock.began + clock.passed)
    return clock


def put(path, data):
    """Write a file that only the user can write to, whatever the umask of the tests is."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    path.chmod(0o600)


def record(key, **changes):
    return json.loads(instance(key).encoded()) | changes


def services(directory):
    return {one.stem for one in directory.iterdir()}


def failures(events):
    return events.of(SnapshotFailed)


# Writing and reading


def test_an_entry_is_read_by_the_next_process_with_all_fields_and_its_age(make):
    newer = instance("a", weight=7).encoded()[:-1] + b', "newer": {"than": "us"}}'
    first = make()
    kept = (type(instance("a")).decoded(newer), instance("b"))
    first.keep(SERVICE, kept)
    first.close()
    found = make().load(SERVICE)
    assert (found.instances, found.source, found.service) == (kept, "cache", SERVICE)
    assert 0 <= found.age_s < 60


def test_several_changes_are_written_once_half_a_second_after_the_first(
    make, path, directory, timer
):
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    timer.advance(DEBOUNCE_S - 0.1)
    snapshots.keep(BILLS, instances("c"))
    assert (path.exists(), timer.pending) == (False, 1)
    timer.advance(0.1)
    assert wait_until(lambda: directory.exists() and services(directory) == {SERVICE, BILLS})
    assert timer.pending == 0


def test_the_file_of_a_service_without_instances_is_deleted(make, write, directory):
    write("a")
    write("b", BILLS)
    write("")
    assert services(directory) == {BILLS}
    assert make().load(SERVICE) is None


# What goes wrong


@pytest.mark.parametrize(
    "torn", [b"", b"\0" * 100, b'{"v": 1, "inst', b"[]", b"[" * 10**6, b"{}"], ids=range(6)
)
def test_a_torn_file_is_ignored_reported_once_and_replaced(make, write, path, events, torn):
    put(path, torn)
    write("b", BILLS)
    snapshots = make()
    assert snapshots.load(SERVICE) is None
    assert snapshots.load(SERVICE) is None
    assert snapshots.load(BILLS).instances == instances("b")
    (reported,) = failures(events)
    assert (reported.registry, reported.path) == (REGISTRY, str(path))
    snapshots.keep(SERVICE, instances("a"))
    snapshots.close()
    assert make().load(SERVICE).instances == instances("a")
    assert len(failures(events)) == 1


@pytest.mark.parametrize(
    ("number", "stays", "reports"), [(errno.EACCES, "b", 1), (errno.EMFILE, "a", 2)]
)
def test_a_file_is_replaced_unread_only_if_reading_it_is_forbidden(
    make, write, events, monkeypatch, number, stays, reports
):
    def fail(path):
        raise OSError(number, "not opened", path)

    write("a")  # by another process, perhaps later
    snapshots = make()
    monkeypatch.setattr(snapshots, "_read", fail)
    assert snapshots.load(SERVICE) is None
    snapshots.keep(SERVICE, instances("b"))
    snapshots.close()
    assert make().load(SERVICE).instances == instances(stays)
    assert len(failures(events)) == reports


@posix
@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_file_that_others_can_write_is_not_read_and_is_replaced(make, write, path, events, mode):
    write("a")
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path)]
    assert modes == [0o700, 0o600]
    path.chmod(mode)
    snapshots = make()
    assert snapshots.load(SERVICE) is None
    assert snapshots.load(SERVICE) is None
    (reported,) = failures(events)
    assert str(reported.error) == (
        f"the file is not read because its mode {mode:04o} lets other users write to it: delete "
        f"the file, or run: chmod 600 {path}"
    )
    snapshots.keep(SERVICE, instances("b"))
    snapshots.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make().load(SERVICE).instances == instances("b")
    assert len(failures(events)) == 1


@posix
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_file_of_another_user_is_not_read_unless_it_is_of_root(
    make, write, path, events, monkeypatch, mode
):
    write("a")
    path.chmod(mode)
    owner = path.stat().st_uid
    monkeypatch.setattr(module, "ROOT", owner + 1)
    monkeypatch.setattr(module.os, "geteuid", lambda: owner + 2)
    assert make().load(SERVICE) is None
    (reported,) = failures(events)
    assert str(reported.error) == (
        f"the file is not read because its owner is the user {owner}, not the user {owner + 2} of "
        f"this process or root: delete the file, or run as root: chown {owner + 2} {path}"
        + (f"; chmod 600 {path}" if mode == 0o666 else "")
    )
    path.chmod(0o600)
    monkeypatch.setattr(module, "ROOT", owner)
    assert make().load(SERVICE).instances == instances("a")


def test_an_invalid_record_is_skipped_and_reported_whenever_it_comes_into_the_file(
    make, path, events
):
    good, bad = record("a"), record("b", host="?")
    snapshots = make()
    for records in ([good, bad], [good], [good, bad]):
        put(path, {"v": 1, "service": SERVICE, "instances": records})
        for _ in range(2):
            assert snapshots.load(SERVICE).instances == instances("a")
    skipped = events.of(RecordSkipped)
    assert [(one.registry, one.service, one.key) for one in skipped] == [
        (REGISTRY, SERVICE, "b")
    ] * 2
    assert "DNS name or an IP address" in str(skipped[0].error)
    put(path, {"v": 1, "service": SERVICE, "instances": [{"v": 1}, 7, None]})
    assert snapshots.load(SERVICE) is None


def test_a_directory_in_place_of_a_file_is_reported_once_and_affects_no_other_service(
    make, path, directory, events, timer
):
    path.mkdir(parents=True)
    snapshots = make()
    for _ in range(3):
        snapshots.keep(SERVICE, instances("a"))
        snapshots.keep(BILLS, instances("b"))
        timer.advance(RETRY_S)
        assert wait_until(lambda: timer.pending == 1)  # it is tried again
    assert snapshots.load(SERVICE).instances == instances("a")
    assert services(directory) == {SERVICE, BILLS}
    assert len(failures(events)) == 2, "one for reading, one for writing"
    snapshots.close()
    assert timer.pending == 0


def test_on_a_full_disk_the_old_file_stays_complete(
    make, write, directory, timer, events, monkeypatch
):
    write("a")
    snapshots = make()
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", Mock(side_effect=full))
        snapshots.keep(SERVICE, instances("a", "b"))
        timer.advance(DEBOUNCE_S)
        assert wait_until(lambda: failures(events) and timer.pending == 1)
    assert [one.error.errno for one in failures(events)] == [errno.ENOSPC]
    assert make().load(SERVICE).instances == instances("a")
    assert services(directory) == {SERVICE}
    timer.advance(RETRY_S)
    assert wait_until(lambda: make().load(SERVICE).instances == instances("a", "b"))
    assert len(failures(events)) == 1


def test_close_does_not_wait_for_a_disk_that_hangs(make, monkeypatch):
    gate = Gate()
    monkeypatch.setattr(module, "replace_file", lambda *_: gate())
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    snapshots.close()
    assert gate.entered.wait(WAIT_S)
    gate.opened.set()


def test_a_change_is_written_at_close_if_the_timer_gets_no_thread(directory):
    with WheelTimer() as timer:
        snapshots = SnapshotFiles(directory, REGISTRY, timer=timer)
        with no_new_threads():
            snapshots.keep(SERVICE, instances("a"))
        snapshots.close()
    assert services(directory) == {SERVICE}


@pytest.fixture
def held_write(monkeypatch):
    """A gate at which the first write waits."""
    gate, real = Gate(), os.fsync

    def hold_first(descriptor):
        if not gate.entered.is_set():
            gate()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", hold_first)
    yield gate
    gate.opened.set()


def test_close_waits_for_a_write_under_way(make, directory, timer, held_write):
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    timer.advance(1)
    assert held_write.entered.wait(WAIT_S)
    opening = threading.Timer(0.02, held_write.opened.set)
    opening.start()
    snapshots.close()
    assert services(directory) == {SERVICE}
    opening.join()


def test_writers_of_two_services_at_a_time_lose_no_entry(make, write, directory, timer, held_write):
    first = make()
    first.keep(SERVICE, instances("a"))
    timer.advance(1)
    assert held_write.entered.wait(WAIT_S)
    write("b", BILLS)
    held_write.opened.set()
    first.close()
    assert services(directory) == {SERVICE, BILLS}
    reader = make()
    assert reader.load(SERVICE).instances == instances("a")
    assert reader.load(BILLS).instances == instances("b")


def test_after_close_nothing_is_kept_and_close_is_idempotent(make, directory, timer):
    snapshots = make()
    snapshots.close()
    snapshots.close()
    snapshots.keep(SERVICE, instances("a"))
    assert snapshots.load(SERVICE) is None
    assert timer.pending == 0
    assert not directory.exists()


# Several writers


def test_an_entry_of_a_clock_that_runs_ahead_has_no_age_and_is_replaced(make, write, clock):
    clock.passed = 10**6
    write("a")
    clock.passed = 0
    assert make().load(SERVICE).age_s == 0.0
    write("b")
    assert make().load(SERVICE).instances == instances("b")


def test_files_older_than_a_month_are_deleted(write, directory, clock):
    clock.passed = -FORGET_S - 1
    write("a", "shop.Old")
    clock.passed = 0
    write("b")
    assert services(directory) == {SERVICE}


def test_other_files_of_a_chosen_directory_are_not_deleted(write, directory, clock, events):
    put(directory / "settings.json", {"v": 1, "colour": "red"})
    put(directory / "notes", b"")
    clock.passed = FORGET_S + 3600
    write("a")
    assert services(directory) == {SERVICE, "settings", "notes"}
    assert not failures(events)


def test_an_old_file_that_cannot_be_deleted_does_not_prevent_a_write(
    make, write, directory, clock, monkeypatch, events
):
    clock.passed = -FORGET_S - 1
    write("a", "shop.Old")
    clock.passed = 0

    def refuse(path, **_):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(module.Path, "unlink", refuse)
    write("b")
    assert make().load(SERVICE).instances == instances("b")
    assert not failures(events)


def test_the_file_of_a_service_whose_name_differs_in_case_is_not_read(make, write, path, events):
    write("a")
    path.rename(path.with_name("shop.orders.json"))  # as macOS and Windows find it
    assert make().load("shop.orders") is None
    (failure,) = failures(events)
    assert "the snapshot file of 'shop.Orders'" in str(failure.error)


def test_the_newer_entry_of_two_processes_stays(make, clock):
    old, new = make(), make()
    for snapshots, seconds, key in ((old, -10, "a"), (new, 0, "b")):
        clock.passed = seconds
        snapshots.keep(SERVICE, instances(key))
    new.close()
    old.close()
    assert make().load(SERVICE).instances == instances("b")


def test_load_returns_a_later_entry_of_another_process(make, write, path, timer):
    first = make()
    first.keep(SERVICE, instances("a"))
    timer.advance(1)
    assert wait_until(path.exists)
    write("b")
    assert first.load(SERVICE).instances == instances("b")


def test_a_forked_child_does_not_write_entries_of_its_parent(make, path):
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    with snapshots._lock:  # as if another thread had it at that moment
        assert holds_in_child(lambda: snapshots.close() or not path.exists())


# How old it is


def test_an_entry_stays_young_while_it_is_confirmed(make, clock, timer):
    agrees, reader = [True], make()
    make().keep(SERVICE, instances("a"), lambda: agrees[0])
    clock.pass_time(1)
    assert wait_until(lambda: reader.load(SERVICE) and timer.pending == 1)
    for _ in range(4):
        clock.pass_time(REFRESH_S)
        assert wait_until(lambda: reader.load(SERVICE).age_s < REFRESH_S and timer.pending == 1)
    agrees[0] = False
    for _ in range(3):
        clock.pass_time(REFRESH_S)
        assert wait_until(lambda: timer.pending == 1)
    assert reader.load(SERVICE).age_s >= 3 * REFRESH_S


def test_an_entry_of_a_watch_is_replaced_only_after_it_has_ended(make, clock, timer):
    """A lookup that began before the first view of the watch may end after it."""
    agrees, reader, snapshots = [True], make(), make()
    snapshots.keep(SERVICE, instances("a"), lambda: agrees[0])
    snapshots.keep(SERVICE, instances("b"))
    snapshots.keep(SERVICE, instances("c"), lambda: None)
    for seconds in (1, REFRESH_S, REFRESH_S):
        clock.pass_time(seconds)
        assert wait_until(lambda: reader.load(SERVICE) and reader.load(SERVICE).age_s < REFRESH_S)
        assert wait_until(lambda: timer.pending == 1)
    assert reader.load(SERVICE).instances == instances("a")
    agrees[0] = None
    snapshots.keep(SERVICE, instances("b"))
    snapshots.close()
    assert reader.load(SERVICE).instances == instances("b")


def test_an_entry_that_is_confirmed_for_a_month_is_not_removed(make, directory, clock):
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"), lambda: True)
    clock.pass_time(FORGET_S + 1)
    snapshots.keep(BILLS, instances("b"))
    clock.pass_time(1)
    assert wait_until(lambda: directory.exists() and services(directory) == {SERVICE, BILLS})


def test_a_callback_that_returns_none_is_not_called_again(make, path, clock, timer):
    asked = []
    make().keep(SERVICE, instances("a"), lambda: asked.append(1))
    clock.pass_time(1)
    assert wait_until(lambda: path.exists() and timer.pending == 0)
    assert len(asked) == 1


def test_a_service_that_is_watched_no_more_takes_no_memory_when_it_is_written(make, clock):
    """A process may look up ever new services."""
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    snapshots.keep(BILLS, instances("b"), lambda: None)
    clock.pass_time(1)
    assert wait_until(lambda: not snapshots._kept)
    assert snapshots.load(SERVICE).instances == instances("a")


def test_one_of_several_processes_refreshes_an_entry(make, path, clock, timer):
    make().keep(SERVICE, instances("a"), lambda: True)
    clock.pass_time(1)
    assert wait_until(path.exists)
    clock.pass_time(REFRESH_S / 2)
    other = make()
    other.keep(SERVICE, instances("a"), lambda: True)
    clock.pass_time(0.5)
    assert wait_until(lambda: other.load(SERVICE).age_s < 1 and timer.pending == 2)
    before = path.stat().st_mtime
    clock.pass_time(REFRESH_S / 2 - 0.5)  # of the first
    assert wait_until(lambda: timer.pending == 2)
    assert path.stat().st_mtime == before


def test_a_confirmed_entry_replaces_that_of_a_process_that_has_ended(make, write, clock, timer):
    reader = make()
    make().keep(SERVICE, instances("a"), lambda: True)
    clock.pass_time(1)
    write("b")
    assert wait_until(lambda: timer.pending == 1)
    clock.pass_time(REFRESH_S)
    assert wait_until(lambda: reader.load(SERVICE).instances == instances("a"))


def test_an_entry_is_refreshed_twice_within_the_stale_timeout(tmp_path):
    for settings, seconds in (({}, 15.0), ({"stale_timeout": 6}, 3.0), ({"stale_timeout": 1}, 1)):
        policy = RegistryPolicy(snapshot=str(tmp_path / "a"), **settings)
        assert open_snapshot_files(parse_url("etcd://a"), policy)._refresh_s == seconds


# Where it is


def url(text="etcd", **parts):
    return RegistryUrl(text, (("10.0.0.2", 2379), ("10.0.0.1", 2379)), **parts)


def directory_of(url, **settings):
    files = open_snapshot_files(url, RegistryPolicy(**settings))
    return files and files.directory


def test_each_registry_has_a_directory_in_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = [
        url(namespace="other"),
        url(user="shop", password="secret"),
        url(path="/x"),
        url("redis"),
        url(options={"db": "1"}),
    ]
    paths = [directory_of(one) for one in (url(), *others)]
    assert len(set(paths)) == len(paths)
    assert {one.parent for one in paths} == {tmp_path / "rpcwheel"}
    assert paths[0].name.startswith("etcd-10.0.0.1-2379-10.0.0.2-2379-")
    same = RegistryUrl("etcd", (("10.0.0.1", 2379), ("10.0.0.2", 2379)), service="any")
    assert directory_of(same) == paths[0]


def test_the_policy_names_the_directory_or_turns_it_off_and_by_default_it_is_in_the_cache_directory(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")  # it is ignored, because it is relative
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    memory, named = RegistryUrl("memory"), tmp_path / "x"
    for of, snapshot, expected in (
        (url(), False, None),
        (url(), "~/x", named),
        (url(), "x", named),
        (memory, True, None),
        (memory, str(named), named),
    ):
        directory = directory_of(of, snapshot=snapshot)
        assert (directory and directory.parent) == expected
    assert directory_of(url()).parent == tmp_path / ".cache" / "rpcwheel"


def test_two_registries_in_a_directory_have_their_own_instances_without_passwords(tmp_path):
    policy = RegistryPolicy(snapshot=str(tmp_path))
    urls = {name: url(namespace=name, user="shop", password="secret") for name in ("a", "b")}
    for name, of_name in urls.items():
        files = open_snapshot_files(of_name, policy)
        files.keep(SERVICE, instances(name))
        files.close()
    for name, of_name in urls.items():
        files = open_snapshot_files(of_name, policy)
        assert files.load(SERVICE).instances == instances(name)
        assert "secret" not in (files.directory / f"{SERVICE}.json").read_text()


@pytest.mark.parametrize("snapshot", [True, "~/snapshots"])
def test_without_a_home_directory_there_are_no_files_and_an_event(monkeypatch, events, snapshot):
    nowhere = Mock(side_effect=RuntimeError("Could not determine home directory."))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(module.Path, "home", nowhere)
    monkeypatch.setattr(module.Path, "expanduser", nowhere)
    assert open_snapshot_files(url(), RegistryPolicy(snapshot=snapshot)) is None
    assert [event.path for event in failures(events)] == ["~" if snapshot is True else snapshot]


def test_without_a_working_directory_there_are_no_relative_files_and_an_event(monkeypatch, events):
    removed = FileNotFoundError(errno.ENOENT, "No such file or directory")
    monkeypatch.setattr(os, "getcwd", Mock(side_effect=removed))
    assert open_snapshot_files(url(), RegistryPolicy(snapshot="snapshots")) is None
    assert [event.path for event in failures(events)] == ["snapshots"]
