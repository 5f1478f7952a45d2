"""How etcd is reached: one connection to one of its members, and another one when that fails.

The channel is a bare grpc one, without anything of ours around it. A request that gets no answer,
or no connection, is the end of the channel: it is asked again over a new channel to the next
member, within its time, so that neither a backoff of gRPC's nor a connection into a black hole
outlives the failure, and a member that is down fails nobody while another one answers.
A channel that is left is dropped, not closed: what others still do on it goes on.

Before a fork, channels on which nothing was received yet are closed, and the calls on them begin
anew after it. In a child that is forked while a channel connects and another thread waits for an
answer, gRPC's own threads crash (SIGSEGV or SIGABRT, grpcio 1.85.1, `GRPC_ENABLE_FORK_SUPPORT` not
set): with an etcd that accepts connections and does not answer, in every third child.
tests/faults/registry/backends/test_fork.py tells whether this is still needed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc

from rpcwheel._grpc.calls import is_unprocessed
from rpcwheel.errors import (
    ConfigurationError,
    ExtraMissing,
    RegistryClosed,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.instance import grpc_target

from .tls import TLS_ADVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rpcwheel.registry.url import RegistryUrl

    Options = list[tuple[str, str | int]]
    from types import ModuleType

__all__ = [
    "EQUAL",
    "LEASE",
    "MOD_REVISION",
    "EtcdClient",
    "Stream",
    "channel_options",
    "check_tls",
    "messages",
    "open_channel",
]


PORT: Final = 2379

PAUSE_S: Final = 1.0

"""Seconds that a fork waits for a thread that opens a channel; that takes milliseconds."""

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


TLS_FAILURES: Final = (
    "TSI_PROTOCOL_FAILURE",  # in the handshake: CERTIFICATE_VERIFY_FAILED, WRONG_VERSION_NUMBER
    "TSI_DATA_CORRUPTED",  # after it, by TLS 1.3: the server does not accept our certificate
    "Hostname Verification Check failed",
)

"""In gRPC's text for a connection that could not be made (grpcio 1.85)."""

WANTS_LEADER: Final = (("hasleader", "true"),)

"""Has etcd end a stream on a member that has lost the others, which goes on answering (its client's
`WithRequireLeader`)."""


