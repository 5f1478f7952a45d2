"""A failed TLS handshake: the same error type and advice with every engine."""

import pytest
import trustme

from fixtures.engine_etcd import EtcdEngine
from fixtures.engine_redis import RedisEngine
from fixtures.engine_zookeeper import ZookeeperEngine
from fixtures.ports import free_port
from rpcwheel.errors import RegistryRefused, RegistryUnavailable

SERVICE = "shop.Orders"


@pytest.mark.parametrize("kind", [EtcdEngine, RedisEngine, ZookeeperEngine])
def test_an_untrusted_certificate_is_refused_with_advice(opened, tls_files, tmp_path, kind):
    if reason := kind.available():
        pytest.skip(reason)
    root, chain, key = map(str, tls_files)
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    with kind(tls=tls_files) as engine:
        good = opened(engine.url(tls="true", ca=root, cert=chain, key=key))
        assert good.lookup(SERVICE).records == {}
        wrong = opened(engine.url(tls="true", ca=str(other), cert=chain, key=key))
        with pytest.raises(RegistryRefused, match=r"the root that signed it: \?ca=") as refused:
            wrong.lookup(SERVICE)
        assert refused.type is RegistryRefused


def test_a_certificate_of_etcd_for_another_host_is_refused(opened, tls_files):
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    root, chain, key = map(str, tls_files)
    with EtcdEngine(tls=tls_files) as engine:
        files = {"ca": root, "cert": chain, "key": key}
        url = engine.url(tls="true", server_name="shop.example", **files)
        with pytest.raises(RegistryRefused, match=r"for this host") as refused:
            opened(url).lookup(SERVICE)
        assert refused.type is RegistryRefused


def test_one_etcd_member_with_a_trusted_certificate_is_enough(opened, tls_files, tmp_path):
    if reason := EtcdEngine.available():
        pytest.skip(reason)
    chain_of_another = tmp_path / "chain.pem"
    key_of_another = tmp_path / "key.pem"
    another = trustme.CA().issue_cert("127.0.0.1", "localhost")
    for blob in another.cert_chain_pems:
        blob.write_to_path(chain_of_another, append=True)
    another.private_key_pem.write_to_path(key_of_another)
    root, chain, key = map(str, tls_files)
    wrong = EtcdEngine(tls=(tls_files[0], chain_of_another, key_of_another))
    with EtcdEngine(tls=tls_files) as right, wrong:
        hosts = f"127.0.0.1:{wrong.port},127.0.0.1:{right.port}"
        for _ in range(4):  # each begins with any of them
            backend = opened(f"etcds://{hosts}?ca={root}&cert={chain}&key={key}")
            assert backend.lookup(SERVICE).records == {}


def test_a_missing_etcd_raises_exactly_registry_unavailable(opened):
    with pytest.raises(RegistryUnavailable) as failed:
        opened(f"etcd://127.0.0.1:{free_port()}").lookup(SERVICE)
    assert failed.type is RegistryUnavailable
