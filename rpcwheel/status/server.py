"""The live view over HTTP: one page, the same as JSON, and the metrics for Prometheus.

`StatusServer` answers GET and HEAD of `/`, `/status.json` and `/metrics`. It is the standard
library's `ThreadingHTTPServer` with limits: one request per connection, on a daemon thread each,
and at most `MAX_CONNECTIONS` at a time. A client has `TIMEOUT_S` to send the head of its request,
of at most `MAX_HEAD_BYTES`, and as long to read the answer.

Who may read it:
    * Without a token it listens on the loopback only, and answers only if the header `Host` names
      the loopback or the configured host: a web page whose name was changed to resolve to this
      machine (DNS rebinding) has another one.
    * With a token `/status.json` and `/metrics` need the header `Authorization: Bearer <token>`.
      The page contains no data, so that a browser can load it. It asks for the token, or takes it
      from the fragment of its URL (`/#token=...`), which browsers do not send.
    * No header permits pages of other origins to read an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import warnings
from base64 import b64encode
from dataclasses import asdict
from functools import cache, partial
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import BaseServer
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rpcwheel import status
from rpcwheel._concurrency.closing import Closing
from rpcwheel._concurrency.executor import reset_after_fork
from rpcwheel._concurrency.shared import SharedObjects
from rpcwheel.errors import ConfigurationError

from .access import LOOPBACK, Access
from .sections import page_sections
from .snapshot import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CONNECTIONS: Final = 16

MAX_HEAD_BYTES: Final = 16_384
READ_BYTES: Final = 8_192
"""How much of a head is read at once: less than all, so that a long first line gets 414, and a long
head 431."""

TIMEOUT_S: Final = 10.0

HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer, unless it has others."""

NO_METRICS: Final = (
    "metrics for Prometheus need the package prometheus_client: pip install 'rpcwheel[prometheus]';"
    " and RPCWHEEL_METRICS must not be off or otel\n"
)

_LOG: Final = logging.getLogger("rpcwheel")


class Answer(NamedTuple):
    """A response to a client."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


UNAUTHORIZED: Final = Answer(
    HTTPStatus.UNAUTHORIZED,
    b"the header Authorization must be 'Bearer' and the token (status_token)\n",
    headers={"WWW-Authenticate": "Bearer"},
)

FORBIDDEN: Final = Answer(
    HTTPStatus.FORBIDDEN,
    b"the header Host must name the loopback, such as localhost, or status_host\n",
)


class StatusServer(Closing):
    """An HTTP server of the live view, on one thread and one more for each request.

    A context manager that closes. A forked child does not serve: it closes its copy of the socket.
    """

    def __init__(self, port: int, host: str = LOOPBACK, token: str | None = None) -> None:
        """Listen.

        Args:
            port: 0: any free port.
            host: A name or address of this machine.
            token: What clients must know.

        Raises:
            ConfigurationError: The host can be reached from other machines, and there is no token;
                the token is too short; or the port is in use, or can't be used for another reason.
        """
        self._closed = True
        access = Access(host, token)
        listener = _listen(host, port)
        self.host, self.port = listener.getsockname()[:2]
        self._http = _HttpServer(listener, access)
        self._thread = _thread(self._http.serve)
        reset_after_fork(self)
        try:
            self._thread.start()
        except BaseException:  # no thread can be started
            self.reset()
            raise
        self._closed = False

    @property
    def address(self) -> str:
        """Host and port, such as `127.0.0.1:9090`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def closed(self) -> bool:
        """Whether it does not serve."""
        return self._closed

    def close(self) -> None:
        """Stop listening, and end the connections, if this is the last user. Any thread."""
        if _SHARED.release(self):
            self._end()

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._http.stop()
        if threading.current_thread() is self._thread:  # where the garbage collector may run
            return
        if not sys.is_finalizing():  # `join` raises then since CPython 3.14
            self._thread.join(TIMEOUT_S)

    def reset(self) -> None:
        """Close the copies of the sockets, in a forked child."""
        self._closed = True
        for sock in (self._http.socket, *self._http.connections):
            descriptor = sock.detach()  # `close` would wait for the file object of a request
            if descriptor != -1:
                os.close(descriptor)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._end()
            warnings.warn(
                f"a StatusServer at {self.address} was dropped and not closed: close it, or its "
                "kit",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )


