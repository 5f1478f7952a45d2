"""The host of an etcd URL cannot select another scheme of gRPC than an address or a DNS name."""

import socket

import pytest

from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import open_provider


def test_a_host_that_is_named_as_a_scheme_is_looked_up_in_dns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("2379")
        listener.listen()
        listener.setblocking(False)
        provider = open_provider("etcd://unix:2379", Settings(15.0, 3.0))
        with pytest.raises(RegistryUnavailable):
            provider.lookup("shop.Orders")
        with pytest.raises(BlockingIOError):  # nobody has connected
            listener.accept()
        provider.close()
