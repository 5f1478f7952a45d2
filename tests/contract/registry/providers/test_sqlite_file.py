"""The file of a registry when it is locked, full, foreign, damaged, forbidden or gone."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from fixtures.timers import hasty_threads, run_threads  # noqa: F401
from rpcwheel.errors import RegistryClosed, RegistryError, RegistryRefused, RegistryUnavailable
from rpcwheel.registry.providers._sqlite_file import SqliteFile

KEEP = "INSERT OR REPLACE INTO meta VALUES ('test', ?)"
FIND = "SELECT value FROM meta WHERE name = 'test'"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.db"


@pytest.fixture
def opened():
    made = []

    def opened(path, timeout=2.0):
        made.append(SqliteFile(str(path), timeout))
        return made[-1]

    yield opened
    for file in made:
        file.close()


def keep(file, value):
    with file.writing() as db:
        db.execute(KEEP, (value,))


def find(file):
    with file.reading() as db:
        found = db.execute(FIND).fetchone()
    return None if found is None else found[0]


def test_it_is_made_at_its_first_use_and_never_before(opened, path):
    file = opened(path)
    assert not path.exists()
    keep(file, 1)
    assert find(opened(path)) == 1


def test_a_path_may_begin_at_home_or_where_the_program_runs(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    keep(opened("~/home.db"), 1)
    monkeypatch.chdir(tmp_path)
    keep(opened("./here.db"), 1)
    assert {"home.db", "here.db"} <= {one.name for one in tmp_path.iterdir()}


@pytest.mark.usefixtures("hasty_threads")
def test_many_that_make_it_at_once_make_one(opened, path):
    for _ in range(20):
        path.unlink(missing_ok=True)
        files = [opened(path, 10.0) for _ in range(8)]
        run_threads(*[lambda file=file: keep(file, 5) for file in files])
    stores = set()
    for file in files:
        with file.reading() as db:
            stores.add(db.execute("SELECT value FROM meta WHERE name = 'store'").fetchone())
    assert len(stores) == 1


def test_all_of_a_transaction_happens_or_nothing(opened, path):
    file = opened(path)
    keep(file, 1)

    def broken():
        with file.writing() as db:
            db.execute(KEEP, (2,))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        broken()
    assert find(file) == 1
    keep(file, 3)
    assert find(file) == 3


def test_a_lock_of_another_process_is_waited_for_and_then_told(opened, path):
    patient, hasty = opened(path, 10.0), opened(path, 0.05)
    keep(patient, 0)
    script = f"""
import sqlite3, sys
db = sqlite3.connect({str(path)!r}, isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RegistryUnavailable, match=r"another process has locked it .* 0.05 s"):
            keep(hasty, 1)
        assert find(hasty) == 0  # who only reads is not held up
        threading.Timer(0.1, other.kill).start()
        keep(patient, 2)
    assert find(hasty) == 2


def test_a_file_that_is_locked_when_it_is_to_be_made_is_waited_for(opened, path):
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RegistryUnavailable, match="another process has locked it"):
        keep(opened(path, 0.05), 1)
    timer = threading.Timer(0.1, other.close)
    timer.start()
    keep(opened(path, 10.0), 1)
    timer.join()


def test_to_make_the_file_may_take_longer_than_a_lock_is_waited_for(opened, path):
    keep(opened(path, 0.0), 1)
    assert find(opened(path)) == 1


def test_a_request_beside_another_waits_for_it_no_longer_than_it_may(opened, path):
    file = opened(path, 0.05)
    with (
        file.reading(),
        pytest.raises(RegistryUnavailable, match="still busy with the request before"),
    ):
        find(file)


def test_another_file_in_its_place_is_found_by_the_next_use(opened, path):
    one, other = opened(path), opened(path)
    keep(one, 1)
    assert find(other) == 1
    for left in path.parent.glob("registry.db*"):
        left.unlink()
    assert one.replaced()
    keep(one, 2)
    assert not one.replaced()
    assert other.replaced()
    assert find(other) == 2


def test_a_file_moved_into_its_place_is_the_one_that_is_used(opened, path, tmp_path):
    file, second = opened(path), opened(tmp_path / "second.db")
    keep(file, 1)
    keep(second, 2)
    second.close()
    shutil.move(tmp_path / "second.db", path)
    assert find(file) == 2


def test_nothing_stands_beside_it_that_could_be_deleted_alone(opened, path):
    keep(opened(path), 1)
    assert [one.name for one in path.parent.iterdir()] == ["registry.db"]


def test_a_write_is_seen_as_a_change_once_and_ones_own_never(opened, path):
    file, other = opened(path), opened(path)
    keep(file, 1)
    assert file.changed()  # nothing was known
    assert not file.changed()
    keep(file, 2)
    assert not file.changed()
    keep(other, 3)
    assert file.changed()
    assert not file.changed()