class _HttpServer(ThreadingHTTPServer):
    """The sockets and threads. They do not know the `StatusServer`, so that it can be dropped."""

    timeout = None if sys.platform == "linux" else 0.5
    """Seconds until `serve` notices `stop`. Linux wakes it at once."""

    def __init__(self, listener: socket.socket, access: Access) -> None:
        # Not the next class's, which would look up the name of this host.
        BaseServer.__init__(self, listener.getsockname(), _Handler)
        self.socket = listener
        self.access = access
        self._stopped = False
        self._lock = threading.RLock()  # a finalizer may close the server at any time
        self.connections: dict[socket.socket, bool] = {}
        """The open connections, the oldest first, and whether the head of the request was read."""

    def serve(self) -> None:
        """Accept connections until `stop`. Not `serve_forever`, which wakes up twice a second."""
        with self:
            while not self._stopped:
                self.handle_request()

    def stop(self) -> None:
        """Stop accepting, and end the connections; their threads close them."""
        with self._lock:
            self._stopped = True
            for sock in (self.socket, *self.connections):
                _shut_down(sock)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            if not self._stopped:  # too many open files
                time.sleep(0.01)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Add a connection. If there are too many, end the oldest one that has sent no request.

        Returns:
            False if all others are being answered, or the server is stopped.
        """
        with self._lock:
            if len(self.connections) >= MAX_CONNECTIONS:
                connections = self.connections.items()
                silent = next((sock for sock, read in connections if not read), None)
                if silent is None:
                    with contextlib.suppress(OSError):  # the client has gone
                        request.send(b"HTTP/1.0 503 Service Unavailable\r\n\r\n")
                    return False
                del self.connections[silent]
                _shut_down(silent)
            if not self._stopped:
                self.connections[request] = False
            return not self._stopped

    def process_request(self, request: Any, client_address: Any) -> None:
        _thread(self.process_request_thread, request, client_address).start()

    def head_read(self, connection: socket.socket) -> None:
        """Note that the head of a request was read."""
        with self._lock:
            if connection in self.connections:
                self.connections[connection] = True

    def close_request(self, request: Any) -> None:
        with self._lock:
            self.connections.pop(request, None)
            request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the client is too slow, or has gone
            _LOG.exception("a request of the live view failed")


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client has closed it
        connection.shutdown(socket.SHUT_RDWR)


_SHARED: Final[SharedObjects[StatusServer]] = SharedObjects()


def shared_server(port: int, host: str, token: str | None) -> StatusServer:
    """Return the server at this address; it listens if this is the first user.

    Each user closes it once. With port 0, each user has a server. Arguments and errors as of
    `StatusServer`.
    """
    key = host, port or object(), token
    return _SHARED.acquire(key, partial(StatusServer, port, host, token))


def _listen(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigurationError(
            f"the live view cannot listen at {host}, port {port}: {error.strerror or error}; give "
            "another status_port, or 0 for any free port"
        ) from error


def _thread(target: Callable[..., object], *args: object) -> threading.Thread:
    return threading.Thread(target=target, args=args, name="rpcwheel-status", daemon=True)


class _HeadReader(io.RawIOBase):
    """Reads the head of a request: no longer than `TIMEOUT_S`, and at most `MAX_HEAD_BYTES`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._left = connection, MAX_HEAD_BYTES
        self._ends_at = time.monotonic() + TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(max(0.001, self._ends_at - time.monotonic()))
        count = self._connection.recv_into(buffer)
        self._left -= count
        if self._left < 0:
            raise LineTooLong("head")  # which the base class answers with 431
        return count


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _HttpServer
    command = requestline = request_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_HeadReader(self.connection), READ_BYTES)

    def handle(self) -> None:
        try:
            self.raw_requestline = self.rfile.readline()
        except LineTooLong:
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
            return
        if not self.parse_request():
            return
        self.server.head_read(self.connection)
        self.connection.settimeout(TIMEOUT_S)
        try:
            answer = self._answer()
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - the next request may succeed
            _LOG.exception("a request of the live view failed")
            answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"see the log of the process\n")
        self._send(answer)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        status = HTTPStatus(code)
        self._send(Answer(status, f"{message or status.phrase}\n".encode(errors="replace")))

    def send_response_only(self, code: int, message: str | None = None) -> None:
        self.request_version = "HTTP/1.0"  # the base class sends no head to a client of HTTP/0.9
        super().send_response_only(code, message)

    def _answer(self) -> Answer:
        # The headers of HTTP/0.9 are {} since CPython 3.14.
        path, headers = self.path.partition("?")[0], self.headers
        access = self.server.access
        if access.needs_token:
            if path != "/" and not access.has_token(headers.get("Authorization", "")):
                return UNAUTHORIZED
        elif not access.is_named_by(headers.get_all("Host", []) if headers else []):
            return FORBIDDEN
        if self.command not in {"GET", "HEAD"}:
            return Answer(
                HTTPStatus.METHOD_NOT_ALLOWED,
                b"only GET and HEAD are allowed\n",
                headers={"Allow": "GET, HEAD"},
            )
        make = PATHS.get(path)
        if make is None:
            return Answer(HTTPStatus.NOT_FOUND, f"there are {', '.join(sorted(PATHS))}\n".encode())
        return make(headers.get("Accept", ""))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        own = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            **answer.headers,
        }
        for name, value in (HEADERS | own).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        return "rpcwheel"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class
        """Log nothing: what clients send is not trusted."""


def _page(_: str) -> Answer:
    page, policy = page_and_policy()
    headers = {"Content-Security-Policy": policy}
    return Answer(HTTPStatus.OK, page, "text/html; charset=utf-8", headers)


@cache
def page_and_policy() -> tuple[bytes, str]:
    """Return the page, and the Content-Security-Policy that allows its script and its style."""
    page = files("rpcwheel.status").joinpath("page.html").read_text("utf-8")
    page = page.replace("$SECTIONS", page_sections())

    def source(element: str) -> str:
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return page.encode(), (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _status(_: str) -> Answer:
    text = json.dumps(asdict(snapshot()), allow_nan=False)
    return Answer(HTTPStatus.OK, text.encode(), "application/json")


def _metrics(accept: str) -> Answer:
    if status.exposition is None:
        return Answer(HTTPStatus.NOT_IMPLEMENTED, NO_METRICS.encode())
    body, content_type = status.exposition(accept)
    return Answer(HTTPStatus.OK, body, content_type)


PATHS: Final[dict[str, Callable[[str], Answer]]] = {
    "/": _page,
    "/status.json": _status,
    "/metrics": _metrics,
}
