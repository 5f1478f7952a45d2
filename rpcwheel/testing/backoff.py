"""Retries and failback without waits, for tests."""

from __future__ import annotations

import inspect
from contextlib import ContextDecorator
from functools import wraps
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from rpcwheel.backoff import NO_WAITS

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound="Callable[..., Any]")


def no_waits() -> NoWaits:
    """Make the waits before retries and before attempts of failback 0 seconds.

    For everything in the process, in any thread, from the `with` statement to its end::

        with no_waits():
            stub.Get(request)

    Also a decorator of functions and of `async def` functions. May be nested.

    The number of attempts, the deadlines and retry budgets remain. The wait that a server asks for
    (`grpc-retry-pushback-ms`) is 0 too, but still ends the retries if it is longer than
    `max_pushback`. A wait that has begun is not shortened. With a `ManualTimer`, attempts of
    failback begin at the next `advance(0)`. The delays of hedging, reconnecting, health checks and
    the registry are not changed.

    A failback queue whose attempts are limited only by time, or not at all, makes attempts without
    a pause until its server succeeds.
    """
    return NoWaits()


class NoWaits(ContextDecorator):
    """The context manager and decorator that `no_waits` returns."""

    def __enter__(self) -> Self:
        NO_WAITS.append(None)
        return self

    def __exit__(self, *_: object) -> None:
        NO_WAITS.pop()

    def __call__(self, func: F) -> F:
        """Return a function that runs `func` without waits.

        Raises:
            TypeError: `func` is a class or a generator function, whose body would run later.
        """
        if inspect.iscoroutinefunction(func):

            @wraps(func)
            async def run(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await func(*args, **kwargs)

            return cast("F", run)
        is_generator = inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func)
        if is_generator or inspect.isclass(func):
            raise TypeError(
                f"no_waits() decorates functions and coroutine functions, not {func!r}; write "
                "`with no_waits():` in its body"
            )
        return super().__call__(func)
