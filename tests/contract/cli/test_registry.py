"""`rpcwheel registry`, run in this process: what its words mean, and how it ends."""

import itertools
import json
import socket
import sys
from types import SimpleNamespace

import pytest

from fixtures.interrupts import Interrupt
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cli import main, registry_jobs
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import Registry, RegistryPolicy, open_registry

ALONE = RegistryPolicy(snapshot=False)
NUMBERS = itertools.count()


def instance(service="shop.Orders", port=50051, **values):
    return ServiceInstance(service=service, host="10.0.0.7", port=port, **values)


@pytest.fixture
def url():
    """Of a registry of this test's own, which this process sees whole."""
    return f"memory://cli-{next(NUMBERS)}"


@pytest.fixture
def registry(url):
    with open_registry(url, policy=ALONE) as opened:
        yield opened


def registered(registry, *instances):
    for one in instances:
        registry.register(one, wait=WAIT_S)


def services_of(shown):
    return {name: [one["id"] for one in found] for name, found in shown["services"].items()}


def test_ls_shows_all_services_if_none_is_named(url, registry, capsys) -> None:
    registered(registry, instance(), instance("shop.Stock", 50052))
    assert main(["registry", "ls", url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert services_of(shown) == {
        "shop.Orders": ["10.0.0.7:50051"],
        "shop.Stock": ["10.0.0.7:50052"],
    }
    assert shown["registry"] == url


def test_ls_shows_the_service_that_is_named_wherever_the_options_stand(
    url, registry, capsys
) -> None:
    for words in [
        ["{url}", "shop.Stock", "--json"],
        ["{url}", "--json", "shop.Stock"],
        ["--json", "{url}", "shop.Stock"],
        ["{url}/shop.Stock", "--json"],
        ["{url}?service=shop.Stock", "--json", "shop.Stock"],
    ]:
        registered(registry, instance(), instance("shop.Stock", 50052))
        assert main(["registry", "ls", *(word.format(url=url) for word in words)]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert services_of(shown) == {"shop.Stock": ["10.0.0.7:50052"]}


def test_ls_tells_machines_all_that_an_instance_is(url, registry, capsys) -> None:
    one = instance(id="a", weight=3, zone="b", metadata={"k": "v"}, started_at=12.5)
    registered(registry, one)
    main(["registry", "ls", url, "--json"])
    (told,) = json.loads(capsys.readouterr().out)["services"]["shop.Orders"]
    assert told.pop("address") == "10.0.0.7:50051"
    assert ServiceInstance(**told) == one


def test_ls_shows_people_a_table_and_how_many_there_are(url, registry, capsys) -> None:
    registered(registry, instance(weight=7), instance(port=50052))
    assert main(["registry", "ls", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["SERVICE", "ID", "ADDRESS", "WEIGHT"]
    assert lines[1].split()[:5] == ["shop.Orders", *["10.0.0.7:50051"] * 2, "7", "UP"]
    assert lines[-1] == f"2 instances of 1 service at {url}"


def test_nothing_there_is_an_answer(url, registry, capsys) -> None:
    assert main(["registry", "ls", url]) == 0
    assert main(["registry", "ls", url, "shop.Orders"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"no service at {url}",
        f"no instance of shop.Orders at {url}",
    ]


def test_to_look_makes_no_file(tmp_path, capsys) -> None:
    file = tmp_path / "shop.db"
    for job in (["ls"], ["watch"], ["unregister"]):
        words = [*job, f"sqlite://{file}", "shop.Orders", *(["a"] if job == ["unregister"] else [])]
        assert main(["registry", *words]) == 1
        assert "there is no such file" in capsys.readouterr().err
    assert not file.exists()


def test_unregister_takes_out_what_another_process_has_published_and_says_whose(
    tmp_path, capsys
) -> None:
    url = f"sqlite://{tmp_path / 'shop.db'}"
    with open_registry(url, policy=ALONE) as other:
        registered(other, instance(epoch="feed"), instance(port=50052))
        assert main(["registry", "unregister", url, "shop.Orders", "10.0.0.7:50051"]) == 0
        assert "of the process feed at 10.0.0.7:50051" in capsys.readouterr().out
        assert [one.port for one in other.lookup("shop.Orders").instances] == [50052]


def test_unregister_says_which_there_are_if_there_is_none_such(url, registry, capsys) -> None:
    registered(registry, instance(id="a"), instance(id="b"))
    assert main(["registry", "unregister", f"{url}/shop.Orders", "c"]) == 1
    assert f"no instance 'c' of shop.Orders at {url}; there are a, b" in capsys.readouterr().err


def test_a_record_that_is_no_instance_is_told_of_and_the_others_are_shown(tmp_path, capsys) -> None:
    import sqlite3

    file = tmp_path / "shop.db"
    with open_registry(f"sqlite://{file}", policy=ALONE) as other:
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
    assert "skipped shop.Orders/x: no JSON" in captured.err


def test_what_makes_no_sense_is_refused_with_what_does(capsys) -> None:
    for words, said in [
        (["ls", "etdc://host"], "did you mean etcd://?"),
        (["ls", "sqlite://host/shop.db"], "three slashes"),
        (["ls", "memory://?pol=1"], "there is no option 'pol'"),
        (["ls", "memory://", "a b"], "it must be a name"),
        (["watch", "memory://"], "name a service"),
        (["register", "memory://", "shop.Orders"], "give a service and HOST:PORT"),
        (["register", "memory://", "shop.Orders", "host"], "has no port"),
        (["register", "memory://", "shop.Orders", "unix:/run/a"], "a unix socket"),
        (["register", "memory://", "shop.Orders", "0.0.0.0:1"], "an address to listen on"),
        (["register", "memory://", "shop.Orders", "host:1", "--weight", "-1"], "weight"),
        (["register", "memory://a/shop.A", "shop.B", "host:1"], "two services are named"),
        (["unregister", "memory://", "id"], "give a service and ID"),
    ]:
        assert main(["registry", *words]) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.out == ""


def test_a_wrong_argument_ends_with_2(capsys) -> None:
    for words, said in [
        (["ls"], "URL"),
        (["ls", "memory://", "--timeout", "0"], "seconds above zero"),
        (["register", "memory://", "shop.A", "host:1", "--meta", "k"], "KEY=VALUE"),
        (["register", "memory://", "shop.A", "host:1", "--weight", "much"], "invalid int"),
        ([], "JOB"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(["registry", *words])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


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
def test_a_registry_that_is_not_there_ends_with_1_and_the_reason(words, capsys) -> None:
    pytest.importorskip("google.protobuf")
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        place = f"etcd://user:secret@127.0.0.1:{nobody.getsockname()[1]}"
        job, *more = words
        assert main(["registry", job, place, *more, "--timeout", "0.3"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("rpcwheel registry: etcd://user:***@127.0.0.1")
    assert "secret" not in captured.err
    assert captured.out == ""


def test_register_publishes_draining_and_gives_clients_time_to_see_it_before_it_withdraws(
    url, registry, capsys, monkeypatch
) -> None:
    seen, pauses = [], []

    def pause(seconds):
        pauses.append(seconds)
        wait_until(lambda: ["DRAINING"] in seen)

    monkeypatch.setattr(registry_jobs, "FAREWELL_S", WAIT_S)
    monkeypatch.setattr(registry_jobs, "time", SimpleNamespace(sleep=pause))

    def look(snapshot):
        seen.append([one.status for one in snapshot.instances])
        if seen[-1] == ["UP"] and seen.count(["UP"]) == 1:
            ctrl_c.send()

    with Interrupt() as ctrl_c, registry.subscribe("shop.Orders", look):
        assert main(["registry", "register", url, "shop.Orders", "10.0.0.7:50051"]) == 130
        assert wait_until(lambda: seen[-1] == [])
    assert len(pauses) == 1
    assert capsys.readouterr().out.endswith("withdrawn shop.Orders/10.0.0.7:50051\n")


def test_a_signal_in_the_middle_of_the_registration_withdraws_it_too(
    url, registry, capsys, monkeypatch
) -> None:
    register, calls = Registry.register, []

    def interrupted(self, *args, **options):
        calls.append(register(self, *args, **options))
        if len(calls) == 1:
            raise KeyboardInterrupt  # before the caller has what was returned
        return calls[-1]

    monkeypatch.setattr(registry_jobs, "FAREWELL_S", WAIT_S)
    monkeypatch.setattr(Registry, "register", interrupted)
    assert main(["registry", "register", url, "shop.Orders", "10.0.0.7:50051"]) == 130
    assert capsys.readouterr().out == "withdrawn shop.Orders/10.0.0.7:50051\n"


def test_register_says_whose_place_it_takes(url, registry, capsys) -> None:
    registered(registry, instance(epoch="feed"))
    others = []

    def look(snapshot):
        others.extend(one for one in snapshot.instances if one.epoch != "feed")
        if len(others) == 1:
            ctrl_c.send()

    with Interrupt() as ctrl_c, registry.subscribe("shop.Orders", look):
        assert main(["registry", "register", f"{url}/shop.Orders", "10.0.0.7:50051"]) == 130
    said = "takes the place of shop.Orders/10.0.0.7:50051 of the process feed at 10.0.0.7:50051"
    assert said in capsys.readouterr().err
