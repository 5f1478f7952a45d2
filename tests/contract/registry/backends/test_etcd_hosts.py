"""The host of an etcd URL cannot select another scheme of gRPC than an address or a DNS name."""

import socket

import pytest

from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend


def test_a_host_that_is_named_as_a_scheme_is_looked_up_in_dns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("2379")
        listener.listen()
        listener.setblocking(False)
        backend = open_backend("etcd://unix:2379", Settings(15.0, 3.0))
        with pytest.raises(RegistryUnavailable):
            backend.lookup("shop.Orders")
        with pytest.raises(BlockingIOError):  # no client has connected
            listener.accept()
        backend.close()
