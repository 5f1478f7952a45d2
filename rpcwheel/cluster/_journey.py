"""A call that its caller holds, on its way from member to member until one has got it.

For `.future()` and for response streams, with one request each, that begin while it is not known
which members there are, or on a member that has no connection yet: grpc's own object could not go
to another one. On a member that is connected the caller gets grpc's own, at grpc's own cost.

One that may wait for a connection waits here, for any of them, and not at one member.

gRPC's threads, which tell how a try ended, take note of a success and hand everything else to a
worker. Nothing of grpc's or the user's is called under the lock.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.calls import (
    InternalCallback,
    failure_of,
    has_ended,
    is_single_threaded,
    metadata_of,
)
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.durations import to_ns
from rpcwheel.observe import CallbackFailed, emit

from ._fleet import UnmadeError
from ._gate import Gate
from ._timeout import timeout_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel._grpc.calls import AnyCall, Metadata
    from rpcwheel.timer import Timeout

    from ._fleet import Began, Member
    from ._tries import Method

__all__ = ["Journey"]

BY_USER: Final = "Locally cancelled by application!"
CLOSED_MEANWHILE: Final = "Channel closed!"
PATIENCE_S: Final = 1.0
"""After which a call that may wait is tried again though all members are down still."""

DROPPED: Final = "Cancelled upon garbage collection!"


class _Try(NamedTuple):
    """One try."""

    call: AnyCall
    member: Member
    began: Began
    gate: Gate | None
    """Of the requests, if they are a stream."""


class Journey:
    """What becomes of one call; see `rpcwheel._grpc.held.Course`."""

    def __init__(
        self,
        method: Method,
        name: str,
        request: Any,
        until_s: float | None,
        options: tuple[Any, ...],
        *,
        patient: bool,
        streams: bool = False,
    ) -> None:
        self._method = method
        self._name = name
        self._request = request
        self._until_s = until_s
        metadata, credentials, _, compression = options
        self._options = (metadata, credentials, False, compression) if patient else options
        self._patient = patient
        self._streams = streams  # its requests
        self._changed = threading.Condition(threading.RLock())
        self.final: AnyCall = None
        self._try: AnyCall = None  # the call that runs
        self._tried: list[Member] = []
        self._last: AnyCall = None  # the last of those that were in vain
        self._hooks: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._timeout: Timeout | None = None

    # --- On its way ---

    def set_out(self, member: Member | None) -> None:
        """Begin, on a member, or once it is known which there are. On the caller's thread."""
        if member is not None:
            self._go(member)
            return
        self._wait_for_members()

    def _wait_for_members(self) -> None:
        fleet = self._method.fleet
        with fleet.changed:
            fleet.waiting[self] = None
        self._arm()
        self.look_for_members()  # they may have come meanwhile

    def _arm(self) -> None:
        """Have it looked after when the wait is over."""
        fleet = self._method.fleet
        latest_s = self._method.latest_s(self._until_s, patient=self._patient)
        if self._tried:  # all are down; which they may not be any more
            soon_s = monotonic() + PATIENCE_S
            latest_s = soon_s if latest_s is None else min(latest_s, soon_s)
        if latest_s is not None:
            delay_ns = to_ns(max(0.0, latest_s - monotonic()))
            overdue = partial(_overdue, weakref.ref(self))
            obsolete = timeout_on(fleet.timer, overdue, delay_ns)
            with fleet.changed:
                if self in fleet.waiting:
                    self._timeout, obsolete = obsolete, self._timeout
            if obsolete is not None:
                obsolete.cancel()

    def _wait_no_more(self) -> bool:
        """Whether it has waited until now."""
        fleet = self._method.fleet
        with fleet.changed:
            waited = fleet.waiting.pop(self, self) is not self
            timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()
        return waited

    def look_for_members(self, *, overdue: bool = False) -> None:
        """Go on if it is known by now which members there are. Any thread that may block."""
        fleet, member, final = self._method.fleet, None, None
        if self._tried and not overdue and fleet.roster.pick is not None and fleet.roster.all_down:
            return  # they were tried just now
        try:
            member = self._found()
        except BaseException as error:  # noqa: BLE001 - the user's picker's too; it is the caller's
            final = self._ended_by(error)
        if member is None and final is None:
            if not overdue:
                return
            if self._patient and self.seconds_left() != 0:
                self._tried = []  # there is nobody now
                self._arm()
                return
            final = self._method.too_late(self._until_s)
        if not self._wait_no_more():
            return  # another thread has gone on
        self._tried = []
        if member is None:
            self._finish(final)
        else:
            self._go_on(member)

    def _found(self) -> Member | None:
        """The member for it, if there is one; raises as `at_once`."""
        if self._last is not None and self.seconds_left() == 0:
            raise self._method.overdue_after(self._last)
        return self._method.at_once(self.call, self._until_s, patient=self._patient)

    def _ended_by(self, error: BaseException) -> FinishedError:
        """How the call ends that this was raised for, instead of a try."""
        if isinstance(error, FinishedError):
            return error
        if self._method.fleet.roster.closed:
            return FinishedError(grpc.StatusCode.CANCELLED, CLOSED_MEANWHILE, cancelled=True)
        said = f"Exception raised while a member was looked for: {error!r}"
        return FinishedError(grpc.StatusCode.INTERNAL, said, error=error)

    @property
    def _hooks_key(self) -> object:
        """By which the workers know the callbacks of this method; who hangs holds up those."""
        return self._method.fleet.jobs, self._method.name

    @property
    def call(self) -> tuple[str, Any, Any]:
        """What pickers take."""
        return self._method.name, self._request, self._options[0]

    def _go(self, member: Member) -> None:
        """Try it on a member.

        Raises:
            FinishedError, ValueError: As `at_once`: the member is gone, and so are all others.
            Exception: What `connect` raised, or the user's picker.
        """
        one = self._begun_on(member)
        while one is None:
            other = self._method.at_once(self.call, self._until_s, patient=False)
            if other is None:
                raise self._method.too_late(self._until_s)
            member, one = other, self._begun_on(other)
        with self._changed:
            self._tried.append(member)
            self._try = one.call
            over = self.final is not None
            self._changed.notify_all()
        if over:
            one.call.cancel()  # the caller's cancel came while it was made
        if is_single_threaded(one.call):
            self._finish(one.call)  # it makes progress only while it is read: from now on it is it
        else:
            one.call.add_done_callback(InternalCallback(self._ended, one))

    def _begun_on(self, member: Member) -> _Try | None:
        """Begin it on a member; None if that is gone, and another one is to be looked for."""
        method, request, gate, began = self._method, self._request, None, member.began(patient=True)
        if self._streams:
            request = gate = Gate(request, member)
        try:
            call = method.begin_on(member, self._name, request, self._until_s, self._options)
        except ValueError as error:
            if not method.has_gone(member, began, error):
                raise
        except UnmadeError as error:
            cause = method.fleet.unmade(member, error)
            if method.fleet.roster.all_down:
                raise cause from None
        else:
            return _Try(call, member, began, gate)
        return None

    def _ended(self, one: _Try, _: object) -> None:
        """Take note of a try's end. On gRPC's thread, or wherever it was cancelled."""
        taken = one.gate is not None and one.gate.shut()
        if failure_of(one.call) is None and one.member.down_ns is None:
            self._finish(one.call)
        else:
            EXECUTOR.submit(self, partial(self._judge, one, taken=taken))

    def _judge(self, one: _Try, *, taken: bool) -> None:
        """Decide what follows. On a worker."""
        fleet, other = self._method.fleet, None
        unsent = fleet.failed(one.member, one.call, one.began)
        if not unsent or taken or self.final is not None:
            self._finish(one.call)
            return
        try:
            other = fleet.roster.other(self._tried, self.call)
        except BaseException as error:  # noqa: BLE001 - the user's picker; it is the caller's
            self._finish(self._ended_by(error))
            return
        if other is not None:
            self._go_on(other)
        elif self._patient and not fleet.roster.closed:
            self._last = one.call
            self._wait_for_members()
        else:
            self._finish(one.call)

    def _go_on(self, member: Member) -> None:
        """Try it on a member. On a worker."""
        try:
            self._go(member)
        except BaseException as error:  # noqa: BLE001 - the user's `connect`; it is the caller's
            self._finish(self._ended_by(error))

    def _finish(self, final: AnyCall) -> bool:
        """Let the call end with this; False if it has ended already."""
        with self._changed:
            if self.final is not None:
                return False
            self.final = final
            hooks, self._hooks = self._hooks, []
            self._changed.notify_all()
        for hook, args in hooks:
            EXECUTOR.submit(self._hooks_key, partial(self._tell, hook, args))
        return True

    def _tell(self, hook: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            hook(*args)
        except Exception as error:  # noqa: BLE001 - the user's; told as an event
            emit(CallbackFailed(self._method.name, callback=repr(hook), error=error))

    # --- What its caller asks ---

    def cancel(self, details: str = BY_USER) -> bool:
        """End the call; False if it has ended."""
        with self._changed:
            if self.final is not None:
                return False
            begun = self._try
        self._wait_no_more()
        if begun is not None and begun.cancel():
            return self._finish(begun)
        if begun is not None and has_ended(begun) and failure_of(begun) is None:
            return False
        return self._finish(FinishedError(grpc.StatusCode.CANCELLED, details, cancelled=True))

    def drop(self) -> None:
        """End the call because nobody holds it any more."""
        if self.final is None:
            self.cancel(DROPPED)

    def look(self) -> None:
        """Do nothing: whatever happens is told."""

    def add_callback(self, hook: Callable[..., object], *args: object) -> bool:
        """Have a function called at the end, on a worker; False if that is past."""
        with self._changed:
            if self.final is None:
                self._hooks.append((hook, args))
                return True
        return False

    def wait(self, timeout: float | None = None) -> AnyCall:
        """Wait for the end, and give the call whose outcome is the caller's.

        Raises:
            grpc.FutureTimeoutError: It took longer than so many seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.final is not None, timeout):
                raise grpc.FutureTimeoutError
        return self.final

    def seconds_left(self) -> float | None:
        """Until its deadline; None without one."""
        return None if self._until_s is None else max(0.0, self._until_s - monotonic())

    def initial_metadata(self) -> Metadata:
        """Wait for the server's first metadata."""
        while True:
            begun = self._current()
            metadata = metadata_of(begun.initial_metadata())
            if begun is self.final or not has_ended(begun):
                return metadata
            self._settled(begun)

    def next_message(self) -> Any:
        """Give the caller the next message, from whichever try it is to come."""
        while True:
            begun = self._current()
            try:
                return next(begun)
            except (StopIteration, grpc.RpcError):
                if begun is not self.final:
                    self._settled(begun)
                if begun is self.final:
                    raise

    def _current(self) -> AnyCall:
        """The try that runs, or how it all ended; waits for either."""
        with self._changed:
            self._changed.wait_for(lambda: self.final is not None or self._try is not None)
            return self._try if self.final is None else self.final

    def _settled(self, begun: AnyCall) -> None:
        """Wait until it is decided what follows a try that has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.final is not None or self._try is not begun)


def _overdue(journey: weakref.ref[Journey], _: Timeout) -> None:
    """On the timer's thread, which keeps no call alive."""
    alive = journey()
    if alive is not None:
        EXECUTOR.submit(alive, partial(alive.look_for_members, overdue=True))
