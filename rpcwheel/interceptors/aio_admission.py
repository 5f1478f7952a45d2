"""Attempts of `grpc.aio` that are sent only if the admission of their method allows it.

See `rpcwheel.interceptors.admission`. An attempt that waits is a call that begins its only attempt
in a task.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.loop import call_on_loop
from rpcwheel._grpc.aio_counted import begin_observed, begin_observed_awaited
from rpcwheel._grpc.aio_finished import failed_call, finished_call
from rpcwheel._grpc.calls import CANCELLED_HERE, aio_metadata, set_not_sent
from rpcwheel.admission.method import NotSent, Reason, Waiting
from rpcwheel.call.aio_call import begin_deferred
from rpcwheel.call.client_state import TIMER_CHECK_INTERVAL_S
from rpcwheel.call.metadata import not_sent_metadata

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rpcwheel._grpc.aio_finished import FinishedCall
    from rpcwheel.admission.method import Admitted, MethodAdmission
    from rpcwheel.call.aio_call import CallFactory
    from rpcwheel.rpc import Kind

CLOSED_LOOPS: Final = "attempts of closed loops"
"""The key of `EXECUTOR` for them."""


def begin_admitted(
    calls: CallFactory,
    admission: MethodAdmission,
    start: Callable[..., Any],
    request: Any,
    *,
    timeout: float | None,
    metadata: Any,
    **options: Any,
) -> Any:
    """Return the call `start(request, ...)`, or one that is sent later, or one that has failed.

    `start` is a multicallable; the options are its arguments.
    """
    if calls.state.loop is None:
        calls.state.loop = asyncio.get_running_loop()
    entered = admission.enter(timeout, asyncio.get_running_loop())
    if isinstance(entered, NotSent):
        return _not_sent(calls.kind, entered)
    if not isinstance(entered, Waiting):
        options |= {"timeout": timeout, "metadata": metadata}
        return begin_observed(admission, entered, start, request, **options)
    waiting = entered
    calls.state.channel_calls.add_waiting(waiting)

    async def start_later(
        request: Any,
        *,
        timeout: float | None,  # noqa: ASYNC109 - of the attempt
        metadata: Any,
        **own: Any,
    ) -> Any:
        began_s = asyncio.get_running_loop().time()
        result = await wait_on_loop(waiting)
        if isinstance(result, NotSent):
            return _not_sent(calls.kind, result)
        if timeout is not None:
            timeout = max(0.0, timeout - (asyncio.get_running_loop().time() - began_s))
        own = options | own | {"timeout": timeout, "metadata": metadata}
        return begin_observed(admission, result, start, request, **own)

    wait_for_ready = options.get("wait_for_ready")
    try:
        return begin_deferred(
            calls, start_later, request, timeout, metadata, wait_for_ready, waiting.cancel
        )
    except BaseException:  # such as metadata of a wrong form
        waiting.cancel()
        raise


async def begin_admitted_awaited(
    kind: Kind,
    admission: MethodAdmission,
    start: Callable[..., Awaitable[Any]],
    details: grpc.aio.ClientCallDetails,
    request: Any,
) -> Any:
    """Return the call `await start(details, request)`, or one that has failed; may wait first."""
    entered = admission.enter(details.timeout, asyncio.get_running_loop())
    if isinstance(entered, Waiting):
        began_s = asyncio.get_running_loop().time()
        entered = await wait_on_loop(entered)
        if details.timeout is not None:
            left_s = details.timeout - (asyncio.get_running_loop().time() - began_s)
            details = details._replace(timeout=max(0.0, left_s))
    if isinstance(entered, NotSent):
        return _not_sent(kind, entered)
    return await begin_observed_awaited(admission, entered, start, details, request)


async def wait_on_loop(waiting: Waiting) -> Admitted | NotSent:
    """Wait until an attempt may be sent, or must not be sent."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def wake() -> None:
        if not call_on_loop(loop, over.set):  # it is closed, so the attempt can't begin
            # On a worker: the next one is woken in `cancel`, and its loop may be closed too.
            EXECUTOR.submit(CLOSED_LOOPS, waiting.cancel)

    try:
        waiting.then(wake)
        while not over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(TIMER_CHECK_INTERVAL_S):
                    await over.wait()
            waiting.check_timer()
        return waiting.take()
    except BaseException:
        waiting.cancel()
        raise


def _not_sent(kind: Kind, result: NotSent) -> FinishedCall:
    """Make the end of an attempt that is not sent."""
    if result.reason is Reason.CLOSED:
        return finished_call(kind, grpc.StatusCode.CANCELLED, CANCELLED_HERE)
    error = grpc.aio.AioRpcError(
        grpc.StatusCode[result.reason.code],
        grpc.aio.Metadata(),
        aio_metadata(not_sent_metadata(result.pushback_ns)),
        result.reason.details,
    )
    set_not_sent(error)
    return failed_call(kind, error)
