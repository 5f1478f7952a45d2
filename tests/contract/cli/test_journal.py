"""`rpcwheel journal`, run in this process on a journal in a file."""

import base64
import io
import json
import re
import signal
import sqlite3
import struct
import sys
import time

import pytest

from fixtures.terminals import Terminal
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cli import journal as journal_module
from rpcwheel.cli import main
from rpcwheel.cli.journal_view import CALL_COLUMNS, call_row
from rpcwheel.errors import JournalUnavailable
from rpcwheel.failback.stored import StoredFunction, StoredRpc
from rpcwheel.journal import CallState, Filter, NewCall, open_journal_backend
from rpcwheel.journal.backend import Dead, Route
from rpcwheel.journal.sqlite import SqliteJournal
from rpcwheel.rpc import Kind

HOUR_S = 3600.0
TARGET = "127.0.0.1:50051"
METADATA = (("x-tenant", "7"), ("x-api-token", "swordfish"), ("trace-bin", b"\x00\x01"))
PUSH = StoredRpc(Kind.UNARY_UNARY, (b"order 1\x00",), METADATA, 2.5)


def call(**values):
    defaults = {
        "queue": "audit",
        "target": TARGET,
        "method": "/shop.Orders/Push",
        "key": "key-1",
        "body": PUSH.encoded(),
        "delay_s": 0.0,
        "max_age_s": HOUR_S,
        "error": "UNAVAILABLE: no route",
    }
    return NewCall(**defaults | values)


@pytest.fixture
def url(tmp_path):
    return f"sqlite://{tmp_path / 'shop.db'}"


@pytest.fixture
def backend(url):
    backend = open_journal_backend(url)
    yield backend
    backend.close()


def run(*words, capsys, status=0):
    assert main(["journal", *map(str, words)]) == status
    return capsys.readouterr()


def listed(*words, capsys):
    return [
        json.loads(line) for line in run("ls", *words, "--json", capsys=capsys).out.splitlines()
    ]


def kill(backend, number, reason="no attempts left", error="INTERNAL: broken"):
    """Make a call, which must be the first of its queue and target, a dead letter."""
    (one,) = backend.select(Filter(ids=(number,)))
    (taken,) = backend.take("killer", HOUR_S, [Route(one.queue, one.target, 1)], 0.0)
    assert taken.id == number
    assert backend.report("killer", [Dead(number, 3, error, reason)]) == []


# ls


def test_ls_prints_a_table_and_a_summary(url, backend, capsys):
    backend.append([call(), call(queue="mail", delay_s=HOUR_S, attempts=4, error="")])
    lines = run("ls", url, capsys=capsys).out.splitlines()
    assert lines[0].split() == [
        *["ID", "STATE", "QUEUE", "TARGET", "METHOD", "AGE", "ATTEMPTS", "DUE", "LAST", "ERROR"]
    ]
    first, second = lines[1].split(), lines[2].split()
    assert first[:5] == ["1", "waiting", "audit", TARGET, "/shop.Orders/Push"]
    assert lines[1].endswith("now  UNAVAILABLE: no route")
    assert second[:3] == ["2", "waiting", "mail"]
    assert lines[2].endswith("4  in 60 min")
    assert lines[-1] == f"2 calls at {url}"


def test_ls_shows_when_a_call_is_due_only_if_it_waits(url, backend, capsys):
    backend.append([call(), call(queue="mail"), call(queue="late", delay_s=HOUR_S)])
    backend.take("worker", HOUR_S, [Route("audit", TARGET, 1)], 0.0)
    kill(backend, 2)
    due = CALL_COLUMNS.index("due")
    assert [call_row(one)[due] for one in backend.select(Filter())] == ["", "", "in 60 min"]
    assert "an attempt is running, or begins soon" in run("show", url, 1, capsys=capsys).out


def test_ls_of_an_empty_journal_says_so(url, backend, capsys):
    backend.routes()
    assert run("ls", url, capsys=capsys).out == f"no call at {url}\n"


def test_ls_json_has_one_object_a_line_without_the_body(url, backend, capsys):
    backend.append([call(order_key="7"), call(order_key="7", key="key-2")])
    first, second = listed(url, capsys=capsys)
    assert first | {"age_s": 0, "due_s": 0, "expires_s": 0} == {
        "id": 1,
        "state": "waiting",
        "queue": "audit",
        "target": TARGET,
        "method": "/shop.Orders/Push",
        "key": "key-1",
        "order_key": "7",
        "age_s": 0,
        "attempts": 1,
        "due_s": 0,
        "expires_s": 0,
        "error": "UNAVAILABLE: no route",
        "reason": "",
        "bytes": len(PUSH.encoded()),
    }
    assert 0 <= first["age_s"] < HOUR_S
    assert 0 < first["expires_s"] <= HOUR_S
    assert second["state"] == "blocked"


