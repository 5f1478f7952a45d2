"""etcd client: unary calls and the watch stream over one connection to one member at a time.

If a call gets no answer, the client drops the channel and makes the call again over a new channel
to the next member, within the same timeout. A dropped channel is not closed, so other calls on it
finish. Each channel has its own connection and does not outlive the failure, so neither gRPC's
reconnect backoff nor a connection into a black hole delays the next call.

gRPC's own address list (`ipv4:a,b,c`) was measured as an alternative, against a cluster of three
with a request timeout of 3 s. With keepalive after 10 s and a ping timeout of 3 s, requests failed
for 3 to 13 s (pick_first) or more than 20 s (round_robin) after one member had frozen; with this
client for 1.6 s. An address list also can't contain host names, and over TLS gRPC checks the
certificates against the whole list (grpcio 1.85);
`test_over_tls_a_list_of_addresses_matches_no_certificate` fails if grpcio changes this.

Forks are safe only with `GRPC_ENABLE_FORK_SUPPORT=0` in the environment. gRPC's own fork handlers
start its threads again in the child. If the process forks while a channel connects and a thread
waits for an answer, they crash the child (SIGSEGV or SIGABRT, grpcio 1.85.1). To close such
channels before the fork was tried: it races with gRPC's handler, and after 100 to 500 forks
`os.fork` did not return in the parent, with the GIL held. So this module does nothing to channels
there, and warns. docs/grpcio.md has the figures.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._engines.tls import TLS_ADVICE, Tls
from rpcwheel.backoff import RANDOM
from rpcwheel.errors import (
    ConfigurationError,
    ExtraMissing,
    RegistryClosed,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.instance import grpc_target
from rpcwheel.registry.url import TLS_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

    from rpcwheel.registry.url import RegistryUrl

PORT: Final = 2379

MAX_OPERATIONS: Final = 128
"""Operations in one transaction: etcd's default for `--max-txn-ops`."""

REFUSALS: Final = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Status codes with which etcd rejects a request. All others may be temporary."""

AUTH_DISABLED: Final = "authentication is not enabled"

INVALID_TOKEN: Final = (
    "invalid auth token",
    "revision of auth store is old",
    "user name is empty",
)
"""Texts in errors of etcd if the token has expired, or if etcd has begun to require one."""

TLS_FAILURES: Final = (
    "TSI_PROTOCOL_FAILURE",  # in the handshake: CERTIFICATE_VERIFY_FAILED, WRONG_VERSION_NUMBER
    "TSI_DATA_CORRUPTED",  # after it, by TLS 1.3: the server does not accept our certificate
    "Hostname Verification Check failed",
    "is not in peer certificate",  # the same in grpcio 1.66
)
"""Parts of gRPC's error text for a connection that could not be made (grpcio 1.66 and 1.85)."""

REQUIRE_LEADER: Final = (("hasleader", "true"),)
"""Makes a member end a watch stream when it loses the leader, instead of staying silent (the
`WithRequireLeader` of etcd's Go client)."""

CHANNEL_OPTIONS: Final[tuple[tuple[str, str | int], ...]] = (
    ("grpc.use_local_subchannel_pool", 1),  # or a new channel would reuse the old connection
    (
        "grpc.keepalive_time_ms",
        10_000,
    ),  # etcd disconnects clients that ping more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),  # a service of 10,000 instances has 4 MB
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
)


@dataclass(eq=False)
class _EtcdConnection:
    """A channel to one member."""

    channel: grpc.Channel
    has_answered: bool = False
    """Whether anything was received on it."""


