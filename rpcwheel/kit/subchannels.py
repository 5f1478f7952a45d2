"""Heartbeats for the subchannels of a balanced channel: a silent one gets no calls."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.heartbeat.rules import HeartbeatState

if TYPE_CHECKING:
    from rpcwheel.probe import Probe

__all__ = ["SubchannelHeartbeats"]

UNHEALTHY: Final = {
    HeartbeatState.SUSPECT: "a heartbeat was not answered",
    HeartbeatState.DEAD: "its connection is dead",
}


class SubchannelHeartbeats:
    """The heartbeats of one channel's subchannels, in both worlds.

    A missed heartbeat marks its subchannel as unhealthy, an answered one as healthy.
    """

    def __init__(self, manager: Any, probe: Probe | None) -> None:
        """Do nothing yet.

        Args:
            manager: A `HeartbeatManager` of the channel's world.
            probe: What is asked; None: the manager's.
        """
        self._manager = manager
        self._probe = probe
        self._heartbeats: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def add(self, subchannel: Any) -> None:
        """Begin the heartbeat of a subchannel's channel; nothing if it has one."""
        channel = subchannel.channel
        known, _ = self._heartbeats.get(subchannel, (None, None))
        if known is channel:
            return
        heartbeat = self._manager.attach(channel, probe=self._probe)
        self._heartbeats[subchannel] = channel, heartbeat
        heartbeat.add_listener(partial(_state_changed, weakref.ref(subchannel)))

    def remove(self, subchannel: Any) -> None:
        """End the heartbeat of a subchannel whose instance is gone."""
        _, heartbeat = self._heartbeats.pop(subchannel, (None, None))
        if heartbeat is not None:
            heartbeat.withdraw()


def _state_changed(
    reference: weakref.ref[Any], _: object, __: HeartbeatState, state: HeartbeatState
) -> None:
    subchannel = reference()
    if subchannel is None:
        return
    if state in UNHEALTHY:
        subchannel.mark_unhealthy(UNHEALTHY[state])
    elif state is HeartbeatState.ALIVE:
        subchannel.mark_healthy()
