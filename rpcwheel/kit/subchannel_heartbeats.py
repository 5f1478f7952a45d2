"""`SubchannelHeartbeats`: a heartbeat for each subchannel of a balanced channel."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rpcwheel.heartbeat.rules import HeartbeatState
    from rpcwheel.transport.probe import Probe

NOT_ANSWERED: Final = "a heartbeat was not answered"
CONNECTION_DEAD: Final = "its connection is dead"
"""Why heartbeats mark a subchannel as unhealthy."""


class SubchannelHeartbeats:
    """The heartbeats of the subchannels of one balanced channel, in either world.

    A missed heartbeat marks its subchannel as unhealthy; an answered one as healthy again, unless
    it is unhealthy for another reason.
    """

    def __init__(self, manager: Any, probe: Probe | None) -> None:
        """Do nothing yet; a `probe` of None is that of the manager."""
        self._manager = manager
        self._probe = probe
        self._heartbeats: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def add(self, subchannel: Any) -> None:
        """Attach a heartbeat to a subchannel's channel.

        Does nothing if it has one, or if the kit is closed.
        """
        if self._manager.closed:
            return
        channel = subchannel.channel
        attached, _ = self._heartbeats.get(subchannel, (None, None))
        if attached is channel:
            return
        heartbeat = self._manager.attach(channel, probe=self._probe)
        self._heartbeats[subchannel] = channel, heartbeat
        heartbeat.add_listener(partial(_state_changed, weakref.ref(subchannel)))

    def remove(self, subchannel: Any) -> None:
        """End the heartbeat of a subchannel whose instance is gone."""
        _, heartbeat = self._heartbeats.pop(subchannel, (None, None))
        if heartbeat is not None:
            heartbeat.detach()


def _state_changed(
    reference: weakref.ref[Any], _: object, __: HeartbeatState, state: HeartbeatState
) -> None:
    from rpcwheel.heartbeat.rules import HeartbeatState

    subchannel = reference()
    if subchannel is None:
        return
    match state:
        case HeartbeatState.SUSPECT:
            subchannel.mark_unhealthy(NOT_ANSWERED)
        case HeartbeatState.DEAD:
            subchannel.mark_unhealthy(CONNECTION_DEAD)
        case HeartbeatState.ALIVE if subchannel.unhealthy_reason in {NOT_ANSWERED, CONNECTION_DEAD}:
            subchannel.mark_healthy()
