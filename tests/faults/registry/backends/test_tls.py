"""TLS with each engine: the certificates that both sides check, and the errors."""

from urllib.parse import urlencode

import pytest
import trustme

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_redis import RedisEngine
from fixtures.engine_watchers import RecordingWatcher, instance
from fixtures.engine_zookeeper import ZookeeperEngine
from rpcwheel.errors import RegistryRefused, RegistryUnavailable

SERVICE = "shop.Orders"


@pytest.mark.parametrize("kind", [EtcdEngine, RedisEngine, ZookeeperEngine])
def test_both_sides_check_certificates(opened, tls_files, tmp_path, kind):
    root, chain, key = map(str, tls_files)
    own, other = {"cert": chain, "key": key}, tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    with kind(tls=tls_files) as engine:
        watcher = RecordingWatcher()
        by_scheme = engine.url(ca=root, **own).replace("://", "s://")
        watching, publishing = opened(by_scheme), opened(engine.url(tls="true", ca=root, **own))
        watching.watch(SERVICE, watcher)
        publishing.publish([instance()])
        assert watcher.sees(instance())
        # Or they would connect again while the engine ends: before Python 3.13, a socket that is
        # reset before its TLS handshake is left to the garbage collector, which warns.
        for backend in (watching, publishing):
            backend.close()
        for url in (engine.url(tls="true"), engine.url(tls="true", ca=str(other), **own)):
            with pytest.raises(RegistryRefused, match=r"the root that signed it: \?ca=") as refused:
                opened(url).lookup(SERVICE)
            assert refused.type is RegistryRefused
            assert "certificate" in str(refused.value).lower()
        without_own = engine.url(tls="true", ca=root)
        if kind is ZookeeperEngine:
            with pytest.raises(RegistryRefused, match=r"(?i)certificate"):
                opened(without_own).lookup(SERVICE)
        if kind is EtcdEngine:  # gRPC may see only the closed connection
            with pytest.raises((RegistryRefused, RegistryUnavailable)):
                opened(without_own).lookup(SERVICE)
        with pytest.raises(RegistryUnavailable):  # without TLS
            opened(engine.url(), timeout=0.3).lookup(SERVICE)


def test_a_certificate_of_etcd_for_another_host_is_refused(opened, tls_files):
    root, chain, key = map(str, tls_files)
    with EtcdEngine(tls=tls_files) as engine:
        files = {"ca": root, "cert": chain, "key": key}
        named = f"{engine.url()}?tls&server_name=localhost&{urlencode(files)}"
        assert opened(named).lookup(SERVICE).records == {}
        url = engine.url(tls="true", server_name="shop.example", **files)
        with pytest.raises(RegistryRefused, match=r"for this host") as refused:
            opened(url).lookup(SERVICE)
        assert refused.type is RegistryRefused


def test_one_etcd_member_with_a_trusted_certificate_is_enough(opened, tls_files, tmp_path):
    chain_of_another = tmp_path / "chain.pem"
    key_of_another = tmp_path / "key.pem"
    another = trustme.CA().issue_cert("127.0.0.1", "localhost")
    another.cert_chain_pems[0].write_to_path(chain_of_another)
    another.private_key_pem.write_to_path(key_of_another)
    root, chain, key = map(str, tls_files)
    others = tls_files[0], chain_of_another, key_of_another
    with EtcdEngine(tls=tls_files) as right, EtcdEngine(tls=others) as wrong:
        hosts = f"127.0.0.1:{wrong.port},127.0.0.1:{right.port}"
        for _ in range(4):  # each begins with any of them
            backend = opened(f"etcds://{hosts}?ca={root}&cert={chain}&key={key}")
            assert backend.lookup(SERVICE).records == {}
