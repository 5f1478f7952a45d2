"""The findings of `rpcwheel doctor` about TLS: with and without it, and with wrong certificates."""

import datetime as dt
import socket

import grpc
import pytest
import trustme

from fixtures.certificates import key_and_chain
from fixtures.listeners import answers, over_tls, says

TODAY = dt.datetime.now(dt.UTC)


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def ca(authority, tmp_path):
    """The file to give with `--ca`."""
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture
def secure_server(authority, health_server):
    """A gRPC server with TLS, whose certificate is for these names."""

    def start(*names, client_ca=None, place="127.0.0.1:0", **given):
        pairs = [key_and_chain(authority.issue_cert(*(names or ["127.0.0.1"]), **given))]
        credentials = grpc.ssl_server_credentials(
            pairs, root_certificates=client_ca, require_client_auth=client_ca is not None
        )
        return health_server(credentials=credentials, place=place)

    return start


def test_a_server_that_requires_tls_is_found_without_tls(doctor, secure_server):
    status, found = doctor(secure_server().target)
    assert (status, found["tls"]["message"]) == (1, "the server requires TLS")
    assert "--tls" in found["tls"]["advice"]


def test_a_server_without_tls_is_found_with_tls(doctor, health_server):
    status, found = doctor(health_server().target, "--tls")
    assert (status, found["tls"]["message"]) == (1, "the server speaks HTTP/2 without TLS")
    assert "leave out --tls" in found["tls"]["advice"]


def test_with_the_right_ca_a_server_is_healthy(doctor, secure_server, ca):
    server = secure_server("127.0.0.1", "localhost")
    assert doctor(f"localhost:{server.port}", "--ca", ca)[0] == 0
    status, found = doctor(server.target, "--ca", ca)
    assert (status, found["health"]["message"]) == (0, "the server is SERVING")
    assert found["tls"]["version"].startswith("TLSv1.")


def test_an_intermediate_ca_is_trusted_as_by_grpc(doctor, health_server, authority, tmp_path):
    intermediate = authority.create_child_ca()
    pairs = [key_and_chain(intermediate.issue_cert("127.0.0.1"))]
    server = health_server(credentials=grpc.ssl_server_credentials(pairs))
    intermediate.cert_pem.write_to_path(tmp_path / "ca.pem")
    status, found = doctor(server.target, "--ca", str(tmp_path / "ca.pem"))
    assert (status, found["health"]["message"]) == (0, "the server is SERVING")


def test_an_unknown_ca_is_found(doctor, secure_server):
    status, found = doctor(secure_server().target, "--tls")
    assert status == 1
    assert "signed by an unknown CA" in found["tls"]["message"]
    assert "--ca FILE" in found["tls"]["advice"]


def test_a_certificate_for_another_name_is_found_with_its_names(doctor, secure_server, ca):
    target = secure_server("shop.example", "www.shop.example").target
    status, found = doctor(target, "--ca", ca)
    assert status == 1
    assert (
        "not valid for '127.0.0.1', but for shop.example, www.shop.exa" in found["tls"]["message"]
    )
    assert doctor(target, "--ca", ca, "--servername", "shop.example")[0] == 0


def test_a_unix_socket_needs_the_name_that_the_client_overrides(
    doctor, secure_server, ca, tmp_path
):
    target = secure_server("localhost", place=f"unix:{tmp_path}/app.sock").target
    status, found = doctor(target, "--ca", ca)
    assert (status, list(found)[-1]) == (1, "tls")
    assert "grpc.ssl_target_name_override" in found["tls"]["advice"]
    assert doctor(target, "--ca", ca, "--servername", "localhost")[0] == 0


def test_a_certificate_that_expires_soon_is_a_warning(doctor, secure_server, ca):
    server = secure_server(not_after=TODAY + dt.timedelta(days=5, hours=1))
    status, found = doctor(server.target, "--ca", ca)
    assert (status, found["tls"]["level"], found["tls"]["advice"]) == (0, "warn", "renew it")
    assert "expires in 5 days" in found["tls"]["message"]


def test_a_missing_client_certificate_is_found(doctor, secure_server, authority, ca, tmp_path):
    server = secure_server(client_ca=authority.cert_pem.bytes())
    status, found = doctor(server.target, "--ca", ca)
    assert status == 1
    assert "requires a client certificate" in found["tls"]["message"]
    leaf, chain, key = authority.issue_cert("client.example"), tmp_path / "chain", tmp_path / "key"
    leaf.cert_chain_pems[0].write_to_path(chain)
    leaf.private_key_pem.write_to_path(key)
    ours = ["--cert", str(chain), "--key", str(key)]
    assert doctor(server.target, "--ca", ca, *ours)[0] == 0


@pytest.mark.parametrize("alpn", [None, "http/1.1"])
def test_tls_without_alpn_h2_is_found(doctor, listen, ca, authority, alpn):
    refuse = answers(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    served = over_tls(refuse, authority.issue_cert("127.0.0.1"), alpn=alpn)
    status, found = doctor(listen(served).target, "--ca", ca)
    assert status == 1
    assert "ALPN h2" in found["tls"]["message"]


def test_tls_is_found_behind_a_server_that_ignores_plaintext(doctor, listen, authority):
    secure = over_tls(says(b""), authority.issue_cert("127.0.0.1"))

    def ignores_plaintext(sock):
        if sock.recv(3, socket.MSG_PEEK) != b"PRI":
            secure(sock)

    _, found = doctor(listen(ignores_plaintext).target)
    assert found["tls"]["message"] == "the server requires TLS"


def test_another_protocol_is_recognized_with_tls(doctor, listen):
    status, found = doctor(listen(says(b"SSH-2.0-OpenSSH_9.6\r\n")).target, "--tls")
    assert status == 1
    assert "this is SSH" in found["tls"]["message"]


def test_a_tls_alert_shows_that_the_server_wants_tls(doctor, listen):
    def refuses(sock):
        if sock.recv(1000).startswith(b"\x16"):
            sock.sendall(b"\x15\x03\x03\0\2\2\x28")  # fatal: handshake_failure

    _, found = doctor(listen(refuses).target)
    assert found["tls"]["message"] == "the server requires TLS"