def test_a_database_of_something_else_is_refused_and_left_as_it_is(opened, path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE invoices (id)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(RegistryRefused, match="is a database of something else"):
        keep(opened(path), 1)
    assert path.read_bytes() == before


def test_a_file_of_another_version_is_refused(opened, path):
    keep(opened(path), 1)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 2")
    db.close()
    with pytest.raises(RegistryRefused, match="made by another version of rpcwheel"):
        keep(opened(path), 1)


def test_what_is_no_database_or_damaged_is_told_and_mended_by_moving_it_away(opened, path):
    file = opened(path)
    path.write_bytes(b"hello, world" * 1000)
    with pytest.raises(RegistryUnavailable, match="move it away, and another is made"):
        keep(file, 1)
    path.rename(path.with_name("away"))
    keep(file, 1)
    assert find(file) == 1


def test_a_registry_that_is_damaged_is_made_anew(opened, path):
    file = opened(path)
    keep(file, 1)
    with path.open("r+b") as raw:
        raw.seek(200)
        raw.write(b"?" * (path.stat().st_size - 200))
    with pytest.raises(RegistryUnavailable, match="it was damaged, and is made anew"):
        keep(opened(path), 2)
    keep(file, 3)
    assert find(file) == find(opened(path)) == 3


def test_one_that_is_damaged_and_may_not_be_deleted_is_refused(opened, path, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    damage(path, opened(path))
    monkeypatch.setattr(Path, "unlink", forbidden)
    with pytest.raises(RegistryRefused, match="damaged, and this user may not delete it"):
        keep(opened(path), 2)


def test_what_another_process_has_made_anew_meanwhile_is_not_deleted(opened, path):
    file = opened(path)
    keep(file, 1)
    error = sqlite3.DatabaseError("malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT

    def use():
        with file.reading():
            path.unlink()
            keep(opened(path), 3)
            raise error

    with pytest.raises(RegistryUnavailable, match="is made anew"):
        use()
    assert find(opened(path)) == 3


def damage(path, file):
    keep(file, 1)
    with path.open("r+b") as raw:
        raw.seek(200)
        raw.write(b"?" * (path.stat().st_size - 200))


def test_a_missing_directory_is_told_and_found_when_it_comes(opened, tmp_path):
    file = opened(tmp_path / "later" / "registry.db")
    with pytest.raises(RegistryUnavailable, match=r"there is no directory .*later"):
        keep(file, 1)
    (tmp_path / "later").mkdir()
    keep(file, 1)


def test_a_directory_in_its_place_is_told(opened, tmp_path):
    with pytest.raises(RegistryUnavailable, match="it is a directory"):
        keep(opened(tmp_path), 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_a_user_may_not_write_is_refused():
    place = Path(tempfile.mkdtemp())  # pytest's are for nobody else to enter
    place.chmod(0o755)
    path = place / "registry.db"
    keep(file := SqliteFile(str(path), 1.0), 1)
    file.close()
    path.chmod(0o644)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setuid(65534)
            keep(SqliteFile(str(path), 1.0), 2)
        except RegistryRefused as error:
            code = 0 if "may not write it" in str(error) else 2
        except RegistryError:
            code = 3
        finally:
            os._exit(code)
    code = os.waitpid(child, 0)[1]
    shutil.rmtree(place)
    assert code == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_harms_nothing_and_is_over_when_there_is_room(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 60_000)
    file = SqliteFile(str(small_disk / "registry.db"), 1.0)
    keep(file, 1)
    big = b"y" * 180_000
    with pytest.raises(RegistryUnavailable, match="the disk is full"):
        keep(file, big)
    assert find(file) == 1
    ballast.unlink()
    keep(file, big)
    assert find(file) == big
    file.close()


def test_a_closed_one_is_opened_no_more(opened, path):
    file = opened(path)
    keep(file, 1)
    file.close()
    file.close()
    with pytest.raises(RegistryClosed):
        find(file)


def test_a_forked_child_opens_it_anew(opened, path):
    file = opened(path)
    keep(file, 1)
    with file.reading() as parents:  # as another thread might
        child = os.fork()
        if not child:
            code = 1
            try:
                keep(file, 2)
                code = 2 if file._db is parents else 0
                file.close()
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    keep(opened(path), 3)
    assert find(file) == 3


def test_looking_for_changes_is_cheap(opened, path):
    file = opened(path)
    keep(file, 1)
    begin = time.perf_counter()
    for _ in range(1000):
        file.changed()
        file.replaced()
    assert time.perf_counter() - begin < 2.0  # 30 ms here
