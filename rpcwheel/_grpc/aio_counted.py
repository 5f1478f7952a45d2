"""Counts the calls of `grpc.aio`: when they begin, and with which status they end.

Used only if metrics are on. The calls are gRPC's own or those of rpcwheel, and none is kept alive:
gRPC could not cancel a response stream that its caller drops. `add_done_callback` of gRPC's calls
(1.60 to 1.85) would keep them alive, so callbacks are added to the objects behind them.

No callback raises, because `await call` would raise that.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from rpcwheel.telemetry.call_counts import CallEnd

from .aio_relay import (
    STATUS_CHECK_DELAYS_S,
    has_ended,
    has_made_up_status,
    is_ok,
    run_without_waiting,
)
from .calls import INVALID_REQUEST_CODES, are_of_invalid_request, code_for, code_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rpcwheel.telemetry.call_counts import CallObserver, MethodCounts


def begin_counted(
    counts: MethodCounts, start: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Return the call `start(*args, **options)`, and count its begin and its end."""
    return begin_observed(counts, counts.begin(), start, *args, **options)


def begin_observed(
    counts: CallObserver, began_ns: Any, start: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Return the call `start(*args, **options)`, and report its end."""
    try:
        call = start(*args, **options)
    except BaseException as error:
        counts.end(began_ns, code_for(counts, error))
        raise
    count_end(counts, began_ns, call)
    return call


async def begin_counted_awaited(
    counts: MethodCounts, start: Callable[..., Awaitable[Any]], *args: Any
) -> Any:
    """Return the call `await start(*args)`, and count its begin and its end."""
    return await begin_observed_awaited(counts, counts.begin(), start, *args)


async def begin_observed_awaited(
    counts: CallObserver, began_ns: Any, start: Callable[..., Awaitable[Any]], *args: Any
) -> Any:
    """Return the call `await start(*args)`, and report its end."""
    try:
        call = await start(*args)
    except BaseException as error:
        counts.end(began_ns, code_for(counts, error))
        raise
    count_end(counts, began_ns, call)
    return call


def count_end(counts: CallObserver, began_ns: Any, call: Any) -> None:
    """Count the end of a call that began at `began_ns` and may have ended. Never raises."""
    core_call = getattr(call, "_cython_call", None)
    if counts.kind == "unary":  # most calls; without an object for the end, which takes longer
        if core_call is not None:
            core_call.add_done_callback(partial(_unary_ended, counts, began_ns, weakref.ref(call)))
            return
        if getattr(call, "is_relay", False):
            call.add_done_callback(partial(_relay_ended, counts, began_ns))
            return
    end = _CallEnd(counts, began_ns)
    try:
        if core_call is not None:
            end.call = weakref.ref(call)
            core_call.add_done_callback(end)
        elif isinstance(task := getattr(call, "_interceptors_task", None), asyncio.Task):
            task.add_done_callback(end.count_intercepted)
        elif has_ended(call):
            end(call)
        else:
            call.add_done_callback(end)
    except Exception:  # noqa: BLE001 - of a call of another library
        end.end("UNKNOWN")


def _unary_ended(counts: CallObserver, began_ns: Any, reference: weakref.ref[Any]) -> None:
    """Count the end of gRPC's own unary call, which ends once, and not before it is dropped."""
    call = reference()
    if is_ok(call):
        counts.end(began_ns, "OK")
    else:
        counts.end(began_ns, "CANCELLED" if call is None else _code_for(counts, call))


def _relay_ended(counts: CallObserver, began_ns: Any, relay: Any) -> None:
    """Count the end of a `Relay` of unary calls, which reports its end once."""
    counts.end(began_ns, "OK" if is_ok(relay.final) else _code_for(counts, relay))


def _code_for(counts: CallObserver, call: Any) -> str:
    try:
        code = code_name(run_without_waiting(call.code()), "CANCELLED")
        if code in INVALID_REQUEST_CODES and counts.ignores_invalid_requests:
            is_invalid = are_of_invalid_request(code, run_without_waiting(call.details()))
            return "CANCELLED" if is_invalid else code
    except BaseException as error:  # noqa: BLE001 - of an inner interceptor
        return code_for(counts, error)
    return code


class _CallEnd(CallEnd):
    """The end of a call, as a done-callback."""

    call: weakref.ref[Any]
    """gRPC's own call, which is not passed to this callback."""
    _checks = 0

    def count_intercepted(self, task: asyncio.Task[Any]) -> None:
        """Count the end of the call that interceptors have returned."""
        counts = self._counts
        if counts is None:
            return
        if task.cancelled():
            self.end("CANCELLED")
        elif (error := task.exception()) is not None:
            self.end(code_for(counts, error))
        else:
            count_end(counts, self._began_ns, task.result())
            self._counts = None

    def __call__(self, ended: Any = None) -> None:
        call: Any = self.call() if ended is None else ended
        if is_ok(call):
            self.end("OK")
            return
        counts = self._counts
        code = "CANCELLED" if call is None or counts is None else _code_for(counts, call)
        if code != "INTERNAL" or not self._waits_for_status(call):
            self.end(code)

    def _waits_for_status(self, call: Any) -> bool:
        """Whether the server's own status may still replace the one of `MADE_UP_DETAILS`."""
        checks = self._checks
        try:
            if not has_made_up_status(call) or checks == len(STATUS_CHECK_DELAYS_S):
                return False
            later = asyncio.get_running_loop().call_later
            later(STATUS_CHECK_DELAYS_S[checks], partial(self, call))
        except Exception:  # noqa: BLE001 - of an inner interceptor, or without a loop
            return False
        self._checks = checks + 1
        return True
