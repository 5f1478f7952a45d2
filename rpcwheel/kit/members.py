"""Heartbeats for the members of a channel by name: who is silent is not called."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.heartbeat.rules import HeartbeatState

if TYPE_CHECKING:
    from rpcwheel.probe import Probe

__all__ = ["MemberHeartbeats"]

SILENT: Final = {
    HeartbeatState.SUSPECT: "a heartbeat was not answered",
    HeartbeatState.DEAD: "its connection is dead",
}


class MemberHeartbeats:
    """The heartbeats of one channel's members, in either world.

    A member gets its own with its connection. While it is missed the member is down; it is up again
    when it answers. Of a member that is gone nothing more is asked.
    """

    def __init__(self, manager: Any, probe: Probe | None) -> None:
        """For one channel.

        Args:
            manager: A `HeartbeatManager` of the channel's world.
            probe: What is asked; None: what the manager asks.
        """
        self._manager = manager
        self._probe = probe
        self._of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def made(self, member: Any) -> None:
        """Take note that a member has a connection."""
        heartbeat = self._manager.attach(member.channel, probe=self._probe)
        self._of[member] = heartbeat
        heartbeat.add_listener(partial(_heard, weakref.ref(member)))

    def removed(self, member: Any) -> None:
        """Take note that a member is gone."""
        heartbeat = self._of.pop(member, None)
        if heartbeat is not None:
            heartbeat.withdraw()


def _heard(member: weakref.ref[Any], _: object, __: HeartbeatState, state: HeartbeatState) -> None:
    one = member()
    if one is None:
        return
    if state in SILENT:
        one.down(SILENT[state])
    elif state is HeartbeatState.ALIVE:
        one.up()
