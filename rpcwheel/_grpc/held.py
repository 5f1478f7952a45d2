"""What the caller holds of a call that runs: a full `grpc.Call` and `grpc.Future`.

It asks the `Course` behind it, which may make the call several times, or elsewhere. Methods block
where those of grpc's own calls do, and their answers are those of the call that the course ends
with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from .details import Metadata
    from .styles import AnyCall

__all__ = ["Course", "HeldCall", "HeldStream"]


class Course(Protocol):
    """What becomes of one call. It does not know the caller's object, whose end is noticed so."""

    @property
    def final(self) -> AnyCall:
        """The call whose outcome is the caller's; None while it is open."""

    def wait(self, timeout: float | None = None) -> AnyCall:
        """Wait for the end, and give `final`; raises `grpc.FutureTimeoutError`."""

    def initial_metadata(self) -> Metadata:
        """Wait for the server's first metadata."""

    def next_message(self) -> Any:
        """Give the next message of a response stream."""

    def cancel(self) -> bool:
        """End the call; False if it has ended."""

    def drop(self) -> None:
        """End the call because nobody holds it any more."""

    def look(self) -> None:
        """Take note of what tells nobody by itself; called often."""

    def add_hook(self, hook: Callable[..., object], *args: object) -> bool:
        """Have a function called at the end, on a worker; False if that is past."""

    def seconds_left(self) -> float | None:
        """Until its deadline; None without one."""


class HeldCall(grpc.Call, grpc.Future):
    """One call, whatever number of tries it takes. Dropping it cancels it, as with grpc's own."""

    def __init__(self, course: Course) -> None:
        """Go on with what the course does."""
        self._course = course

    # --- grpc.Call ---

    def initial_metadata(self) -> Metadata:
        """Wait for the metadata that the server sent first."""
        return self._course.initial_metadata()

    def trailing_metadata(self) -> Metadata:
        """Wait for the end, and give the metadata that came with it."""
        metadata: Metadata = self._course.wait().trailing_metadata()
        return metadata

    def code(self) -> grpc.StatusCode:
        """Wait for the end, and give its status code."""
        code: grpc.StatusCode = self._course.wait().code()
        return code

    def details(self) -> str:
        """Wait for the end, and give its status details."""
        details: str = self._course.wait().details()
        return details

    def debug_error_string(self) -> str:
        """Wait for the end, and give what grpc's core says of a failure."""
        tell = getattr(self._course.wait(), "debug_error_string", None)
        return "" if tell is None else tell()

    def is_active(self) -> bool:
        return not self.done()

    def time_remaining(self) -> float | None:
        """Seconds until its deadline, for all tries together; None without one."""
        return self._course.seconds_left()

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Call `callback()` at the end, on a worker thread; False if it has ended."""
        return self._course.add_hook(callback)

    # --- grpc.Future ---

    def cancel(self) -> bool:
        """End the call, during a try or between two; False if it has ended."""
        return self._course.cancel()

    def cancelled(self) -> bool:
        final = self._course.final
        return final is not None and bool(final.cancelled())

    def running(self) -> bool:
        return not self.done()

    def done(self) -> bool:
        self._course.look()
        return self._course.final is not None

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end and give the response.

        Raises:
            grpc.FutureTimeoutError: It took longer than `timeout` seconds; the call goes on.
            grpc.FutureCancelledError: It was cancelled on this side.
            grpc.RpcError: It failed.
        """
        return self._course.wait(timeout).result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and give the failure, None if it succeeded; raises as `result`."""
        error: BaseException | None = self._course.wait(timeout).exception()
        return error

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        """Wait for the end and give the failure's traceback; raises as `result`."""
        traceback: TracebackType | None = self._course.wait(timeout).traceback()
        return traceback

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call `fn(self)` at the end, on a worker thread; at once, on this one, if it has ended."""
        if not self._course.add_hook(fn, self):
            fn(self)

    def __del__(self) -> None:
        course = getattr(self, "_course", None)
        if course is not None:
            course.drop()

    def __repr__(self) -> str:
        final = self._course.final
        return f"<{type(self).__name__} object>" if final is None else repr(final)


class HeldStream(HeldCall):
    """The same for a response stream: an iterator too."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Wait for the next message."""
        return self._course.next_message()

    next = __next__
