"""`rpcwheel journal work` as a process, on a journal that other processes have filled."""

import re
import signal
import sys
from functools import partial

import pytest

from fixtures.grpc_servers import requests_of
from fixtures.journals import stored_rpc
from fixtures.programs import command, ended, python
from fixtures.shop import Hang, Shop
from fixtures.waiting import START_S, wait_until
from rpcwheel.cli import main
from rpcwheel.failback import JournalWorker
from rpcwheel.journal import CallState, Filter, open_journal_backend

HOUR_S = 3600.0

working = partial(command, "journal", "work")

PROGRAM = """
import asyncio, sys
import grpc
import rpcwheel
from rpcwheel import CallPolicy, FailbackPolicy
import tasks

durable = {"journal": tasks.URL, "default": b"queued"}
failback = FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01, **durable)
bare = grpc.insecure_channel(sys.argv[1])
queues = rpcwheel.interceptors.FailbackQueues()
with rpcwheel.intercept_channel(bare, CallPolicy(failback=failback), queues=queues) as channel:
    assert channel.unary_unary("/test.Shop/UnaryUnary")(b"order 1", timeout=30.0) == b"queued"
    queues.close(0)
assert tasks.record("line 1") is None
tasks.record.failback.close(0)
assert asyncio.run(tasks.record_aio("line 2")) is None
"""
"""Stores a gRPC call to a server that does not run, and the calls of two functions."""

IMPATIENT = """
import sys
from rpcwheel.cli import journal_work, main

journal_work.PROGRESS_INTERVAL_S = 0.0
sys.exit(main(sys.argv[1:]))
"""

TASKS = """
import os
from pathlib import Path
from rpcwheel import with_failback

URL = {url!r}


def write(line):
    if "DOWN" in os.environ:
        raise ConnectionError("the disk is away")
    with Path("lines").open("a") as lines:
        lines.write(line + "\\n")


@with_failback(retry_on=ConnectionError, backoff=0.01, journal=URL)
def record(line: str) -> None:
    write(line)


@with_failback(retry_on=ConnectionError, backoff=0.01, journal=URL)
async def record_aio(line: str) -> None:
    write(line)
"""


@pytest.fixture
def url(worker_url):
    return worker_url


def run(*words, capsys):
    status = main(["journal", "work", *words])
    return status, capsys.readouterr().err


def test_calls_that_another_process_has_stored_are_delivered(url, tmp_path, shop):
    (tmp_path / "tasks.py").write_text(TASKS.format(url=url))
    shop.kill()
    stored = python("-c", PROGRAM, shop.target, cwd=tmp_path, DOWN="1")
    assert stored.returncode == 0, stored.stderr
    backend = open_journal_backend(url, create=False)
    assert len(backend.select(Filter(states=(CallState.READY,)))) == 3
    shop.start()
    with working(url, "--import", "tasks", cwd=tmp_path) as process:
        wait_until(lambda: not backend.select(Filter()), timeout=START_S)
        status, _, err = ended(process, signal.SIGTERM)
    backend.close()
    assert (status, requests_of(shop)) == (0, [b"order 1"])
    assert sorted((tmp_path / "lines").read_text().split("\n")) == ["", "line 1", "line 2"]
    assert "ended: 3 delivered, 0 given up" in err


def test_a_signal_gives_the_calls_to_another_worker_at_once(url, backend, shop):
    shop.then(hang := Hang())
    backend.append([stored_rpc(shop.target)])
    with working(url, "--grace", "0.01") as process:
        assert hang.begun.wait(START_S)
        assert [call.state for call in backend.select(Filter())] == [CallState.TAKEN]
        assert ended(process, signal.SIGINT)[0] == 0
    with JournalWorker(url):  # the lease would end after an hour
        wait_until(lambda: not backend.select(Filter()))
    assert requests_of(shop) == [b"order 1", b"order 1"]


def test_a_second_signal_ends_the_process_at_once(url, backend, shop):
    shop.then(hang := Hang())
    backend.append([stored_rpc(shop.target)])
    with working(url, "--grace", "1000") as process:
        assert hang.begun.wait(START_S)
        process.send_signal(signal.SIGTERM)
        while "a second signal ends them" not in process.stderr.readline():
            assert process.poll() is None
        assert ended(process, signal.SIGTERM)[0] == 143


