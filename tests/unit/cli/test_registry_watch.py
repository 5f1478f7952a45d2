"""`rpcwheel registry watch` without a registry."""

from contextlib import nullcontext

import pytest

from rpcwheel.cli import registry as commands
from rpcwheel.instance import ServiceInstance, Snapshot
from rpcwheel.registry.backend import Consumer

A, B = (ServiceInstance(service="shop.Orders", host="10.0.0.7", port=port) for port in (1, 2))
WEB = Consumer("shop.Orders", "web", "10.0.0.9")


class ChangingRegistry:
    """A registry whose changes are waiting already, and that ends after the consumers."""

    def lookup(self, service):
        pass

    def subscribe(self, service, callback):
        callback(Snapshot(service, (A,)))
        callback(Snapshot(service, (A, B)))

    def consumers(self, services):
        self.consumers = self.interrupt
        return [WEB]

    def interrupt(self, services):
        raise KeyboardInterrupt


@pytest.fixture
def changing(monkeypatch, set_limit):
    registry = nullcontext(ChangingRegistry())
    set_limit("cli.registry.CONSUMERS_INTERVAL_S", 0.0)
    monkeypatch.setattr(commands, "_open_registry", lambda *_: registry)
    monkeypatch.setattr(commands, "_open_backend", lambda *_: registry)


def test_consumers_are_shown_while_the_instances_keep_changing(changing, capsys):
    with pytest.raises(KeyboardInterrupt):
        commands.watch("memory://", ["shop.Orders"])
    lines = capsys.readouterr().out.splitlines()
    shown = ["consumer" if "consumer" in line else line[0] for line in lines]
    assert shown == ["=", "consumer", "+"]
