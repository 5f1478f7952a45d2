"""The journal in a SQLite file: durability, other files, full disks, and the file itself."""

import os
import sqlite3
import stat
import threading
from contextlib import closing
from functools import partial

import pytest

from fixtures.disks import disk_fixture
from fixtures.journal_calls import ROUTES, bodies_of, new_call
from fixtures.leaks import without_descriptors
from fixtures.waiting import WAIT_S, in_thread
from rpcwheel.errors import ConfigurationError, JournalFull, JournalRefused, JournalUnavailable
from rpcwheel.journal import Filter, open_journal_backend
from rpcwheel.journal.backend import Delivered
from rpcwheel.testing.conformance.registry_harness import on_threads


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path, opened):
    return opened(f"sqlite://{path}")


class Connection(sqlite3.Connection):
    """A connection on which a test does something, or fails, after a statement."""

    executed = staticmethod(lambda statement: None)

    def execute(self, statement, *given):
        cursor = super().execute(statement, *given)
        self.executed(statement)
        return cursor


@pytest.fixture
def connections(monkeypatch, path):
    """The connections to the journal's file that were opened since, first that of its workers.

    Not those to other files: when coverage is measured, its own are opened at any time.
    """
    connections, connect = [], sqlite3.connect

    def recording(database, *given, **options):
        if str(database) != str(path):
            return connect(database, *given, **options)
        connections.append(connect(database, *given, **options, factory=Connection))
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", recording)
    return connections


def execute(path, statement):
    """Execute a statement as another program."""
    with closing(sqlite3.connect(path)) as other:
        return other.execute(statement).fetchall()


@pytest.mark.parametrize(
    ("options", "synchronous"), [("", 1), ("?durability=process", 1), ("?durability=power", 2)]
)
def test_durability_is_how_often_the_log_is_synchronized(
    path, opened, connections, options, synchronous
):
    journal = opened(f"sqlite://{path}{options}")
    journal.append([new_call()])
    (db,) = connections
    assert db.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("is_link", [False, True])
def test_only_its_owner_may_read_the_file(journal, path, is_link):
    if is_link:  # to a file that does not exist
        link, path = path, path.with_name("elsewhere.db")
        link.symlink_to(path)
    previous = os.umask(0)
    try:
        journal.append([new_call()])
    finally:
        os.umask(previous)
    for name in ("", "-wal", "-shm"):
        mode = stat.S_IMODE(path.with_name(f"{path.name}{name}").stat().st_mode)
        assert mode == 0o600


# The clock


@pytest.mark.parametrize("opens_again", [False, True])
def test_a_clock_that_is_set_back_delays_neither_takeovers_nor_calls(path, opened, opens_again):
    now_s = [1_800_000_000.0]

    def opened_journal():
        journal = opened(f"sqlite://{path}")
        journal.clock = lambda: now_s[0]
        return journal

    journal = opened_journal()
    journal.append([new_call(1), new_call(2, order_key="a"), new_call(3, order_key="a")])
    assert bodies_of(journal.take("killed", 3.0, ROUTES, 0.0)) == [1, 2]
    now_s[0] += 10.0  # the worker renews its lease, and a call is appended
    assert journal.renew("killed", 3.0)
    journal.append([new_call(4, delay_s=60.0)])
    now_s[0] -= 3600.0
    if opens_again:
        journal = opened_journal()
    assert journal.take("worker", 60.0, ROUTES, 0.0) == []
    assert [round(call.due_s) for call in journal.select(Filter())] == [-10, -10, -10, 60]
    now_s[0] += 3.0
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [1, 2]
    now_s[0] += 57.0
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [4]
    assert all(call.age_s >= 0 for call in journal.select(Filter()))


def test_a_call_is_not_moved_if_the_first_request_after_the_clock_was_set_back_has_failed(
    journal, connections
):
    def fail(statement):
        if statement.startswith("INSERT INTO call"):
            raise sqlite3.OperationalError

    now_s = [1_800_000_000.0]
    journal.clock = lambda: now_s[0]
    journal.append([new_call(1)])
    now_s[0] -= 3600.0
    connections[0].executed = fail
    with pytest.raises(JournalRefused):
        journal.append([new_call(2)])
    del connections[0].executed
    journal.append([new_call(3, delay_s=60.0)])
    now_s[0] += 2.0
    journal.append([new_call(4)])
    assert [round(call.due_s) for call in journal.select(Filter())] == [-2, 58, 0]


