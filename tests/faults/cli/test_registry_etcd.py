"""`rpcwheel registry register` and `watch` on an etcd that loses its data."""

import json
import signal
from functools import partial

from fixtures.engine_etcd import EtcdEngine
from fixtures.programs import command, ended
from fixtures.waiting import wait_until
from rpcwheel.registry import RegistryPolicy, open_registry

ALONE = RegistryPolicy(snapshot=False)

job = partial(command, "registry")


def test_register_and_watch_report_data_loss_and_register_publishes_again() -> None:
    with EtcdEngine() as etcd:
        register = ["register", etcd.url("shop.Orders"), "10.0.0.7:50051", "--lease-ttl", "9"]
        with job(*register) as publisher:
            assert publisher.stdout.readline().startswith("published shop.Orders/10.0.0.7:50051")
            with job("watch", etcd.url(), "shop.Orders", "--json") as watcher:
                lines = [json.loads(watcher.stdout.readline())]
                etcd.wipe()
                assert any(" again: the registry had lost it" in line for line in publisher.stdout)
                while lines[-1]["event"] != "reconnected":
                    lines.append(json.loads(watcher.stdout.readline()))
                assert ended(watcher, signal.SIGINT)[0] == 130
            assert lines[0]["event"] == "present"
            assert "disconnected" in [one["event"] for one in lines]
            assert "removed" not in [one["event"] for one in lines]
            with open_registry(etcd.url(), registry_policy=ALONE) as registry:
                assert wait_until(lambda: registry.lookup("shop.Orders").instances)
                assert ended(publisher, signal.SIGTERM)[0] == 143
                assert registry.lookup("shop.Orders").instances == ()
