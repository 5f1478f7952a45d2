"""The registry in a file: the contract, leases, and processes that come, die and fork."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing, contextmanager

import pytest

from fixtures.engine_watchers import contract_settings
from fixtures.waiting import wait_until
from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import ServiceInstance
from rpcwheel.observe.events import RegistryFailed
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import open_provider
from rpcwheel.testing import PROVIDER_CHECKS
from rpcwheel.timer import WheelTimer

LEASE = 1.0
ONE = ServiceInstance(service="shop.Orders", host="10.0.0.1", port=1)
TWO = ServiceInstance(service="shop.Orders", host="10.0.0.2", port=1)


class Told:
    """What a watcher was told: ids, and doubts as text."""

    def __init__(self):
        self.news = []

    def saw(self, view):
        self.news.append(sorted(view.records))

    def suspect(self, reason):
        self.news.append(reason)

    @property
    def last(self):
        return self.news[-1] if self.news else None


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.db"


@pytest.fixture
def opened(path):
    """Open providers on one file; closed in the end. Leases end where time moves by hand."""
    made = []

    def opened(query="", timer=None, timeout=10.0, lease=None):
        settings = Settings(lease or (60.0 if timer is None else LEASE), timeout, timer)
        made.append(open_provider(f"sqlite://{path}{query}", settings))
        return made[-1]

    yield opened
    for provider in made:
        provider.close()


@pytest.mark.parametrize("check", PROVIDER_CHECKS.values(), ids=PROVIDER_CHECKS)
def test_it_keeps_the_contract(check, opened):
    settings = contract_settings(check)
    check(lambda: opened(timeout=settings.timeout_s, lease=settings.lease_s))


@pytest.mark.parametrize("check", PROVIDER_CHECKS.values(), ids=PROVIDER_CHECKS)
def test_it_keeps_the_contract_in_manual_time(check, opened, timer):
    check(lambda: opened(timer=timer))


# Leases


def test_what_is_not_renewed_vanishes_at_the_end_of_its_lease(opened, timer):
    provider, other = opened(timer=timer), opened(timer=timer)
    provider.publish([ONE])
    timer.advance(LEASE - 0.01)
    assert other.lookup("shop.Orders").records
    timer.advance(0.01)
    assert not other.lookup("shop.Orders").records
    assert other.services() == []
    assert provider.renew([ONE]) == provider.renew([ONE]) == {ONE.key: "lease"}
    provider.publish([TWO])
    assert provider.renew([ONE, TWO]) == {ONE.key: "missing"}
    assert list(other.lookup("shop.Orders").records) == [TWO.id]


def test_a_watcher_is_told_when_a_lease_ends_though_nobody_writes(opened, timer):
    provider, other = opened(timer=timer), opened(timer=timer, lease=60.0)
    provider.publish([ONE])
    other.watch("shop.Orders", told := Told())
    assert wait_until(lambda: told.last == [ONE.id])
    assert wait_until(lambda: timer.advance(0.001) * 0 or other._seen_at[0])  # the first poll
    assert wait_until(lambda: not other._following._running)
    timer.advance(LEASE)
    assert wait_until(lambda: timer.now > 5 or timer.advance(0.05) * 0 or told.last == [])
    assert told.last == []  # long before anybody looks without a reason


def test_a_lease_from_before_a_reboot_is_over(opened, path, timer):
    """The monotonic clock begins anew: its end is then further ahead than it is long."""
    timer.advance(1000)
    before = opened(timer=timer)
    before.publish([ONE])
    with sqlite3.connect(path) as db:
        db.execute("UPDATE lease SET ends_ns = ends_ns + 1000000000000")
    db.close()
    assert opened(timer=timer).services() == []
    assert before.renew([ONE]) == {ONE.key: "lease"}


def test_leases_that_are_over_are_swept_by_whoever_renews(opened, path, timer):
    opened(timer=timer).publish([ONE])
    living = opened(timer=timer)
    living.publish([TWO.changed(service="other")])
    timer.advance(LEASE / 2)
    living.renew([])
    timer.advance(LEASE / 2)
    living.renew([])
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT id FROM instance").fetchall() == [(TWO.id,)]
        assert db.execute("SELECT count(*) FROM lease").fetchall() == [(1,)]
    db.close()


def test_a_renewal_alone_is_no_news(opened):
    provider, other = opened(), opened("?poll=0.01")
    provider.publish([ONE])
    other.watch("shop.Orders", told := Told())
    assert wait_until(lambda: told.last == [ONE.id])
    done = []
    look, read = other._look, other._following._read
    other._look = lambda: look() or done.append("look")
    other._following._read = lambda *given: done.append("read") or read(*given)
    for number in range(5):
        assert wait_until(lambda: done[-2:] == ["look", "look"])
        if number:  # what was before the first may have been read in these
            assert "read" not in done
        done.clear()
        provider.renew([ONE])


def test_a_lease_that_is_renewed_while_a_lookup_waits_is_alive(opened, path):
    provider, other = opened(), opened(timeout=10.0)
    provider.publish([ONE])
    other.services()  # it is open
    found = []
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        looks = threading.Thread(
            target=lambda: found.extend((other.lookup(ONE.service).records, other.services()))
        )
        looks.start()
        time.sleep(0.2)  # it waits for the file by now
        ends_ns = provider._now() + provider._lease_ns
        db.execute("UPDATE lease SET ends_ns = ?", (ends_ns,))
        db.execute("COMMIT")
        looks.join()
    assert found == [{ONE.id: ONE.encoded()}, [ONE.service]]


# What is in the file


def test_namespaces_do_not_see_each_other(opened):
    opened().publish([ONE])
    other = opened("?namespace=other")
    assert other.services() == []
    other.publish([TWO])
    assert list(opened().lookup("shop.Orders").records) == [ONE.id]


def test_what_others_wrote_there_is_given_as_it_is_and_hides_nothing(opened, path):
    provider = opened()
    provider.publish([ONE])
    with sqlite3.connect(path) as db:
        (lease,) = db.execute("SELECT id FROM lease").fetchone()
        for number, data in enumerate(["text", None, 5, b"\xff"]):
            row = ("rpcwheel", "shop.Orders", f"bad{number}", data, "", lease)
            db.execute("INSERT INTO instance VALUES (?, ?, ?, ?, ?, ?)", row)
        no_text = "INSERT INTO instance VALUES ('rpcwheel', ?, CAST(x'ff41' AS TEXT), 1, 1, ?)"
        db.execute(no_text, ("shop.Orders", lease))
    db.close()
    records = provider.lookup("shop.Orders").records
    assert records[ONE.id] == ONE.encoded()
    assert [records[f"bad{number}"] for number in range(4)] == [b"text", b"None", b"5", b"\xff"]
    assert len(records) == 6


@pytest.mark.parametrize("query", ["?pol=1", "?poll=0", "?tls=1"])
def test_an_option_that_makes_no_sense_is_refused(query):
    with pytest.raises(ConfigurationError):
        open_provider(f"sqlite:///run/a.db{query}", Settings(LEASE, 1.0))


def test_polls_come_as_often_as_the_url_says(opened, timer):
    opened("?poll=0.5", timer=timer).watch("shop.Orders", told := Told())
    assert wait_until(lambda: told.last == [])
    assert wait_until(lambda: timer.pending == 2)  # the poll, and the look without reason
    opened(timer=timer).publish([ONE])
    timer.advance(0.49)
    assert told.last == []
    timer.advance(0.02)
    assert wait_until(lambda: told.last == [ONE.id])


def test_polls_go_on_after_the_directory_was_none_for_a_while(opened, path):
    directory = path.parent / "run"
    directory.mkdir()
    url = f"sqlite://{directory}/registry.db"
    settings = Settings(60.0, 1.0)
    with closing(open_provider(url, settings)) as one, closing(open_provider(url, settings)) as two:
        one.publish([ONE])
        two.watch("shop.Orders", told := Told())
        assert wait_until(lambda: told.last == [ONE.id] and two._planned)
        directory.rename(path.parent / "away")
        directory.touch()
        assert wait_until(lambda: any(isinstance(news, str) for news in told.news))
        directory.unlink()
        (path.parent / "away").rename(directory)
        one.publish([TWO])
        assert wait_until(lambda: told.last == [ONE.id, TWO.id])
        one.withdraw([ONE])
        assert wait_until(lambda: told.last == [TWO.id])


def test_a_timer_that_is_full_keeps_no_watch_from_being_told(opened, events):
    with WheelTimer(max_pending=1) as timer:
        timer.new_timeout(print, 1000)
        publisher, other = opened(lease=60.0), opened(lease=60.0, timer=timer)
        other.watch("shop.Orders", told := Told())
        assert wait_until(lambda: told.last == [])
        for one in (ONE, TWO):
            publisher.publish([one])
            assert wait_until(lambda one=one: told.last and one.id in told.last)
        other.close()
    assert wait_until(lambda: any(isinstance(event, RegistryFailed) for event in events))


# Processes


PUBLISHER = """
import sys, time
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import open_provider
url, lease, name, many = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
provider = open_provider(url, Settings(lease, 5.0))
mine = [ServiceInstance(service="shop.Orders", host=name, port=1 + n) for n in range(many)]
provider.publish(mine)
print("published", flush=True)
while sys.stdin.readable():
    lost = provider.renew(mine)
    if lost:
        print("lost", sorted(set(lost.values())), flush=True)
        provider.publish(mine)
    time.sleep(0.1)
