"""An HTTP/2 connection without streams (RFC 9113), and the detection of other protocols.

gRPC reports UNAVAILABLE for nearly everything that fails before the first call, and has no way to
send a PING. So the doctor opens connections of its own. hyperframe encodes and decodes the frames.

h2 cannot replace this module (4.4.1): a gRPC server that shuts down sends GOAWAY and PING in one
segment, and h2 raises ProtocolError for the PING without reporting the GOAWAY.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hyperframe.exceptions import HyperframeError
from hyperframe.frame import Frame, GoAwayFrame, PingFrame, SettingsFrame

if TYPE_CHECKING:
    import socket

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes that a client sends (RFC 9113, section 3.4)."""

SETTINGS_NAMES: Final = {
    1: "header_table_size",
    2: "enable_push",
    3: "max_concurrent_streams",
    4: "initial_window_size",
    5: "max_frame_size",
    6: "max_header_list_size",
}

HEADER_SIZE: Final = 9
MAX_FRAME_SIZE: Final = 1 << 14
"""The longest payload that a peer may send, as our SETTINGS frame does not change the default."""

SHOWN_BYTES: Final = 40
"""How many bytes of an unknown protocol a message shows."""

ERROR_NAMES: Final = {
    0: "NO_ERROR",
    1: "PROTOCOL_ERROR",
    2: "INTERNAL_ERROR",
    3: "FLOW_CONTROL_ERROR",
    11: "ENHANCE_YOUR_CALM",
}


class Closed(ConnectionError):
    """The peer closed the connection."""


class GoneAway(ConnectionError):
    """The peer sent GOAWAY: it accepts no more streams on this connection."""

    def __init__(self, code: int, debug_data: str) -> None:
        """Store the error code and the debug data of the frame."""
        super().__init__(code, debug_data)
        self.code = code
        self.debug_data = debug_data

    @property
    def too_many_pings(self) -> bool:
        """Whether the peer refuses the rate of pings (gRFC A8: ENHANCE_YOUR_CALM)."""
        return ERROR_NAMES.get(self.code) == "ENHANCE_YOUR_CALM" or (
            self.debug_data == "too_many_pings"
        )

    def __str__(self) -> str:
        name = ERROR_NAMES.get(self.code, f"code {self.code}")
        return f"GOAWAY {name}" + (f" ({self.debug_data!r})" if self.debug_data else "")


class OtherProtocol(Exception):
    """The peer sent bytes that are not HTTP/2, or a frame that is not valid."""

    def __init__(self, received: bytes) -> None:
        """Store what the peer sent."""
        super().__init__(received)
        self.received = received

    def __str__(self) -> str:
        return f"the peer sent bytes that are not HTTP/2: {self.received[:SHOWN_BYTES]!r}"