class Stream(Protocol):
    """A watch's answers, while it lasts."""

    def __iter__(self) -> Iterator[Any]:
        """Give the answers; raises grpc.RpcError at the end."""

    def cancel(self) -> object:
        """End it; does not block."""

    def leave(self) -> object:
        """As cancel, and have what follows take another connection."""


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
        self._check()
        self._targets = [grpc_target(host, port or PORT) for host, port in url.hosts]
        self._turn = random.randrange(len(self._targets))  # or all clients would ask the first one
        self._options = channel_options(url)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._opened: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()
        self._answered: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()
        self._given_up: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()  # before a fork
        self._token = ""
        self._logging_in = threading.Lock()  # two at once would have two tokens
        self._closed = False
        self._pid = os.getpid()
        with _FORKING:
            _CLIENTS.add(self)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, which must let go of what its parent has."""
        return os.getpid() != self._pid

    def ask(
        self,
        what: str,
        request: object,
        timeout_s: float | None = None,
        *,
        once: bool = False,
    ) -> Any:
        """Send a request, such as "KV/Range", and wait for the answer, from any member.

        Each member is asked in turn until one can answer, with half of the time that is left; the
        last one with all of it.

        Args:
            what: The method.
            request: Its message.
            timeout_s: For all of it; None for what the client was made with.
            once: It does harm if it is carried out later than what is asked after it. So it is
                given to another member only if it was certainly not sent to the one before.

        Raises:
            RegistryUnavailable: No connection, no answer in time, or etcd can't do it now.
            RegistryRefused: etcd will not; a lease that it does not know is a `LeaseUnknown`.
            RegistryClosed: `close()` was called.
        """
        end_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        others = len(self._targets)
        while True:
            others -= 1
            left_s = end_s - time.monotonic()
            try:
                return self._ask_one(what, request, left_s / 2 if others else left_s)
            except _GivenUp as error:
                if once or end_s <= time.monotonic():
                    raise RegistryUnavailable(str(error)) from error.__cause__
                others += 1
            except (RegistryUnavailable, _TlsRefused) as error:
                if not others or (once and not isinstance(error, (NotSent, _TlsRefused))):
                    refused = isinstance(error, _TlsRefused)
                    kind = RegistryRefused if refused else RegistryUnavailable
                    raise kind(str(error)) from error.__cause__

    def _ask_one(self, what: str, request: object, timeout_s: float) -> Any:
        end_s = time.monotonic() + timeout_s
        channel = self._current()
        token = self._login(channel, timeout_s)
        try:
            return self._call(channel, what, request, token, end_s - time.monotonic())
        except _StaleLogin:
            self._forget(token)
        token = self._login(channel, end_s - time.monotonic())
        return self._call(channel, what, request, token, end_s - time.monotonic())

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
            call: Any = method(iter(requests), metadata=(*_with(token), *WANTS_LEADER))
        except ValueError as error:  # closed in this very moment
            raise self._closed_meanwhile(channel) from error
        return _Watching(call, self, channel, token)

    def outdated(self, stream: Stream, key: bytes) -> bool:
        """Whether a stream that was refused to watch a key had a token that is void by now."""
        return isinstance(stream, _Watching) and self._verified(key) != stream.token

    def failed(self, error: grpc.RpcError, channel: grpc.Channel | None) -> RegistryError:
        """Say what an error of a call means, and leave the channel if it is to blame."""
        if self._closed or channel in self._given_up:
            return self._closed_meanwhile(channel)
        code, details = _said(error)
        if code in REFUSALS:
            if any(stale in details for stale in STALE_LOGIN) and self._url.user:
                return _StaleLogin(f"{self.where}: {details}")
            refused = LeaseUnknown if "lease not found" in details else RegistryRefused
            return refused(f"{self.where}: {details}{_hint(code, details)}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no answer in {self._timeout_s:g} s"
        if code is not grpc.StatusCode.CANCELLED:  # by us
            self.leave(channel)
        if any(failure in details for failure in TLS_FAILURES):
            return _TlsRefused(f"{self.where}: {details}; {TLS_ADVICE}")
        kind = NotSent if is_unprocessed(code.name, details, None, None) else RegistryUnavailable
        return kind(f"{self.where}: {details or code.name}")

    def close(self) -> None:
        """End all connections, and what waits for an answer. Idempotent."""
        if self.forked:
            self._closed = True
            return
        with self._lock:
            self._closed = True
            self._channel = None
            channels = list(self._opened)
        for channel in channels:
            channel.close()

    def pause(self) -> bool:
        """Close the channels on which nothing was received, and open none until `resume()`.

        Called by the thread that forks. Returns False if that is not possible within a second;
        then `resume()` must not be called.
        """
        if self.forked or not self._lock.acquire(timeout=PAUSE_S):
            return False
        for channel in [one for one in self._opened if one not in self._answered]:
            self._given_up.add(channel)
            if channel is self._channel:
                self._channel = None
            channel.close()
        return True

    def resume(self) -> None:
        """Open channels again."""
        self._lock.release()

    def keep_channels(self) -> None:
        """Keep the parent's channels referenced for ever: a forked child can't close them."""
        _KEPT.extend(self._opened)

    def answered(self, channel: grpc.Channel) -> None:
        """Note that something was received on a channel."""
        self._answered.add(channel)

    def _closed_meanwhile(self, channel: grpc.Channel | None) -> RegistryError:
        """The error of a call on a channel that was closed on this side."""
        if channel in self._given_up and not (self._closed or self.forked):
            return _GivenUp(f"{self.where}: no answer yet as this process forked; tried again")
        return self.gone()

    def _check(self) -> None:
        url = self._url
        url.check_options("tls", "ca", "cert", "key", "server_name")
        if not url.hosts:
            raise ConfigurationError(f"{url}: the host is missing: etcd://10.0.0.1:{PORT}")
        if bool(url.user) != bool(url.password):
            raise ConfigurationError(f"{url}: user and password go together: user:password@host")
        check_tls(url)

    def _current(self) -> grpc.Channel:
        if self.forked:  # whoever held the lock then is not here
            raise self.gone()
        with self._lock:
            if self._closed:
                raise self.gone()
            channel = self._channel
            if channel is None:
                target = self._targets[self._turn % len(self._targets)]
                channel = self._channel = open_channel(self._url, target, self._options)
                self._opened.add(channel)
            return channel

    def leave(self, channel: grpc.Channel | None) -> None:
        """Have the next request go over another channel, to the next member."""
        with self._lock:
            if channel is not None and channel is self._channel:
                self._channel = None
                self._turn += 1

    def _login(self, channel: grpc.Channel, timeout_s: float) -> str:
        """A token to ask with; "" if none is needed."""
        if not self._url.user:
            return ""
        with self._logging_in:
            if not self._token:
                request = self._messages.AuthenticateRequest(
                    name=self._url.user, password=self._url.password
                )
                try:
                    answer = self._call(channel, "Auth/Authenticate", request, "", timeout_s)
                    self._token = answer.token
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
        return self._login(self._current(), self._timeout_s)

    def _forget(self, token: str) -> None:
        if self._token == token:
            self._token = ""

    def _call(
        self,
        channel: grpc.Channel,
        what: str,
        request: object,
        token: str,
        timeout_s: float,
    ) -> Any:
        method = channel.unary_unary(
            f"/etcdserverpb.{what}",
            request_serializer=_serialized,
            response_deserializer=getattr(self._messages, ANSWERS[what]).FromString,
        )
        try:
            answer = method(request, timeout=timeout_s, metadata=_with(token))
        except grpc.RpcError as error:
            raise self.failed(error, channel) from error
        except ValueError as error:  # closed in this very moment
            raise self._closed_meanwhile(channel) from error
        self.answered(channel)
        return answer

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


class NotSent(RegistryUnavailable):
    """There was no connection, so etcd has not seen the request."""


class _TlsRefused(RegistryRefused):
    """One side did not accept the other's certificate, or speaks no TLS; nothing was sent."""