FILTERS = {
    "--queue": ["--queue", "mail"],
    "--target": ["--target", ""],
    "--method": ["--method", "shop.tasks.*"],
    "--error": ["--error", "no answer"],
    "--id": ["--id", "2"],
    "--older": ["--older", "2h"],
    "--state": ["--state", "dead"],
}


@pytest.fixture
def mixed(url, tmp_path):
    """Call 2 differs from calls 1 and 3 in everything that a filter can select."""
    now_s = [1e9]
    backend = open_journal_backend(url)
    backend.clock = lambda: now_s[0]
    function = {"queue": "mail", "target": "", "method": "shop.tasks.mail"}
    backend.append([call()])
    now_s[0] -= 3 * HOUR_S
    backend.append([call(**function, max_age_s=1e12)])
    now_s[0] += 3 * HOUR_S
    backend.append([call(method="/shop.Orders/Get")])
    kill(backend, 2, error="no answer")
    backend.close()
    return url


@pytest.fixture
def at_that_time(monkeypatch):
    """The time of the calls of `mixed`."""
    monkeypatch.setattr(time, "time", lambda: 1e9)


@pytest.mark.usefixtures("at_that_time")
@pytest.mark.parametrize("words", FILTERS.values(), ids=FILTERS)
def test_a_filter_selects_calls(words, mixed, capsys):
    assert [one["id"] for one in listed(mixed, *words, capsys=capsys)] == [2]


@pytest.mark.usefixtures("at_that_time")
@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["--id", "3", "--id", "1"], [1, 3]),
        (["--state", "waiting", "--state", "dead"], [1, 2, 3]),
        (["--state", "taken"], []),
        (["--queue", "mail", "--id", "1"], []),
        (["--method", "/shop.Orders/?et"], [3]),
        (["--older", "4h"], []),
        (["--older", "0s", "--limit", "2"], [1, 2]),
    ],
)
def test_filters_are_combined(words, ids, mixed, capsys):
    assert [one["id"] for one in listed(mixed, *words, capsys=capsys)] == ids


def test_waiting_includes_calls_that_an_order_key_blocks(url, backend, capsys):
    backend.append([call(order_key="7"), call(order_key="7"), call()])
    backend.take("worker", HOUR_S, [Route("audit", TARGET, 1)], 0.0)
    states = [one["state"] for one in listed(url, capsys=capsys)]
    assert states == ["taken", "blocked", "waiting"]
    assert [one["id"] for one in listed(url, "--state", "waiting", capsys=capsys)] == [2, 3]


def test_ls_shows_a_limited_number_and_says_so(url, backend, capsys):
    backend.append([call()] * 3)
    shown = run("ls", url, "--limit", 2, capsys=capsys).out.splitlines()
    assert [line.split()[0] for line in shown[1:3]] == ["1", "2"]
    assert shown[-1].startswith(f"the first 2 calls at {url}; --limit shows more")
    assert run("ls", url, "--limit", 3, capsys=capsys).out.splitlines()[-1] == f"3 calls at {url}"


def test_texts_of_a_journal_are_not_control_characters(url, backend, capsys):
    backend.append([call(queue="\x1b[31m", error="\u202eevil\n")])
    for words in (["ls", url], ["show", url, 1], ["stats", url]):
        shown = run(*words, capsys=capsys).out
        assert shown.replace("\n", "").isprintable()


# show


def test_show_has_everything_but_secrets_and_requests(url, backend, capsys):
    backend.append([call(order_key="customer 9", delay_s=86_400.0)])
    shown = run("show", url, 1, capsys=capsys).out
    lines = {tuple(line.split(None, 1)) for line in shown.splitlines()}
    for name, value in [
        ("id", "1"),
        ("state", "waiting"),
        ("queue", "audit"),
        ("target", TARGET),
        ("method", "/shop.Orders/Push"),
        ("key", "key-1"),
        ("order", "key       customer 9"),
        ("attempts", "1"),
        ("last", "error      UNAVAILABLE: no route"),
        ("kind", "unary_unary"),
        ("timeout", "2.5 s for each attempt"),
        ("metadata", "x-tenant=7"),
        ("metadata", "x-api-token=***"),
        ("metadata", "trace-bin=AAE="),
        ("requests", "1 (8 bytes)"),
    ]:
        assert (name, value) in lines, shown
    assert re.search(r"^due +in (24|23\.9.*) h$", shown, re.MULTILINE), shown
    assert re.search(r"^expires +in (60|59\.\d+) min$", shown, re.MULTILINE), shown
    assert "swordfish" not in shown
    assert "order 1" not in shown


