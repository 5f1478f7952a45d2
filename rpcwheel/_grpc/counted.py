"""Multicallables and continuations of `grpc` whose calls are counted.

They are made only if metrics are on, one around the multicallable or continuation of the attempts,
and one around that of the calls. They return the calls of gRPC themselves, and keep none alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rpcwheel.rpc import classes_by_kind
from rpcwheel.telemetry.call_counts import CallEnd, CountedMessages

from . import multicallable
from .calls import InternalCallback, code_for, code_of, has_ended, weak_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.rpc import Kind
    from rpcwheel.telemetry.call_counts import CallObserver, MethodCounts

    from .calls import AnyCall


def counted_multicallable(kind: Kind, below: Any, counts: MethodCounts) -> Any:
    """Return a multicallable of the same kind that counts the calls of `below`."""
    return _MULTICALLABLES[kind](below, counts)


def counted_continuation(
    continuation: Callable[[Any, Any], AnyCall], counts: MethodCounts
) -> Callable[[Any, Any], AnyCall]:
    """Return a continuation of an interceptor that counts the calls of another one."""

    def start(details: Any, request: Any) -> AnyCall:
        return begin_counted(counts, continuation, details, request)

    start.__qualname__ = getattr(continuation, "__qualname__", "")  # for `is_blocking_unary`
    return start


def begin_counted(counts: MethodCounts, start: Callable[..., AnyCall], *args: Any) -> AnyCall:
    """Return the call `start(*args)`, which may have ended, and count its begin and its end.

    An iterator that is not a call, such as a generator of an interceptor, is returned in a wrapper.
    """
    return begin_observed(counts, counts.begin(), start, *args)


def begin_observed(
    counts: CallObserver, began_ns: Any, start: Callable[..., AnyCall], *args: Any
) -> AnyCall:
    """Return the call `start(*args)` as `begin_counted` does, and report only its end."""
    try:
        call = start(*args)
    except BaseException as error:
        counts.end(began_ns, code_for(counts, error))
        raise
    add_callback = getattr(call, "add_callback", None)
    if add_callback is None and hasattr(call, "__next__"):
        return _CountedIterator(call, CallEnd(counts, began_ns), code_of)
    if add_callback is None or has_ended(call):
        counts.end(began_ns, code_for(counts, call))
        return call
    end = _CallEnd(counts, began_ns, call)
    try:
        is_running = add_callback(InternalCallback(end))
    except Exception:  # noqa: BLE001 - of a call of another library, which need not implement it
        end.end("UNKNOWN")
    else:
        if not is_running:
            end.end(code_for(counts, call))
    return call


class _CallEnd(CallEnd):
    """The end of a running call, as a callback of the call.

    A call that is single-threaded runs its callbacks only while it is read.
    """

    def __init__(self, counts: CallObserver, began_ns: Any, call: AnyCall) -> None:
        super().__init__(counts, began_ns)
        self._status = weak_status(call)

    def __call__(self) -> None:
        counts, status = self._counts, self._status()
        if counts is not None:
            self.end("CANCELLED" if status is None else code_for(counts, status))


class _CountedIterator(CountedMessages):
    """A response stream that is not a call, such as a generator of an interceptor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._messages, name)


class _Counted:
    """The part that is common to the four kinds of call."""

    def __init__(self, below: Any, counts: MethodCounts) -> None:
        self._below = below
        self._counts = counts

    def _begin(self, name: str, request: Any, *options: Any) -> AnyCall:
        return begin_counted(self._counts, getattr(self._below, name), request, *options)

    def _wait(self, name: str, request: Any, *options: Any) -> Any:
        counts = self._counts
        began_ns = counts.begin()
        try:
            result = getattr(self._below, name)(request, *options)
        except BaseException as error:
            counts.end(began_ns, code_of(error))
            raise
        counts.end(began_ns, "OK")
        return result


_MULTICALLABLES: Final = classes_by_kind(_Counted, multicallable.MULTICALLABLES)
