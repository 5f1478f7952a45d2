"""The HTTP/2 connection of the doctor, over a pair of sockets."""

import socket
import struct
import time

import pytest

from fixtures.waiting import WAIT_S
from rpcwheel.cli.http2 import (
    ACK,
    PREFACE,
    Closed,
    Connection,
    Frame,
    GoneAway,
    Kind,
    OtherProtocol,
    protocol_of,
)

SETTINGS = Frame(Kind.SETTINGS, struct.pack(">HIHI", 3, 100, 0xFE03, 1))


@pytest.fixture
def ends():
    """The connection under test, and the socket of its peer."""
    near, far = socket.socketpair()
    far.settimeout(WAIT_S)
    with near, far:
        yield Connection(near), far


def until(seconds=WAIT_S):
    return time.monotonic() + seconds


def goaway(code, debug=b""):
    return Frame(Kind.GOAWAY, struct.pack(">II", 0, code) + debug).encoded()


def test_greet_sends_preface_settings_and_acknowledgement(ends):
    connection, far = ends
    far.sendall(SETTINGS.encoded())
    connection.greet(until())
    said = far.recv(1000)
    acknowledged = Frame(Kind.SETTINGS, b"", ACK).encoded()
    assert said == PREFACE + Frame(Kind.SETTINGS).encoded() + acknowledged
    assert connection.settings == {"max_concurrent_streams": 100, "65027": 1}


@pytest.mark.parametrize("first", [b"HTTP/1.1 400 Bad Request\r\n", b"-E"])
def test_a_first_frame_that_is_not_settings_is_another_protocol(ends, first):
    connection, far = ends
    far.sendall(first)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(OtherProtocol) as other:
        connection.greet(until())
    assert other.value.first == first


def test_greet_distinguishes_a_closed_from_a_silent_peer(ends):
    connection, far = ends
    with pytest.raises(TimeoutError):
        connection.greet(until(0.05))
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(Closed):
        connection.greet(until())


def test_a_ping_ignores_acknowledgements_of_other_pings(ends):
    connection, far = ends
    far.sendall(Frame(Kind.PING, b"somebody", ACK).encoded())
    with pytest.raises(TimeoutError):
        connection.ping(until(0.05))
    ping = far.recv(1000)
    far.sendall(Frame(Kind.PING, ping[9:], ACK).encoded())  # late: of the one before
    with pytest.raises(TimeoutError):
        connection.ping(until(0.05))


def test_listen_acknowledges_pings_of_the_peer(ends):
    connection, far = ends
    far.sendall(Frame(Kind.PING, b"12345678").encoded() + Frame(Kind.WINDOW_UPDATE).encoded())
    connection.listen(until(0.05))
    assert far.recv(1000) == Frame(Kind.PING, b"12345678", ACK).encoded()
    assert connection.pings_seen == 1


def test_a_frame_may_arrive_in_parts(ends):
    connection, far = ends
    whole = SETTINGS.encoded()
    far.sendall(whole[:11])
    with pytest.raises(TimeoutError):
        connection.greet(until(0.05))
    far.sendall(whole[11:])
    connection.greet(until())
    assert connection.settings["max_concurrent_streams"] == 100


@pytest.mark.parametrize(
    ("frame", "said", "pings"),
    [
        (goaway(11, b"too_many_pings"), "GOAWAY ENHANCE_YOUR_CALM ('too_many_pings')", True),
        (goaway(0, b"max_idle"), "GOAWAY NO_ERROR ('max_idle')", False),
        (goaway(77), "GOAWAY code 77", False),
    ],
)
def test_a_goaway_has_code_and_debug_data(ends, frame, said, pings):
    connection, far = ends
    far.sendall(frame)
    with pytest.raises(GoneAway) as gone:
        connection.listen(until())
    assert (str(gone.value), gone.value.too_many_pings) == (said, pings)


def test_a_frame_that_is_too_long_is_another_protocol(ends):
    connection, far = ends
    far.sendall(b"GET / HTTP/1.0\r\n")
    with pytest.raises(OtherProtocol):
        connection.listen(until())


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.SETTINGS, b"12345"),
        Frame(Kind.GOAWAY, b"123"),
        Frame(Kind.PING, b"1234", ACK),
    ],
)
def test_a_frame_of_a_wrong_length_is_another_protocol(ends, frame):
    connection, far = ends
    far.sendall(frame.encoded())
    with pytest.raises(OtherProtocol, match="it sent what is no HTTP/2") as other:
        connection.listen(until())
    assert other.value.first == frame.encoded()


def test_the_message_about_another_protocol_is_short(ends):
    assert len(str(OtherProtocol(b"\xff" * 16_000))) < 250


def test_a_goaway_may_be_the_first_frame(ends):
    connection, far = ends
    far.sendall(goaway(11, b"too many"))
    with pytest.raises(GoneAway, match="ENHANCE_YOUR_CALM"):
        connection.greet(until())


def test_other_protocols_are_recognized_by_their_first_bytes():
    for first, name, said in [
        (b"HTTP/1.0 200 OK\r\nServer: x", "HTTP/1.1", "200 OK"),
        (b"<!DOCTYPE HTML>\n<html>", "HTTP/1.1", "<!DOCTYPE HTML"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "TLS", ""),
        (b"-NOAUTH Authentication required.\r\n", "Redis", "-NOAUTH Authentication required."),
        (b"J\x00\x00\x00\x0a8.0.36\x00abc", "MySQL", "8.0.36"),
        (b"E\x00\x00\x00\xffj\x04Host is blocked", "MySQL", ""),
        (b"AMQP\x00\x00\x09\x01", "AMQP (RabbitMQ)", ""),
        (b"RFB 003.008\n", "VNC", "RFB 003.008"),
        (b"\x00\x01what", "", "'\\x00\\x01what'"),
    ]:
        assert protocol_of(first) == (name, said)
