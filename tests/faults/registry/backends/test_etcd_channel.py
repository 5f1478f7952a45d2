"""TLS to etcd: the options of a URL, and the certificates that both sides check."""

import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_watchers import RecordingWatcher, instance
from rpcwheel.errors import RegistryRefused, RegistryUnavailable

SERVICE = "shop.Orders"


def test_both_sides_check_certificates(opened, tls_files) -> None:
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    root, chain, key = map(str, tls_files)
    with EtcdEngine(tls=tls_files) as etcd:
        secure = etcd.url().replace("etcd:", "etcds:")
        good = opened(f"{secure}?ca={root}&cert={chain}&key={key}")
        named = opened(f"{etcd.url()}?tls&ca={root}&cert={chain}&key={key}&server_name=localhost")
        watcher = RecordingWatcher()
        good.watch(SERVICE, watcher)
        named.publish([instance()])
        assert watcher.sees(instance())
        with pytest.raises(RegistryRefused):  # an unknown root
            opened(secure).lookup(SERVICE)
        with pytest.raises((RegistryRefused, RegistryUnavailable)):  # no client certificate
            opened(f"{secure}?ca={root}").lookup(SERVICE)  # gRPC may see only the closed connection
        with pytest.raises(RegistryUnavailable):  # no TLS
            opened(etcd.url()).lookup(SERVICE)
