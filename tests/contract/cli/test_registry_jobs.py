"""The jobs that run until Ctrl-C, as processes, on a registry in a file."""

import signal
import socket
from functools import partial

from fixtures.programs import command, ended
from fixtures.waiting import WAIT_S
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import RegistryPolicy, open_registry

ALONE = RegistryPolicy(snapshot=False)

job = partial(command, "registry")

ON_ANOTHER_THREAD = """
import signal, sys, threading
from rpcwheel.cli import main
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in this thread and in those to come
sys.exit(main(sys.argv[1:]))
"""


def instance(**values):
    return ServiceInstance(**{"service": "shop.Orders", "host": "10.0.0.7", "port": 50051} | values)


def test_register_publishes_until_a_signal_and_then_withdraws(url) -> None:
    words = [*(url, "shop.Orders", "10.0.0.7:50051", "--lease-ttl", "60", "--tls", "--group", "g"),
             *("--weight", "7", "--zone", "b", "--meta", "a=1", "--meta", "b=x=y"),
             *("--version", "v2")]  # fmt: skip
    with open_registry(url, registry_policy=ALONE) as registry, job("register", *words) as process:
        assert process.stdout.readline().startswith("published shop.Orders/10.0.0.7:50051 at")
        (one,) = registry.lookup("shop.Orders").instances
        expected = instance(weight=7, zone="b", metadata={"a": "1", "b": "x=y"}, version="v2",
                            group="g", protocol="grpcs", epoch=one.epoch,
                            started_at=one.started_at)  # fmt: skip
        assert one == expected
        assert one.started_at > 0
        withdrew = "withdrew shop.Orders/10.0.0.7:50051\n"
        assert ended(process, signal.SIGTERM)[:2] == (143, withdrew)
        assert registry.lookup("shop.Orders").instances == ()  # long before the lease is over


def test_watch_prints_instances_that_are_added_changed_and_removed(url) -> None:
    """Also if a signal does not interrupt its wait."""
    with open_registry(url, registry_policy=ALONE) as registry:
        registry.register(instance(id="a"), wait=WAIT_S)
        with job("watch", url, "shop.Orders", program=("-c", ON_ANOTHER_THREAD)) as process:
            lines = [process.stdout.readline()]
            two = registry.register(instance(id="b"))
            lines.append(process.stdout.readline())
            for change in ({"weight": 1}, {"status": "DRAINING"}):
                two.update(**change)
                lines.append(process.stdout.readline())
            two.unregister()
            lines.append(process.stdout.readline())
            assert ended(process, signal.SIGINT)[:2] == (130, "")
    assert [line.rstrip() for line in lines] == [
        "= shop.Orders a (10.0.0.7:50051) present: UP, weight 100",
        "+ shop.Orders b (10.0.0.7:50051) added: UP, weight 100",
        "~ shop.Orders b (10.0.0.7:50051) changed: weight 100 -> 1",
        "~ shop.Orders b (10.0.0.7:50051) changed: status UP -> DRAINING",
        "- shop.Orders b (10.0.0.7:50051) removed",
    ]


def test_a_registry_that_never_answers_is_reported_in_one_line() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        place = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with job("ls", place, "shop.Orders", "--timeout", "0.3") as process:
            _, printed = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    (line,) = printed.splitlines()  # and none of the log
    assert line.endswith("Timeout reading from socket")  # the cause, not: no answer yet
