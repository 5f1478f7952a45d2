"""What listens at an address. Most of it: test_doctor.py and test_doctor_tls.py."""

import socket
import time

import trustme

from fixtures.listeners import closes, greeted, http2_answering, over_tls, says
from fixtures.waiting import WAIT_S
from rpcwheel.cli.diagnosis import Level
from rpcwheel.cli.peer import Way, pings_permitted, protocol, round_trips
from rpcwheel.cli.target import Address


def way(port, timeout=WAIT_S, **settings):
    return Way(Address(socket.AF_INET, ("127.0.0.1", port)), timeout, **settings)


def test_a_server_that_comes_and_goes_is_told_with_what_was_measured(listen):
    left = [http2_answering(b"200")] * 2

    def twice(sock):
        (left.pop() if left else closes)(sock)

    port = listen(twice).port
    notes = {note.step: note for note in round_trips(way(port), 5)}
    assert notes["rtt"].level is Level.WARN
    assert "after 2 of 5 connections" in notes["rtt"].said
    assert notes["ping"].facts["samples"] == 2


def test_a_connection_that_is_cut_between_pings_breaks_keepalive(listen):
    def cut(sock):
        greeted(sock).listen(time.monotonic() + 0.5)

    port = listen(cut).port
    *_, last = pings_permitted(way(port), 2.0)
    assert (last.step, last.level) == ("keepalive", Level.FAIL)
    assert "and 1 pings: the peer closed" in last.said


def test_tls_that_gives_no_alert_to_plaintext_is_found_by_trying(listen, tmp_path):
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(leaf.cert_chain_pems[0].bytes())
    key.write_bytes(leaf.private_key_pem.bytes())
    secure = over_tls(says(b""), (chain, key))

    def sulks(sock):
        if sock.recv(3, socket.MSG_PEEK) == b"PRI":
            return
        secure(sock)

    (note,) = protocol(way(listen(sulks).port))
    assert note.said == "the server wants TLS"


def test_an_alert_is_tls_too(listen):
    def refuses(sock):
        if sock.recv(1000).startswith(b"\x16"):
            sock.sendall(b"\x15\x03\x03\0\2\2\x28")  # fatal: handshake_failure

    (note,) = protocol(way(listen(refuses).port))
    assert note.said == "the server wants TLS"
