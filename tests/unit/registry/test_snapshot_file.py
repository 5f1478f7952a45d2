"""The file of what was known last: whole or not there, for all processes, and never in the way."""

import errno
import json
import math
import os
import stat
import sys
import threading
import time

import pytest

from fixtures.cache_worlds import REGISTRY, SERVICE, instance, instances
from fixtures.forks import holds_in_child
from fixtures.timers import run_threads
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events.events import RecordSkipped, SnapshotFailed
from rpcwheel.registry import snapshot_file as module
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.snapshot_file import (
    DEBOUNCE_S,
    FORGET_S,
    REFRESH_S,
    RETRY_S,
    SnapshotFile,
    open_snapshot_file,
)
from rpcwheel.registry.url import RegistryUrl, parse_url

posix = pytest.mark.skipif(sys.platform == "win32", reason="locks and modes of POSIX")


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch):
    """Wait for writes and for locks as long as it takes. A slow write does not delay the next."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(module, "PAUSE_FACTOR", 0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "orders.json"


@pytest.fixture
def make(path, timer):
    """Make snapshots on the same file, as another process would; closed at the end."""
    made = []

    def make(**others):
        made.append(SnapshotFile(path, REGISTRY, **{"timer": timer} | others))
        return made[-1]

    yield make
    for snapshots in made:
        snapshots.close()


def put(path, data):
    """Write a file that only the user can write to, whatever the umask of the tests is."""
    path.parent.mkdir(mode=0o700)
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    path.chmod(0o600)


def services(path):
    return json.loads(path.read_text())["services"]


def failures(events):
    return [event for event in events if isinstance(event, SnapshotFailed)]


@pytest.fixture
def pass_time(timer, monkeypatch):
    """Let time pass by the timer and by the calendar."""
    began, gone = time.time(), []
    monkeypatch.setattr(module.time, "time", lambda: began + sum(gone))

    def pass_time(seconds):
        gone.append(seconds)
        timer.advance(seconds)

    return pass_time


def age_s(path, service=SERVICE):
    return module.time.time() - services(path)[service]["written"]


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


def test_several_changes_are_written_once_half_a_second_after_the_first(make, path, timer):
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    timer.advance(DEBOUNCE_S - 0.1)
    snapshots.keep("shop.Bills", instances("c"))
    assert (path.exists(), timer.pending) == (False, 1)
    timer.advance(0.1)
    assert wait_until(path.exists)
    assert set(services(path)) == {SERVICE, "shop.Bills"}
    assert timer.pending == 0


def test_a_service_without_instances_is_removed_from_the_file(make, path):
    first = make()
    first.keep(SERVICE, instances("a"))
    first.keep("shop.Bills", instances("b"))
    first.close()
    second = make()
    second.keep(SERVICE, ())
    second.close()
    assert set(services(path)) == {"shop.Bills"}
    assert make().load(SERVICE) is None


def test_an_age_is_never_negative(make, path):
    record = json.loads(instance("a").encoded())
    entry = {"written": time.time() + 3600, "instances": [record]}
    put(path, {"v": 1, "services": {SERVICE: entry}})
    assert make().load(SERVICE).age_s == 0.0


# What goes wrong


@pytest.mark.parametrize(
    "torn", [b"", b"\0" * 100, b'{"v": 1, "services": {"shop', b"[]", b"[" * 10**6], ids=range(5)
)
def test_a_torn_file_is_ignored_reported_once_and_replaced(make, path, events, torn):
    put(path, torn)
    snapshots = make()
    assert snapshots.load(SERVICE) is None
    assert snapshots.load("shop.Bills") is None
    (reported,) = failures(events)
    assert (reported.registry, reported.path) == (REGISTRY, str(path))
    snapshots.keep(SERVICE, instances("a"))
    snapshots.close()
    assert make().load(SERVICE).instances == instances("a")
    assert len(failures(events)) == 1


def test_an_invalid_entry_does_not_affect_others(make, path):
    good = json.loads(instance("a").encoded())
    reported = {
        SERVICE: {"written": time.time(), "instances": [good, {"v": 1}, 7, None]},
        "x": 5,
        "y": {"written": "today", "instances": []},
        "z": {"written": 1.0, "instances": 3},
        **{str(n): {"written": n, "instances": [good]} for n in (10**400, math.inf, math.nan)},
    }
    put(path, {"v": 1, "services": reported})
    snapshots = make()
    assert snapshots.load(SERVICE).instances == instances("a")
    assert not [name for name in reported if name != SERVICE and snapshots.load(name)]


@posix
@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_file_that_others_can_write_is_not_read_and_is_replaced(make, path, events, mode):
    first = make()
    first.keep(SERVICE, instances("a"))
    first.close()
    modes = [one.stat().st_mode & 0o777 for one in (path.parent, *sorted(path.parent.iterdir()))]
    assert modes == [0o700, 0o600, 0o600]
    path.chmod(mode)
    second = make()
    assert second.load(SERVICE) is None
    assert second.load(SERVICE) is None
    (reported,) = failures(events)
    assert str(reported.error) == (
        f"the file is not read because its mode {mode:04o} lets other users write to it: delete "
        f"the file, or run: chmod 600 {path}"
    )
    second.keep("shop.Bills", instances("b"))
    second.close()
    assert set(services(path)) == {"shop.Bills"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make().load("shop.Bills").instances == instances("b")
    assert len(failures(events)) == 1


@posix
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_file_of_another_user_is_not_read_unless_it_is_of_root(
    make, path, events, monkeypatch, mode
):
    first = make()
    first.keep(SERVICE, instances("a"))
    first.close()
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
    good, bad = (json.loads(instance(key).encoded()) for key in "ab")
    put(path, b"")
    snapshots = make()
    for records in ([good, bad | {"host": "?"}], [good], [good, bad | {"host": "?"}]):
        entry = {"written": time.time(), "instances": records}
        path.write_text(json.dumps({"v": 1, "services": {SERVICE: entry}}))
        for _ in range(2):
            assert snapshots.load(SERVICE).instances == instances("a")
    skipped = [event for event in events if isinstance(event, RecordSkipped)]
    assert [(one.registry, one.service, one.key) for one in skipped] == [
        (REGISTRY, SERVICE, "b")
    ] * 2
    assert "DNS name or an IP address" in str(skipped[0].error)


def test_a_directory_in_place_of_the_file_is_reported_once(make, path, events, timer):
    path.mkdir(parents=True)
    snapshots = make()
    for _ in range(3):
        assert snapshots.load("shop.Bills") is None
        snapshots.keep(SERVICE, instances("a"))
        timer.advance(module.RETRY_S)
        assert wait_until(lambda: timer.pending == 1)  # it is tried again
    assert snapshots.load(SERVICE).instances == instances("a")
    assert len(failures(events)) == 2, "one for reading, one for writing"
    snapshots.close()
    assert timer.pending == 0


def test_on_a_full_disk_the_old_file_stays_complete(make, path, timer, events, monkeypatch):
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    timer.advance(DEBOUNCE_S)
    assert wait_until(path.exists)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        snapshots.keep(SERVICE, instances("a", "b"))
        timer.advance(DEBOUNCE_S)
        assert wait_until(lambda: failures(events) and timer.pending == 1)
    assert [one.error.errno for one in failures(events)] == [errno.ENOSPC]
    assert make().load(SERVICE).instances == instances("a")
    assert {one.name for one in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}
    timer.advance(RETRY_S)
    assert wait_until(lambda: make().load(SERVICE).instances == instances("a", "b"))
    assert len(failures(events)) == 1


def test_close_does_not_wait_for_a_disk_that_hangs(make, monkeypatch):
    entered, gate = threading.Event(), threading.Event()

    def hang(*_):
        entered.set()
        gate.wait()

    monkeypatch.setattr(module, "replace_file", hang)
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    snapshots.close()
    assert entered.wait(WAIT_S)
    gate.set()


def test_close_waits_for_a_write_under_way(make, path, timer, monkeypatch):
    entered, gate, real = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor):
        entered.set()
        gate.wait()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", WAIT_S)
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    timer.advance(1)
    assert wait_until(entered.is_set)
    opening = threading.Timer(0.02, gate.set)
    opening.start()
    snapshots.close()
    assert set(services(path)) == {SERVICE}
    opening.join()


def test_after_close_nothing_is_kept_and_close_is_idempotent(make, path, timer):
    snapshots = make()
    snapshots.close()
    snapshots.close()
    snapshots.keep(SERVICE, instances("a"))
    assert snapshots.load(SERVICE) is None
    assert timer.pending == 0
    assert not path.exists()


# Several writers


@pytest.fixture
def write_at(make, monkeypatch):
    """Write an entry as a process does that starts and ends at that time, from now."""
    now = time.time()

    def write_at(seconds, service, ids):
        monkeypatch.setattr(module.time, "time", lambda: now + seconds)
        snapshots = make()
        snapshots.keep(service, instances(*ids))
        snapshots.close()

    return write_at


def test_an_entry_of_a_clock_that_runs_ahead_is_replaced(make, write_at):
    write_at(10**6, SERVICE, "a")
    write_at(0, SERVICE, "b")
    assert make().load(SERVICE).instances == instances("b")


def test_an_entry_older_than_a_month_is_removed(path, write_at):
    write_at(-FORGET_S - 1, "shop.Old", "a")
    write_at(0, SERVICE, "b")
    assert set(services(path)) == {SERVICE}


def test_the_newer_entry_of_two_processes_stays(make, monkeypatch):
    old, new, now = make(), make(), time.time()
    for snapshots, seconds, key in ((old, -10, "a"), (new, 0, "b")):
        monkeypatch.setattr(module.time, "time", lambda seconds=seconds: now + seconds)
        snapshots.keep(SERVICE, instances(key))
    new.close()
    old.close()
    assert make().load(SERVICE).instances == instances("b")


def test_load_returns_a_later_entry_of_another_process(make, path, timer):
    first, second = make(), make()
    first.keep(SERVICE, instances("a"))
    timer.advance(1)
    assert wait_until(path.exists)
    second.keep(SERVICE, instances("b"))
    timer.advance(1)
    assert wait_until(lambda: first.load(SERVICE).instances == instances("b"))


@posix
def test_a_write_is_postponed_while_another_process_writes(make, path, timer, monkeypatch):
    import fcntl

    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.01)
    path.parent.mkdir()
    snapshots = make()
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        snapshots.keep(SERVICE, instances("a"))
        timer.advance(DEBOUNCE_S)
        assert wait_until(lambda: timer.pending == 1)
        assert not path.exists()
    timer.advance(DEBOUNCE_S)
    assert wait_until(path.exists)


def test_concurrent_writers_leave_a_complete_file(make, path, timer):
    def work(number):
        snapshots = make()
        for turn in range(10):
            snapshots.keep(f"shop.S{number}", instances("abcdef"[turn % 6]))
            snapshots.load(f"shop.S{number - 1}")
        snapshots.close()

    run_threads(*(lambda number=number: work(number) for number in range(6)))
    assert set(services(path)) == {f"shop.S{number}" for number in range(6)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_write_entries_of_its_parent(make, path):
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"))
    with snapshots._lock:  # as if another thread had it at that moment
        assert holds_in_child(lambda: snapshots.close() or not path.exists())


# How old it is


def test_an_entry_stays_young_while_it_is_confirmed(make, path, pass_time, timer):
    agrees = [True]
    make().keep(SERVICE, instances("a"), lambda: agrees[0])
    pass_time(1)
    assert wait_until(lambda: path.exists() and timer.pending == 1)
    for _ in range(4):
        pass_time(REFRESH_S)
        assert wait_until(lambda: age_s(path) < REFRESH_S and timer.pending == 1)
    agrees[0] = False
    for _ in range(3):
        pass_time(REFRESH_S)
        assert wait_until(lambda: timer.pending == 1)
    assert age_s(path) >= 3 * REFRESH_S


def test_an_entry_that_is_confirmed_for_a_month_is_not_removed(make, path, pass_time):
    snapshots = make()
    snapshots.keep(SERVICE, instances("a"), lambda: True)
    pass_time(FORGET_S + 1)
    snapshots.keep("shop.Bills", instances("b"))
    pass_time(1)
    assert wait_until(lambda: path.exists() and "shop.Bills" in services(path))
    assert SERVICE in services(path)


def test_a_callback_that_returns_none_is_not_called_again(make, path, pass_time, timer):
    asked = []
    make().keep(SERVICE, instances("a"), lambda: asked.append(1))
    pass_time(1)
    assert wait_until(path.exists)
    assert wait_until(lambda: timer.pending == 0)
    assert len(asked) == 1


def test_one_of_several_processes_refreshes_an_entry(make, path, pass_time, timer):
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


def test_an_entry_is_refreshed_twice_within_the_stale_timeout(tmp_path):
    for settings, seconds in (({}, 15.0), ({"stale_timeout": 6}, 3.0), ({"stale_timeout": 1}, 1)):
        policy = RegistryPolicy(snapshot=str(tmp_path / "a.json"), **settings)
        assert open_snapshot_file(parse_url("etcd://a"), policy)._refresh_s == seconds


# Where it is


def url(text="etcd", **parts):
    return RegistryUrl(text, (("10.0.0.2", 2379), ("10.0.0.1", 2379)), **parts)


def test_each_registry_has_a_file_in_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = [
        url(namespace="other"),
        url(user="shop", password="secret"),
        url(path="/x"),
        url("redis"),
        url(options={"db": "1"}),
    ]
    paths = [open_snapshot_file(one, RegistryPolicy()).path for one in (url(), *others)]
    assert len(set(paths)) == len(paths)
    assert {one.parent for one in paths} == {tmp_path / "rpcwheel"}
    assert paths[0].name.startswith("etcd-10.0.0.1-2379-10.0.0.2-2379-")
    same = RegistryUrl("etcd", (("10.0.0.1", 2379), ("10.0.0.2", 2379)), service="any")
    assert open_snapshot_file(same, RegistryPolicy()).path == paths[0]


def test_the_policy_names_the_file_or_turns_it_off_and_by_default_it_is_in_the_cache_directory(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")  # it is ignored, because it is relative
    monkeypatch.setenv("HOME", str(tmp_path))
    memory, named = RegistryUrl("memory"), tmp_path / "x.json"
    for of, snapshot, expected in (
        (url(), False, None),
        (url(), "~/x.json", named),
        (memory, True, None),
        (memory, str(named), named),
    ):
        made = open_snapshot_file(of, RegistryPolicy(snapshot=snapshot))
        assert (made and made.path) == expected
    made = open_snapshot_file(url(), RegistryPolicy())
    assert made.path.parent == tmp_path / ".cache" / "rpcwheel"


def test_without_a_home_directory_there_is_no_file_and_an_event(monkeypatch, events):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(module.Path, "home", nowhere)
    assert open_snapshot_file(url(), RegistryPolicy()) is None
    assert [type(event) for event in events] == [SnapshotFailed]


def test_no_password_is_in_the_file(tmp_path):
    with_password = url(user="shop", password="secret")
    made = open_snapshot_file(with_password, RegistryPolicy(snapshot=str(tmp_path / "x.json")))
    made.keep(SERVICE, instances("a"))
    made.close()
    assert "secret" not in made.path.read_text()