def test_a_call_is_moved_once_if_the_clock_is_set_back_to_about_the_time_before(journal):
    now_s = [1_800_000_000.0]
    journal.clock = lambda: now_s[0]
    journal.append([new_call(1)])
    now_s[0] += 3600.0
    journal.append([new_call(2)])
    now_s[0] -= 3599.5
    journal.append([new_call(3, delay_s=7200.0)])
    now_s[0] += 1.0
    journal.append([new_call(4)])
    assert [round(call.due_s) for call in journal.select(Filter())] == [-3601, -1, 7199, 0]


@pytest.mark.parametrize("names", [[""], ["", "-wal", "-shm"]])
def test_a_file_that_was_deleted_is_created_again(journal, path, names):
    journal.append([new_call(1)])
    journal.depths()
    for name in names:
        path.with_name(f"{path.name}{name}").unlink()
    journal.append([new_call(2)])
    assert bodies_of(journal.select(Filter())) == [2]
    assert path.exists()


def test_a_file_that_is_deleted_while_it_is_opened_is_refused(
    journal, path, connections, monkeypatch
):
    def delete(statement):
        if "pragma_database_list" in statement:
            path.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "executed", staticmethod(delete))
        with pytest.raises(JournalRefused, match="No such file"):
            journal.append([new_call(1)])
    journal.append([new_call(2)])
    assert bodies_of(journal.select(Filter())) == [2]


def test_a_file_that_was_replaced_is_opened(journal, path, tmp_path, opened):
    journal.append([new_call(1)])
    other = opened(f"sqlite://{tmp_path}/other.db")
    other.append([new_call(2)])
    other.close()
    for name in ("-wal", "-shm"):
        path.with_name(f"{path.name}{name}").unlink()
    (tmp_path / "other.db").rename(path)
    assert bodies_of(journal.select(Filter())) == [2]
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [2]


def test_a_link_that_leads_to_another_file_is_followed(tmp_path, opened):
    link = tmp_path / "link.db"
    for number in (1, 2):
        opened(f"sqlite://{tmp_path}/{number}.db").append([new_call(number)])
    link.symlink_to(tmp_path / "1.db")
    journal = opened(f"sqlite://{link}")
    assert bodies_of(journal.select(Filter())) == [1]
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [1]
    link.unlink()
    link.symlink_to(tmp_path / "2.db")
    assert bodies_of(journal.select(Filter())) == [2]
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [2]


def test_a_missing_directory_is_refused(tmp_path, opened):
    with pytest.raises(JournalRefused, match="create its directory"):
        opened(f"sqlite://{tmp_path}/missing/journal.db").append([new_call()])
    (tmp_path / "file").touch()
    with pytest.raises(JournalRefused, match="cannot be opened"):
        opened(f"sqlite://{tmp_path}/file/journal.db").append([new_call()])
    with pytest.raises(JournalRefused, match="cannot be opened"):
        opened(f"sqlite://{tmp_path}").append([new_call()])


def test_an_empty_file_does_not_become_a_journal_without_create(path):
    path.touch()
    reading = open_journal_backend(f"sqlite://{path}", create=False)
    with pytest.raises(JournalRefused, match="is empty, and no journal yet"):
        reading.depths()
    assert path.stat().st_size == 0


def test_another_programs_database_is_refused(path, opened):
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE call (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(JournalRefused, match="is another program's database"):
        opened(f"sqlite://{path}").append([new_call()])
    assert path.read_bytes() == before


def test_a_file_of_a_newer_version_is_refused(journal, path, opened):
    journal.append([new_call()])
    execute(path, "PRAGMA user_version = 2")
    newer = opened(f"sqlite://{path}")
    with pytest.raises(JournalRefused, match=r"newer rpcwheel \(version 2 .*: update rpcwheel"):
        newer.append([new_call()])


@pytest.mark.parametrize(
    "content", [b"this is no database" * 300, b"SQLite format 3\0" + b"x" * 5000]
)
def test_a_damaged_file_is_refused(path, opened, content):
    path.write_bytes(content)
    with pytest.raises(JournalRefused, match=r"is damaged .*move it away"):
        opened(f"sqlite://{path}").append([new_call()])
    assert path.read_bytes() == content


def test_a_file_that_others_keep_busy_is_unavailable(journal, path, opened):
    journal.append([new_call(1)])
    impatient = opened(f"sqlite://{path}?timeout=0.1")
    impatient.renew("worker", 60.0)  # connected
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalUnavailable, match=r"kept it busy for 0\.09 s"):
        impatient.append([new_call(2)])
    assert bodies_of(impatient.select(Filter())) == [1]
    other.execute("COMMIT")
    other.close()
    impatient.append([new_call(3)])
    assert bodies_of(impatient.select(Filter())) == [1, 3]


