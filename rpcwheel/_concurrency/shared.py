"""Objects that several users in a process share, such as the registry of a URL, or a journal."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

from .executor import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


class SharedObjects(Generic[T]):
    """Objects by key, each with the number of its users. Thread-safe.

    Holds them weakly: one whose users drop it without `release` is forgotten.
    """

    def __init__(self, *, also_in_child: bool = False) -> None:
        """Begin without an object.

        `also_in_child`: a forked child uses the objects of its parent, instead of others.
        """
        self._also_in_child = also_in_child
        self._by_key: weakref.WeakValueDictionary[Hashable, T] = weakref.WeakValueDictionary()
        # Lists with an item for each user: a signal handler or finalizer may release an object at
        # any point of `acquire` and `release`, and would change a number after it was read.
        self._users: weakref.WeakKeyDictionary[T, list[None]] = weakref.WeakKeyDictionary()
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Replace the locks, in a forked child, where the old ones may never be released."""
        self._lock = threading.RLock()  # finalizers release objects
        self._making = threading.RLock()  # `release` does not wait while an object is made
        if not self._also_in_child:
            self._by_key.clear()

    def acquire(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of this key for another user. Without users, it is a new one.

        Raises:
            Exception: What `make` raised; nothing is kept then.
        """
        with self._making:
            with self._lock:
                shared = self._by_key.get(key)
                users = None if shared is None else self._users.get(shared)
                if shared is not None and users:
                    users.append(None)
                    return shared
            shared = make()
            with self._lock:
                self._by_key[key], self._users[shared] = shared, [None]
            return shared

    def release(self, shared: T) -> bool:
        """End one use of an object. Returns True to its last user, who must close it.

        True also for an object that was not acquired here.
        """
        with self._lock:
            users = self._users.get(shared, [])
            del users[-1:]
            return not users
