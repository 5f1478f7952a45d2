"""The journal in PostgreSQL: failures of the server, rights, tables, and locks."""

import dataclasses
import secrets

import psycopg
import pytest

from fixtures.engine_postgresql import PostgresqlEngine
from fixtures.journal_calls import ROUTES, bodies_of, new_call
from fixtures.listeners import answers
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel.cli import main
from rpcwheel.errors import (
    JournalFull,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
)
from rpcwheel.journal import Filter
from rpcwheel.journal import postgresql as module
from rpcwheel.journal.backend import CallState, Dead, Delivered


@pytest.fixture
def schema():
    return f"test_{secrets.token_hex(4)}"


@pytest.fixture
def journal(postgresql, schema, opened):
    """A journal in a schema of its own."""
    return opened(postgresql.journal_url(schema=schema))


# Failures of the server


def test_an_ordered_append_whose_answer_was_lost_has_an_unknown_outcome(
    own_postgresql, schema, opened, impatient
):
    journal = opened(own_postgresql.journal_url(schema=schema))
    journal.append([new_call(0)])  # connected
    own_postgresql.freeze()
    try:
        with pytest.raises(JournalOutcomeUnknown, match="not known whether the call was sto"):
            journal.append([new_call(1, order_key="a")])
    finally:
        own_postgresql.thaw()


