"""Matching of errors with a policy's `retry_on` or `on`.

Status codes are matched by the name of `error.code()`. So this file does not need grpc, and it
treats the errors of `grpc`, `grpc.aio` and other libraries alike.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import tenacity
from tenacity import retry_base

from rpcwheel.backoff import failed_state
from rpcwheel.errors import ConfigurationError, is_coroutine_function
from rpcwheel.rpc import CODES, checked_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def accepted_values(setting: str) -> str:
    """The part of an error message that says which values `setting` takes."""
    return (
        f"say which errors: exception types ({setting}=ConnectionError), gRPC status codes "
        f'({setting}=grpc.StatusCode.UNAVAILABLE or {setting}="UNAVAILABLE"), a predicate '
        f"({setting}=lambda error: ...), a tenacity retry_if_* object, or a set of these "
        f'({setting}={{"UNAVAILABLE", ConnectionError}})'
    )


class Matcher:
    """Decides whether a setting names an error. Immutable; runs the user's predicates."""

    def __init__(self, on: object, setting: str = "retry_on") -> None:
        """Check the value of a setting.

        Args:
            on: As `accepted_values` says; sets, tuples and lists may be mixed and nested.
            setting: The setting's name, for error messages.

        Raises:
            TypeError: An item is of a type that is not allowed.
            ConfigurationError: It is empty, names an unknown code, or could never match.
        """
        self._codes: set[str] = set()
        self._predicates: list[Callable[[Exception], object]] = []
        self._strategies: list[retry_base] = []
        types: list[type[Exception]] = []
        for condition in _flat(on):
            match condition:
                case type():
                    types.append(_exception_type(condition, setting))
                case str():
                    self._codes.add(checked_code(condition))
                case enum.Enum() if type(condition).__name__ == "StatusCode":
                    self._codes.add(checked_code(condition))
                case retry_base():
                    self._strategies.append(_strategy(condition))
                case _:
                    self._predicates.append(_predicate(condition, setting))
        self._types = tuple(types)
        if not (types or self._codes or self._strategies or self._predicates):
            raise ConfigurationError(f"it is empty; {accepted_values(setting)}")

    def codes(self, rpc_error: type[Exception]) -> frozenset[str]:
        """Return the status codes that are named: each code if a type is that of all gRPC errors.

        Args:
            rpc_error: `grpc.RpcError`.
        """
        return CODES if issubclass(rpc_error, self._types) else frozenset(self._codes)

    def __call__(self, error: BaseException, *, attempt: int, elapsed_ns: int) -> bool:
        """Return whether to retry after `error`, with which the `attempt`-th attempt ended.

        An error that is not an `Exception` never matches: KeyboardInterrupt, SystemExit, asyncio's
        CancelledError.
        """
        if not isinstance(error, Exception):
            return False
        if isinstance(error, self._types) or (self._codes and _code_of(error) in self._codes):
            return True
        if any(predicate(error) for predicate in self._predicates):
            return True
        if not self._strategies:
            return False
        state = failed_state(attempt, elapsed_ns=elapsed_ns, error=error)
        return any(strategy(state) for strategy in self._strategies)


def _flat(on: object) -> Iterator[object]:
    if isinstance(on, (set, frozenset, tuple, list)):
        for element in on:
            yield from _flat(element)
    else:
        yield on


def _code_of(error: Exception) -> str | None:
    """The name of the status code that a gRPC error carries, None for other errors."""
    code = getattr(error, "code", None)
    return getattr(code(), "name", None) if callable(code) else None


def _exception_type(kind: type, setting: str) -> type[Exception]:
    if issubclass(kind, Exception):
        return kind
    if issubclass(kind, BaseException):
        raise ConfigurationError(
            f"it names {kind.__name__}, which ends a program or a task and is never "
            f"handled; {setting}=Exception means every error"
        )
    raise TypeError(
        f"it names the class {kind.__name__}, which is not an exception; {accepted_values(setting)}"
    )


def _strategy(retry: retry_base) -> retry_base:
    if isinstance(retry, (tenacity.retry_if_result, tenacity.retry_if_not_result)):
        raise ConfigurationError(
            f"it looks at results ({type(retry).__name__}), but a call that returns has "
            "succeeded; raise an error for a result that is a failure"
        )
    return retry


def _predicate(predicate: object, setting: str) -> Callable[[Exception], object]:
    if not callable(predicate):
        raise TypeError(f"it holds {predicate!r}; {accepted_values(setting)}")
    if is_coroutine_function(predicate):
        raise TypeError(f"the predicate {predicate!r} is a coroutine function; give a plain one")
    return predicate
