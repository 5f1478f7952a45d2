"""What is called when a call has ended: hooks of ours at once, users' on a worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.styles import InternalCallback
from rpcwheel.observe import CallbackFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Hook", "run_hooks"]

Hook: TypeAlias = "tuple[Callable[..., object], tuple[object, ...]]"
"""A function, and its arguments."""


def run_hooks(method: str, hooks: list[Hook]) -> None:
    """Call them, each group in order. Users' that hang hold up other users' of the method only.

    Hooks of ours don't wait for those: an outer call of ours learns by one that this call ended.
    """
    users = []
    for hook, args in hooks:
        if isinstance(hook, InternalCallback):
            hook(*args)
        else:
            users.append((hook, args))
    if users:
        EXECUTOR.submit(("callbacks", method), partial(_run_users, method, users))


def _run_users(method: str, hooks: list[Hook]) -> None:
    for hook, args in hooks:
        try:
            hook(*args)
        except BaseException as error:  # noqa: BLE001 - a user's; told as an event
            emit(CallbackFailed(method, "done callback", error))