@pytest.mark.parametrize("options", [{}, {"options": "-c default_transaction_read_only=on"}])
def test_the_commands_show_calls_to_a_role_that_may_only_read(
    options, journal, postgresql, schema, capsys
):
    """Also of a server that only reads, as a standby does."""
    journal.append([new_call(1)])
    journal.take("died", 0.05, ROUTES, 0.0)
    ended = f"SELECT 1 FROM {schema}.worker WHERE ends_ms / 1e3 < extract(epoch FROM now())"
    wait_until(lambda: postgresql.ask(ended))
    role = f"reader_{schema}"
    postgresql.ask(f"CREATE ROLE {role} LOGIN")
    postgresql.ask(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    postgresql.ask(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}")
    url = postgresql.journal_url(user=role, schema=schema, **options)
    assert main(["journal", "stats", url]) == 0
    assert "0 waiting, 1 taken" in capsys.readouterr().out


def test_a_full_disk_is_reported(journal, postgresql, schema):
    journal.append([new_call(1)])
    (number,) = (one.id for one in journal.take("worker", 60.0, ROUTES, 0.0))
    postgresql.ask(
        f"""CREATE FUNCTION {schema}.full() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN RAISE ''no space'' USING ERRCODE = ''53100''; END'"""
    )
    for event in ("INSERT", "DELETE"):
        postgresql.ask(
            f"""CREATE TRIGGER full_{event} AFTER {event} ON {schema}.call
                FOR EACH ROW EXECUTE FUNCTION {schema}.full()"""
        )
    with pytest.raises(JournalFull, match=r"no space.*the server's disk is full"):
        journal.append([new_call(2)])
    with pytest.raises(JournalFull):
        journal.append([new_call(2, order_key="a")])
    with pytest.raises(JournalFull):
        journal.report("worker", [Delivered(number)])
    postgresql.ask(f"DROP FUNCTION {schema}.full CASCADE")
    assert journal.report("worker", [Delivered(number)]) == []
    assert journal.select(Filter()) == []


def on_delete(postgresql, schema, body, *, at_commit=False):
    """Let the server execute this when calls are deleted, or then before the commit."""
    postgresql.ask(
        f"""CREATE FUNCTION {schema}.on_delete() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN {body}; RETURN NULL; END'"""
    )
    kind, deferred = ("CONSTRAINT", "DEFERRABLE INITIALLY DEFERRED") if at_commit else ("", "")
    postgresql.ask(
        f"""CREATE {kind} TRIGGER on_delete AFTER DELETE ON {schema}.call {deferred}
            FOR EACH ROW EXECUTE FUNCTION {schema}.on_delete()"""
    )


@pytest.mark.parametrize("code", ["40P01", "40001"])
def test_transactions_that_others_have_made_fail_are_repeated(journal, postgresql, schema, code):
    journal.append([new_call(1, order_key="a"), new_call(2, order_key="a")])
    journal.take("worker", 60.0, ROUTES, 0.0)
    postgresql.ask(f"CREATE SEQUENCE {schema}.failures")  # a rollback leaves it
    on_delete(
        postgresql,
        schema,
        f"""IF nextval(''{schema}.failures'') <> 3
            THEN RAISE ''again'' USING ERRCODE = ''{code}''; END IF""",
    )
    assert journal.report("worker", [Delivered(1)]) == []
    assert [one.state for one in journal.select(Filter())] == [CallState.READY]
    with pytest.raises(JournalUnavailable, match="again"):
        journal.delete(Filter())
    assert len(journal.select(Filter())) == 1


# Locks


def test_a_request_that_waits_for_locks_ends(journal, postgresql, schema, impatient):
    journal.append([new_call(1)])
    with psycopg.connect(postgresql.journal_url()) as other:
        other.execute(f"LOCK TABLE {schema}.call")
        for request in (lambda: journal.append([new_call(2)]), lambda: journal.select(Filter())):
            with pytest.raises(JournalUnavailable, match="statement timeout"):
                request()
        other.rollback()
    journal.append([new_call(3)])
    assert bodies_of(journal.select(Filter())) == [1, 3]


def test_requests_of_operators_delay_no_workers_and_no_counts(journal, postgresql, schema):
    journal.append([new_call(1), new_call(2)])
    with psycopg.connect(postgresql.journal_url()) as other:
        other.execute(f"SELECT 1 FROM {schema}.call WHERE id = 1 FOR UPDATE")
        deleting = in_thread(journal.delete, Filter())
        wait_until(lambda: other.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall())
        journal.append([new_call(3)])
        assert bodies_of(journal.take("worker", 60.0, ROUTES, 0.0)) == [2, 3]
        assert [(depth.waiting, depth.taken) for depth in journal.depths()] == [(1, 2)]
        assert not deleting.done()
        other.rollback()
        deleting.result(WAIT_S)
    assert bodies_of(journal.select(Filter())) == [3]


def test_a_call_that_is_being_taken_is_not_blocked_by_a_retried_dead_letter(
    journal, postgresql, schema
):
    journal.append([new_call(1, order_key="a"), new_call(2, order_key="a")])
    journal.take("worker", 60.0, ROUTES, 0.0)
    journal.report("worker", [Dead(1, 2, "", "")])
    with psycopg.connect(postgresql.journal_url()) as other:
        other.execute(f"UPDATE {schema}.call SET state = 2, worker = 'other' WHERE id = 2")
        retrying = in_thread(journal.retry, Filter(ids=(1,)))
        wait_until(lambda: other.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall())
        other.commit()
        retrying.result(WAIT_S)
    states = [one.state for one in journal.select(Filter())]
    assert states == [CallState.BLOCKED, CallState.TAKEN]


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_an_append_waits_for_a_result_that_ends_the_call_before_it(
    isolation, journal, postgresql, schema, opened
):
    """Also if the role or the database has another level of isolation by default."""
    journal.append([new_call(1, order_key="a")])
    journal.take("worker", 60.0, ROUTES, 0.0)
    on_delete(postgresql, schema, "PERFORM pg_advisory_xact_lock(1)", at_commit=True)
    level = isolation.replace(" ", "\\ ")
    options = f"-c default_transaction_isolation={level}"
    other = opened(postgresql.journal_url(schema=schema, options=options))

    def wait_for_waiting(count):
        query = "SELECT 1 FROM pg_locks WHERE NOT granted"
        wait_until(lambda: len(postgresql.ask(query)) == count)

    with psycopg.connect(postgresql.journal_url()) as lock:
        lock.execute("SELECT pg_advisory_xact_lock(1)")
        reporting = in_thread(journal.report, "worker", [Delivered(1)])
        wait_for_waiting(1)
        appending = in_thread(other.append, [new_call(2, order_key="a")])
        wait_for_waiting(2)
        lock.rollback()
        assert reporting.result(WAIT_S) == []
        appending.result(WAIT_S)
    assert [one.state for one in journal.select(Filter())] == [CallState.READY]


# Rights and tables


def test_a_wrong_password_is_refused_and_not_shown(opened):
    with PostgresqlEngine(password="sesame") as engine:
        journal = opened(engine.journal_url(user="postgres:hunter2"))
        with pytest.raises(JournalRefused, match="password authentication failed") as refused:
            journal.append([new_call(1)])
        assert "hunter2" not in str(refused.value)
        with pytest.raises(JournalRefused, match="no password supplied"):
            opened(engine.journal_url(user="postgres:").replace(":@", "@")).routes()
        opened(engine.journal_url()).append([new_call(1)])


def test_a_refused_certificate_is_told_from_a_refused_user(opened, listen):
    server = listen(answers(b"S"))  # it accepts TLS
    url = f"postgresql://bob:sesame@{server.target}/shop?sslmode=verify-full&sslrootcert=/none"
    with pytest.raises(JournalRefused, match=r"sslrootcert, sslcert and sslkey$") as refused:
        opened(url).routes()
    assert "password" not in str(refused.value)


def test_a_name_is_not_taken_for_the_reason_of_a_refusal(opened, listen):
    said = b'SFATAL\0C28P01\0Mpassword authentication failed for user "certificate"\0\0'
    server = listen(answers(b"E" + (len(said) + 4).to_bytes(4, "big") + said))
    url = f"postgresql://certificate:sesame@{server.target}/certificates?sslmode=disable"
    with pytest.raises(JournalRefused, match="look at the user, the password"):
        opened(url).routes()


def test_a_role_without_rights_is_refused(journal, postgresql, schema, opened):
    journal.append([new_call(1)])
    role = f"role_{schema}"
    postgresql.ask(f"CREATE ROLE {role} LOGIN")
    with pytest.raises(JournalRefused, match="permission denied for schema"):
        opened(postgresql.journal_url(user=role, schema=schema)).append([new_call(2)])
    with pytest.raises(JournalRefused, match="permission denied for database"):
        opened(postgresql.journal_url(user=role, schema=f"{schema}_2")).append([new_call(2)])
    with pytest.raises(JournalRefused, match=r"role .* does not exist"):
        opened(postgresql.journal_url(user="nobody_else")).append([new_call(2)])


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("version AS SELECT '1'::text AS version", "than those of a journal; give"),
        ("version (version integer)", "than those of a journal; give"),
        # Before PostgreSQL 18, there is no max() of rows.
        ("version AS SELECT 1 AS number", "than those of a journal(, or .* a function)?; give"),
        ("version AS SELECT '{}'::jsonb AS version", "or the server lacks a function; give"),
        ("call (number integer)", "than those of a journal; give"),
    ],
)
def test_a_schema_with_other_tables_is_refused(table, problem, postgresql, schema, opened):
    postgresql.ask(f"CREATE SCHEMA {schema}")
    postgresql.ask(f"CREATE TABLE {schema}.{table}")
    with pytest.raises(JournalRefused, match=problem):
        opened(postgresql.journal_url(schema=schema)).append([new_call(1)])


