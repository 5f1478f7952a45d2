"""The state that all calls of one client share.

The clients of both worlds use it in this order::

    config = state.current_config(method)              # policies of the method, and call_options
    now, deadline, attempt = state.begin(config, ...)  # then make the first attempt
    attempts = Attempts(method, config, ...)           # only if it failed, or if it is hedged
    state.failback.enqueue(...)                        # if failback is to deliver the call

Nothing in this module waits or does I/O. Any thread may use it.
"""

from __future__ import annotations

import contextlib
import weakref
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from rpcwheel.admission.targets import Breakers
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.events import CallbackFailed, StreamStalled, emit
from rpcwheel.telemetry import components
from rpcwheel.timer import shared_timer
from rpcwheel.timer.manual import checked_timer, clock_of, start_timeout

from .budget import Budget, BudgetKey, budget_key, new_budget
from .config import (
    CALL_OPTIONS,
    MAX_METHODS,
    MethodConfigs,
    admission_settings,
    attempt_deadline_ns,
    slow_call_task,
)
from .deadline import left_ns
from .failed_calls import ClientFailback
from .policy import CallPolicy, checked_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Never

    from rpcwheel.admission.method import MethodAdmission
    from rpcwheel.admission.targets import TargetAdmission
    from rpcwheel.rpc import Kind
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .config import MethodConfig
    from .failback_policy import FailbackPolicy
    from .failed_calls import FailedCallQueue

CallT = TypeVar("CallT")

TIMER_CHECK_INTERVAL_S: Final = 1.0
"""How often a thread that waits for a timer checks whether the timer was stopped."""

MAX_OPTION_BUDGETS: Final = 256
"""Retry budgets of `call_options` that a client keeps. A program may compute ever new values."""


class EndsWithChannel(Protocol):
    """A call or an attempt that waits for some time, or for the end of another attempt."""

    def end_waiting(self) -> None:
        """Begin no further attempt, and end if none runs: the channel was closed.

        Idempotent; must not block.
        """


class ChannelCalls:
    """The calls of one channel that end with it. Its references to them are weak.

    Thread-safe without a lock: a finalizer may add or end a call at any time, also on a thread that
    is here. So no code of Python iterates over the calls, and each is found by its `id`.
    """

    def __init__(self) -> None:
        self._waiting = weakref.WeakValueDictionary[int, EndsWithChannel]()
        self._running = weakref.WeakValueDictionary[int, Any]()
        self.is_closed = False
        """Whether the channel was closed. No attempt may begin after a wait, with any channel. New
        calls are refused by `ClientState.refuse`, or by gRPC."""

    def add_running(self, call: Any) -> None:
        """Add a call for `running`."""
        with contextlib.suppress(TypeError):  # of an interceptor, with slots
            self._running[id(call)] = call

    @property
    def running(self) -> list[Any]:
        """The calls of `add_running`."""
        return _alive(self._running)

    @contextlib.contextmanager
    def delivery(self) -> Iterator[None]:
        """Begin an attempt of a queued call of the channel, which does not end with it."""
        token = _DELIVERING.set(self)
        try:
            yield
        finally:
            _DELIVERING.reset(token)

    def add_waiting(self, call: EndsWithChannel) -> bool:
        """Add a call or an attempt that begins to wait, unless it is one of a `delivery`.

        Returns:
            Whether it may wait. If not, the channel was closed, and its `end_waiting` was called.
        """
        if _DELIVERING.get() is self:
            return True
        self._waiting[id(call)] = call
        if self.is_closed:
            call.end_waiting()
            return False
        return True

    def end_waiting(self) -> None:
        """End what waits now or later, because the channel is closed."""
        self.is_closed = True
        for call in _alive(self._waiting):
            call.end_waiting()


_DELIVERING: Final[ContextVar[ChannelCalls | None]] = ContextVar("rpcwheel_delivery", default=None)
"""The channel of the queued call whose attempt begins. An attempt of an outer channel may make
calls on an inner one, and these end with the inner one."""


def _alive(calls: weakref.WeakValueDictionary[int, CallT]) -> list[CallT]:
    references = calls.valuerefs()  # copied without code of Python
    return [call for reference in references if (call := reference()) is not None]


