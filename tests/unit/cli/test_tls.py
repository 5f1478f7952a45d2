"""Whom we trust, and what each failure of TLS means. Over sockets: test_doctor_tls.py."""

import ssl
from pathlib import Path

import grpc

from rpcwheel.cli.tls import TlsSettings, explained, roots


def error(reason):
    failed = ssl.SSLError(1, reason)
    failed.reason = reason
    return failed


def of_certificate(code, message="said so"):
    failed = ssl.SSLCertVerificationError(1, message)
    failed.verify_code, failed.verify_message = code, message
    return failed


def test_without_a_file_we_trust_whom_grpc_trusts(monkeypatch, tmp_path):
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    brought = Path(grpc.__file__).parent / "_cython" / "_credentials" / "roots.pem"
    assert roots(None) == brought.read_bytes()
    (tmp_path / "mine.pem").write_bytes(b"mine")
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(tmp_path / "mine.pem"))
    assert roots(None) == b"mine"
    assert roots(brought) == brought.read_bytes()


def test_without_checking_nothing_is_required():
    lenient = TlsSettings().context(verify=False)
    assert (lenient.verify_mode, lenient.check_hostname) == (ssl.CERT_NONE, False)
    strict = TlsSettings().context()
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert TlsSettings().context(check_name=False).verify_mode == ssl.CERT_REQUIRED


def test_what_is_wrong_with_a_certificate_is_said_with_what_to_do():
    for code, said in [
        (10, "has expired"),
        (9, "not valid yet"),
        (18, "is self-signed"),
        (19, "is self-signed"),
        (20, "unknown CA"),
        (62, "not for 'shop', but for a.b, c.d"),
        (64, "not for 'shop'"),
        (7, "not valid: said so"),
    ]:
        trouble = explained(of_certificate(code), "shop", ["a.b", "c.d"])
        assert said in trouble.said
        assert trouble.do


def test_an_alert_of_the_server_is_said_in_words():
    for reason, said in [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "wants a certificate of the client"),
        ("SSLV3_ALERT_BAD_CERTIFICATE", "does not take our certificate"),
        ("TLSV1_ALERT_UNKNOWN_CA", "does not trust"),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", "refused the handshake; it may want"),
        ("TLSV1_ALERT_NO_APPLICATION_PROTOCOL", "no HTTP/2"),
        ("TLSV1_ALERT_PROTOCOL_VERSION", "no version of TLS in common"),
        ("TLSV1_UNRECOGNIZED_NAME", "no certificate for this name"),
        ("TLSV1_ALERT_INTERNAL_ERROR", "refused the handshake (TLSV1_ALERT_INTERNAL_ERROR)"),
    ]:
        trouble = explained(error(reason), "shop", [])
        assert said in trouble.said
        assert trouble.do


def test_what_is_no_tls_is_left_to_who_looks_further():
    for reason in ["WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING", None]:
        assert explained(error(reason), "shop", []) is None
