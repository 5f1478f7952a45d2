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
        self._forget()
        self.reset()
        reset_after_fork(self)

    def _forget(self) -> None:
        self._by_key: weakref.WeakValueDictionary[Hashable, T] = weakref.WeakValueDictionary()
        self._users: weakref.WeakKeyDictionary[T, int] = weakref.WeakKeyDictionary()

    def reset(self) -> None:
        """Replace the locks, in a forked child, where the old ones may never be released."""
        self._lock = threading.RLock()  # finalizers release objects
        self._making = threading.RLock()  # `release` does not wait while an object is made
        if not self._also_in_child:
            self._forget()

    def acquire(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of this key for another user. Without users, it is a new one.

        Raises:
            Exception: What `make` raised; nothing is kept then.
        """
        with self._making:
            with self._lock:
                known = self._by_key.get(key)
                users = 0 if known is None else self._users.get(known, 0)
                if known is not None and users:
                    self._users[known] = users + 1
                    return known
            made = make()
            with self._lock:
                self._by_key[key], self._users[made] = made, 1
            return made

    def release(self, shared: T) -> bool:
        """End one use of an object. Returns True to its last user, who must close it.

        True also for an object that was not acquired here.
        """
        with self._lock:
            left = self._users.pop(shared, 1) - 1
            if left:
                self._users[shared] = left
            return not left