class ClientState:
    """The state that the calls of one client share. Any thread may use it."""

    def __init__(
        self,
        policy: CallPolicy,
        *,
        timer: Timer | None,
        queue_of: Callable[[FailbackPolicy, str], FailedCallQueue],
        breakers: Breakers | None = None,
    ) -> None:
        """Make the state of a client.

        Args:
            policy: The policies of all methods.
            timer: Any rpcwheel timer; None for `shared_timer()`, which is made when it is needed.
            queue_of: Returns the queue of a failback policy. The second argument is the name of the
                queue if the policy has none.
            breakers: Those of the kit; None for new ones.

        Raises:
            TypeError: `policy` is not a `CallPolicy`, or `timer` is not a timer.
        """
        self.policy = policy
        self.configs = MethodConfigs(checked_calls(policy))
        # Starts the traces too: the timer that the first retry makes would start them too late.
        self.counts = components.call_counts()
        """Where calls and attempts are counted; None if metrics are off."""
        self.failback = ClientFailback(policy, queue_of)
        self._breakers = breakers
        self.loop: Any = None
        """The event loop of the calls, if they are of grpc.aio and have an `admission`."""
        self.admission: TargetAdmission | None = None
        """Decides whether attempts are sent; None if no method has policies for that."""
        self.channel_calls = ChannelCalls()
        """The calls that end when the channel is closed. Interceptors never close it."""
        self.refuse: Callable[[], Never] | None = None
        """Raises the error of a call on a closed channel. None while the channel is open, and for
        channels without an owner: they close their connections, so gRPC refuses calls. Those of a
        kit may keep them for queued calls."""
        self._timer = checked_timer(timer)
        self.now_ns = clock_of(timer)
        """The clock of the timer in use."""
        self._slow: dict[tuple[str, int], tuple[Callable[[Timeout], object], float]] = {}
        limited = [
            each
            for settings in (policy, *policy.methods.values())
            for each in (settings.retry, settings.hedging)
            if each is not None
        ]
        self._budgets: dict[BudgetKey, Budget] = {
            key: new_budget(key) for key in map(budget_key, limited) if key is not None
        }
        self._option_budgets: dict[BudgetKey, Budget] = {}
        self._reported: set[str] = set()

    def begin_admission(self, target: str | None, *, is_shared: bool = False) -> None:
        """Make `admission`, if a method has policies for that.

        Args:
            target: The target of the channel; None if it is not known.
            is_shared: Whether channels of the kit to the same target share it.
        """
        layers = self.policy, *self.policy.methods.values()
        if any(admission_settings(settings) is not None for settings in layers):
            breakers = Breakers() if self._breakers is None else self._breakers
            self.admission = breakers.admission(target, self._timer, is_shared=is_shared)

    def admission_of(self, method: str, kind: Kind) -> MethodAdmission | None:
        """Return what decides whether attempts of a method are sent; None if all are."""
        if self.admission is None:
            return None
        settings = self.configs.config_for(method).admission
        if settings is None:
            return None
        return self.admission.method(method, settings, is_stream=kind.streams_responses)

    @cached_property
    def without_policies(self) -> ClientState:
        """The state of calls to which no policies apply, with the same timer."""
        return ClientState(CallPolicy(), timer=self._timer, queue_of=self.failback.queue_of)

    @property
    def timer(self) -> Timer:
        """The timer in use."""
        return shared_timer() if self._timer is None else self._timer

    def current_config(self, method: str) -> MethodConfig:
        """Return the configuration of a method in this context, with its `call_options`."""
        options = CALL_OPTIONS.get()
        return (
            self.configs.config_for(method)
            if options is None
            else options.config(self.configs, method)
        )

    def begin(self, config: MethodConfig, timeout: float | None) -> tuple[int, int, int]:
        """Begin a call, with the timeout that its caller gave.

        Creates no plan: most calls need only their first attempt.

        Returns:
            The time now, the deadline of the call, and the deadline of its first attempt. If the
            deadline has passed, the first attempt must not be made.

        Raises:
            TypeError, ConfigurationError: `timeout` is not a duration, or NaN.
            ValueError, grpc.aio.UsageError: The channel was closed.
        """
        own_ns = None if timeout is None else to_ns(timeout, subject="timeout")
        if self.refuse is not None:
            self.refuse()
        now_ns = self.now_ns()
        deadline_ns = attempt_ns = config.deadline_ns(now_ns, own_ns, left_ns())
        if (config.retry is not None or config.hedging is not None) and now_ns < deadline_ns:
            attempt_ns = attempt_deadline_ns(config.retry, now_ns, deadline_ns)
            budget = self.budget_of(config)
            if budget is not None:
                budget.call(now_ns)
        return now_ns, deadline_ns, attempt_ns

    def budget_of(self, config: MethodConfig) -> Budget | None:
        """Return the budget for further attempts of a method; None for no limit."""
        key = config.budget
        if key is None:
            return None
        budget = self._budgets.get(key) or self._option_budgets.get(key)
        if budget is None:
            if len(self._option_budgets) >= MAX_OPTION_BUDGETS:
                self._option_budgets.clear()
            budget = self._option_budgets.setdefault(key, new_budget(key))
        return budget

    def watch_slow_call(self, method: str, config: MethodConfig) -> Timeout | None:
        """Set a timeout that emits `CallSlow`; the caller cancels it at the end of the call.

        None if the method has no threshold, or the timer takes no timeout.
        """
        slow_ns = config.slow_ns
        if slow_ns == NEVER:
            return None
        key = method, slow_ns
        cached = self._slow.get(key)
        if cached is None:
            if len(self._slow) >= MAX_METHODS:
                self._slow.clear()
            cached = self._slow[key] = slow_call_task(method, "client", slow_ns)
        return self.schedule(*cached, "slow_call_threshold")

    def schedule(
        self, task: Callable[[Timeout], object], delay_s: float, task_name: str
    ) -> Timeout | None:
        """Run a task on the timer's thread after a delay. See `start_timeout`."""
        return start_timeout(self._timer, task, delay_s, task_name)

    def report_plain_iterator(self, method: str) -> None:
        """Emit, once for each method, that only the deadline applies to its calls."""
        if method in self._reported:
            return
        if len(self._reported) >= MAX_METHODS:
            self._reported.clear()
        self._reported.add(method)
        why = (
            "it returns an iterator in place of a call, so there is no retry, default response, "
            "failback or message_timeout"
        )
        emit(CallbackFailed(method, "inner interceptor", TypeError(why)))

    @staticmethod
    def report_stall(method: str, config: MethodConfig) -> str:
        """Emit that a stream has exceeded its message_timeout, and return the status details."""
        silent_s = to_seconds(config.message_timeout_ns)
        emit(StreamStalled(method, silent_s))
        return f"no message for {silent_s:g} s (message_timeout)"


def seconds_left(deadline_ns: int, now_ns: int) -> float | None:
    """Return the `timeout=` for gRPC until a deadline; None for no limit, never negative."""
    return None if deadline_ns == NEVER else max(0, deadline_ns - now_ns) / 1e9
