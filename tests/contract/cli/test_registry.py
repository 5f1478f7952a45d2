"""`rpcwheel registry`, run in this process: arguments, output and exit status."""

import io
import itertools
import json
import socket
import sys
from types import SimpleNamespace

import pytest

from fixtures.interrupts import Interrupt
from fixtures.terminals import TerminalText
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cli import main
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import Registry, RegistryPolicy, open_registry

ALONE = RegistryPolicy(snapshot=False)
NUMBERS = itertools.count()


def instance(service="shop.Orders", port=50051, **values):
    return ServiceInstance(service=service, host="10.0.0.7", port=port, **values)


@pytest.fixture
def url():
    """The URL of a registry of this test's own."""
    return f"memory://cli-{next(NUMBERS)}"


@pytest.fixture
def registry(url):
    with open_registry(url, registry_policy=ALONE) as opened:
        yield opened


def registered(registry, *instances):
    for one in instances:
        registry.register(one, wait=WAIT_S)


def services_of(shown):
    return {name: [one["id"] for one in found] for name, found in shown["services"].items()}


def test_ls_shows_the_named_service_wherever_the_options_are_or_all(url, registry, capsys) -> None:
    registered(registry, instance(), instance("shop.Stock", 50052))
    stock = {"shop.Stock": ["10.0.0.7:50052"]}
    for words, services in [
        (["{url}", "--json"], {"shop.Orders": ["10.0.0.7:50051"]} | stock),
        (["{url}", "--json", "shop.Stock"], stock),
        (["--json", "{url}", "shop.Stock"], stock),
        (["{url}/shop.Stock", "--json"], stock),
        (["{url}?service=shop.Stock", "--json", "shop.Stock"], stock),
    ]:
        assert main(["registry", "ls", *(word.format(url=url) for word in words)]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (services_of(shown), shown["registry"]) == (services, url)


def test_ls_json_has_all_values_of_an_instance(url, registry, capsys) -> None:
    one = instance(id="a", weight=3, zone="b", metadata={"k": "v"}, started_at=12.5)
    registered(registry, one)
    main(["registry", "ls", url, "--json"])
    (record,) = json.loads(capsys.readouterr().out)["services"]["shop.Orders"]
    assert record.pop("address") == "10.0.0.7:50051"
    assert ServiceInstance(**record) == one


def shown(url, monkeypatch, stream, *words):
    """What `ls` writes to a stream."""
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["registry", "ls", url, *words]) == 0
    return stream.getvalue()


def test_the_table_leaves_out_columns_that_are_empty_and_aligns_the_others(
    url, registry, monkeypatch
) -> None:
    registered(registry, instance(id="a", weight=7))
    head, row, *_, summary = shown(url, monkeypatch, io.StringIO()).splitlines()
    assert head.split() == ["SERVICE", "ID", "ADDRESS", "WEIGHT", "STATUS", "UP", "SINCE"]
    assert row.split()[:5] == ["shop.Orders", "a", "10.0.0.7:50051", "7", "UP"]
    assert summary == f"1 instance of 1 service at {url}"
    registered(registry, instance(id="longer-than-the-others", zone="z"))
    others = {"protocol": "grpcs", "started_at": 86400.0, "metadata": {"b": "2", "a": "1"}}
    registered(
        registry, instance("shop.P", version="v2", **others), instance("shop.Q", started_at=1e300)
    )
    head, *rows = shown(url, monkeypatch, io.StringIO()).splitlines()[:5]
    assert [row[head.index("ADDRESS") :].split()[0] for row in rows] == [
        "10.0.0.7:50051",
        "10.0.0.7:50051",
        "grpcs://10.0.0.7:50051",
        "10.0.0.7:50051",
    ]
    assert rows[1][head.index("ZONE") :].startswith("z")
    assert rows[2][head.index("VERSION") :].startswith("v2")
    assert "1970-01-0" in rows[2]
    assert rows[2].endswith("a=1 b=2")
    assert "?" in rows[3]


