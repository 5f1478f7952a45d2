"""How a connection to etcd is made: what a URL may say of TLS, and what both sides check."""

import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_watchers import RecordingWatcher, instance
from rpcwheel.errors import ConfigurationError, RegistryRefused, RegistryUnavailable
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend

SERVICE = "shop.Orders"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("etcd://10.0.0.1?ca=/ca.pem", "only over TLS"),
        ("etcd://10.0.0.1?server_name=etcd", "only over TLS"),
        ("etcds://10.0.0.1?tls=no", "without it etcd://"),
        ("etcds://10.0.0.1?cert=/a.pem", "cert and key go together"),
        ("etcds://10.0.0.1?ca=/no/such/file", "can't be read"),
    ],
)
def test_a_url_that_makes_no_sense_for_tls_is_refused_at_once(url, why) -> None:
    with pytest.raises(ConfigurationError, match=why):
        open_backend(url, Settings(2.0, 1.0))


def test_over_tls_the_certificates_of_both_sides_are_checked(opened, tls_files) -> None:
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    root, chain, key = map(str, tls_files)
    with EtcdEngine(tls=tls_files) as etcd:
        secure = etcd.url().replace("etcd:", "etcds:")
        good = opened(f"{secure}?ca={root}&cert={chain}&key={key}")
        named = opened(f"{etcd.url()}?tls&ca={root}&cert={chain}&key={key}&server_name=localhost")
        witness = RecordingWatcher()
        good.watch(SERVICE, witness)
        named.publish([instance()])
        assert witness.sees(instance())
        with pytest.raises(RegistryRefused):  # a root that nobody knows
            opened(secure).lookup(SERVICE)
        with pytest.raises((RegistryRefused, RegistryUnavailable)):  # no certificate of our own
            opened(f"{secure}?ca={root}").lookup(SERVICE)  # gRPC may see only the end
        with pytest.raises(RegistryUnavailable):  # no TLS
            opened(etcd.url()).lookup(SERVICE)
