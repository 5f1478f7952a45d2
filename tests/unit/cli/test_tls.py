"""The root certificates, and the meaning of TLS errors. Over sockets: test_doctor_tls.py."""

import ssl
from pathlib import Path

import grpc
import pytest

from rpcwheel.cli.doctor.tls import TlsSettings, explained, roots


def error(reason):
    failed = ssl.SSLError(1, reason)
    failed.reason = reason
    return failed


def of_certificate(code):
    failed = ssl.SSLCertVerificationError(1, "said so")
    failed.verify_code, failed.verify_message = code, "said so"
    return failed


def test_without_a_file_the_roots_are_those_of_grpc(monkeypatch, tmp_path):
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    brought = Path(grpc.__file__).parent / "_cython" / "_credentials" / "roots.pem"
    assert roots(None) == brought.read_bytes()
    (tmp_path / "mine.pem").write_bytes(b"mine")
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(tmp_path / "mine.pem"))
    assert roots(None) == b"mine"
    assert roots(brought) == brought.read_bytes()


def test_the_context_verifies_unless_told_not_to(monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        patched.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(tmp_path / "none.pem"))
        lenient = TlsSettings().context(verify=False)
    assert (lenient.verify_mode, lenient.check_hostname) == (ssl.CERT_NONE, False)
    strict = TlsSettings().context()
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert TlsSettings().context(check_name=False).verify_mode == ssl.CERT_REQUIRED


def test_the_comments_of_a_ca_file_may_have_any_encoding(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_bytes("# Főtanúsítvány\n".encode() + b"# Z\xfcrich\n" + roots(None))
    stores = [TlsSettings(ca=ca).context().cert_store_stats() for ca in (file, None)]
    assert stores[0] == stores[1]


def test_a_ca_file_that_grpc_cannot_use_is_refused(tmp_path):
    line = next(line for line in roots(None).splitlines(True) if line.startswith(b"-----BEGIN"))
    certificate = line + roots(None).partition(line)[2].partition(line)[0]
    for name, content in [
        ("with a byte order mark", b"\xef\xbb\xbf" + certificate),
        ("with bytes of no base64", certificate.replace(line, line + b"\xc2\xa0")),
    ]:
        file = tmp_path / f"{name}.pem"
        file.write_bytes(content)
        with pytest.raises(ssl.SSLError):
            TlsSettings(ca=file).context()


def test_each_wrong_certificate_has_message_and_advice():
    for code, message in [
        (10, "has expired"),
        (9, "not valid yet"),
        (18, "is self-signed"),
        (19, "is self-signed"),
        (20, "unknown CA"),
        (62, "not valid for 'shop', but for a.b, c.d"),
        (64, "not valid for 'shop'"),
        (7, "not valid: said so"),
    ]:
        problem = explained(of_certificate(code), "shop", ["a.b", "c.d"])
        assert message in problem.message
        assert problem.advice


def test_each_alert_has_message_and_advice():
    for reason, message in [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "requires a client certificate"),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "rejects the client certificate"),
        ("TLSV1_ALERT_UNKNOWN_CA", "does not trust"),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", "refused the handshake; it may require"),
        ("TLSV1_ALERT_NO_APPLICATION_PROTOCOL", "does not offer HTTP/2"),
        ("TLSV1_ALERT_PROTOCOL_VERSION", "no TLS version in common"),
        ("TLSV1_UNRECOGNIZED_NAME", "no certificate for this name"),
        ("TLSV1_ALERT_INTERNAL_ERROR", "refused the handshake (TLSV1_ALERT_INTERNAL_ERROR)"),
    ]:
        problem = explained(error(reason), "shop", [])
        assert message in problem.message
        assert problem.advice


def test_an_error_without_alert_has_no_meaning():
    for reason in ["WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", None]:
        assert explained(error(reason), "shop", []) is None