def test_a_terminal_gets_a_rich_table_with_all_text_and_no_markup(
    url, registry, monkeypatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    registered(registry, instance(metadata={"k": "[bold]x[/bold]", "long": "v" * 200}))
    text = shown(url, monkeypatch, TerminalText())
    assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in text
    assert "[bold]" in "".join(text.split())
    assert text.count("v") > 200
    assert "SERVICE" in shown(url, monkeypatch, TerminalText(), "--plain")


def test_characters_that_the_encoding_does_not_have_are_escaped(url, registry, monkeypatch) -> None:
    registered(registry, instance(zone="Zürich"))
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", pipe)
    assert main(["registry", "ls", url]) == 0
    assert rb"Z\xfcrich" in pipe.buffer.getvalue()


def test_ls_of_a_service_without_instances_ends_with_1_and_of_an_empty_registry_with_0(
    url, registry, capsys
) -> None:
    assert main(["registry", "ls", url]) == 0
    assert capsys.readouterr().out == f"no service at {url}\n"
    assert main(["registry", "ls", url, "shop.Orders"]) == 1
    assert capsys.readouterr().out == f"no instance of shop.Orders at {url}\n"
    registered(registry, instance())
    assert main(["registry", "ls", url, "shop.Orders", "shop.Stock", "--json"]) == 1
    captured = capsys.readouterr()
    assert "10.0.0.7:50051" in captured.out
    assert f"no instance of shop.Stock at {url}" in captured.err


def test_jobs_that_read_do_not_create_a_file(tmp_path, capsys) -> None:
    file = tmp_path / "shop.db"
    for job in (["ls"], ["watch"], ["unregister"]):
        words = [*job, f"sqlite://{file}", "shop.Orders", *(["a"] if job == ["unregister"] else [])]
        assert main(["registry", *words]) == 1
        error = capsys.readouterr().err
        assert f"sqlite://{file}: there is no such file" in error
        assert "the first server or client that uses the registry creates it" in error
    assert not file.exists()


def test_jobs_that_read_report_a_file_that_cannot_be_examined(tmp_path, capsys) -> None:
    file = tmp_path / ("a" * 300)
    assert main(["registry", "ls", f"sqlite://{file}"]) == 1
    assert f"{file}: File name too long" in capsys.readouterr().err


def test_unregister_removes_an_instance_of_another_process_and_names_the_process(
    tmp_path, capsys
) -> None:
    url = f"sqlite://{tmp_path / 'shop.db'}"
    with open_registry(url, registry_policy=ALONE) as other:
        registered(other, instance(epoch="feed"), instance(port=50052))
        assert main(["registry", "unregister", url, "shop.Orders", "10.0.0.7:50051"]) == 0
        assert "of the process feed at 10.0.0.7:50051" in capsys.readouterr().out
        assert [one.port for one in other.lookup("shop.Orders").instances] == [50052]


def test_unregister_of_an_unknown_id_names_the_known_ones(url, registry, capsys) -> None:
    registered(registry, instance(id="a"), instance(id="b"))
    assert main(["registry", "unregister", f"{url}/shop.Orders", "c"]) == 1
    assert f"no instance 'c' of shop.Orders at {url}; there are a, b" in capsys.readouterr().err


def test_an_invalid_record_is_reported_and_the_other_instances_are_shown(tmp_path, capsys) -> None:
    import sqlite3

    file = tmp_path / "shop.db"
    with open_registry(f"sqlite://{file}", registry_policy=ALONE) as other:
        registered(other, instance())
        db = sqlite3.connect(file)
        db.execute(
            "INSERT INTO instance SELECT namespace, service, 'x', 'no', '', lease FROM instance"
        )
        db.commit()
        db.close()
        assert main(["registry", "ls", f"sqlite://{file}", "--json"]) == 0
    captured = capsys.readouterr()
    assert services_of(json.loads(captured.out)) == {"shop.Orders": ["10.0.0.7:50051"]}
    assert "skipped shop.Orders/x, which is not a valid instance: no JSON" in captured.err


def test_a_wrong_argument_ends_with_2_and_an_explanation(capsys) -> None:
    for words, said in [
        (["ls"], "URL"),
        (["ls", "etdc://host"], "did you mean etcd://?"),
        (["ls", "memory://", "a b"], "it must be a name"),
        (["ls", "memory://", "--timeout", "0"], "seconds above zero"),
        (["watch", "sqlit://./registry.db", "shop.A"], "did you mean sqlite://?"),
        (["watch", "memory://"], "name a service"),
        (["register", "memory://", "shop.Orders"], "give a service and HOST:PORT"),
        (["register", "memory://", "shop.Orders", "host"], "has no port"),
        (["register", "memory://", "shop.Orders", "unix:/run/a"], "a Unix socket"),
        (["register", "memory://", "shop.Orders", "0.0.0.0:1"], "an address to listen on"),
        (["register", "memory://", "shop.Orders", "host:1", "--weight", "-1"], "weight"),
        (["register", "memory://", "shop.A", "host:1", "--weight", "much"], "'--weight'"),
        (["register", "memory://", "shop.A", "host:1", "--meta", "k"], "KEY=VALUE"),
        (["register", "memory://a/shop.A", "shop.B", "host:1"], "two services are named"),
        (["unregister", "memory://", "id"], "give a service and ID"),
    ]:
        assert main(["registry", *words]) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.out == ""


def test_a_missing_package_ends_with_2_and_the_command_that_installs_it(
    monkeypatch, capsys
) -> None:
    monkeypatch.delitem(sys.modules, "rpcwheel.registry.backends.redis", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    assert main(["registry", "ls", "redis://host"]) == 2
    assert "pip install 'rpcwheel[redis]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["ls"], ["watch", "shop.A"], ["unregister", "shop.A", "x"], ["register", "shop.A", "h:1"]],
)
def test_a_registry_that_can_not_be_reached_ends_with_1_and_the_reason(words, capsys) -> None:
    pytest.importorskip("google.protobuf")
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        place = f"etcd://user:secret@127.0.0.1:{closed.getsockname()[1]}"
        job, *more = words
        assert main(["registry", job, place, *more, "--timeout", str(WAIT_S)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("rpcwheel registry: etcd://user:***@127.0.0.1")
    assert "failed to connect" in captured.err
    assert "secret" not in captured.err
    assert captured.out == ""


def test_register_publishes_draining_and_gives_clients_time_to_see_it_before_it_withdraws(
    url, registry, capsys, monkeypatch, set_limit, caplog
) -> None:
    caplog.set_level("INFO", "rpcwheel.registry")
    one = f"{url}: published shop.Orders instance 10.0.0.7:50051"
    seen, pauses = [], []

    def pause(seconds):
        pauses.append(seconds)
        wait_until(lambda: ["DRAINING"] in seen)

    set_limit("cli.registry.WITHDRAW_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr("rpcwheel.cli.registry.time", SimpleNamespace(sleep=pause))

    def look(snapshot):
        seen.append([each.status for each in snapshot.instances])
        if seen[-1] == ["UP"] and seen.count(["UP"]) == 1:
            wait_until(lambda: one in caplog.messages)
            ctrl_c.send()

    with Interrupt() as ctrl_c, registry.subscribe("shop.Orders", look):
        assert main(["registry", "register", url, "shop.Orders", "10.0.0.7:50051"]) == 130
        assert wait_until(lambda: seen[-1] == [])
    assert len(pauses) == 1
    assert capsys.readouterr().out.endswith("withdrew shop.Orders/10.0.0.7:50051\n")
    assert [line for line in caplog.messages if " published " in line] == [
        one,
        f"{one}, status DRAINING",
    ]


def test_a_signal_during_the_registration_withdraws_it(
    url, registry, capsys, monkeypatch, set_limit
) -> None:
    register, calls = Registry.register, []

    def interrupted(self, *args, **options):
        calls.append(register(self, *args, **options))
        if len(calls) == 1:
            raise KeyboardInterrupt  # before the caller has what was returned
        return calls[-1]

    set_limit("cli.registry.WITHDRAW_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(Registry, "register", interrupted)
    assert main(["registry", "register", url, "shop.Orders", "10.0.0.7:50051"]) == 130
    assert capsys.readouterr().out == "withdrew shop.Orders/10.0.0.7:50051\n"


def test_register_names_the_process_whose_instance_it_replaces(url, registry, capsys) -> None:
    registered(registry, instance(epoch="feed", started_at=1e18))
    others = []

    def look(snapshot):
        others.extend(one for one in snapshot.instances if one.epoch != "feed")
        if len(others) == 1:
            ctrl_c.send()

    with Interrupt() as ctrl_c, registry.subscribe("shop.Orders", look):
        assert main(["registry", "register", f"{url}/shop.Orders", "10.0.0.7:50051"]) == 130
    assert (
        "replaces shop.Orders/10.0.0.7:50051 of the process feed at 10.0.0.7:50051, up since ?"
        in capsys.readouterr().err
    )
