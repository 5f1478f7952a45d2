"""Who waits in the shared timer, and is to go on in the next one if that is stopped.

A timer drops what waits in it when it is stopped, and tells only who stops it. What is to be done
now and then, as long as a process lives, would never be done again.
"""

from __future__ import annotations

import weakref
from typing import Final, Protocol

__all__ = ["Renewed", "tell_when_renewed", "timer_renewed"]


class Renewed(Protocol):
    """What waits in the shared timer."""

    def timer_renewed(self) -> None:
        """Have a worker look what is to be waited for: there is another shared timer now.

        Under any lock of any caller's, so it takes none but the workers'.
        """


_waiting: Final[weakref.WeakValueDictionary[int, Renewed]] = weakref.WeakValueDictionary()


def tell_when_renewed(one: Renewed) -> None:
    """Have it told, as long as somebody holds it, whenever another shared timer is made."""
    _waiting[id(one)] = one


def timer_renewed() -> None:
    """Tell all: there is another shared timer."""
    for reference in _waiting.valuerefs():  # a copy: others may come meanwhile
        one = reference()
        if one is not None:
            one.timer_renewed()