def test_show_body_dumps_the_requests(url, backend, capsys):
    body = StoredRpc(Kind.STREAM_UNARY, (b"order 1\x00", b"x" * 1025)).encoded()
    backend.append([call(body=body)])
    lines = run("show", url, 1, "--body", capsys=capsys).out.splitlines()
    assert "requests        2 (8, 1,025 bytes)" in lines
    first = lines.index("request 1")
    assert lines[first + 1].split("  ")[:2] == ["00000000", "6f 72 64 65 72 20 31 00"]
    assert lines[first + 1].endswith("order 1.")
    assert lines[-1] == "... and 1 more bytes; --json shows all"
    shown = json.loads(run("show", url, 1, "--body", "--json", capsys=capsys).out)
    assert [base64.b64decode(one) for one in shown["requests"]] == [b"order 1\x00", b"x" * 1025]


ORDER = bytes.fromhex("089601 12064772c3bcc39f 1a040a020807 2501000000 2a02ff00")
"""A request: a varint, a text, a message with a message, 4 bytes, and bytes that are no message."""


@pytest.fixture
def descriptors(tmp_path):
    """A descriptor set with the method, whose request has names for some of the fields."""
    messages = pytest.importorskip("google.protobuf.descriptor_pb2")
    file = messages.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    order = file.message_type.add(name="Order")
    kind = messages.FieldDescriptorProto
    order.field.add(name="number", number=1, type=kind.TYPE_INT32, label=kind.LABEL_OPTIONAL)
    order.field.add(name="customer", number=2, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    push = {"name": "Push", "input_type": ".shop.Order", "output_type": ".shop.Order"}
    file.service.add(name="Orders").method.add(**push)
    path = tmp_path / "shop.pb"
    path.write_bytes(messages.FileDescriptorSet(file=[file]).SerializeToString())
    return path


def body_lines(*words, capsys):
    lines = run("show", *words, "--body", capsys=capsys).out.splitlines()
    return lines[next(at for at, line in enumerate(lines) if line.startswith("requests ")) + 1 :]


def test_show_body_decodes_protobuf_with_the_numbers_of_fields(url, backend, capsys):
    backend.append([call(body=StoredRpc(Kind.UNARY_UNARY, (ORDER,)).encoded())])
    assert body_lines(url, 1, capsys=capsys) == [
        "1: 150", '2: "Grüß"', "3 {", "  1 {", "    1: 7", "  }", "}", "4: 0x00000001", "5: ff 00",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "request_bytes",
    [b"\x08", b"\x0a\x05a", b"\x0b", b"\x00\x01", b"\x08" + b"\xff" * 11, b"\x0d\x01", b"xx"],
)
def test_show_body_dumps_what_is_not_protobuf(request_bytes, url, backend, capsys):
    backend.append([call(body=StoredRpc(Kind.UNARY_UNARY, (request_bytes,)).encoded())])
    (line,) = body_lines(url, 1, capsys=capsys)
    assert line.startswith(f"00000000  {request_bytes.hex(' ')}  ")


def test_show_body_decodes_protobuf_with_the_names_of_a_descriptor_set(
    url, backend, descriptors, tmp_path, capsys
):
    backend.append([call(body=StoredRpc(Kind.UNARY_UNARY, (ORDER,)).encoded())])
    lines = body_lines(url, 1, "--descriptors", descriptors, capsys=capsys)
    assert lines[:2] == ["number: 150", 'customer: "Grüß"']
    backend.append([call(method="/shop.Orders/Other")])
    (tmp_path / "other").write_text("no descriptors")
    for number, file, words in [
        (2, descriptors, f"{descriptors} does not describe /shop.Orders/Other"),
        (1, tmp_path / "other", "is no descriptor set"),
        (1, tmp_path / "none", "No such file"),
    ]:
        shown = run("show", url, number, "--body", "--descriptors", file, capsys=capsys, status=2)
        assert words in shown.err


def test_show_body_has_the_arguments_of_a_function(url, backend, capsys):
    body = StoredFunction(json.dumps({"to": "anna"}).encode()).encoded()
    backend.append([call(body=body, target="", method="shop.tasks.mail")])
    assert "anna" not in run("show", url, 1, capsys=capsys).out
    shown = run("show", url, 1, "--body", capsys=capsys).out
    assert "kind            function" in shown
    assert '"to": "anna"' in shown
    document = json.loads(run("show", url, 1, "--body", "--json", capsys=capsys).out)
    assert document["arguments"] == {"to": "anna"}


def with_header(header):
    return struct.pack(">BI", 1, len(header)) + header


TOO_LATE = b'{"kind":"unary_unary","metadata":[],"sizes":[0],"timeout":1%s}' % (b"0" * 400)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\x09garbage", "format 9"),
        (b"", "its bytes are damaged"),
        (with_header(b"[" * 10**5), "RecursionError"),
        (with_header(TOO_LATE), "OverflowError"),
        (StoredFunction(b"{").encoded(), "it cannot be decoded"),
    ],
)
def test_a_body_that_cannot_be_decoded_is_shown_as_such(body, words, url, backend, capsys):
    backend.append([call(body=body)])
    shown = run("show", url, 1, "--body", capsys=capsys).out
    (line,) = (line for line in shown.splitlines() if line.startswith("body "))
    assert f"{len(body):,} bytes; it cannot be decoded" in line
    assert words in line
    document = json.loads(run("show", url, 1, "--body", "--json", capsys=capsys).out)
    assert base64.b64decode(document["body"]) == body
    assert "body" not in json.loads(run("show", url, 1, "--json", capsys=capsys).out)


