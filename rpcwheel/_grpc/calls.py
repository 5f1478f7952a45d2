"""Calls of `grpc` and `grpc.aio`: how they are made, their details and metadata, how they ended.

Some facts are not public in grpcio, or only as the text of a status. Each of these names the
versions of grpcio on which it was verified.
"""

from __future__ import annotations

import copy
import re
import weakref
from contextlib import suppress
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.errors import REFUSALS, ConfigurationError, short_repr
from rpcwheel.rpc import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.errors import FailbackError
    from rpcwheel.telemetry.call_counts import CallObserver

    Metadata = tuple[tuple[str, str | bytes], ...]

FailedT = TypeVar("FailedT")

AnyCall: TypeAlias = Any
"""A call of grpc, or the object that another interceptor returns in its place."""

NOT_SERIALIZED: Final = "Exception serializing request!"
"""gRPC's details of a call of `grpc` whose serializer has raised (1.60 to 1.85)."""

INVALID_REQUEST_DETAILS: Final = frozenset(
    {
        NOT_SERIALIZED,
        "Exception iterating requests!",
        "Invalid metadata",
        "Received http2 header with status: 413",  # of nginx: above client_max_body_size
    }
)
"""gRPC's details of calls that it has ended with INTERNAL or UNKNOWN because it could not send
them, or because they are too large for a proxy (1.60 to 1.85)."""

TOO_LARGE_DETAILS: Final = re.compile(
    r"(Stream removed \()?((CLIENT|SERVER): )?(Sent|Received) message larger than max \("
    r"|(grpc: )?(received|trying to send) message larger than max \("  # of a server in Go
)
"""The start of gRPC's details of calls that it has ended with RESOURCE_EXHAUSTED because a message
is too large for the client or the server (1.60 to 1.85). Not searched in the middle: a server may
report an error of its own calls."""

INVALID_REQUEST_CODES: Final = frozenset({"INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED"})
"""The status codes of these calls, and of errors without a status."""

DROPPED_STREAMS: Final = "dropped streams"
"""The key of `EXECUTOR` for their ends."""

METADATA_KEY: Final = re.compile(r"[0-9a-z_.-]+")
_METADATA_VALUE: Final = re.compile(rb"[\x20-\x7e]*")

# --- The methods of channels ---


