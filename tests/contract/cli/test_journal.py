"""`rpcwheel journal`, run in this process on a journal in a file."""

import base64
import contextlib
import io
import json
import re
import signal
import struct
import sys

import pytest

from fixtures.journal_calls import new_call
from fixtures.terminals import Terminal, TerminalText
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cli import journal as journal_module
from rpcwheel.cli import main
from rpcwheel.cli.journal_view import CALL_COLUMNS, call_row
from rpcwheel.errors import JournalUnavailable
from rpcwheel.failback.stored import StoredFunction, StoredRpc
from rpcwheel.journal import CallState, Filter, open_journal_backend
from rpcwheel.journal.backend import Dead, Route
from rpcwheel.journal.sqlite import SqliteJournal
from rpcwheel.rpc import Kind

HOUR_S = 3600.0
TARGET = "127.0.0.1:50051"
TOO_LARGE = str(2**63 - 1)
METADATA = (("x-tenant", "7"), ("x-api-token", "swordfish"), ("trace-bin", b"\x00\x01"))
PUSH = StoredRpc(Kind.UNARY_UNARY, (b"order 1\x00",), METADATA, 2.5)


def call(**values):
    usual = {"queue": "audit", "target": TARGET, "body": PUSH.encoded()}
    return new_call(**usual | {"error": "UNAVAILABLE: no route"} | values)


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


def test_a_call_that_waits_has_a_due_time_and_a_dead_letter_a_reason(url, backend, capsys):
    backend.append([call(), call(queue="mail"), call(queue="late", delay_s=HOUR_S)])
    backend.take("worker", HOUR_S, [Route("audit", TARGET, 1)], 0.0)
    kill(backend, 2)
    due = CALL_COLUMNS.index("due")
    assert [call_row(one)[due] for one in backend.select(Filter())] == ["", "", "in 60 min"]
    assert "no attempts left: INTERNAL: broken" in run("ls", url, capsys=capsys).out
    assert "an attempt is running, or begins soon" in run("show", url, 1, capsys=capsys).out
    lines = run("show", url, 2, capsys=capsys).out.splitlines()
    assert "given up        no attempts left" in lines
    assert "last error      INTERNAL: broken" in lines
    assert not [line for line in lines if line.startswith(("due", "expires"))]


WAITING = (CallState.READY, CallState.BLOCKED)
FILTERS = {
    "": Filter(),
    "--queue mail --id 2 --id 1": Filter(queue="mail", ids=(2, 1)),
    "--target t --method /shop.Orders/?et": Filter(target="t", method="/shop.Orders/?et"),
    "--error UNAVAILABLE --older 2h": Filter(error="UNAVAILABLE", min_age_s=7200.0),
    "--state waiting": Filter(states=WAITING),
    "--state taken --state dead": Filter(states=(CallState.TAKEN, CallState.DEAD)),
}


@pytest.mark.parametrize(("words", "chosen"), FILTERS.items(), ids=FILTERS)
def test_options_are_the_fields_of_a_filter(words, chosen, url, backend, monkeypatch, capsys):
    backend.routes()
    seen = []

    def select(self, chosen, *, after=0, limit=100):
        seen.append(chosen)
        return []

    monkeypatch.setattr(SqliteJournal, "select", select)
    assert run("ls", url, *words.split(), capsys=capsys).out == f"no call at {url}\n"
    assert seen == [chosen]


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
def test_a_change_needs_a_filter_or_all_and_an_answer_or_yes(
    job, url, backend, monkeypatch, capsys
):
    backend.append([call(), call()])
    monkeypatch.setattr(sys, "stdin", TerminalText(""))
    selected_none = run(job, url, "--state", "dead", capsys=capsys).out
    assert selected_none == "no call is selected\n"
    kill(backend, 1)
    error = run(job, url, "--yes", capsys=capsys, status=2).err
    assert "no filter is given; --all selects all calls" in error
    words = [job, url, "--state", "dead"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    error = run(*words, capsys=capsys, status=2).err
    assert f"no terminal to ask whether to {job} calls; give --yes" in error
    monkeypatch.setattr(sys, "stdin", TerminalText("n\n"))
    captured = run(*words, capsys=capsys, status=1)
    assert f"{job} 1 call of {url}?" in captured.err
    assert captured.out.strip() == "nothing was changed"
    assert backend.select(Filter(ids=(1,)))[0].state is CallState.DEAD
    monkeypatch.setattr(sys, "stdin", TerminalText("y\n"))
    assert "1 call d" in run(*words, capsys=capsys).out
    assert [one.state for one in backend.select(Filter(ids=(1,)))] != [CallState.DEAD]


class Interrupted(TerminalText):
    """A user who presses Ctrl-C."""

    def readline(self, *_):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("typed", "status"),
    [(Interrupted, 130), (lambda: TerminalText(""), 1), (lambda: TerminalText("perhaps\nY\n"), 0)],
    ids=["ctrl-c", "ctrl-d", "again"],
)
def test_a_question_may_be_interrupted_or_is_asked_again(
    typed, status, url, backend, monkeypatch, capsys
):
    backend.append([call()])
    monkeypatch.setattr(sys, "stdin", typed())
    run("drop", url, "--state", "waiting", capsys=capsys, status=status)
    assert len(backend.select(Filter())) == (status != 0)


def test_a_question_counts_up_to_a_limit(url, backend, monkeypatch, set_limit, capsys):
    set_limit("cli.journal.MAX_COUNT", 2)
    backend.append([call()] * 3)
    monkeypatch.setattr(sys, "stdin", TerminalText("y\n"))
    captured = run("retry", url, "--all", capsys=capsys)
    assert "retry more than 2 calls of" in captured.err
    assert captured.out.strip() == "3 calls due now"


