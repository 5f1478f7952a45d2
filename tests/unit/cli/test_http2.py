"""The HTTP/2 connection of the doctor, over a pair of sockets."""

import socket
import time

import pytest
from hyperframe.frame import (
    Frame,
    GoAwayFrame,
    PingFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from fixtures.waiting import WAIT_S
from rpcwheel.cli.doctor.http2 import (
    PREFACE,
    Closed,
    GoneAway,
    Http2Connection,
    OtherProtocol,
    protocol_of,
)

SETTINGS = bytes.fromhex("00000c 04 00 00000000 0003 00000064 fe03 00000001")
"""At most 100 streams, and a setting that only gRPC knows."""


@pytest.fixture
def ends():
    """The connection under test, and the socket of its peer."""
    near, far = socket.socketpair()
    far.settimeout(WAIT_S)
    with near, far:
        yield Http2Connection(near), far


def until(seconds=WAIT_S):
    return time.monotonic() + seconds


def frames(received: bytes) -> list[Frame]:
    """Decode what the connection has sent."""
    found = []
    while received:
        frame, size = Frame.parse_frame_header(memoryview(received[:9]))
        frame.parse_body(memoryview(received[9 : 9 + size]))
        found.append(frame)
        received = received[9 + size :]
    return found


def goaway(code, debug=b""):
    return GoAwayFrame(error_code=code, additional_data=debug).serialize()


def test_the_handshake_sends_preface_settings_and_acknowledgement(ends):
    connection, far = ends
    far.sendall(SETTINGS)
    connection.handshake(until())
    received = far.recv(1000)
    assert received.startswith(PREFACE)
    settings, acknowledgement = frames(received.removeprefix(PREFACE))
    assert isinstance(settings, SettingsFrame)
    assert isinstance(acknowledgement, SettingsFrame)
    assert "ACK" in acknowledgement.flags
    assert connection.settings == {"max_concurrent_streams": 100, "65027": 1}


@pytest.mark.parametrize("first", [b"HTTP/1.1 400 Bad Request\r\n", b"-E"])
def test_a_first_frame_that_is_not_settings_is_another_protocol(ends, first):
    connection, far = ends
    far.sendall(first)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(OtherProtocol) as other:
        connection.handshake(until())
    assert other.value.received == first


def test_the_handshake_distinguishes_a_closed_from_a_silent_peer(ends):
    connection, far = ends
    with pytest.raises(TimeoutError):
        connection.handshake(until(0.05))
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(Closed):
        connection.handshake(until())


def test_a_ping_ignores_acknowledgements_of_other_pings(ends):
    connection, far = ends
    far.sendall(PingFrame(opaque_data=b"another1", flags=["ACK"]).serialize())
    with pytest.raises(TimeoutError):
        connection.ping(until(0.05))
    (ping,) = frames(far.recv(1000))
    far.sendall(PingFrame(opaque_data=ping.opaque_data, flags=["ACK"]).serialize())  # too late
    with pytest.raises(TimeoutError):
        connection.ping(until(0.05))


def test_listen_acknowledges_pings_of_the_peer(ends):
    connection, far = ends
    window = WindowUpdateFrame(0, window_increment=1)
    far.sendall(PingFrame(opaque_data=b"12345678").serialize() + window.serialize())
    connection.listen(until(0.05))
    assert far.recv(1000) == PingFrame(opaque_data=b"12345678", flags=["ACK"]).serialize()
    assert connection.pings_received == 1


def test_a_frame_may_arrive_in_parts(ends):
    connection, far = ends
    far.sendall(SETTINGS[:11])
    with pytest.raises(TimeoutError):
        connection.handshake(until(0.05))
    far.sendall(SETTINGS[11:])
    connection.handshake(until())
    assert connection.settings["max_concurrent_streams"] == 100


@pytest.mark.parametrize(
    ("frame", "text", "too_many_pings"),
    [
        (goaway(11, b"too_many_pings"), "GOAWAY ENHANCE_YOUR_CALM ('too_many_pings')", True),
        (goaway(0, b"max_idle"), "GOAWAY NO_ERROR ('max_idle')", False),
        (goaway(77), "GOAWAY code 77", False),
    ],
)
def test_a_goaway_has_code_and_debug_data(ends, frame, text, too_many_pings):
    connection, far = ends
    far.sendall(frame + PingFrame(opaque_data=b"12345678").serialize())  # as gRPC servers do
    with pytest.raises(GoneAway) as gone:
        connection.listen(until())
    assert (str(gone.value), gone.value.too_many_pings) == (text, too_many_pings)


def test_a_goaway_may_be_the_first_frame(ends):
    connection, far = ends
    far.sendall(goaway(11, b"too many"))
    with pytest.raises(GoneAway, match="ENHANCE_YOUR_CALM"):
        connection.handshake(until())


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.0\r\n",  # too long
        bytes.fromhex("000005 04 00 00000000 0102030405"),  # SETTINGS
        bytes.fromhex("000003 07 00 00000000 010203"),  # GOAWAY
        bytes.fromhex("000004 06 01 00000000 01020304"),  # PING
        bytes.fromhex("000008 06 01 00000001 0102030405060708"),  # PING on a stream
    ],
)
def test_a_frame_that_is_not_valid_is_another_protocol(ends, frame):
    connection, far = ends
    far.sendall(frame)
    with pytest.raises(OtherProtocol, match="sent bytes that are not HTTP/2") as other:
        connection.listen(until())
    assert other.value.received == frame


def test_the_message_about_another_protocol_is_short():
    assert len(str(OtherProtocol(b"\xff" * 16_000))) < 250


def test_other_protocols_are_recognized_by_their_first_bytes():
    for first, name, said in [
        (b"HTTP/1.0 200 OK\r\nServer: x", "HTTP/1.1", "200 OK"),
        (b"<!DOCTYPE HTML>\n<html>", "HTTP/1.1", "<!DOCTYPE HTML"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "TLS", ""),
        (b"-NOAUTH Authentication required.\r\n", "Redis", "-NOAUTH Authentication required."),
        (b"J\x00\x00\x00\x0a8.0.36\x00abc", "MySQL", "8.0.36"),
        (b"E\x00\x00\x00\xffj\x04Host is blocked", "MySQL", ""),
        (b"220 mail.example ESMTP\r\n", "SMTP or FTP", "220 mail.example ESMTP"),
        (b"AMQP\x00\x00\x09\x01", "AMQP (RabbitMQ)", ""),
        (b"RFB 003.008\n", "VNC", "RFB 003.008"),
        (b"\x00\x01what", "", "'\\x00\\x01what'"),
    ]:
        assert protocol_of(first) == (name, said)