def test_a_file_is_created_by_several_backends_at_once(path, opened):
    journals = [opened(f"sqlite://{path}") for _ in range(8)]
    on_threads(*(partial(journal.append, [new_call()]) for journal in journals))
    assert len(journals[0].select(Filter())) == len(journals)


def test_a_value_that_cannot_be_stored_is_refused(journal, connections):
    with pytest.raises(JournalRefused, match="cannot store a value"):
        journal.append([new_call(body=None)])
    connections[0].setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
    with pytest.raises(JournalRefused, match="cannot store a value"):
        journal.append([new_call(body=b"x" * 2000)])
    journal.append([new_call(2)])
    assert bodies_of(journal.select(Filter())) == [2]


small_disk = disk_fixture("1m")


def test_a_full_disk_refuses_calls_and_keeps_the_stored_ones(small_disk, opened):
    journal = opened(f"sqlite://{small_disk}/journal.db")
    stored = []

    def store_until_full():
        for number in range(10_000):
            journal.append([new_call(number, body=b"%d" % number + b" " * 5000)])
            stored.append(number)

    with pytest.raises(JournalFull, match="the disk is full"):
        store_until_full()
    assert len(stored) > 10
    with pytest.raises(JournalFull):
        journal.append([new_call(order_key="a", body=b" " * 50_000)])
    assert bodies_of(journal.select(Filter(), limit=10_000)) == stored
    assert execute(small_disk / "journal.db", "PRAGMA integrity_check") == [("ok",)]
    journal.close()
    again = opened(f"sqlite://{small_disk}/journal.db")
    assert bodies_of(again.select(Filter(), limit=10_000)) == stored


def test_a_disk_without_any_space_is_full(small_disk, opened):
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "other").write_bytes(b"x" * (2 << 20))
    journal = opened(f"sqlite://{small_disk}/journal.db")
    with pytest.raises(JournalFull, match="the disk is full"):
        journal.append([new_call(1)])
    (small_disk / "other").unlink()
    journal.append([new_call(2)])
    assert bodies_of(journal.select(Filter())) == [2]


def test_the_space_of_delivered_calls_is_returned(journal, path):
    journal.append([new_call(number, body=b" " * 8000) for number in range(1000)])
    execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    before = path.stat().st_size
    while taken := journal.take("worker", 60.0, ROUTES, 0.0):
        assert journal.report("worker", [Delivered(one.id) for one in taken]) == []
    execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    assert path.stat().st_size < before / 2


def test_a_long_scan_does_not_delay_workers(journal, connections):
    journal.append([new_call(1)])
    journal.depths()
    scanning, go_on = threading.Event(), threading.Event()

    def scan():
        scanning.set()
        return not go_on.wait(WAIT_S)

    connections[1].set_progress_handler(scan, 1)
    scanned = in_thread(journal.select, Filter())
    assert scanning.wait(WAIT_S)
    journal.append([new_call(2)])
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [1, 2]
    go_on.set()
    assert 1 in bodies_of(scanned.result(WAIT_S))  # and 2, if it had not begun to read


def test_an_interrupted_request_leaves_no_transaction_open(journal, connections):
    def interrupt(statement):
        if statement == "BEGIN IMMEDIATE":
            raise KeyboardInterrupt

    journal.append([new_call()])
    (db,) = connections
    db.executed = interrupt
    with pytest.raises(KeyboardInterrupt):
        journal.append([new_call()])
    assert not db.in_transaction
    del db.executed
    journal.append([new_call()])


def test_calls_that_were_deleted_before_the_disk_was_full_count(journal, connections, set_limit):
    error, begun = sqlite3.OperationalError("database or disk is full"), []
    error.sqlite_errorname = "SQLITE_FULL"

    def fail_once(statement):
        if statement == "BEGIN IMMEDIATE":
            begun.append(statement)
            if len(begun) == 2:
                raise error

    set_limit("journal.sqlite.CHUNK", 2)
    journal.append([new_call(number) for number in range(5)])
    connections[0].executed = fail_once
    assert journal.delete(Filter()) == 5


def test_a_path_below_a_home_directory_that_is_unknown_is_refused(monkeypatch):
    monkeypatch.setenv("HOME", "~")  # what `expanduser` makes of "~" without a home directory
    with pytest.raises(ConfigurationError, match=r"~/journal\.db: .*absolute path"):
        open_journal_backend("sqlite://~/journal.db")


def test_a_file_that_cannot_be_opened_for_want_of_descriptors_is_unavailable(journal):
    unavailable = pytest.raises(JournalUnavailable, match="too many files are open")
    with without_descriptors(left=1), unavailable:  # the log beside the file needs another one
        journal.append([new_call()])
    assert journal.append([new_call()])