class ChannelMethods:
    """The four methods of a channel that make multicallables, of `grpc` or `grpc.aio`.

    Each calls `_multicallable`, which a subclass defines.
    """

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable. Gets all arguments of gRPC's own, such as `_registered_method`."""
        raise NotImplementedError

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable for one request and one response."""
        return self._multicallable(Kind.UNARY_UNARY, method, *args, **options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable for one request and a stream of responses."""
        return self._multicallable(Kind.UNARY_STREAM, method, *args, **options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable for a stream of requests and one response."""
        return self._multicallable(Kind.STREAM_UNARY, method, *args, **options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable for a stream of requests and a stream of responses."""
        return self._multicallable(Kind.STREAM_STREAM, method, *args, **options)


# --- Call details and metadata ---


class Details(
    NamedTuple(  # as a function, because a `NamedTuple` class can't have another base
        "_Details",
        [
            ("method", str),
            ("timeout", "float | None"),
            ("metadata", "Metadata | None"),
            ("credentials", "grpc.CallCredentials | None"),
            ("wait_for_ready", "bool | None"),
            ("compression", "grpc.Compression | None"),
        ],
    ),
    grpc.ClientCallDetails,
):
    """Call details of `grpc`; `_replace` makes a changed copy."""


def details_of(details: Any) -> Details:
    """Return call details of any class as `Details`. A missing attribute is None, as in grpc."""
    if isinstance(details, Details):
        return details
    fields: Any = (getattr(details, name, None) for name in Details._fields)
    return Details(*fields)


def copy_of(request: Any) -> Any:
    """Copy a request, because its caller may change it. One that can't be copied is returned."""
    try:
        return copy.deepcopy(request)
    except Exception:  # noqa: BLE001 - of a class of the user's
        return request


def metadata_tuple(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Return metadata of any form (None, list, tuple, `grpc.aio.Metadata`) as a tuple of pairs."""
    return () if metadata is None else tuple((key, value) for key, value in metadata)


def reusable_metadata(metadata: Any) -> Any:
    """Return metadata that can be read more than once: an iterator becomes a tuple of pairs.

    Raises:
        TypeError, ValueError: It does not consist of pairs.
    """
    if metadata is None or isinstance(metadata, (tuple, list, grpc.aio.Metadata)):
        return metadata
    return metadata_tuple(metadata)


def aio_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> grpc.aio.Metadata:
    """Return metadata of any form as `grpc.aio.Metadata`."""
    if isinstance(metadata, grpc.aio.Metadata):
        return metadata
    return grpc.aio.Metadata(*(metadata or ()))


# --- Arguments of a call that waits for a connection ---


def check_call_options(metadata: Any, credentials: object, compression: object) -> None:
    """Raise if an argument of a call has a wrong type, as gRPC does when it begins the call.

    Raises:
        TypeError, ValueError: An argument has a wrong type, or metadata does not consist of pairs.
    """
    for key, value in metadata or ():
        is_binary = isinstance(key, (str, bytes)) and key[-4:] in {"-bin", b"-bin"}
        if not isinstance(value, bytes if is_binary else (str, bytes, NoneType)):
            expected = "bytes" if is_binary else "str"
            raise TypeError(f"metadata {key!r} must be {expected}, not {type(value).__name__}")
    if not isinstance(credentials, (grpc.CallCredentials, NoneType)):
        raise TypeError(f"credentials must be grpc.CallCredentials, not {credentials!r}")
    if compression not in (None, *grpc.Compression):
        raise TypeError(f"compression must be a grpc.Compression, not {compression!r}")


def checked_metadata(pairs: Iterable[tuple[Any, Any]]) -> Metadata:
    """Return metadata that gRPC can send.

    When a call begins with other metadata, gRPC raises ValueError, whose message has the values,
    which may be secret, or it ends the call with INTERNAL.

    Raises:
        ConfigurationError: It does not consist of pairs, or gRPC cannot send one of them. The
            message names the key only.
    """
    try:
        checked = tuple((key, value) for key, value in pairs)
    except (TypeError, ValueError):
        raise ConfigurationError("metadata must be pairs of a key and a value") from None
    for key, value in checked:
        if not isinstance(key, str) or not METADATA_KEY.fullmatch(key):
            raise ConfigurationError(
                "a key of metadata must consist of lower-case letters, digits, '_', '-' and '.', "
                f"not {short_repr(key)}"
            )
        if key.endswith("-bin"):
            if not isinstance(value, bytes):
                raise ConfigurationError(f"the value of the metadata {key!r} must be bytes")
            continue
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if not isinstance(data, bytes) or not _METADATA_VALUE.fullmatch(data):
            raise ConfigurationError(
                f"the value of the metadata {key!r} must be one line of printable ASCII characters"
            )
    return checked


def check_request(request: Any, serializer: Callable[[Any], Any] | None) -> Exception | None:
    """Serialize the request of a call that waits, to find out whether gRPC will accept it.

    Returns:
        The exception of the serializer; None if it raised none. gRPC does not raise it: a call of
        `grpc` ends with INTERNAL, and one of `grpc.aio` (1.85) sends an empty message.

    Raises:
        TypeError: The serialized request is not of type bytes.
    """
    try:
        data = request if serializer is None else serializer(request)
    except Exception as error:  # noqa: BLE001 - returned
        return error
    if not isinstance(data, bytes):
        raise TypeError(f"a request must be serialized to bytes, not {type(data).__name__}")
    return None


# --- Whether a call blocks, and its end ---


class InternalCallback(partial):  # type: ignore[type-arg]
    """A done-callback of rpcwheel, which only sets state or submits work to a worker.

    It may therefore run on gRPC's threads. Callbacks of users run on a worker.

    It is a `partial`, because grpcio 1.85 logs the exception of a callback with `callback.func`. A
    plain function has no `func`, and the thread of the channel would end.
    """


def is_blocking_unary(continuation: object) -> bool | None:
    """Whether the caller of a unary call blocks until its end; None if that is not known.

    Decided by the names of gRPC's own closures (1.60 to 1.85). A test in
    `tests/interop/grpcio/test_canaries_client.py` detects if they change. For other functions it is
    not known; make the call, and use `has_ended`.
    """
    name = getattr(continuation, "__qualname__", "")
    if name.endswith("._with_call.<locals>.continuation"):
        return True
    if name.endswith(".future.<locals>.continuation"):
        return False
    return None


def has_ended(call: AnyCall) -> bool:
    """Whether a call has ended.

    An object without `done()` counts as ended, because nothing would report its end.
    """
    done = getattr(call, "done", None)
    return done is None or bool(done())


def failure_of(call: AnyCall) -> BaseException | None:
    """Return the failure of a call; None if it succeeded. Waits for the end of a running call.

    The failure of a call that was canceled by the client is a `grpc.FutureCancelledError`, which
    has no status.
    """
    exception = getattr(call, "exception", None)
    if exception is None:  # another interceptor may return an error in place of a call
        return call if isinstance(call, BaseException) else None
    try:
        error: BaseException | None = exception()
    except grpc.FutureCancelledError as canceled:
        return canceled.with_traceback(None)  # its frames would keep the call
    return error


def outcome_of(call: AnyCall) -> tuple[Any, BaseException | None]:
    """Return the response and the failure of a unary call that has ended; one of them is None."""
    try:
        return call.result(timeout=0), None
    except Exception as error:  # noqa: BLE001 - also canceled, or of an interceptor
        return None, error.with_traceback(None)  # its frames would keep the call


def has_status(error: BaseException) -> bool:
    """Whether an error is the status of a call, not a bug or a cancellation by the client."""
    return isinstance(error, grpc.RpcError) and callable(getattr(error, "code", None))


def value_of(call: object, name: str) -> Any:
    """Return what a method of a call or an error returns, such as `code`; None if it has none.

    An error of another interceptor may have only some of the methods, and one may raise.
    """
    method = getattr(call, name, None)
    try:
        return method() if callable(method) else None
    except Exception:  # noqa: BLE001 - of another library
        return None


def metadata_of(error: object, name: str) -> Metadata:
    """Return what a method of an error returns, such as `trailing_metadata`; () if no pairs."""
    try:
        return metadata_tuple(value_of(error, name))
    except (TypeError, ValueError):  # of another library, such as a dict
        return ()


class FailureStatus(NamedTuple):
    """The status of a failed call."""

    code: grpc.StatusCode
    details: str
    initial: Metadata
    trailing: Metadata

    @classmethod
    def of(cls, error: BaseException) -> FailureStatus:
        """Return the status in an error; that of another interceptor may have only a code."""
        code, details = value_of(error, "code"), value_of(error, "details")
        return cls(
            code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN,
            f"{type(error).__name__}: {error}" if details is None else details,
            metadata_of(error, "initial_metadata"),
            metadata_of(error, "trailing_metadata"),
        )


def code_name(code: object, default: str = "UNKNOWN") -> str:
    """Return the name of a status code: `default` for None, UNKNOWN for another object."""
    if isinstance(code, grpc.StatusCode):
        return code.name
    return default if code is None else "UNKNOWN"


def code_of(ended: object) -> str:
    """Return the name of the status code of an error or a call that has ended. Never raises.

    An error without a status is CANCELLED if the client canceled the call or closed the channel,
    and UNKNOWN otherwise. A response that an interceptor returns in place of a call is OK, and None
    too: the end of an iterator.
    """
    try:
        code: Any = getattr(ended, "code", None)
        code = code() if callable(code) else code
        if code is not None or not isinstance(ended, BaseException):
            return code_name(code, "UNKNOWN" if hasattr(ended, "code") else "OK")
        canceled = isinstance(ended, grpc.FutureCancelledError) or is_channel_closed_error(ended)
        return "CANCELLED" if canceled or not isinstance(ended, Exception) else "UNKNOWN"
    except Exception:  # noqa: BLE001 - of another library
        return "UNKNOWN"


def code_for(observer: CallObserver, ended: object) -> str:
    """Return `code_of` for an observer of the ends of calls. Never raises."""
    code = code_of(ended)
    may_be_invalid = code in INVALID_REQUEST_CODES and observer.ignores_invalid_requests
    return "CANCELLED" if may_be_invalid and _is_invalid_request(code, ended) else code


def _is_invalid_request(code: str, ended: object) -> bool:
    """Whether gRPC has ended a call of `grpc` because of the call itself."""
    try:
        if isinstance(failure_of(ended), (TypeError, ValueError)):  # of arguments that gRPC refuses
            return True
        details: Any = getattr(ended, "details", None)
        return are_of_invalid_request(code, details() if callable(details) else details)
    except Exception:  # noqa: BLE001 - of another library
        return False


def are_of_invalid_request(code: str, details: object) -> bool:
    """Whether gRPC has ended a call because of the call itself.

    Then the status says nothing about the server. `code` is one of `INVALID_REQUEST_CODES`.
    """
    if not isinstance(details, str):
        return False
    if code == "RESOURCE_EXHAUSTED":
        return TOO_LARGE_DETAILS.match(details) is not None
    return details in INVALID_REQUEST_DETAILS


def is_single_threaded(call: object) -> bool:
    """Whether a call is a response stream that makes progress only while it is read.

    grpcio (1.60 to 1.85) makes such streams with the option `SingleThreadedUnaryStream`.
    """
    return type(call).__name__ == "_SingleThreadedRendezvous"


def run_at_end(call: AnyCall, callback: Callable[[], object]) -> None:
    """Run `callback` when an RPC has ended, on any thread, without keeping the RPC alive.

    Runs it at once if the RPC has ended, or if its end can't be observed. (`add_done_callback`
    would keep the RPC alive, and it would not be canceled when its user drops it.)

    A single-threaded stream reports no end if it is dropped or canceled: then `callback` runs when
    the stream is freed, on a worker, as the thread of the garbage collector may hold any lock.
    """
    if is_single_threaded(call):
        finalizer = weakref.finalize(call, EXECUTOR.submit, DROPPED_STREAMS, callback)
        finalizer.atexit = False
        callback = partial(_end_once, finalizer, callback)
    add = getattr(call, "add_callback", None)
    if add is None or not add(InternalCallback(callback)):
        callback()


def _end_once(finalizer: weakref.finalize[..., Any], callback: Callable[[], object]) -> None:
    if finalizer.detach() is not None:
        callback()


def weak_status(call: AnyCall) -> Callable[[], object]:
    """Return a weak reference to the object that has the status of a call.

    In gRPC's own calls (1.60 to 1.85) and in a `RetryingCall` it is `_state`, which exists until
    the callbacks have run, even if the caller has dropped the call.
    """
    state = getattr(call, "_state", None)
    try:
        return weakref.ref(state if hasattr(state, "code") else call)
    except TypeError:  # of another library
        return lambda: None


# --- The server of an attempt ---


def set_server_of(ended: Any, server: object) -> None:
    """Note which server of a balanced channel has ended a call; `ended` is a call or an error."""
    with suppress(AttributeError, TypeError):  # of another interceptor, with slots
        ended.rpcwheel_server = server


def server_of(*ended: object) -> Any:
    """Return what `set_server_of` has noted of a call or its error; None if that is nothing."""
    servers = (getattr(each, "rpcwheel_server", None) for each in ended)
    return next((server for server in servers if server is not None), None)


# --- Attempts that were not sent ---


def set_not_sent(error: Any) -> None:
    """Note that the client itself has ended an attempt with this error, without sending it."""
    with suppress(AttributeError, TypeError):
        error.rpcwheel_not_sent = True


def was_not_sent(error: object) -> bool:
    """Whether `set_not_sent` was called for an error."""
    return getattr(error, "rpcwheel_not_sent", False) is True


# --- Calls that the client canceled, and closed channels ---

CANCELLED_HERE: Final = "Locally cancelled by application!"
"""The details that gRPC gives a call that the client canceled (1.60 to 1.85)."""

COLLECTED: Final = "Cancelled upon garbage collection!"
"""The details that gRPC gives a call that its user dropped (1.60 to 1.85)."""

ENDED_HERE: Final = frozenset({CANCELLED_HERE, COLLECTED})

CLOSED: Final = "Cannot invoke RPC on closed channel!"
"""The text of gRPC's `ValueError` for a call with one response on a closed channel of `grpc`."""

AIO_CLOSED: Final = "Channel is closed."
"""The text of gRPC's `UsageError` for a call on a closed channel of `grpc.aio`."""

_NOT_INVOKED: Final = "Cannot invoke RPC"
"""How the texts of gRPC's `ValueError`s for calls on a closed channel begin."""

_CLOSED_MESSAGES: Final = {
    CLOSED,
    f"{_NOT_INVOKED}: Channel closed!",  # `ValueError`, for response streams and futures
    AIO_CLOSED,
}
"""The errors of a call that is made on a closed channel (grpcio 1.60 to 1.85)."""

CLOSED_DURING_CALL: Final = "Channel closed!"
"""The details of a call of `grpc` that ran when its channel was closed. A call of `grpc.aio` raises
a `CancelledError` without a text."""


def was_not_invoked(error: object) -> bool:
    """Whether `grpc` has refused to begin a call, because its channel is closed."""
    return isinstance(error, ValueError) and str(error).startswith(_NOT_INVOKED)


def is_channel_closed_error(error: BaseException) -> bool:
    """Whether an error says that the client closed the channel before or during the call."""
    if isinstance(error, grpc.RpcError):
        canceled = value_of(error, "code") is grpc.StatusCode.CANCELLED
        return canceled and CLOSED_DURING_CALL in str(value_of(error, "details"))
    return isinstance(error, (ValueError, grpc.aio.UsageError)) and str(error) in _CLOSED_MESSAGES


def is_canceled_by_server(error: BaseException) -> bool:
    """Whether the server canceled the call, as one that is being stopped may do."""
    is_canceled = isinstance(error, grpc.RpcError) and code_of(error) == "CANCELLED"
    if not is_canceled or is_channel_closed_error(error):
        return False
    return value_of(error, "details") not in ENDED_HERE


def refused_classes(
    base: type[FailedT], namespace: dict[str, Any]
) -> Callable[[FailbackError], type[FailedT]]:
    """Make the classes of failed calls that failback refuses to queue.

    Each is a class of `REFUSALS` and a failed call.

    Args:
        base: The class of the failed call.
        namespace: That of the module, in which pickle looks for the classes.

    Returns:
        A function that returns the class for a refusal.
    """
    classes: dict[type, type[FailedT]] = {
        kind: type(f"{kind.__name__}Rpc", (base, kind), {"__module__": namespace["__name__"]})
        for kind in REFUSALS
    }
    namespace.update({cls.__name__: cls for cls in classes.values()})  # pickle wants it
    return lambda refusal: next(classes[kind] for kind in type(refusal).__mro__ if kind in classes)