# export


def test_export_prints_all_calls_page_by_page(url, backend, monkeypatch, set_limit, capsys):
    set_limit("journal.backend.FIRST_PAGE", 3)
    set_limit("journal.backend.PAGE_BYTES", 2 * len(PUSH.encoded()) + 2)
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
    counts = {"waiting": 1, "taken": 0, "dead": 1, "oldest_s": 0}
    assert document["total"] | {"oldest_s": 0} == counts | {"waiting": 2}
    of_audit = document["queues"][0] | {"oldest_s": 0}
    assert of_audit == {"queue": "audit", "target": TARGET} | counts


def test_calls_of_a_process_that_has_died_are_waiting_when_its_lease_has_ended(
    url, backend, capsys
):
    backend.append([call()])
    backend.take("died", 0.05, [Route("audit", TARGET, 1)], 0.0)
    waiting = f"1 waiting, 0 taken, 0 dead at {url}"
    wait_until(lambda: waiting in run("stats", url, capsys=capsys).out)
    assert len(listed(url, "--state", "waiting", capsys=capsys)) == 1


# --watch


def test_watch_follows_the_journal_until_ctrl_c(url, backend):
    backend.append([call()])
    with Terminal("journal", "ls", url, "--watch", "--interval", "0.1") as terminal:
        wait_until(lambda: "audit" in terminal.text)
        backend.append([call(queue="second-queue")])
        wait_until(lambda: "second-queue" in terminal.text)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(WAIT_S) == 130
        wait_until(lambda: terminal.raw.endswith("\x1b[?1049l"))
    assert "Traceback" not in terminal.text


class Stop(Exception):
    """Ends a command that runs until Ctrl-C."""


@pytest.mark.parametrize("job", ["retry", "drop"])
def test_no_calls_are_changed_if_leases_cannot_be_ended(job, url, backend, monkeypatch, capsys):
    backend.append([call()])
    backend.take("died", 0.0, [Route("audit", TARGET, 1)], 0.0)

    def failing(*_):
        raise JournalUnavailable("the journal is busy")

    monkeypatch.setattr(SqliteJournal, "take", failing)
    assert main(["journal", job, url, "--all", "--yes"]) == 1
    assert "the journal is busy" in capsys.readouterr().err


@pytest.fixture
def watched(monkeypatch, capsys):
    """Runs a command with two looks at the journal; the second wait between them ends it."""

    def watched(*words):
        waits = []

        def sleep(seconds):
            assert seconds == 0.5
            waits.append(seconds)
            if len(waits) == 2:
                raise Stop

        monkeypatch.setattr(journal_module.time, "sleep", sleep)
        with pytest.raises(Stop):
            main(["journal", *words, "--watch", "--interval", "0.5"])
        return capsys.readouterr()

    return watched


def test_watch_in_a_pipe_prints_one_result_after_the_other(url, backend, watched):
    backend.append([call()])
    assert watched("ls", url).out.count(f"1 call at {url}\n") == 2
    lines = watched("stats", url, "--json").out.splitlines()
    assert [json.loads(line)["total"]["waiting"] for line in lines] == [1, 1]


@pytest.mark.parametrize(("words", "shown"), [([], "1 waiting"), (["--json"], '"waiting": 1')])
def test_watch_continues_while_the_journal_does_not_answer(
    words, shown, url, backend, monkeypatch, watched
):
    backend.append([call()])
    depths, answers = SqliteJournal.depths, iter([None])

    def failing(self):
        for _ in answers:
            return depths(self)
        raise JournalUnavailable("the journal is busy")

    monkeypatch.setattr(SqliteJournal, "depths", failing)
    captured = watched("stats", url, *words)
    assert shown in captured.out
    assert captured.err == "rpcwheel journal: the journal is busy\n"


# Errors


def test_a_journal_or_call_that_does_not_exist_ends_with_1(url, tmp_path, capsys):
    captured = run("retry", url, "--all", "--yes", capsys=capsys, status=1)
    assert (captured.out, list(tmp_path.iterdir())) == ("", [])
    assert captured.err == (
        f"rpcwheel journal: {tmp_path / 'shop.db'}: there is no such file; "
        "the first program that uses it creates it\n"
    )
    with contextlib.closing(open_journal_backend(url)) as backend:
        backend.routes()
    assert f"there is no call 2 in {url}" in run("show", url, 2, capsys=capsys, status=1).err


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
        ["ls", "sqlite:///x.db", "--limit", TOO_LARGE],
        ["ls", "sqlite:///x.db", "--id", TOO_LARGE],
        ["ls", "sqlite:///x.db", "--older", f"{TOO_LARGE}d"],
        ["show", "sqlite:///x.db", "first"],
        ["show", "sqlite:///x.db", TOO_LARGE],
        ["ls"],
    ],
)
def test_wrong_arguments_end_with_2(words, capsys):
    assert run(*words, capsys=capsys, status=2).err


def test_the_largest_numbers_and_times_are_accepted(url, backend, capsys):
    most = str(2**63 - 2)
    backend.routes()  # creates it
    assert f"there is no call {most}" in run("show", url, most, capsys=capsys, status=1).err
    run("ls", url, "--id", most, "--limit", most, "--older", "36500d", capsys=capsys)


def test_a_password_in_the_url_is_not_printed(capsys):
    error = run("ls", "redsi://u:swordfish@host/0?password=x", capsys=capsys, status=2).err
    assert "did you mean redis" in error
    assert "swordfish" not in error
    assert "password=x" not in error
