"""Heartbeats: detect dead connections, and replace them.

    from rpcwheel.heartbeat import HeartbeatManager
    from rpcwheel.transport import ReconnectingChannel

    channel = ReconnectingChannel("10.0.0.7:50051")
    with HeartbeatManager(interval=10.0) as heartbeats:
        heartbeat = heartbeats.attach(channel)
        heartbeat.add_listener(lambda heartbeat, old, new: print(heartbeat.target, old, "->", new))
        ...                                    # stubs of `channel` outlive its connections

TCP may need a quarter of an hour to notice that the server is frozen, unplugged, or has lost its
state. A heartbeat is a call of the standard health service (`HealthProbe`) or of a method of yours
(`MethodProbe`). It is sent if nothing was read, or nothing was written, for `interval`. If nothing
was read for `timeout`, by default three intervals, the connection is dead and is replaced. These
are Dubbo's rules (`HeartbeatTimerTask`, `ReconnectTimerTask`). Calls of the user count as activity,
so a busy connection gets no heartbeats. An unused connection gets none either, nor one that the
server closed because it was idle.

==============  ====================================================================================
`policy.py`     The settings.
`rules.py`      States, times derived from the settings, actions.
`core.py`       Decides when a heartbeat is sent, and when a connection is dead. No I/O.
`channel.py`    The channel that is watched: what differs if it is no `ReconnectingChannel`.
`monitor.py`    Heartbeats and their manager, as far as they are the same for both worlds.
`sync.py`       The adapter for `grpc`.
`aio.py`        The adapter for `grpc.aio`: `rpcwheel.heartbeat.aio`, with the same names.
==============  ====================================================================================
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from rpcwheel.transport.probe import HealthProbe, MethodProbe, Probe, ProbeResult

    from . import aio, sync
    from .policy import HeartbeatPolicy
    from .rules import HeartbeatState
    from .sync import Heartbeat, HeartbeatManager
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "rpcwheel.transport.probe": "HealthProbe MethodProbe Probe ProbeResult",
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
