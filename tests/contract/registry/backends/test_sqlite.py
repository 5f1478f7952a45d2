"""The registry in a file: the contract, leases, watches, and a file that is replaced or damaged."""

import os
import shutil
import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from fixtures.disks import disk_fixture
from fixtures.engine_watchers import RecordingWatcher
from fixtures.forks import holds_in_child
from fixtures.leaks import without_descriptors
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.testing import check_backend

LEASE = 1.0
"""Seconds of a lease where time moves by hand; else none ends within a test."""

SERVICE = "shop.Orders"
ONE = ServiceInstance(service=SERVICE, host="10.0.0.1", port=1)
TWO = ServiceInstance(service=SERVICE, host="10.0.0.2", port=1)
THREE = ServiceInstance(service=SERVICE, host="10.0.0.3", port=1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.db"


@pytest.fixture
def opened(path, closed_later):
    """Open backends on one file; closed in the end. Leases end where time moves by hand."""

    def opened(query="", *, at=path, timer=None, timeout=60.0, lease=None):
        settings = Settings(lease or (3600.0 if timer is None else LEASE), timeout, timer)
        return closed_later(open_backend(f"sqlite://{at}{query}", settings))

    return opened


def keep(backend, weight):
    """Publish an instance with this weight."""
    backend.publish([ONE.replace(weight=weight)])


def find(backend):
    """The weight that was published last."""
    (record,) = backend.lookup(SERVICE).records.values()
    return ServiceInstance.decoded(record).weight


def test_sqlite_keeps_the_backend_contract(opened, timer):
    check_backend(lambda: opened(timer=timer))


# Leases


def test_a_watcher_sees_the_end_of_a_lease_although_nothing_is_written(opened, timer):
    backend, other = opened(timer=timer), opened(timer=timer, lease=3600.0)
    backend.publish([ONE])
    other.watch(SERVICE, watcher := RecordingWatcher())
    assert watcher.sees(ONE)
    assert wait_until(lambda: timer.advance(0.05) >= 0 and watcher.has_seen())
    assert timer.now < 3600  # before anybody looks without a reason


def test_no_lease_ends_while_the_file_cannot_be_written(opened, path, timer):
    """Then none can be renewed either, by whatever process."""
    backend, other = opened(timer=timer), opened(timer=timer, lease=3600.0, timeout=0.01)
    backend.publish([ONE])
    other.watch(SERVICE, watcher := RecordingWatcher())
    assert watcher.sees(ONE)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        assert wait_until(lambda: timer.advance(0.05) >= 0 and len(watcher.news) > 1)
        assert watcher.doubts("another process has locked it")
        for ask in (lambda: other.lookup(SERVICE), other.services):
            with pytest.raises(RegistryUnavailable):
                ask()
        assert frozenset() not in watcher.news
    assert wait_until(lambda: timer.advance(0.05) >= 0 and watcher.has_seen())


def test_a_reboot_ends_all_leases(opened, path, timer):
    """The monotonic clock begins anew: its end is then further ahead than it is long."""
    timer.advance(1000)
    before = opened(timer=timer)
    before.publish([ONE])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE lease SET ends_ns = ends_ns + 1000000000000")
    assert opened(timer=timer).services() == []
    assert before.renew([ONE]) == {ONE.key: "lease"}


def test_instances_whose_lease_has_ended_stay_away_when_others_are_published(opened, timer):
    backend = opened(timer=timer)
    backend.publish([ONE])
    timer.advance(LEASE)
    backend.publish([TWO])
    assert [*backend.lookup(SERVICE).records] == [TWO.id]


def test_a_renewal_removes_ended_leases(opened, path, timer):
    opened(timer=timer).publish([ONE])
    living = opened(timer=timer)
    living.publish([TWO.replace(service="other")])
    for _ in range(2):
        timer.advance(LEASE / 2)
        living.renew([])
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT id FROM instance").fetchall() == [(TWO.id,)]
        assert db.execute("SELECT count(*) FROM lease").fetchall() == [(1,)]


def test_a_lease_that_is_renewed_while_a_lookup_waits_is_alive(opened, path):
    backend, other = opened(), opened()
    backend.publish([ONE])
    other.services()  # it is open
    found = []
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        looks = threading.Thread(
            target=lambda: found.extend((other.lookup(SERVICE).records, other.services()))
        )
        looks.start()
        time.sleep(0.05)  # most likely it waits for the file by now
        ends_ns = time.monotonic_ns() + 3600 * 10**9
        db.execute("UPDATE lease SET ends_ns = ?", (ends_ns,))
        db.execute("COMMIT")
        looks.join()
    assert found == [{ONE.id: ONE.encoded()}, [SERVICE]]


def test_a_forked_child_has_a_lease_of_its_own(opened):
    backend = opened()
    backend.publish([ONE])

    def begins_a_lease():
        lost = backend.renew([ONE])
        backend.publish([TWO])
        found = list(backend.lookup(SERVICE).records)
        backend.close()
        return (lost, found) == ({ONE.key: "lease"}, [ONE.id, TWO.id])

    assert holds_in_child(begins_a_lease)
    assert backend.renew([ONE]) == {}
    assert list(backend.lookup(SERVICE).records) == [ONE.id]


# Watches


def test_a_change_or_another_file_is_seen_after_the_poll_interval_of_the_url(opened, path, timer):
    watching = opened("?poll=0.5", timer=timer, lease=3600.0)
    other = opened(timer=timer, lease=3600.0)
    watching.watch(SERVICE, watcher := RecordingWatcher())
    assert watcher.sees()
    other.publish([ONE])
    timer.advance(0.44)
    assert watcher.has_seen()
    timer.advance(0.12)  # the period varies by 10 %
    assert watcher.sees(ONE)
    other.publish([TWO])
    timer.advance(0.56)
    assert watcher.sees(ONE, TWO)
    path.unlink()
    for instance in (ONE, TWO):  # as many changes as in the file before
        other.publish([instance])
    timer.advance(0.56)
    assert watcher.doubts("another file is in its place")


def test_a_restored_copy_with_as_many_changes_is_seen(opened, path, timer):
    watching = opened("?poll=0.5", timer=timer, lease=3600.0)
    other = opened(timer=timer, lease=3600.0)
    other.publish([ONE])
    copy = shutil.copy(path, path.with_suffix(".copy"))
    watching.watch(SERVICE, watcher := RecordingWatcher())
    assert watcher.sees(ONE)
    other.publish([TWO])
    timer.advance(0.56)
    assert watcher.sees(ONE, TWO)
    Path(copy).replace(path)
    other.publish([THREE])
    timer.advance(0.56)
    assert watcher.sees(ONE, THREE)


def test_watches_continue_after_the_directory_was_missing(opened, path):
    directory = path.parent / "run"
    directory.mkdir()
    one, two = opened(at=directory / "registry.db"), opened(at=directory / "registry.db")
    one.publish([ONE])
    two.watch(SERVICE, watcher := RecordingWatcher())
    assert watcher.sees(ONE)
    directory.rename(path.parent / "away")
    directory.touch()
    assert watcher.doubts()
    directory.unlink()
    (path.parent / "away").rename(directory)
    one.publish([TWO])
    assert watcher.sees(ONE, TWO)
    one.withdraw([ONE])
    assert watcher.sees(TWO)


# What is in the file


def test_namespaces_do_not_see_each_other(opened):
    opened().publish([ONE])
    other = opened("?namespace=other")
    assert other.services() == []
    other.publish([TWO])
    assert list(opened().lookup(SERVICE).records) == [ONE.id]


def test_records_of_others_are_returned_unchanged_beside_ours(opened, path):
    backend = opened()
    backend.publish([ONE])
    with closing(sqlite3.connect(path)) as db, db:
        (lease,) = db.execute("SELECT id FROM lease").fetchone()
        for number, data in enumerate(["text", None, 5, b"\xff"]):
            row = ("rpcwheel", SERVICE, f"bad{number}", data, "", lease)
            db.execute("INSERT INTO instance VALUES (?, ?, ?, ?, ?, ?)", row)
        no_text = "INSERT INTO instance VALUES ('rpcwheel', ?, CAST(x'ff41' AS TEXT), 1, 1, ?)"
        db.execute(no_text, (SERVICE, lease))
    records = backend.lookup(SERVICE).records
    assert records[ONE.id] == ONE.encoded()
    assert [records[f"bad{number}"] for number in range(4)] == [b"text", b"None", b"5", b"\xff"]
    assert len(records) == 6


def test_records_overwritten_under_their_lease_are_reported_as_missing(opened, path):
    backend = opened()
    backend.publish([ONE, TWO])
    with closing(sqlite3.connect(path)) as db, db:
        change = "UPDATE instance SET data = ? WHERE id = ?"
        db.execute(change, (ONE.replace(epoch="another").encoded(), ONE.id))
        db.execute(change, ("broken", TWO.id))
    assert backend.renew([ONE, TWO]) == {ONE.key: "missing", TWO.key: "missing"}
    backend.publish([ONE, TWO])
    assert backend.renew([ONE, TWO]) == {}


# The file


def test_the_file_is_created_at_its_first_use_and_no_other_file(opened, path):
    backend = opened(timeout=0.0)
    assert not path.exists()
    keep(backend, 1)
    assert find(opened()) == 1
    assert [one.name for one in path.parent.iterdir()] == ["registry.db"]


def test_the_path_may_begin_at_home_or_in_the_working_directory(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    keep(opened(at="~/home.db"), 1)
    monkeypatch.chdir(tmp_path)
    keep(opened(at="./here.db"), 1)
    assert {"home.db", "here.db"} <= {one.name for one in tmp_path.iterdir()}


@pytest.mark.usefixtures("frequent_thread_switches")
def test_threads_that_create_the_file_at_once_create_one(opened, path):
    for _ in range(5):
        path.unlink(missing_ok=True)
        backends = [opened() for _ in range(8)]
        run_threads(
            *(
                lambda one=one, number=number: one.publish([ONE.replace(id=str(number))])
                for number, one in enumerate(backends)
            )
        )
        assert sorted(opened().lookup(SERVICE).records) == sorted(map(str, range(8)))


def test_a_locked_file_is_waited_for_until_the_timeout(opened, path):
    patient, hasty = opened(), opened(timeout=0.05)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")  # the file is still to be made
    with pytest.raises(RegistryUnavailable, match="another process has locked it"):
        keep(hasty, 1)
    other.execute("ROLLBACK")
    keep(patient, 0)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(RegistryUnavailable, match=r"another process has locked it .* 0.05 s"):
        keep(hasty, 1)
    assert find(hasty) == 0  # a lookup is not held up
    unlocking = threading.Timer(0.05, other.close)
    unlocking.start()
    keep(patient, 2)
    unlocking.join()
    assert find(patient) == 2


def test_another_file_in_its_place_is_used_and_reported_to_watchers(opened, path, tmp_path):
    one, other, second = opened(), opened(), opened(at=tmp_path / "second.db")
    keep(one, 1)
    assert find(other) == 1
    other.watch(SERVICE, watcher := RecordingWatcher())
    assert watcher.sees(ONE)
    path.unlink()
    assert one.renew([ONE]) == {ONE.key: "wiped"}
    keep(one, 2)
    assert find(other) == 2
    keep(second, 3)
    shutil.move(tmp_path / "second.db", path)
    assert find(one) == find(other) == 3
    one.publish([TWO])
    assert watcher.sees(ONE, TWO)
    assert any("another file is in its place" in news for news in watcher.news)


def test_a_database_of_another_program_or_version_is_refused(opened, path):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE invoices (id)")
    before = path.read_bytes()
    with pytest.raises(RegistryRefused, match="is a database of something else"):
        keep(opened(), 1)
    assert path.read_bytes() == before
    path.unlink()
    keep(opened(), 1)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(RegistryRefused, match=r"made by another version of rpcwheel.*update"):
        keep(opened(), 1)


def test_a_file_that_is_no_database_is_reported_until_it_is_moved_away(opened, path):
    backend = opened()
    path.write_bytes(b"hello, world" * 1000)
    with pytest.raises(RegistryUnavailable, match="move it away, and another one is created"):
        keep(backend, 1)
    path.rename(path.with_name("away"))
    keep(backend, 1)
    assert find(backend) == 1


def damage(path, backend):
    keep(backend, 1)
    with path.open("r+b") as raw:
        raw.seek(200)
        raw.write(b"?" * (path.stat().st_size - 200))


def test_a_damaged_registry_is_created_again_if_it_can_be_deleted(opened, path, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    backend = opened()
    damage(path, backend)
    with monkeypatch.context() as rights:
        rights.setattr(Path, "unlink", forbidden)
        with pytest.raises(RegistryRefused, match="damaged, and this user may not delete it"):
            keep(opened(), 2)
    with pytest.raises(RegistryUnavailable, match="it was damaged, and is created again"):
        keep(opened(), 2)
    keep(backend, 3)
    assert find(backend) == find(opened()) == 3


def test_a_missing_directory_is_unavailable_until_it_exists(opened, tmp_path):
    backend = opened(at=tmp_path / "later" / "registry.db")
    with pytest.raises(RegistryUnavailable, match=r"there is no directory .*later"):
        keep(backend, 1)
    (tmp_path / "later").mkdir()
    keep(backend, 1)
    with pytest.raises(RegistryUnavailable, match="it is a directory"):
        keep(opened(at=tmp_path), 1)


def test_a_file_that_cannot_be_opened_for_want_of_descriptors_is_unavailable(opened):
    backend = opened()
    keep(backend, 1)
    with without_descriptors(), pytest.raises(RegistryUnavailable, match="too many files are open"):
        keep(backend, 2)
    keep(backend, 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_without_write_permission_is_refused(opened):
    place = Path(tempfile.mkdtemp())  # other users cannot enter those of pytest
    place.chmod(0o755)
    path = place / "registry.db"
    keep(opened(at=path, lease=0.01), 1)
    path.chmod(0o644)

    def is_refused():
        os.setuid(65534)
        other = opened(at=path)
        with pytest.raises(RegistryRefused, match="may not write it"):
            keep(other, 2)
        return wait_until(lambda: other.services() == [])  # the lease has ended

    refused = holds_in_child(is_refused)
    shutil.rmtree(place)
    assert refused


small_disk = disk_fixture("256k")


def test_a_full_disk_damages_nothing_and_writes_work_when_there_is_room(opened, small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 60_000)
    backend = opened(at=small_disk / "registry.db")
    keep(backend, 1)
    big = [
        TWO.replace(id=str(number), metadata={f"k{n}": "y" * 1000 for n in range(8)})
        for number in range(20)
    ]
    with pytest.raises(RegistryUnavailable, match="the disk is full"):
        backend.publish(big)
    assert find(backend) == 1
    ballast.unlink()
    backend.publish(big)
    assert len(backend.lookup(SERVICE).records) == 21


def test_no_lease_ends_while_the_disk_is_full(opened, small_disk, timer):
    path = small_disk / "registry.db"
    backend, other = opened(at=path, timer=timer), opened(at=path, timer=timer, lease=3600.0)
    backend.publish([ONE])
    other.watch(SERVICE, watcher := RecordingWatcher())
    assert watcher.sees(ONE)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2**20))
    assert wait_until(lambda: timer.advance(0.05) >= 0 and len(watcher.news) > 1)
    assert watcher.doubts("the disk is full")
    with pytest.raises(RegistryUnavailable, match="the disk is full"):
        other.lookup(SERVICE)
    assert frozenset() not in watcher.news
    ballast.unlink()
    assert wait_until(lambda: timer.advance(0.05) >= 0 and watcher.has_seen())
