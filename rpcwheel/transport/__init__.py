"""Channels whose connection can be replaced while stubs and calls live on: `ReconnectingChannel`.

A stub made of such a channel works as long as the channel does, whatever happens to the connection.
`reconnect()` puts a new one in the place of the old: new calls use it at once, calls in flight end
where they began. The new one shares nothing with the old, not even gRPC's memory of failed attempts
to connect. `rpcwheel.heartbeat` replaces connections whose peer no longer answers.

`rpcwheel.transport.aio` has the same for `grpc.aio`.

==================  ================================================================================
`state.py`          Which connection serves the next call: pure, for both worlds.
`sync.py`           The channel for `grpc`.
`subscriptions.py`  Its state, reported to subscribers across reconnects.
`aio.py`            The channel for `grpc.aio`.
`drain_timer.py`    The timeout that ends a drain, for both.
`arguments.py`      Checks of what both are given.
==================  ================================================================================
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .sync import ReconnectingChannel
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".sync": "ReconnectingChannel",
        },
        submodules="aio sync",
    )

__all__ = ["ReconnectingChannel"]