def test_show_says_why_a_call_was_given_up(url, backend, capsys):
    backend.append([call()])
    kill(backend, 1)
    lines = run("show", url, 1, capsys=capsys).out.splitlines()
    assert "given up        no attempts left" in lines
    assert "last error      INTERNAL: broken" in lines
    assert not [line for line in lines if line.startswith(("due", "expires"))]
    assert "no attempts left: INTERNAL: broken" in run("ls", url, capsys=capsys).out


def test_show_of_a_call_that_does_not_exist_ends_with_1(url, backend, capsys):
    backend.append([call()])
    assert f"there is no call 2 in {url}" in run("show", url, 2, capsys=capsys, status=1).err


# retry and drop


def test_retry_makes_calls_due_and_dead_letters_ready(url, backend, capsys):
    backend.append([call(), call(delay_s=HOUR_S), call(delay_s=HOUR_S, queue="mail")])
    kill(backend, 1)
    assert run("retry", url, "--queue", "audit", "--yes", capsys=capsys).out == "2 calls due now\n"
    calls = backend.select(Filter())
    assert [(one.state, one.due_s <= 0) for one in calls] == [
        (CallState.READY, True),
        (CallState.READY, True),
        (CallState.READY, False),
    ]


def test_drop_deletes_only_dead_letters_unless_a_state_is_named(url, backend, capsys):
    backend.append([call(), call()])
    kill(backend, 1)
    assert run("drop", url, "--queue", "audit", "--yes", capsys=capsys).out == "1 call dropped\n"
    captured = run("drop", url, "--all", "--yes", capsys=capsys)
    assert captured.out == "0 calls dropped\n"
    assert "only dead letters were considered; --state names other calls" in captured.err
    assert len(backend.select(Filter())) == 1
    run("drop", url, "--state", "waiting", "--yes", capsys=capsys)
    assert backend.select(Filter()) == []


@pytest.mark.parametrize("job", ["retry", "drop"])
def test_a_change_without_a_filter_needs_all(job, url, backend, capsys):
    backend.append([call()])
    kill(backend, 1)
    error = run(job, url, "--yes", capsys=capsys, status=2).err
    assert "no filter is given; --all selects all calls" in error
    assert run(job, url, "--all", "--yes", capsys=capsys).out.startswith("1 call d")