def test_progress_is_reported_when_it_changes(url, backend, shop):
    backend.append([stored_rpc(shop.target), stored_rpc(shop.target, b"2", delay_s=HOUR_S)])
    with working(url, program=("-c", IMPATIENT)) as process:
        lines = iter(process.stderr.readline, "")
        progress = "so far 1 delivered, 0 given up, 0 failed attempts; [12] calls? left"
        assert any(re.search(progress, line) for line in lines)
        ended(process, signal.SIGTERM)


# In this process


def test_once_delivers_what_is_due_and_logs_failures(
    url, backend, shop, tmp_path, monkeypatch, capsys, caplog
):
    warning = "error ignored in rollback on <_Bounded [BAD] at 0x7f00>: the connection is lost"
    (tmp_path / "lossy.py").write_text(
        f"import logging\nlogging.getLogger('psycopg').warning({warning!r})\n"
    )
    gone = [stored_rpc("gone:1", b"%d" % number) for number in range(20)]
    backend.append([stored_rpc("shop.Orders"), *gone])
    words = ["--map", f"shop.Orders={shop.target}", "--map", "gone:1=127.0.0.1:1"]
    monkeypatch.syspath_prepend(tmp_path)
    try:
        status, err = run(url, "--once", "--import", "lossy", *words, capsys=capsys)
    finally:
        sys.modules.pop("lossy", None)
    assert (status, requests_of(shop)) == (0, [b"order 1"])
    assert "ended: 1 delivered, 0 given up" in err
    assert "20 calls are left" in err
    assert "ignored in rollback" not in err + caplog.text
    lines = [line for line in err.splitlines() if "UNAVAILABLE" in line]
    assert lines
    assert all("INFO" in line for line in lines)
    (line,) = (line for line in err.splitlines() if "more FailbackAttemptFailed not logged" in line)
    assert re.match(r"\d{4}-\d\d-\d\d .* INFO +audit .*: \d+ more ", line)