class _GivenUp(RegistryUnavailable):
    """The channel was closed before a fork."""


class _StaleLogin(RegistryRefused):
    """etcd does not know the token (any more), or wants one by now."""


class _Watching:
    """A stream whose end is told as one of our errors."""

    def __init__(
        self,
        call: Any,
        client: EtcdClient,
        channel: grpc.Channel,
        token: str,
    ) -> None:
        self.token = token
        self._call = call
        self._client = client
        self._channel: grpc.Channel | None = channel

    def __iter__(self) -> Iterator[Any]:
        try:
            for answer in self._call:
                if self._channel is not None:
                    self._client.answered(self._channel)
                yield answer
        except grpc.RpcError as error:
            channel, self._channel = self._channel, None
            raise self._client.failed(error, channel) from error

    def cancel(self) -> object:
        return self._call.cancel()

    def leave(self) -> object:
        self._client.leave(self._channel)
        return self.cancel()


_CLIENTS: Final[weakref.WeakSet[EtcdClient]] = weakref.WeakSet()

_FORKING: Final = threading.RLock()

"""Protects `_CLIENTS`. Held during a fork, so that the child gets it in a known state."""

_PAUSED: Final[list[EtcdClient]] = []

"""Clients paused for the fork that is under way."""

_KEPT: Final[list[grpc.Channel]] = []

"""The parent's channels, in a forked child. gRPC's threads do not exist there, so closing a channel
could hang."""


def _before_fork() -> None:
    _FORKING.acquire()
    _PAUSED.extend(client for client in _CLIENTS if client.pause())


def _after_fork() -> None:
    while _PAUSED:
        _PAUSED.pop().resume()
    _FORKING.release()


def _after_fork_in_child() -> None:
    for client in _CLIENTS:
        client.keep_channels()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _with(token: str) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()


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


KEEPALIVE_MS: Final = 10_000

PING_TIMEOUT_MS: Final = 3_000


def check_tls(url: RegistryUrl) -> None:
    """See that what the URL says of TLS makes sense, and that its files can be read.

    Raises:
        ConfigurationError: It does not, or they can't.
    """
    of_tls = [name for name in ("ca", "cert", "key", "server_name") if name in url.options]
    if not _is_tls(url) and of_tls:
        raise ConfigurationError(f"{url}: {', '.join(of_tls)}: only over TLS, with etcds://")
    if ("cert" in url.options) != ("key" in url.options):
        raise ConfigurationError(f"{url}: cert and key go together: two files in PEM")
    try:
        _files(url)
    except OSError as error:
        raise ConfigurationError(f"{url}: a file can't be read: {error}") from error


