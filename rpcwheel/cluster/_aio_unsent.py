"""Whether a call of `grpc.aio` that has failed was sent at all, by what grpc says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import grpc

from rpcwheel._grpc.calls import is_unprocessed

from .member import proves_unsent

if TYPE_CHECKING:
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.transport.aio import AioTransport

__all__ = ["is_unsent", "state_of"]

FAILING: Final = grpc.ChannelConnectivity.TRANSIENT_FAILURE.name
READY: Final = grpc.ChannelConnectivity.READY.name


def is_unsent(
    error: grpc.aio.AioRpcError, instance: ServiceInstance, began_in: str, state: str
) -> bool:
    """Whether it is sure that nothing was sent; what proves that is in `proves_unsent`.

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
    return proves_unsent(instance, details, had_none=had_none, has_none=state == FAILING)


def state_of(link: AioTransport) -> str:
    """The state of a connection; "" if it is unknown."""
    try:
        name: str = link.channel.get_state().name
    except Exception:  # noqa: BLE001 - of another make
        return ""
    return name
