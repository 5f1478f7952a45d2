"""How etcd is reached: one connection to one of its members, and another one when that fails.

The channel is a bare grpc one, without anything of ours around it. A request that gets no answer,
or no connection, is the end of the channel: the next one goes over a new channel to the next
member, so that neither a backoff of gRPC's nor a connection into a black hole outlives the failure.
A channel that is left is dropped, not closed: what others still do on it goes on.

Keepalives are of 10 s: etcd ends a connection that pings more often than each 5 s.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc

from rpcwheel.errors import (
    ConfigurationError,
    RegistryClosed,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.instance import joined

from ._etcd_messages import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rpcwheel.registry.url import RegistryUrl

__all__ = ["EtcdClient", "Stream"]

PORT: Final = 2379
KEEPALIVE_MS: Final = 10_000
PING_TIMEOUT_MS: Final = 3_000

ANSWERS: Final = {
    "KV/Range": "RangeResponse",
    "KV/Txn": "TxnResponse",
    "Lease/LeaseGrant": "LeaseGrantResponse",
    "Lease/LeaseRevoke": "LeaseRevokeResponse",
    "Lease/LeaseKeepAlive": "LeaseKeepAliveResponse",
    "Auth/Authenticate": "AuthenticateResponse",
    "Watch/Watch": "WatchResponse",
}
"""What is asked, and the message that answers. LeaseKeepAlive is a stream to etcd's mind; with one
request and one answer it is on the wire what a unary call is, and takes no thread here."""

REFUSALS: Final = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""With these etcd has understood, and will not; all others may pass."""

NOT_NEEDED: Final = "authentication is not enabled"
STALE_LOGIN: Final = ("invalid auth token", "revision of auth store is old", "user name is empty")
"""What etcd says of a token that it does not know any more, or wants by now."""


class Stream(Protocol):
    """A watch's answers, while it lasts."""

    def __iter__(self) -> Iterator[Any]:
        """Give the answers; raises grpc.RpcError at the end."""

    def cancel(self) -> object:
        """End it; does not block."""


