"""Whether a call that has failed was sent at all: what its words and its connection say together.

The words alone prove nothing: a server that hands on the failure of its own upstream says the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import grpc

from rpcwheel._grpc.status import is_unprocessed

from .member import address_dialled

if TYPE_CHECKING:
    from rpcwheel.channel._aio_members import Wire
    from rpcwheel.channel.core import Link
    from rpcwheel.instance import ServiceInstance

__all__ = ["is_unsent", "state_of"]

FAILING: Final = grpc.ChannelConnectivity.TRANSIENT_FAILURE.name
READY: Final = grpc.ChannelConnectivity.READY.name


def is_unsent(
    error: grpc.aio.AioRpcError, instance: ServiceInstance, began_in: str, state: str
) -> bool:
    """Whether it is sure that nothing was sent, by the words and two of three things more.

    That is: there was no connection when the try began; there is none now; the words name the
    address that we called. One may be missing: by the time that we see the failure there may be a
    connection again, a connection may break just when a try begins on it, and what a host name or
    a proxy stands for we do not know.

    Args:
        error: How the try failed.
        instance: Whom it was for.
        began_in: The name of the state of its connection when it began; "" if unknown.
        state: That of now.
    """
    details = error.details() or ""
    if not is_unprocessed(
        error.code().name, details, error.trailing_metadata(), error.initial_metadata()
    ):
        return False
    had_none = began_in not in {READY, ""}
    dialled = address_dialled(instance)
    named = dialled is not None and dialled in details
    return had_none + (state == FAILING) + named > 1


def state_of(link: Link[Wire]) -> str:
    """The state of a connection; "" if it is unknown."""
    try:
        name: str = link.channel.channel.get_state().name
    except Exception:  # noqa: BLE001 - of another make
        return ""
    return name