class Typed(io.StringIO):
    """What a user types on a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("job", ["retry", "drop"])
def test_a_change_asks_and_says_how_many_calls_it_is_about(job, url, backend, monkeypatch, capsys):
    backend.append([call(), call()])
    kill(backend, 1)
    words = [job, url, "--state", "dead"]
    monkeypatch.setattr(sys, "stdin", Typed("n\n"))
    captured = run(*words, capsys=capsys, status=1)
    assert f"{job} 1 call of {url}?" in captured.err
    assert captured.out.strip() == "nothing was changed"
    assert backend.select(Filter(ids=(1,)))[0].state is CallState.DEAD
    monkeypatch.setattr(sys, "stdin", Typed("y\n"))
    assert "1 call d" in run(*words, capsys=capsys).out
    assert [one.state for one in backend.select(Filter(ids=(1,)))] != [CallState.DEAD]


def test_nothing_is_asked_if_no_call_is_selected(url, backend, monkeypatch, capsys):
    backend.append([call()])
    monkeypatch.setattr(sys, "stdin", Typed(""))
    assert run("drop", url, "--all", capsys=capsys).out == "no call is selected\n"


def test_a_question_counts_up_to_a_limit(url, backend, monkeypatch, capsys):
    monkeypatch.setattr(journal_module, "MAX_COUNT", 2)
    backend.append([call()] * 3)
    monkeypatch.setattr(sys, "stdin", Typed("y\n"))
    captured = run("retry", url, "--all", capsys=capsys)
    assert "retry more than 2 calls of" in captured.err
    assert captured.out.strip() == "3 calls due now"


@pytest.mark.parametrize("job", ["retry", "drop"])
def test_without_a_terminal_a_change_needs_yes(job, url, backend, monkeypatch, capsys):
    backend.append([call()])
    kill(backend, 1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    error = run(job, url, "--all", capsys=capsys, status=2).err
    assert f"no terminal to ask whether to {job} calls; give --yes" in error
    assert backend.select(Filter())[0].state is CallState.DEAD


# export


def test_export_prints_all_calls_page_by_page(url, backend, monkeypatch, capsys):
    monkeypatch.setattr(journal_module, "FIRST_PAGE", 3)
    monkeypatch.setattr(journal_module, "PAGE_BYTES", 2 * len(PUSH.encoded()) + 2)
    limits = []
    select = SqliteJournal.select

    def counting(self, chosen, *, after=0, limit=100):
        limits.append(limit)
        return select(self, chosen, after=after, limit=limit)

    monkeypatch.setattr(SqliteJournal, "select", counting)
    backend.append([call(key=f"key-{number}") for number in range(1, 9)] + [call(queue="mail")])
    lines = run("export", url, "--queue", "audit", capsys=capsys).out.splitlines()
    assert [json.loads(line)["key"] for line in lines] == [f"key-{n}" for n in range(1, 9)]
    assert limits == [3, 2, 2, 2]


def test_export_has_requests_only_with_body_and_never_secrets_of_the_metadata(url, backend, capsys):
    backend.append([call()])
    (without,) = map(json.loads, run("export", url, capsys=capsys).out.splitlines())
    assert without["metadata"] == [["x-tenant", "7"], ["x-api-token", "***"], ["trace-bin", "AAE="]]
    assert without["sizes"] == [8]
    assert "requests" not in without
    (found,) = map(json.loads, run("export", url, "--body", capsys=capsys).out.splitlines())
    assert found.pop("requests") == [base64.b64encode(b"order 1\x00").decode()]
    assert found.keys() == without.keys()


# stats


def test_stats_counts_by_queue_and_target(url, backend, capsys):
    backend.append([call(), call(), call(queue="mail", target="")])
    kill(backend, 1)
    lines = run("stats", url, capsys=capsys).out.splitlines()
    assert lines[0].split() == ["QUEUE", "TARGET", "WAITING", "TAKEN", "DEAD", "OLDEST"]
    assert lines[1].split()[:5] == ["audit", TARGET, "1", "0", "1"]
    assert lines[2].split()[:4] == ["mail", "1", "0", "0"]
    assert lines[3].split()[:4] == ["total", "2", "0", "1"]
    assert lines[-1] == f"2 waiting, 0 taken, 1 dead at {url}"
    document = json.loads(run("stats", url, "--json", capsys=capsys).out)
    assert document["journal"] == url
    assert document["total"] | {"oldest_s": 0} == {
        "waiting": 2,
        "taken": 0,
        "dead": 1,
        "oldest_s": 0,
    }
    assert [one["queue"] for one in document["queues"]] == ["audit", "mail"]
    assert document["queues"][0] | {"oldest_s": 0} == {
        "queue": "audit",
        "target": TARGET,
        "waiting": 1,
        "taken": 0,
        "dead": 1,
        "oldest_s": 0,
    }


# --watch


def test_watch_follows_the_journal_until_ctrl_c(url, backend):
    backend.append([call()])
    for job in ("ls", "stats"):
        backend.delete(Filter())
        backend.append([call(queue="first-queue")])
        with Terminal("journal", job, url, "--watch", "--interval", "0.1") as terminal:
            wait_until(lambda terminal=terminal: "first-queue" in terminal.text)
            backend.append([call(queue="second-queue")])
            wait_until(lambda terminal=terminal: "second-queue" in terminal.text)
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.process.wait(WAIT_S) == 130
            wait_until(lambda terminal=terminal: terminal.raw.endswith("\x1b[?1049l"))
        assert "Traceback" not in terminal.text


class Stop(Exception):
    """Ends a command that runs until Ctrl-C."""


@pytest.fixture
def two_looks(monkeypatch):
    """The second wait between two looks ends the command."""
    waits = iter([lambda: None])

    def sleep(seconds):
        assert seconds == 0.5
        next(waits, _stop)()

    monkeypatch.setattr(journal_module.time, "sleep", sleep)


def _stop():
    raise Stop


def watched(*words, capsys):
    with pytest.raises(Stop):
        main(["journal", *words, "--watch", "--interval", "0.5"])
    return capsys.readouterr()


@pytest.mark.usefixtures("two_looks")
def test_watch_in_a_pipe_prints_one_table_after_the_other(url, backend, capsys):
    backend.append([call()])
    assert watched("ls", url, capsys=capsys).out.count(f"1 call at {url}\n") == 2


@pytest.mark.usefixtures("two_looks")
def test_watch_of_stats_as_json_prints_one_object_a_line(url, backend, capsys):
    backend.append([call()])
    lines = watched("stats", url, "--json", capsys=capsys).out.splitlines()
    assert [json.loads(line)["total"]["waiting"] for line in lines] == [1, 1]


@pytest.mark.usefixtures("two_looks")
def test_watch_continues_while_the_journal_does_not_answer(url, backend, monkeypatch, capsys):
    backend.append([call()])
    depths, answers = SqliteJournal.depths, iter([None])

    def failing(self):
        for _ in answers:
            return depths(self)
        raise JournalUnavailable("the journal is busy")

    monkeypatch.setattr(SqliteJournal, "depths", failing)
    captured = watched("stats", url, capsys=capsys)
    assert "1 waiting" in captured.out
    assert captured.err == "rpcwheel journal: the journal is busy\n"


# Errors

COMMANDS = [
    ["ls"],
    ["show", "1"],
    ["retry", "--all", "--yes"],
    ["drop", "--all", "--yes"],
    ["export"],
    ["stats"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_journal_that_does_not_exist_is_not_created(words, url, tmp_path, capsys):
    job, *rest = words
    captured = run(job, url, *rest, capsys=capsys, status=1)
    assert captured.out == ""
    path = tmp_path / "shop.db"
    assert captured.err == (
        f"rpcwheel journal: {path}: there is no such file; "
        "the first program that uses it creates it\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_does_not_become_a_journal(url, tmp_path, capsys):
    (tmp_path / "shop.db").touch()
    assert "is empty, and no journal yet" in run("ls", url, capsys=capsys, status=1).err
    assert (tmp_path / "shop.db").stat().st_size == 0


def test_a_file_of_another_program_is_refused(url, tmp_path, capsys):
    other = sqlite3.connect(tmp_path / "shop.db")
    other.execute("CREATE TABLE orders (id INTEGER)")
    other.close()
    error = run("stats", url, capsys=capsys, status=1).err
    assert "is another program's database" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "nothing://host"],
        ["ls", "shop.db"],
        ["ls", "sqlite:///x.db?durabilty=power"],
        ["ls", "sqlite:///x.db", "--older", "yesterday"],
        ["ls", "sqlite:///x.db", "--state", "lost"],
        ["ls", "sqlite:///x.db", "--limit", "0"],
        ["ls", "sqlite:///x.db", "--json", "--watch"],
        ["ls", "sqlite:///x.db", "--interval", "0"],
        ["show", "sqlite:///x.db", "first"],
        ["ls"],
    ],
)
def test_wrong_arguments_end_with_2(words, capsys):
    assert run(*words, capsys=capsys, status=2).err


def test_a_password_in_the_url_is_not_printed(capsys):
    for words in (["ls"], ["stats"]):
        error = run(*words, "redsi://u:swordfish@host/0?password=x", capsys=capsys, status=2).err
        assert "did you mean redis" in error
        assert "swordfish" not in error
        assert "password=x" not in error
