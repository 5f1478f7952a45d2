"""Heartbeats: silent connections are asked whether they live, and dead ones replaced.

    from rpcwheel.heartbeat import HeartbeatManager
    from rpcwheel.transport import ReconnectingChannel

    channel = ReconnectingChannel("10.0.0.7:50051")
    with HeartbeatManager(interval=10.0) as heartbeats:
        heartbeat = heartbeats.attach(channel)
        heartbeat.add_listener(lambda heartbeat, old, new: print(heartbeat.target, old, "->", new))
        ...                                    # stubs made of `channel` live on when it is replaced

What a TCP connection does not tell for a quarter of an hour: that the other end is frozen, was
unplugged, or lost its state. A heartbeat (`HealthProbe`: the standard health service, which servers
of any language have) is sent when nothing was read, or nothing written, for `interval`. When
nothing was read for `timeout`, three intervals by default, the connection is dead, and is replaced.
These are Dubbo's rules (`HeartbeatTimerTask`, `ReconnectTimerTask`). What calls read and write
counts, so a busy connection is never asked; one that was not used yet is left alone, and so is one
that the server has closed because nobody used it.

The states are in `HeartbeatState`, what may follow what in `heartbeat.rules.TRANSITIONS`. Nothing
polls: each connection has one timeout on the timer, set to the next moment that matters.

The twin for `grpc.aio`, with the same names, is in `rpcwheel.heartbeat.aio`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from rpcwheel.probe import HealthProbe, MethodProbe, Probe, ProbeResult

    from .policy import HeartbeatPolicy
    from .rules import HeartbeatState
    from .sync import Heartbeat, HeartbeatManager
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "rpcwheel.probe": "HealthProbe MethodProbe Probe ProbeResult",
            ".policy": "HeartbeatPolicy",
            ".rules": "HeartbeatState",
            ".sync": "Heartbeat HeartbeatManager",
        },
        submodules="aio sync",
    )

__all__ = [
    "HealthProbe",
    "Heartbeat",
    "HeartbeatManager",
    "HeartbeatPolicy",
    "HeartbeatState",
    "MethodProbe",
    "Probe",
    "ProbeResult",
]