@dataclass(slots=True)
class Http2Connection:
    """HTTP/2 frames on a connected socket, plain or TLS. `until` is a `time.monotonic()` value."""

    sock: socket.socket
    settings: dict[str, int] = field(default_factory=dict)
    """The settings of the peer."""
    pings_received: int = 0
    _buffer: bytearray = field(default_factory=bytearray)

    def handshake(self, until: float) -> None:
        """Send the preface, receive the settings of the server, and acknowledge them.

        Raises:
            OtherProtocol: The server does not speak HTTP/2.
            GoneAway: The server refuses the connection.
            Closed: The server closed the connection without sending anything.
            TimeoutError: The server sent nothing in time.
            OSError: An error of the socket (reset, TLS alert).
        """
        self.sock.sendall(PREFACE + SettingsFrame().serialize())
        try:
            self._fill(HEADER_SIZE, until)
        except (Closed, TimeoutError):
            if not self._buffer:
                raise
            raise OtherProtocol(bytes(self._buffer)) from None
        kind, flags, stream = self._buffer[3], self._buffer[4], self._buffer[5:9]
        if kind not in {SettingsFrame.type, GoAwayFrame.type} or flags or any(stream):
            raise OtherProtocol(bytes(self._buffer))
        self.handle(self.receive(until))

    def ping(self, until: float) -> float:
        """Send a PING, wait for its acknowledgement, and return the seconds between them.

        Raises:
            GoneAway, OtherProtocol, Closed, TimeoutError, OSError: As in `handshake`.
        """
        payload = os.urandom(8)
        began = time.monotonic()
        self.send(PingFrame(opaque_data=payload))
        while True:
            frame = self.receive(until)
            took = time.monotonic() - began
            self.handle(frame)
            match frame:
                case PingFrame(opaque_data=data) if "ACK" in frame.flags and data == payload:
                    return took

    def listen(self, until: float) -> None:
        """Receive and handle frames until the given time.

        Raises:
            GoneAway, OtherProtocol, Closed, OSError: As in `handshake`.
        """
        while True:
            try:
                self.handle(self.receive(until))
            except TimeoutError:
                return

    def handle(self, frame: Frame) -> None:
        """Acknowledge SETTINGS and PING.

        Raises:
            GoneAway: The frame is a GOAWAY.
        """
        match frame:
            case GoAwayFrame():
                raise GoneAway(frame.error_code, frame.additional_data.decode(errors="replace"))
            case PingFrame() if "ACK" not in frame.flags:
                self.pings_received += 1
                self.send(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]))
            case SettingsFrame() if "ACK" not in frame.flags:
                for number, value in frame.settings.items():
                    self.settings[SETTINGS_NAMES.get(number, str(number))] = value
                self.send(SettingsFrame(flags=["ACK"]))

    def send(self, frame: Frame) -> None:
        """Send one frame."""
        self.sock.sendall(frame.serialize())

    def receive(self, until: float) -> Frame:
        """Receive one frame.

        Raises:
            OtherProtocol, Closed, TimeoutError, OSError: As in `handshake`.
        """
        self._fill(HEADER_SIZE, until)
        size = HEADER_SIZE + int.from_bytes(self._buffer[:3], "big")
        if size > HEADER_SIZE + MAX_FRAME_SIZE:
            raise OtherProtocol(bytes(self._buffer))
        received = self.read(size, until)
        try:
            frame, _ = Frame.parse_frame_header(memoryview(received[:HEADER_SIZE]))
            frame.parse_body(memoryview(received[HEADER_SIZE:]))
        except HyperframeError:
            raise OtherProtocol(received) from None
        return frame

    def read(self, size: int, until: float) -> bytes:
        """Receive exactly so many bytes.

        Raises:
            Closed, TimeoutError, OSError: As in `handshake`.
        """
        self._fill(size, until)
        received = bytes(self._buffer[:size])
        del self._buffer[:size]
        return received

    def _fill(self, size: int, until: float) -> None:
        while len(self._buffer) < size:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer sent nothing in time")
            self.sock.settimeout(left)
            received = self.sock.recv(MAX_FRAME_SIZE)
            if not received:
                raise Closed("the peer closed the connection")
            self._buffer += received


FIRST_BYTES: Final = (  # what servers of other protocols send first, or as an answer to the preface
    (re.compile(rb"HTTP/1\.\d (?P<text>\d{3}[^\r\n]*)"), "HTTP/1.1"),
    (re.compile(rb"(?i)(?P<text><(!doctype )?html)"), "HTTP/1.1"),  # http.server: no status line
    (re.compile(rb"\x15\x03"), "TLS"),
    (re.compile(rb"(?P<text>SSH-[^\r\n]*)"), "SSH"),
    (re.compile(rb"(?P<text>-(ERR|NOAUTH|DENIED)[^\r\n]*)"), "Redis"),
    (re.compile(rb".{3}\x00\x0a(?P<text>[\x20-\x7e]+)\x00", re.DOTALL), "MySQL"),
    (re.compile(rb".{3}\x00\xff", re.DOTALL), "MySQL"),
    (re.compile(rb"(?P<text>220[ -][^\r\n]*)"), "SMTP or FTP"),
    (re.compile(rb"AMQP"), "AMQP (RabbitMQ)"),
    (re.compile(rb"(?P<text>RFB [^\r\n]*)"), "VNC"),
)


def protocol_of(received: bytes) -> tuple[str, str]:
    """Return the protocol that begins with these bytes ("" if unknown), and the text in them."""
    for pattern, name in FIRST_BYTES:
        if match := pattern.match(received):
            text = match.groupdict().get("text") or b""
            return name, text.decode(errors="replace")
    return "", repr(received[:SHOWN_BYTES])[1:]