"""


@contextmanager
def process(path, name, *, many=1, lease=LEASE):
    """Another process that publishes and renews; killed in the end."""
    command = [sys.executable, "-c", textwrap.dedent(PUBLISHER), f"sqlite://{path}", str(lease)]
    with subprocess.Popen(
        [*command, name, str(many)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout.readline() == "published\n"
            yield running
        finally:
            running.kill()


def test_processes_see_each_other_and_one_that_is_killed_is_gone_after_its_lease(opened, path):
    provider = opened()
    provider.watch("shop.Orders", told := Told())
    with (
        process(path, "a", many=20, lease=3.0) as a,
        process(path, "b", many=20, lease=3.0) as b,
    ):
        everybody = sorted(f"{name}:{1 + number}" for name in "ab" for number in range(20))
        assert wait_until(lambda: told.last == everybody)
        a.kill()
        a.wait()
        those_of_b = [one for one in everybody if one.startswith("b")]
        assert wait_until(lambda: told.last == those_of_b)
        assert sorted(provider.lookup("shop.Orders").records) == those_of_b
        assert b.poll() is None
    assert wait_until(lambda: told.last == [])
    assert not any(isinstance(news, str) for news in told.news)


def test_a_file_that_is_deleted_is_made_again_by_whoever_publishes_and_all_converge(opened, path):
    provider = opened()
    provider.publish([ONE])
    provider.watch("shop.Orders", told := Told())
    with process(path, "a", lease=60.0) as a:
        assert wait_until(lambda: told.last == [ONE.id, "a:1"])
        for left in path.parent.glob("registry.db*"):
            left.unlink()
        assert a.stdout.readline() == "lost ['wiped']\n"
        assert provider.renew([ONE]) == {ONE.key: "wiped"}
        provider.publish([ONE])
        assert wait_until(lambda: any("another file is in its place" in news for news in told.news))
        assert wait_until(lambda: told.last == [ONE.id, "a:1"])


def test_one_that_was_stopped_longer_than_its_lease_learns_that_it_was_gone(opened, path):
    provider = opened()
    provider.watch("shop.Orders", told := Told())
    with process(path, "a") as a:
        assert wait_until(lambda: told.last == ["a:1"])
        a.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: told.last == [])
        a.send_signal(signal.SIGCONT)
        assert a.stdout.readline() == "lost ['lease']\n"
        assert wait_until(lambda: told.last == ["a:1"])


def test_a_forked_child_has_a_lease_of_its_own_and_does_not_touch_its_parents(opened):
    provider = opened()
    provider.publish([ONE])
    provider.watch("shop.Orders", told := Told())
    assert wait_until(lambda: told.last == [ONE.id])
    with provider._file._lock, provider._changed:  # as other threads might have them
        child = os.fork()
        if not child:
            code = 1
            try:
                lost = provider.renew([ONE])
                provider.publish([TWO])
                found = list(provider.lookup("shop.Orders").records)
                provider.close()
                code = 0 if (lost, found) == ({ONE.key: "lease"}, [ONE.id, TWO.id]) else 2
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert provider.renew([ONE]) == {}
    assert wait_until(lambda: list(provider.lookup("shop.Orders").records) == [ONE.id])
