"""TLS settings of registry URLs."""

import os
import ssl
from pathlib import Path
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from fixtures.engine_watchers import tls_files
from rpcwheel._engines.tls import Tls, refused_by_tls
from rpcwheel.cli.doctor.tls import TlsSettings
from rpcwheel.errors import ConfigurationError
from rpcwheel.registry.url import parse_url

__all__ = ["tls_files"]


def tls_of(text):
    url = parse_url(text)
    return Tls.from_options(url, url.tls_options())


@pytest.mark.parametrize("scheme", ["etcd", "zookeeper", "dubbo+zookeeper", "redis"])
def test_tls_is_on_if_the_scheme_or_the_url_says_so(scheme):
    assert tls_of(f"{scheme}://a") is None
    assert tls_of(f"{scheme}://a?tls") == Tls()
    assert tls_of(f"{scheme}s://a") == Tls()


def test_the_context_checks_the_host_name_and_trusts_the_given_root(tls_files):
    root, chain, key = tls_files
    url = f"redis://a?tls=1&ca={root}&cert={chain}&key={key}"
    context = tls_of(url).context()
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1


def test_a_relative_file_is_found_after_the_program_has_changed_its_directory(
    tls_files, tmp_path, monkeypatch
):
    root = Path(tls_files[0])
    monkeypatch.chdir(root.parent)
    tls = tls_of(f"redis://a?tls=1&ca={root.name}")
    monkeypatch.chdir(tmp_path)
    assert len(tls.context().get_ca_certs()) == 1


def test_a_file_without_a_certificate_is_refused(tls_files):
    root, _, key = tls_files
    with pytest.raises(ConfigurationError, match="can't be used"):
        tls_of(f"redis://a?tls=1&ca={key}")
    with pytest.raises(ConfigurationError, match="can't be used"):
        tls_of(f"redis://a?tls=1&cert={root}&key={key}")


def test_a_pass_phrase_of_a_key_is_not_asked_for(tls_files, tmp_path):
    root, chain, key = tls_files
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        load_pem_private_key(key.read_bytes(), None).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"pass")
        )
    )
    with pytest.raises(ConfigurationError, match="the private key is encrypted"):
        tls_of(f"redis://a?tls=1&cert={chain}&key={encrypted}")
    with pytest.raises(OSError, match="the private key is encrypted"):
        TlsSettings(True, root, chain, encrypted).context()


def test_a_file_below_a_home_directory_that_is_unknown_is_refused():
    with pytest.raises(ConfigurationError, match=r"~nobody-is-called-so/ca\.pem.*absolute path"):
        tls_of("redis://a?tls=1&ca=~nobody-is-called-so/ca.pem")


def test_a_relative_file_is_refused_if_the_working_directory_was_removed(monkeypatch):
    removed = FileNotFoundError(2, "No such file or directory")
    monkeypatch.setattr(os, "getcwd", Mock(side_effect=removed))
    with pytest.raises(ConfigurationError, match=r"'ca\.pem'.*absolute path"):
        tls_of("redis://a?tls=1&ca=ca.pem")


def test_refused_by_tls_finds_the_ssl_error_among_the_causes():
    error = ConnectionError()
    error.__cause__ = ssl.SSLCertVerificationError("self-signed")
    assert refused_by_tls(error)
    assert not refused_by_tls(ConnectionError("reset"))
    assert not refused_by_tls(ssl.SSLEOFError())
    assert not refused_by_tls(None)
