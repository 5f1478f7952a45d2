"""Rules of the journals in PostgreSQL and in Redis: a server that fails, and versions."""

import secrets

import pytest

from fixtures.journal_calls import ROUTES, bodies_of, new_call
from fixtures.processes import has_ended
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import JournalOutcomeUnknown, JournalRefused, JournalUnavailable
from rpcwheel.failback import JournalWorker, with_failback
from rpcwheel.journal import Filter, open_journal_backend
from rpcwheel.journal.backend import CallState, Delivered


class InPostgresql:
    """A schema of a server."""

    missing = "there is no journal in the schema"

    def __init__(self, engine, name):
        self.engine = engine
        self._name = name

    def url(self, suffix=""):
        return self.engine.journal_url(schema=f"{self._name}{suffix}")

    def set_version(self, version):
        self.engine.ask(f"UPDATE {self._name}.version SET version = {version}")

    def lose(self, number):
        self.engine.ask(f"DELETE FROM {self._name}.call WHERE id = {number}")

    def disconnect(self):
        """End all connections, as the server or a firewall does with idle ones."""
        ended = self.engine.ask(
            """SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE application_name = 'rpcwheel'"""
        )
        wait_until(lambda: all(has_ended(pid) for pid, _ in ended))

    def exists(self):
        query = f"SELECT 1 FROM pg_namespace WHERE nspname = '{self._name}'"
        return self.engine.ask(query) != []


class InRedis:
    """A namespace of a server."""

    missing = "there are no keys"

    def __init__(self, engine, name):
        self.engine = engine
        self._name = name

    def url(self, suffix=""):
        return self.engine.url(namespace=f"{self._name}{suffix}")

    def set_version(self, version):
        self.engine.ask("SET", f"{self._name}:version", f"{version}")

    def lose(self, number):
        self.engine.ask("DEL", f"{self._name}:call:{number}")

    def disconnect(self):
        """End all connections."""
        self.engine.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def exists(self):
        return self.engine.ask("KEYS", f"{self._name}:*") != []


PLACES = {"postgresql": InPostgresql, "redis": InRedis}


@pytest.fixture(params=PLACES)
def place(request, impatient):
    """Where a journal is on a server that tests kill and freeze; requests wait for 1 s."""
    engine = request.getfixturevalue(f"own_{request.param}")
    return PLACES[request.param](engine, f"test_{secrets.token_hex(4)}")


@pytest.fixture
def journal(place, opened):
    return opened(place.url())


def test_calls_survive_a_killed_server(place, journal):
    journal.append([new_call(1)])
    (taken,) = journal.take("worker", 60.0, ROUTES, 0.0)
    journal.append([new_call(2)])
    place.engine.kill9()
    for request in (
        lambda: journal.append([new_call(3)]),
        lambda: journal.report("worker", [Delivered(taken.id)]),
        lambda: journal.select(Filter()),
        journal.depths,
    ):
        with pytest.raises(JournalUnavailable):
            request()
    with pytest.raises(JournalUnavailable) as refused:
        journal.append([new_call(3)])
    assert not isinstance(refused.value, JournalOutcomeUnknown)  # it was not sent
    place.engine.start()
    assert journal.report("worker", [Delivered(taken.id)]) == []
    journal.append([new_call(4)])
    assert bodies_of(journal.select(Filter())) == [2, 4]


def test_a_frozen_server_is_unavailable(place, journal):
    journal.append([new_call(1)])
    journal.depths()  # connected
    place.engine.freeze()
    try:
        with pytest.raises(JournalOutcomeUnknown):
            journal.append([new_call(2)])
        with pytest.raises(JournalUnavailable):
            journal.depths()
    finally:
        place.engine.thaw()
    journal.append([new_call(3)])
    assert set(bodies_of(journal.select(Filter()))) >= {1, 3}


def test_a_connection_that_was_closed_while_it_was_idle_is_opened_again(place, journal):
    journal.append([new_call(1)])
    place.disconnect()
    journal.append([new_call(2)])
    place.disconnect()
    journal.append([new_call(3, order_key="a")])
    place.disconnect()
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [1, 2, 3]
    assert len(journal.depths()) == 1
    place.disconnect()
    assert len(journal.depths()) == 1


def test_calls_taken_by_a_request_whose_answer_was_lost_are_taken_again(place, journal):
    journal.append([new_call(0)])
    journal.take("worker", 60.0, ROUTES, 0.0)
    calls = [new_call(1), new_call(2, order_key="a"), new_call(3, order_key="a"), new_call(4)]
    *_, lost = journal.append(calls)
    place.engine.freeze()
    try:
        with pytest.raises(JournalUnavailable):
            journal.take("worker", 60.0, ROUTES, 0.0)
    finally:
        place.engine.thaw()
    wait_until(lambda: len(journal.select(Filter(states=(CallState.TAKEN,)))) == 4)
    place.lose(lost)
    assert journal.renew("worker", 60.0)
    assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [1, 2]
    assert journal.take("worker", 60.0, ROUTES, 0.0) == []


def test_a_journal_of_a_newer_version_is_refused(place, journal, opened):
    journal.append([new_call(1)])
    place.set_version(2)
    newer = opened(place.url())
    with pytest.raises(JournalRefused, match=r"newer rpcwheel \(version 2 .*: update rpcwheel"):
        newer.append([new_call(2)])
    place.set_version(1)
    newer.append([new_call(3)])


def test_schemas_and_namespaces_are_separate_journals(place, journal, opened):
    other = opened(place.url("_2"))
    journal.append([new_call(1)])
    assert other.select(Filter()) == []
    assert other.take("worker", 60.0, ROUTES, 0.0) == []


def test_a_worker_skips_functions_whose_journal_is_another_one_on_its_server(place, journal):
    journal.append([new_call(1, queue="push", target="", method="push")])

    @with_failback(retry_on=ConnectionError, journal=place.url("_2"), name="push")
    def push():
        raise AssertionError

    with JournalWorker(place.url(), functions=[push], once=True) as worker:
        assert worker.wait(WAIT_S)
        (reason,) = worker.skipped.values()
        assert reason.startswith("the journal of the function is ")
        assert "_2" in reason
    push.failback.close(0)
    assert [call.state for call in journal.select(Filter())] == [CallState.READY]


def test_only_programs_that_use_a_journal_create_it(place, opened):
    reading = open_journal_backend(place.url(), create=False)
    with pytest.raises(JournalRefused, match=place.missing):
        reading.depths()
    assert not place.exists()
    opened(place.url()).append([new_call(1)])
    assert bodies_of(reading.select(Filter())) == [1]
    reading.close()
