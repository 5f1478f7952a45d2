"""Channels whose connection can be replaced while stubs and calls live on: `ReconnectingChannel`.

`reconnect()` creates a new connection. New calls use it at once, while calls in flight continue on
the old connection. Stubs of the channel work as long as the channel is open. The connections share
no state, also not gRPC's backoff after failed attempts to connect. `rpcwheel.heartbeat` reconnects
channels whose server no longer answers.

`rpcwheel.transport.aio` has the same for `grpc.aio`.

==================  ================================================================================
`state.py`          Which connection serves the next call; no I/O, for both APIs.
`base.py`           How connections are replaced and drained; for both APIs.
`sync.py`           The channel for `grpc`.
`subscriptions.py`  Subscriptions to its state, across reconnects.
`aio.py`            The channel for `grpc.aio`.
`arguments.py`      Checks of arguments, for both APIs.
`probe.py`          The calls of heartbeats and health checks.
==================  ================================================================================
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from . import aio, sync
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
