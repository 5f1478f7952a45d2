"""What the caller holds of a call that runs and is made several times, or answered by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcwheel._grpc.held import HeldCall, HeldStream

from ._client_live import Course

if TYPE_CHECKING:
    from rpcwheel._grpc.styles import AnyCall

    from .sync_call import Outgoing

__all__ = ["LiveCall", "LiveStream"]


class LiveCall(HeldCall):
    """One call, whatever number of tries it takes."""

    def __init__(self, outgoing: Outgoing, call: AnyCall) -> None:
        """Go on from the first try, `call`."""
        course = Course(outgoing)
        super().__init__(course)
        course.start(call)


class LiveStream(LiveCall, HeldStream):
    """The same for a response stream."""
