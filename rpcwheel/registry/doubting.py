"""What calls that wait are told of a registry that does not say whom there is to call. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rpcwheel.errors import RegistryRefused

if TYPE_CHECKING:
    from rpcwheel.errors import RegistryError

__all__ = ["Doubtful", "tell_why"]


class Doubtful(Protocol):
    """A channel, of either world."""

    def doubt(self, reason: str) -> object:
        """Take note why nothing is known yet: for calls whose wait is over."""

    def fail(self, reason: str) -> object:
        """Have all calls that wait end: nothing will be known soon."""


def tell_why(channel: Doubtful | None, error: RegistryError, *, last: bool) -> bool:
    """Tell a channel why the registry could not be asked.

    Args:
        channel: Whose calls wait; None: it is gone.
        error: What the registry said.
        last: Whether it has been asked before, and the calls have waited since.

    Returns:
        Whether to ask once more, when calls have waited for as long as they do.
    """
    if channel is None:
        return False
    if last or isinstance(error, RegistryRefused):  # which waiting does not mend
        channel.fail(str(error))
        return False
    channel.doubt(str(error))  # a call may begin to wait before we do
    return True