def test_options_are_the_settings_of_the_worker(url, backend, tmp_path, monkeypatch, capsys):
    given, begin, close = [], JournalWorker.__init__, JournalWorker.close

    def beginning(worker, url, **settings):
        begin(worker, url, **settings)
        given.append(settings)

    def closing(worker, grace):
        close(worker, grace)
        given.append(grace)

    monkeypatch.setattr(JournalWorker, "__init__", beginning)
    monkeypatch.setattr(JournalWorker, "close", closing)
    (tmp_path / "tasks_of_test.py").write_text(TASKS.format(url=url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as the script has it
    words = "--queue audit --target a --target b --retry-on ABORTED --retry-on UNAVAILABLE"
    words += " --backoff 60 --max-attempts 3 --rate 2 --max-in-flight 4 --grace 7 --once"
    try:
        status, _ = run(url, *words.split(), "--import", "tasks_of_test", capsys=capsys)
    finally:
        sys.modules.pop("tasks_of_test", None)
    assert status == 0
    settings, grace, _ = given
    assert grace == 7.0
    assert " 'tasks_of_test.record_aio'>" in repr(settings.pop("functions"))
    del settings["connect"], settings["metadata"]
    assert settings == {
        "queues": ["audit"],
        "targets": ["a", "b"],
        "retry_on": ("ABORTED", "UNAVAILABLE"),
        "backoff": 60.0,
        "max_attempts": 3,
        "rate": 2.0,
        "max_in_flight": 4,
        "once": True,
    }


def test_metadata_comes_from_arguments_files_and_variables(
    url, backend, shop, tmp_path, monkeypatch, capsys
):
    (tmp_path / "token").write_text("Bearer 1\n")
    monkeypatch.setenv("TENANT", "7")
    backend.append([stored_rpc(shop.target)])
    words = [f"authorization=file:{tmp_path}/token", "X-Tenant=env:TENANT", "x-zone=a=b"]
    words += ["Trace-BIN=AAE="]
    options = [part for word in words for part in ("--metadata", word)]
    options.append("--metadata-to-all-targets")
    assert run(url, "--once", *options, capsys=capsys)[0] == 0
    found = shop.calls[0].metadata
    assert {name: found[name] for name in ("authorization", "x-tenant", "x-zone", "trace-bin")} == {
        "authorization": "Bearer 1",
        "x-tenant": "7",
        "x-zone": "a=b",
        "trace-bin": b"\x00\x01",
    }


def test_a_target_with_an_equals_sign_is_mapped(url, backend, shop, capsys):
    target = "sqlite:///var/lib/shop/registry.db?service=shop.Orders"
    backend.append([stored_rpc(target)])
    words = ["--map", f"{target}=127.0.0.1:1", "--map", f"{target}={shop.target}"]
    assert run(url, "--once", *words, capsys=capsys)[0] == 0
    assert len(shop.calls) == 1


@pytest.fixture
def secure_shop(certificates):
    """A server with TLS."""
    with Shop(credentials=certificates.server_credentials()) as shop:
        yield shop


@pytest.mark.parametrize(("name", "attempts"), [("localhost", 0), ("shop.test", 2)])
def test_calls_are_sent_over_tls(
    name, attempts, url, backend, secure_shop, certificates, tmp_path, capsys
):
    (tmp_path / "ca.pem").write_bytes(certificates.root)
    backend.append([stored_rpc(secure_shop.target)])
    words = ["--ca", str(tmp_path / "ca.pem"), "--servername", name]
    assert run(url, "--once", *words, capsys=capsys)[0] == 0
    assert requests_of(secure_shop) == ([] if attempts else [b"order 1"])
    assert sum(call.attempts for call in backend.select(Filter())) == attempts


@pytest.mark.parametrize(
    ("delay_s", "options", "left"),
    [
        (HOUR_S, [], "2 calls are left: not due yet, "),
        (HOUR_S, ["--queue", "audit"], "1 call is left: not due yet, "),
        (0.0, [], ""),
    ],
)
def test_once_says_how_many_calls_are_left(delay_s, options, left, url, backend, shop, capsys):
    later = [
        stored_rpc(shop.target, b"2", delay_s=delay_s),
        stored_rpc("b", b"3", queue="mail", delay_s=delay_s),
    ]
    backend.append([stored_rpc(shop.target), *(later if delay_s else ())])
    _, err = run(url, "--once", *options, capsys=capsys)
    assert left in err
    assert ("left" in err) is bool(left)


def test_calls_that_cannot_be_delivered_are_reported(url, backend, capsys):
    backend.append(
        [stored_rpc("", queue="shop.tasks.mail"), stored_rpc("", b"2", queue="shop.tasks.mail")]
    )
    status, err = run(url, "--once", capsys=capsys)
    assert status == 0
    assert err.count("skips the calls of shop.tasks.mail: they are calls of a function") == 1


def test_a_module_that_ends_the_process_cannot_be_imported(
    url, backend, tmp_path, monkeypatch, capsys
):
    (tmp_path / "script_of_test.py").write_text("raise SystemExit('no settings')")
    monkeypatch.syspath_prepend(tmp_path)
    status, err = run(url, "--once", "--import", "script_of_test", capsys=capsys)
    assert status == 2
    assert "cannot import script_of_test: SystemExit: no settings" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--import", "no_such_module"], "cannot import no_such_module: ModuleNotFoundError"),
        (["--metadata", "token=swordfish"], "--metadata-to-all-targets"),
        (["--target", "a", "--metadata", "swordfish"], "KEY=VALUE"),
        (["--target", "a", "--metadata", "token=file:/no/such/file"], "No such file"),
        (["--target", "a", "--metadata", "token=env:NO_SUCH"], "there is no variable NO_SUCH"),
        (["--target", "a", "--metadata", "token-bin=swordfish"], "base64 for -bin"),
        (["--target", "a", "--metadata", "a key=swordfish"], "lower-case letters"),
        (["--target", "a", "--metadata", "token=swordfish\n1"], "one line of printable ASCII"),
        (["--target", "a", "--metadata", "token=swördfish"], "one line of printable ASCII"),
        (["--target", "a", "--metadata", "token=swordfish\udcff"], "one line of printable ASCII"),
        (["--map", "shop.Orders"], "TARGET=ADDRESS"),
        (["--retry-on", "UNAVAILBLE"], "did you mean 'UNAVAILABLE'"),
        (["--max-attempts", "0"], "Invalid value for '--max-attempts'"),
        (["--rate", "0"], "Invalid value for '--rate'"),
        (["--backoff", "0"], "above zero"),
        (["--cert", "cert.pem"], "--cert and --key must be given together"),
        (["--servername", ".x"], "not a valid server name"),
    ],
)
def test_wrong_arguments_end_with_2(words, message, url, backend, capsys):
    status, err = run(url, "--once", *words, capsys=capsys)
    assert status == 2
    assert message in err
    assert "swordfish" not in err