class EtcdClient:
    """Sends requests to etcd. Thread-safe; a forked child can't use its parent's client."""

    def __init__(self, url: RegistryUrl, timeout_s: float) -> None:
        """Check the URL; does not connect.

        Raises:
            ConfigurationError: The URL is wrong, or names a TLS file that can't be loaded.
            ExtraMissing: protobuf is not installed.
        """
        self.where = str(url)
        self._timeout_s = timeout_s
        self._messages = messages()
        self._url = url
        url.check_options(*TLS_OPTIONS, "server_name")
        if not url.hosts:
            raise ConfigurationError(f"{url}: the host is missing: etcd://10.0.0.1:{PORT}")
        if bool(url.user) != bool(url.password):
            raise ConfigurationError(f"{url}: user and password go together: user:password@host")
        self._tls = Tls.from_options(url, url.tls_options())
        self._targets = [grpc_target(host, port or PORT) for host, port in url.hosts]
        self._next_target = RANDOM.randrange(len(self._targets))  # spreads clients over members
        self._connection: _EtcdConnection | None = None  # changed under _LOCK
        self._connections: weakref.WeakSet[_EtcdConnection] = weakref.WeakSet()  # under _LOCK
        self._closed = False
        self._token = ""
        self._login_lock = threading.Lock()  # so that concurrent calls share one login
        self._pid = os.getpid()
        with _LOCK:
            _CLIENTS.add(self)

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the one that made the client."""
        return os.getpid() != self._pid

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called and this process can use it."""
        return not (self._closed or self.forked)

    @property
    def is_connected(self) -> bool:
        """Whether something was received on the current connection."""
        connection = self._connection
        return connection is not None and connection.has_answered

    def call(
        self, method: str, request: object, timeout_s: float | None = None, *, once: bool = False
    ) -> Any:
        """Send a request and return the response of the first member that answers.

        Each member gets half of the time that is left, the last one all of it.

        Args:
            method: Such as "KV/Range".
            request: Its message.
            timeout_s: For all members together; None for the client's.
            once: Send the request to one member only, with half of the time if there are others.
                For requests that do harm if they are applied after a later request, which happens
                if they wait in the sockets of a frozen member.

        Raises:
            RegistryUnavailable: No connection, no answer in time, or etcd can't do it now.
            RegistryRefused: etcd rejects the request; `LeaseUnknown` if it does not know the lease.
            RegistryClosed: `close()` was called.
        """
        end_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        members = len(self._targets)
        while True:
            left_s = end_s - time.monotonic()
            try:
                return self._call_member(method, request, left_s if members == 1 else left_s / 2)
            except (RegistryUnavailable, _TlsRefused) as error:
                members -= 1
                if not members or once:
                    tls = isinstance(error, _TlsRefused)
                    public = RegistryRefused if tls else RegistryUnavailable
                    raise public(str(error)) from error.__cause__

    def _call_member(self, method: str, request: object, timeout_s: float) -> Any:
        end_s = time.monotonic() + timeout_s
        connection = self._connect()
        token = self._login(connection, timeout_s)
        try:
            return self._call(connection, method, request, token, end_s - time.monotonic())
        except _InvalidToken:
            if self._token == token:
                self._token = ""
        token = self._login(connection, end_s - time.monotonic())
        return self._call(connection, method, request, token, end_s - time.monotonic())

    def watch(self, requests: Iterable[object]) -> WatchStream:
        """Open a watch stream; raises as `call` does, except for errors of the stream itself.

        If the token is invalid, etcd refuses watches as if they were not permitted. A call of the
        client gets a new token, which the next stream has.
        """
        connection = self._connect()
        token = self._login(connection, self._timeout_s)
        method = connection.channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=self._messages.WatchRequest.SerializeToString,
            response_deserializer=self._messages.WatchResponse.FromString,
        )
        try:
            call: Any = method(iter(requests), metadata=(*_metadata(token), *REQUIRE_LEADER))
        except ValueError as error:  # the channel was closed meanwhile
            raise self.closed_error() from error
        return WatchStream(call, self, connection)

    def error_of(self, error: grpc.RpcError, connection: _EtcdConnection) -> RegistryError:
        """Return the registry error for a call's error.

        Drops the connection, unless etcd refused the request or the client canceled the call.
        """
        if self._closed:
            return self.closed_error()
        code, details = _status(error)
        if code in REFUSALS:
            if self._url.user and any(text in details for text in INVALID_TOKEN):
                return _InvalidToken(f"{self.where}: {details}")
            refused = LeaseUnknown if "lease not found" in details else RegistryRefused
            return refused(f"{self.where}: {details}{_advice(code, details)}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no answer in {self._timeout_s:g} s"
        if code is not grpc.StatusCode.CANCELLED:  # that is our own cancel()
            self.drop(connection)
        if any(text in details for text in TLS_FAILURES):
            return _TlsRefused(f"{self.where}: {TLS_ADVICE} ({details})")
        return RegistryUnavailable(f"{self.where}: {details or code.name}")

    def drop(self, connection: _EtcdConnection) -> None:
        """Make the next request connect to the next member. Calls on this connection finish."""
        with _LOCK:
            if connection is self._connection:
                self._connection = None
                self._next_target += 1

    def close(self) -> None:
        """Close all channels, which ends the calls on them. Idempotent."""
        self._closed = True
        if self.forked:
            return
        with _LOCK:
            self._connection = None
            connections = list(self._connections)
        for connection in connections:
            connection.channel.close()

    def keep_channels(self) -> None:
        """Keep the parent's channels referenced in a forked child.

        gRPC's threads do not exist there, so closing a channel could hang.
        """
        _PARENTS_CHANNELS.extend(connection.channel for connection in self._connections)

    def closed_error(self) -> RegistryClosed:
        """Return the error of a call after `close()`, or in a forked child."""
        if self.forked:
            return RegistryClosed(
                f"{self.where}: it was opened before the fork, and belongs to the parent process; "
                "open another one"
            )
        return RegistryClosed(f"{self.where}: it was closed; open another one")

    def _connect(self) -> _EtcdConnection:
        """Return the current connection, or a new one, which connects at the first call."""
        connection = self._connection
        if self._closed or self.forked:
            raise self.closed_error()
        if connection is not None:
            return connection
        try:  # without the lock, as it reads files and a fork waits for the lock
            credentials = self._tls and self._tls.grpc_credentials()
        except OSError as error:
            raise RegistryUnavailable(f"{self.where}: a file can't be read: {error}") from error
        options = list(CHANNEL_OPTIONS)
        if self._tls and self._tls.server_name:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        with _LOCK:
            if self._closed:
                raise self.closed_error()
            if self._connection is None:
                target = self._targets[self._next_target % len(self._targets)]
                channel = (
                    grpc.secure_channel(target, credentials, options)
                    if credentials
                    else grpc.insecure_channel(target, options)
                )
                self._connection = _EtcdConnection(channel)
                self._connections.add(self._connection)
            return self._connection

    def _login(self, connection: _EtcdConnection, timeout_s: float) -> str:
        """Return the token to send; "" if none is needed."""
        if not self._url.user:
            return ""
        with self._login_lock:
            if not self._token:
                request = self._messages.AuthenticateRequest(
                    name=self._url.user, password=self._url.password
                )
                try:
                    response = self._call(connection, "Auth/Authenticate", request, "", timeout_s)
                    self._token = response.token
                except RegistryRefused as error:
                    if AUTH_DISABLED not in str(error):
                        raise
            return self._token

    def _call(
        self, connection: _EtcdConnection, method: str, request: Any, token: str, timeout_s: float
    ) -> Any:
        # LeaseKeepAlive is a bidirectional stream in etcd's API. With one request and one response
        # a stream looks like a unary call on the wire, and here it needs no thread.
        response_class = getattr(self._messages, f"{method.partition('/')[2]}Response")
        call = connection.channel.unary_unary(
            f"/etcdserverpb.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_class.FromString,
        )
        try:
            response = call(request, timeout=timeout_s, metadata=_metadata(token))
        except grpc.RpcError as error:
            raise self.error_of(error, connection) from error
        except ValueError as error:  # the channel was closed meanwhile
            raise self.closed_error() from error
        connection.has_answered = True
        return response


class LeaseUnknown(RegistryRefused):
    """etcd does not know the lease (any more)."""


class _TlsRefused(RegistryRefused):
    """The TLS handshake with this member failed; another one may have a valid certificate."""


class _InvalidToken(RegistryRefused):
    """etcd does not know the token (any more), or has begun to require one."""


class WatchStream:
    """Iterates over the responses of a watch stream; raises RegistryError at its end."""

    def __init__(self, call: Any, client: EtcdClient, connection: _EtcdConnection) -> None:
        self._call = call
        self._client = client
        self._connection = connection

    def __iter__(self) -> Iterator[Any]:
        try:
            for response in self._call:
                self._connection.has_answered = True
                yield response
        except grpc.RpcError as error:
            # gRPC's error is the call itself. A cycle, with its traceback or with an error in a
            # local variable, would keep it until the interpreter ends, where its finalizer can wait
            # forever (grpcio 1.85).
            error.__traceback__ = None
            raise self._client.error_of(error, self._connection) from error

    def cancel(self) -> object:
        """End the stream; does not block."""
        return self._call.cancel()

    def drop(self) -> object:
        """End the stream, and make the next request connect to the next member."""
        self._client.drop(self._connection)
        return self.cancel()


_LOCK: Final = threading.RLock()
"""Guards `_CLIENTS` and the connections of all clients. Held for moments only, and during a fork,
so that no channel is being made then and the child gets it in a known state."""

_CLIENTS: Final[weakref.WeakSet[EtcdClient]] = weakref.WeakSet()

_PARENTS_CHANNELS: Final[list[grpc.Channel]] = []
"""The parent's channels in a forked child; see `EtcdClient.keep_channels`."""


FORK_SUPPORT: Final = "GRPC_ENABLE_FORK_SUPPORT"
"""The variable in the environment that switches gRPC's fork handlers off."""

FORK_WARNING: Final = (
    f"this process has an etcd registry and forks. Without {FORK_SUPPORT}=0 in the environment, "
    "gRPC's fork handlers can crash the child if etcd does not answer at this moment. Fork before "
    "the registry is opened, or set it; a child cannot use gRPC then, unless it executes another "
    'program (multiprocessing "spawn")'
)

_warned: Final = threading.Event()
"""Set when this process was warned of a fork that gRPC's handlers make unsafe: once is enough."""


def _after_fork_in_parent() -> None:
    _LOCK.release()
    if _warned.is_set() or FORK_SUPPORT in os.environ:
        return
    if any(client.is_open for client in list(_CLIENTS)):
        _warned.set()
        # Last, as it may raise: Python reports that and goes on.
        warnings.warn(FORK_WARNING, RuntimeWarning, stacklevel=2)


def _after_fork_in_child() -> None:
    for client in _CLIENTS:
        client.keep_channels()
    _LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_LOCK.acquire,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()


def _status(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Return code and details, which every error of a call has though its class lacks them."""
    call: Any = error
    return call.code(), call.details() or ""


def _advice(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "; the server at this port is a gRPC server, and no etcd of version 3"
    if "user name is empty" in details:
        return "; it wants a login: etcd://user:password@host"
    return ""


EQUAL: Final = 0
"""A value of `Compare.result`, of etcd's enum `CompareResult`."""

MOD_REVISION: Final = 2
"""A value of `Compare.target`, of etcd's enum `CompareTarget`."""

SCHEMA: Final = """
ResponseHeader         revision:3:i
KeyValue               key:1:b mod_revision:3:i value:5:b lease:6:i
Event                  type:1:e kv:2:KeyValue
RangeRequest           key:1:b range_end:2:b keys_only:8:t
RangeResponse          header:1:ResponseHeader kvs:2:*KeyValue
PutRequest             key:1:b value:2:b lease:3:i
PutResponse            header:1:ResponseHeader
DeleteRangeRequest     key:1:b range_end:2:b
DeleteRangeResponse    header:1:ResponseHeader
Compare                result:1:e target:2:e key:3:b mod_revision:6:i
RequestOp              range:1:RangeRequest put:2:PutRequest delete_range:3:DeleteRangeRequest
ResponseOp             range:1:RangeResponse put:2:PutResponse delete_range:3:DeleteRangeResponse
TxnRequest             compare:1:*Compare success:2:*RequestOp
TxnResponse            header:1:ResponseHeader succeeded:2:t responses:3:*ResponseOp
LeaseGrantRequest      TTL:1:i
LeaseGrantResponse     header:1:ResponseHeader ID:2:i error:4:s
LeaseRevokeRequest     ID:1:i
LeaseRevokeResponse    header:1:ResponseHeader
LeaseKeepAliveRequest  ID:1:i
LeaseKeepAliveResponse header:1:ResponseHeader TTL:3:i
AuthenticateRequest    name:1:s password:2:s
AuthenticateResponse   header:1:ResponseHeader token:2:s
WatchCreateRequest     key:1:b range_end:2:b watch_id:7:i
WatchCancelRequest     watch_id:1:i
WatchProgressRequest
WatchRequest           create:1:WatchCreateRequest cancel:2:WatchCancelRequest \
progress:3:WatchProgressRequest
WatchResponse          header:1:ResponseHeader watch_id:2:i created:3:t canceled:4:t \
cancel_reason:6:s events:11:*Event
"""
"""One message per line, its fields as `name:number:type`, without the fields that this package
does not use. Types: i int64, e int32 (for an enum), t bool, b bytes, s string, or a message; `*`
before it: repeated. Fields of a `oneof` are plain fields of which one is set, which is the same on
the wire.

The classes are made at run time in a descriptor pool of their own. etcd's generated code registers
`rpc.proto` in the pool that all libraries share, so a second one could not be imported."""

PACKAGE: Final = "rpcwheel.etcd"


@functools.cache
def messages() -> SimpleNamespace:
    """Return the message classes by name; made once per process.

    Raises:
        ExtraMissing: protobuf is not installed, or too old.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool
        from google.protobuf.message_factory import GetMessageClass  # since 4.22
    except ImportError as error:
        raise ExtraMissing(
            f"etcd:// needs the package protobuf ({error}): pip install 'rpcwheel[etcd]'"
        ) from error
    file = descriptor_pb2.FileDescriptorProto(
        name="rpcwheel/etcd.proto", package=PACKAGE, syntax="proto3"
    )
    for line in SCHEMA.strip().splitlines():
        name, *fields = line.split()
        message_type = file.message_type.add(name=name)
        for field in fields:
            message_type.field.append(_field(descriptor_pb2, *field.split(":")))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = [message.name for message in file.message_type]
    descriptors = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in names}
    return SimpleNamespace(**{name: GetMessageClass(each) for name, each in descriptors.items()})


def _field(proto: ModuleType, name: str, number: str, kind: str) -> Any:
    kinds = proto.FieldDescriptorProto
    types = {
        "i": kinds.TYPE_INT64,
        "e": kinds.TYPE_INT32,
        "t": kinds.TYPE_BOOL,
        "b": kinds.TYPE_BYTES,
        "s": kinds.TYPE_STRING,
    }
    bare = kind.removeprefix("*")
    label = kinds.LABEL_REPEATED if kind != bare else kinds.LABEL_OPTIONAL
    type_name = None if bare in types else f".{PACKAGE}.{bare}"
    which = types.get(bare, kinds.TYPE_MESSAGE)
    return kinds(name=name, number=int(number), label=label, type=which, type_name=type_name)