class EtcdClient:
    """Asks etcd. Thread-safe; of the process that made it only."""

    def __init__(self, url: RegistryUrl, timeout_s: float) -> None:
        """Take note of where etcd is; contacts nobody.

        Raises:
            ConfigurationError: The URL makes no sense; it says what does.
            ExtraMissing: protobuf is missing.
        """
        self.where = str(url)
        self._timeout_s = timeout_s
        self._messages = messages()
        self._url = url
        self._tls = _is_tls(url)
        self._check()
        self._targets = [joined(host, port or PORT) for host, port in url.hosts]
        self._turn = random.randrange(len(self._targets))  # or all clients would ask the first one
        self._options = _channel_options(url)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._opened: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()
        self._token = ""
        self._closed = False
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, which must let go of what its parent has."""
        return os.getpid() != self._pid

    def ask(self, what: str, request: object, timeout_s: float | None = None) -> Any:  # noqa: ANN401
        """Send a request, such as "KV/Range", and wait for the answer.

        Raises:
            RegistryUnavailable: No connection, no answer in time, or etcd can't do it now.
            RegistryRefused: etcd will not; a lease that it does not know is a `LeaseUnknown`.
            RegistryClosed: `close()` was called.
        """
        channel = self._current()
        token = self._login(channel)
        try:
            return self._call(channel, what, request, token, timeout_s)
        except _StaleLogin:
            self._forget(token)
        return self._call(channel, what, request, self._login(channel), timeout_s)

    def watch(self, requests: Iterable[object], first: bytes) -> Stream:
        """Open a stream of watches; raises as `ask` does, but for what only the stream tells.

        A stream never says that it does not know a token, only that a watch is not permitted. So
        with a login `first`, one of the keys to watch, is asked for first: that does.
        """
        token = self._verified(first)
        channel = self._current()
        method = channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=_serialized,
            response_deserializer=self._messages.WatchResponse.FromString,
        )
        try:
            call: Stream = method(iter(requests), metadata=_with(token))
        except ValueError as error:  # closed in this very moment
            raise self.gone() from error
        return _Watching(call, self, channel, token)

    def outdated(self, stream: Stream, key: bytes) -> bool:
        """Whether a stream that was refused to watch a key had a token that is void by now."""
        return isinstance(stream, _Watching) and self._verified(key) != stream.token

    def failed(self, error: grpc.RpcError, channel: grpc.Channel | None) -> RegistryError:
        """Say what an error of a call means, and leave the channel if it is to blame."""
        if self._closed:
            return self.gone()
        code, details = _said(error)
        if code in REFUSALS:
            if any(stale in details for stale in STALE_LOGIN) and self._url.user:
                return _StaleLogin(f"{self.where}: {details}")
            kind = LeaseUnknown if "lease not found" in details else RegistryRefused
            return kind(f"{self.where}: {details}{_hint(code, details)}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no answer in {self._timeout_s:g} s"
        self._leave(channel)
        return RegistryUnavailable(f"{self.where}: {details or code.name}")

    def close(self) -> None:
        """End all connections, and what waits for an answer. Idempotent."""
        if self.forked:
            self._closed = True
            _KEPT.extend(self._opened)  # their threads are not here: to end them could hang
            return
        with self._lock:
            self._closed = True
            self._channel = None
            channels = list(self._opened)
        for channel in channels:
            channel.close()

    def _check(self) -> None:
        url = self._url
        url.check_options("tls", "ca", "cert", "key", "server_name")
        if not url.hosts:
            raise ConfigurationError(f"{url}: the host is missing: etcd://10.0.0.1:{PORT}")
        if bool(url.user) != bool(url.password):
            raise ConfigurationError(f"{url}: user and password go together: user:password@host")
        of_tls = [name for name in ("ca", "cert", "key", "server_name") if name in url.options]
        if of_tls and not self._tls:
            raise ConfigurationError(f"{url}: {', '.join(of_tls)}: only over TLS, with etcds://")
        if ("cert" in url.options) != ("key" in url.options):
            raise ConfigurationError(f"{url}: cert and key go together: two files in PEM")
        try:
            self._files()
        except OSError as error:
            raise ConfigurationError(f"{url}: a file can't be read: {error}") from error

    def _files(self) -> list[bytes | None]:
        """Root, key and chain, as they are now: they may be renewed while the process lives."""
        paths = [self._url.options.get(name) for name in ("ca", "key", "cert")]
        return [None if path is None else Path(path).expanduser().read_bytes() for path in paths]

    def _current(self) -> grpc.Channel:
        if self.forked:  # whoever held the lock then is not here
            raise self.gone()
        with self._lock:
            if self._closed:
                raise self.gone()
            channel = self._channel
            if channel is None:
                target = self._targets[self._turn % len(self._targets)]
                channel = self._channel = self._open(target)
                self._opened.add(channel)
            return channel

    def _open(self, target: str) -> grpc.Channel:
        if not self._tls:
            plain: grpc.Channel = grpc.insecure_channel(target, self._options)
            return plain
        try:
            root, key, chain = self._files()
        except OSError as error:
            raise RegistryUnavailable(f"{self.where}: a file can't be read: {error}") from error
        credentials = grpc.ssl_channel_credentials(root, key, chain)
        secure: grpc.Channel = grpc.secure_channel(target, credentials, self._options)
        return secure

    def _leave(self, channel: grpc.Channel | None) -> None:
        with self._lock:
            if channel is not None and channel is self._channel:
                self._channel = None
                self._turn += 1

    def _login(self, channel: grpc.Channel) -> str:
        """A token to ask with; "" if none is needed."""
        if not self._url.user:
            return ""
        if not self._token:
            request = self._messages.AuthenticateRequest(
                name=self._url.user, password=self._url.password
            )
            try:
                self._token = self._call(channel, "Auth/Authenticate", request, "", None).token
            except RegistryRefused as error:
                if NOT_NEEDED not in str(error):
                    raise
        return self._token

    def _verified(self, key: bytes) -> str:
        """A token that etcd knows; "" if none is needed."""
        if not self._url.user:
            return ""
        request = self._messages.RangeRequest(key=key, count_only=True)
        with contextlib.suppress(RegistryRefused):  # not permitted: it knows who asks
            self.ask("KV/Range", request)
        return self._login(self._current())

    def _forget(self, token: str) -> None:
        if self._token == token:
            self._token = ""

    def _call(
        self,
        channel: grpc.Channel,
        what: str,
        request: object,
        token: str,
        timeout_s: float | None,
    ) -> Any:  # noqa: ANN401 - a message, made at run time
        method = channel.unary_unary(
            f"/etcdserverpb.{what}",
            request_serializer=_serialized,
            response_deserializer=getattr(self._messages, ANSWERS[what]).FromString,
        )
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return method(request, timeout=timeout_s, metadata=_with(token))
        except grpc.RpcError as error:
            raise self.failed(error, channel) from error
        except ValueError as error:  # closed in this very moment
            raise self.gone() from error

    def gone(self) -> RegistryClosed:
        """The error of whoever asks after the end."""
        if self.forked:
            return RegistryClosed(
                f"{self.where}: it was opened before the fork, and belongs to the parent process; "
                "open another one"
            )
        return RegistryClosed(f"{self.where}: it was closed; open another one")


class LeaseUnknown(RegistryRefused):
    """etcd does not know the lease (any more)."""


class _StaleLogin(RegistryRefused):
    """etcd does not know the token (any more), or wants one by now."""


class _Watching:
    """A stream whose end is told as one of our errors."""

    def __init__(self, call: Stream, client: EtcdClient, channel: grpc.Channel, token: str) -> None:
        self.token = token
        self._call = call
        self._client = client
        self._channel: grpc.Channel | None = channel

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            channel, self._channel = self._channel, None
            raise self._client.failed(error, channel) from error

    def cancel(self) -> object:
        return self._call.cancel()


_KEPT: Final[list[grpc.Channel]] = []
"""A parent's, in a forked child."""


def _serialized(message: Any) -> bytes:  # noqa: ANN401 - made at run time
    data: bytes = message.SerializeToString()
    return data


def _with(token: str) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()


def _is_tls(url: RegistryUrl) -> bool:
    if url.scheme == "etcds" and not url.flag("tls", default=True):
        raise ConfigurationError(f"{url}: etcds:// is over TLS; without it etcd://")
    return url.flag("tls", default=url.scheme == "etcds")


def _channel_options(url: RegistryUrl) -> list[tuple[str, str | int]]:
    options: list[tuple[str, str | int]] = [
        ("grpc.use_local_subchannel_pool", 1),  # or a new channel would have the old connection
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", -1),  # a service of 10,000 instances has 4 MB
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]
    if "server_name" in url.options:
        options.append(("grpc.ssl_target_name_override", url.options["server_name"]))
    return options


def _said(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """What every error of a call has, though its class does not say so."""
    call: Any = error
    return call.code(), call.details() or ""


def _hint(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "; what listens there is a gRPC server, and no etcd of version 3"
    if "user name is empty" in details:
        return "; it wants a login: etcd://user:password@host"
    return ""