def channel_options(url: RegistryUrl) -> Options:
    """What each channel is made with."""
    options: Options = [
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


def open_channel(url: RegistryUrl, target: str, options: Options) -> grpc.Channel:
    """Make a channel to one member; connects when it is used.

    Raises:
        RegistryUnavailable: A file of the TLS can't be read any more.
    """
    if not _is_tls(url):
        plain: grpc.Channel = grpc.insecure_channel(target, options)
        return plain
    try:
        root, key, chain = _files(url)
    except OSError as error:
        raise RegistryUnavailable(f"{url}: a file can't be read: {error}") from error
    credentials = grpc.ssl_channel_credentials(root, key, chain)
    secure: grpc.Channel = grpc.secure_channel(target, credentials, options)
    return secure


def _is_tls(url: RegistryUrl) -> bool:
    if url.scheme == "etcds" and not url.flag("tls", default=True):
        raise ConfigurationError(f"{url}: etcds:// is over TLS; without it etcd://")
    return url.flag("tls", default=url.scheme == "etcds")


def _files(url: RegistryUrl) -> list[bytes | None]:
    """Root, key and chain, as they are now: they may be renewed while the process lives."""
    paths = [url.options.get(name) for name in ("ca", "key", "cert")]
    return [None if path is None else Path(path).expanduser().read_bytes() for path in paths]


EQUAL: Final = 0

"""`Compare.result`."""

MOD_REVISION: Final = 2

LEASE: Final = 4

"""`Compare.target`."""

SCHEMA: Final = """
ResponseHeader         cluster_id:1:u member_id:2:u revision:3:i raft_term:4:u
KeyValue               key:1:b create_revision:2:i mod_revision:3:i version:4:i value:5:b lease:6:i
Event                  type:1:e kv:2:KeyValue
RangeRequest           key:1:b range_end:2:b limit:3:i revision:4:i keys_only:8:t count_only:9:t
RangeResponse          header:1:ResponseHeader kvs:2:*KeyValue more:3:t count:4:i
PutRequest             key:1:b value:2:b lease:3:i
PutResponse            header:1:ResponseHeader
DeleteRangeRequest     key:1:b range_end:2:b
DeleteRangeResponse    header:1:ResponseHeader deleted:2:i
Compare                result:1:e target:2:e key:3:b mod_revision:6:i lease:8:i
RequestOp              range:1:RangeRequest put:2:PutRequest delete_range:3:DeleteRangeRequest
ResponseOp             range:1:RangeResponse put:2:PutResponse delete_range:3:DeleteRangeResponse
TxnRequest             compare:1:*Compare success:2:*RequestOp failure:3:*RequestOp
TxnResponse            header:1:ResponseHeader succeeded:2:t responses:3:*ResponseOp
LeaseGrantRequest      TTL:1:i ID:2:i
LeaseGrantResponse     header:1:ResponseHeader ID:2:i TTL:3:i error:4:s
LeaseRevokeRequest     ID:1:i
LeaseRevokeResponse    header:1:ResponseHeader
LeaseKeepAliveRequest  ID:1:i
LeaseKeepAliveResponse header:1:ResponseHeader ID:2:i TTL:3:i
AuthenticateRequest    name:1:s password:2:s
AuthenticateResponse   header:1:ResponseHeader token:2:s
WatchCreateRequest     key:1:b range_end:2:b start_revision:3:i watch_id:7:i
WatchCancelRequest     watch_id:1:i
WatchProgressRequest
WatchRequest           create:1:WatchCreateRequest cancel:2:WatchCancelRequest \
progress:3:WatchProgressRequest
WatchResponse          header:1:ResponseHeader watch_id:2:i created:3:t canceled:4:t \
compact_revision:5:i cancel_reason:6:s events:11:*Event
"""

"""A message in each line, its fields as `name:number:type`. Types: i int64, u uint64, e int32 (an
enum), t bool, b bytes, s string, or a message; `*` before it: repeated. Where etcd has a `oneof`,
one of the fields is set: on the wire that is the same."""

PACKAGE: Final = "rpcwheel.etcd"


@functools.cache
def messages() -> SimpleNamespace:
    """Make the classes, by name; the same ones for the whole process.

    Raises:
        ExtraMissing: protobuf is not installed.
    """
    try:
        from google.protobuf import (
            descriptor_pb2,
            descriptor_pool,
            message_factory,
        )
    except ImportError as error:
        raise ExtraMissing(
            "etcd:// needs the package protobuf: pip install 'rpcwheel[etcd]'"
        ) from error
    file = descriptor_pb2.FileDescriptorProto(
        name="rpcwheel/etcd.proto", package=PACKAGE, syntax="proto3"
    )
    for line in SCHEMA.strip().splitlines():
        name, *fields = line.split()
        made = file.message_type.add(name=name)
        for field in fields:
            made.field.append(_field(descriptor_pb2, *field.split(":")))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = [message.name for message in file.message_type]
    found = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in names}
    return SimpleNamespace(
        **{name: message_factory.GetMessageClass(each) for name, each in found.items()}
    )


def _field(proto: ModuleType, name: str, number: str, kind: str) -> Any:
    kinds = proto.FieldDescriptorProto
    types = {
        "i": kinds.TYPE_INT64,
        "u": kinds.TYPE_UINT64,
        "e": kinds.TYPE_INT32,
        "t": kinds.TYPE_BOOL,
        "b": kinds.TYPE_BYTES,
        "s": kinds.TYPE_STRING,
    }
    bare = kind.removeprefix("*")
    label = kinds.LABEL_REPEATED if kind != bare else kinds.LABEL_OPTIONAL
    if bare in types:
        return kinds(name=name, number=int(number), label=label, type=types[bare])
    where = f".{PACKAGE}.{bare}"
    return kinds(
        name=name, number=int(number), label=label, type=kinds.TYPE_MESSAGE, type_name=where
    )