def test_tables_that_were_deleted_are_created_again(journal, postgresql, schema):
    journal.append([new_call(1)])
    postgresql.ask(f"DROP SCHEMA {schema} CASCADE")
    with pytest.raises(JournalUnavailable):
        journal.append([new_call(2)])
    journal.append([new_call(3)])
    assert bodies_of(journal.select(Filter())) == [3]


def test_a_value_that_cannot_be_stored_is_refused(journal):
    with pytest.raises(JournalRefused, match="the journal cannot store such a value"):
        journal.append([new_call(1, order_key=secrets.token_hex(10_000))])
    with pytest.raises(JournalRefused, match="the journal cannot store such a value"):
        journal.append([new_call(1, attempts=2**63)])
    journal.append([new_call(2)])
    assert bodies_of(journal.select(Filter())) == [2]


def test_texts_are_kept_in_a_database_without_an_encoding(postgresql, schema, opened):
    postgresql.ask(f"CREATE DATABASE {schema} ENCODING 'SQL_ASCII' TEMPLATE template0")
    journal = opened(f"{postgresql.journal_url().removesuffix('postgres')}{schema}")
    journal.append([new_call(1, error="Zürich ∑", order_key="ü")])
    (taken,) = journal.take("worker", 60.0, ROUTES, 0.0)
    assert (taken.queue, taken.error, taken.order_key) == ("orders", "Zürich ∑", "ü")
    assert journal.report("worker", [Dead(taken.id, 2, "Zürich", "∑")]) == []
    assert [depth.queue for depth in journal.depths()] == ["orders"]
    assert journal.delete(Filter(error="∑")) == 1


def test_a_database_whose_encoding_lacks_characters_is_refused(postgresql, schema, opened):
    postgresql.ask(
        f"CREATE DATABASE {schema} ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    )
    journal = opened(f"{postgresql.journal_url().removesuffix('postgres')}{schema}")
    with pytest.raises(JournalRefused, match="has the encoding LATIN1"):
        journal.append([new_call(1)])


def test_a_database_whose_encoding_a_proxy_does_not_tell_is_used(journal, monkeypatch):
    monkeypatch.setattr(psycopg.ConnectionInfo, "parameter_status", lambda *_: None)
    journal.append([new_call(1)])


def test_a_server_that_only_reads_is_unavailable(journal, postgresql, schema, opened):
    journal.append([new_call(1)])
    reading = opened(
        postgresql.journal_url(schema=schema, options="-c default_transaction_read_only=on")
    )
    assert bodies_of(reading.select(Filter())) == [1]
    with pytest.raises(JournalUnavailable, match="read-only"):
        reading.append([new_call(2)])


def test_connections_are_named_and_limited(journal, monkeypatch):
    connections, connect = [], psycopg.Connection.connect.__func__

    def recording(kind, **parameters):
        connections.append(connect(kind, **parameters))
        return connections[-1]

    monkeypatch.setattr(psycopg.Connection, "connect", classmethod(recording))
    journal.append([new_call(1)])
    (db,) = connections
    shown = [
        db.execute(f"SHOW {name}").fetchone()[0]
        for name in ("application_name", "statement_timeout", "idle_in_transaction_session_timeout")
    ]
    assert shown == ["rpcwheel", "10s", "10s"]
    parameters = {one.keyword.decode(): one.val for one in db.pgconn.info}
    assert parameters["connect_timeout"] == b"10"
    assert parameters["tcp_user_timeout"] == b"10000"


def test_a_take_while_another_backend_ends_workers_returns_all_that_it_takes(journal, monkeypatch):
    journal.append([new_call(), new_call()])
    monkeypatch.setattr(module, "HAS_ENDED", "SELECT 1")  # they have ended since
    found = journal.take("w", 60.0, [dataclasses.replace(ROUTES[0], limit=1)], 0.0)
    taken = journal.select(Filter(states=(CallState.TAKEN,)))
    assert [call.id for call in found] == [call.id for call in taken]
