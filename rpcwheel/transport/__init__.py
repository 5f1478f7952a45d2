"""Channels whose connection can be replaced while stubs and calls go on: `ReconnectingChannel`.

A stub made of such a channel works for as long as the channel does, whatever becomes of the
connection. `replace()` puts a new one in the place of the old: new calls go there at once, calls in
flight end where they began. The new one shares nothing with the old, not even gRPC's memory of
failed attempts to connect. `rpcwheel.heartbeat` replaces connections that have died in silence.

`rpcwheel.transport.aio` has the same for `grpc.aio`.

==================  ================================================================================
`core.py`           Which connection serves the next call: pure, for both worlds.
`sync.py`           The channel for threads.
`_switch.py`        Its connections under a lock: calls come and go, one takes another's place.
`_members.py`       Its multi-callables, which find the connection of the moment for each call.
`_subscriptions.py` Its state, told to whoever subscribes, across replacements.
`aio.py`            The channel for `grpc.aio`.
`_aio_seen.py`      What is seen of it: its state, across replacements.
`_aio_members.py`   Its multi-callables; they end with a status when their connection is given up.
`_drain.py`         When what still runs on an old connection is ended, for both worlds.
`arguments.py`      What both are given, checked.
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
