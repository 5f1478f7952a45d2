"""Which members a channel has, and which of them is to be called: pure, for both worlds.

A member stands for one instance of the service, known by its id. It is *up* until a call to it
fails as unreachable; then it is *down*: not called while another is up, and probed until it
answers. A member that is removed takes no new calls and drains.

Nothing here does I/O or reads a clock but the one that is given, and nothing is thread-safe:
whoever owns a `Roster` calls in under a lock, or on one loop. Only `pick`, `known` and `members`
may be read by anybody at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from rpcwheel.durations import NEVER, to_ns

from .member import MemberCore, checked_instances

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rpcwheel.instance import ServiceInstance

    from .member import Rules
    from .pickers import Pick, Picker

__all__ = ["MOST_DOWN", "Change", "Roster"]

MOST_DOWN: Final = 3
"""Members that are down which one call tries, if no other is left."""

WARM_STEPS: Final = 20
"""In so many steps a weight grows."""

MOST_BACKOFF: Final = 64
"""Probes after which the wait grows no more: wait objects may overflow."""


M = TypeVar("M", bound=MemberCore)


class Change(NamedTuple, Generic[M]):
    """What an update has changed."""

    added: tuple[M, ...]
    removed: tuple[M, ...]
    """Those to retire; none of them is picked any more."""
    returned: tuple[M, ...]
    """Those that were down, and were published anew by another process: to be probed at once."""


class Roster(Generic[M]):
    """The members of one channel."""

    def __init__(
        self,
        name: str,
        make: Callable[[ServiceInstance, int], M],
        picker: Picker,
        rules: Rules,
        now_ns: Callable[[], int],
    ) -> None:
        """Begin without members.

        Args:
            name: Of the service, for what is said to people.
            make: Makes a member of an instance and the time when that began to serve; no I/O.
            picker: Who is called.
            rules: The policy.
            now_ns: The timer's clock.
        """
        self.name = name
        self.rules = rules
        self._make = make
        self._picker = picker
        self._now_ns = now_ns
        self._by_id: dict[str, M] = {}
        self.members: tuple[M, ...] = ()
        """All but those that leave, in the order of their ids."""
        self.leaving: list[M] = []
        """Those that are gone and drain."""
        self.known = False
        """Whether it was ever told which members there are."""
        self.reason = ""
        """Why nothing is known."""
        self._doubt = ""
        self.closed = False
        self.pick: Pick[M] | None = None
        """Gives the member for a call; None: there is none."""
        self.all_down = False
        """Whether those that `pick` gives are down, as all are."""

    # Which there are

    def update(self, instances: Iterable[ServiceInstance], wall_s: float) -> Change[M]:
        """Take note of the instances that there are; touches only what has changed.

        Args:
            instances: All of them; of two with one id the last counts.
            wall_s: The time of day, for instances that tell when they began.

        Raises:
            TypeError: One is no instance; nothing has changed.
        """
        told = {one.id: one for one in checked_instances(instances)}
        if self.closed:
            return Change((), (), ())
        added, removed, returned, by_id = [], [], [], {}
        for name in sorted(told):
            instance, known = told[name], self._by_id.get(name)
            if known is not None and _address(known.instance) == _address(instance):
                if known.down_ns is not None and known.instance.epoch != instance.epoch:
                    known.probes = 0
                    known.spell += 1
                    returned.append(known)
                known.instance = instance
            else:
                known = self._make(instance, self._began_ns(instance, wall_s))
                added.append(known)
            by_id[name] = known
        kept = set(by_id.values())
        for member in self.members:
            if member not in kept:
                member.leaving = True
                removed.append(member)
                if member.used:
                    self.leaving.append(member)
        self._by_id, self.members = by_id, tuple(by_id.values())
        self.known, self.reason = True, ""
        self.refresh()
        return Change(tuple(added), tuple(removed), tuple(returned))

    def fail(self, reason: str) -> None:
        """Take note that it can't be known which members there are; once they are, nothing."""
        if not self.known:
            self.reason = reason

    def doubt(self, reason: str) -> None:
        """Take note why nothing is known yet, for calls whose wait is over; the others go on."""
        self._doubt = reason

    def left(self, member: M) -> None:
        """Take note that a member that was removed has been drained and is closed."""
        member.closed = True
        if member in self.leaving:
            self.leaving.remove(member)

    def close(self) -> tuple[M, ...]:
        """Have no members any more; gives those to close. A second time, none."""
        if self.closed:
            return ()
        self.closed = True
        gone = (*self.members, *self.leaving)
        for member in gone:
            member.closed = True
        self.members, self.leaving, self._by_id, self.pick = (), [], {}, None
        return gone

    # Which is called

    def refusal(self) -> str | None:
        """Why there is nobody to call, in the words of a status; None: that is not known yet."""
        if self.known:
            return None if self.members else f"no instance of {self.name} is known"
        return f"no instance of {self.name} is known: {self.reason}" if self.reason else None

    def too_late(self) -> str:
        """What to say to a call that has waited for too long to know the members."""
        said = f"no instance of {self.name} is known yet"
        return f"{said}: {self._doubt}" if self._doubt else said

    def other(self, tried: Iterable[M], call: tuple[str, Any, Any]) -> M | None:
        """The next member for a call that `tried` did not take; None if none is left.

        Args:
            tried: Those that it was tried on.
            call: What `pick` takes.
        """
        if self.pick is None:
            return None
        used = set(tried)
        picked = self.pick(*call)
        if picked in used:
            left = [one for one in self._tier() if one not in used]
            if not left:
                return None
            picked = left[0]
        if picked.down_ns is not None and len(used) >= MOST_DOWN:
            return None
        return picked

    def several(
        self, count: int, call: tuple[str, Any, Any], picked: Sequence[M] = ()
    ) -> tuple[M, ...]:
        """Pick `count` members, no one twice; fewer, if no more are to be called.

        Args:
            count: 1 or more.
            call: What `pick` takes.
            picked: Those that were picked by then; they count.
        """
        found = list(picked)
        while len(found) < count:
            one = self.other(found, call)
            if one is None:  # not who has no weight, drains or is down, while others are called
                break
            found.append(one)
        return tuple(found)

    def refresh(self) -> None:
        """Look anew who is to be called: something has changed, or time has passed."""
        tier = self._tier()
        if not tier:
            self.pick, self.all_down = None, False
            return
        self.all_down = tier[0].down_ns is not None
        if self.all_down:
            self.pick = _longest_down(sorted(tier, key=lambda member: member.failed_ns))
        else:
            self.pick = self._picker.prepare(tier, [self.weight(member) for member in tier])

    def _tier(self) -> Sequence[M]:
        """The best that there are: those that are up before those that are not, and so on."""
        usable = [member for member in self.members if member.down_ns is None]
        willing = [member for member in usable if member.instance.status != "DRAINING"]
        weighty = [member for member in willing if member.instance.weight]
        near = [member for member in weighty if member.instance.zone == self.rules.zone]
        return (self.rules.zone and near) or weighty or willing or usable or self.members

    # Up and down

    def down(self, member: M, reason: str) -> bool:
        """Take note that a member can't be reached; True if that is news."""
        if member.closed or member.leaving:
            return False
        member.failed_ns = self._now_ns()
        if member.down_ns is not None:
            return False
        member.down_ns, member.reason = member.failed_ns, reason
        member.probes = 0
        member.spell += 1
        self.refresh()
        return True

    def up(self, member: M) -> int | None:
        """Take note that a member answers; for how long it was down, None if it was not."""
        if member.down_ns is None:
            return None
        away_ns = self._now_ns() - member.down_ns
        member.down_ns = member.dark_ns = None
        member.reason = ""
        member.spell += 1
        self.refresh()
        return away_ns

    def wants_probe(self, member: M, spell: int) -> bool:
        """Whether a probe of this spell of being down is still wanted."""
        there = not (member.closed or member.leaving or self.closed)
        return there and member.down_ns is not None and member.spell == spell

    def probe_failed(self, member: M) -> None:
        """Take note that a probe was not answered."""
        member.probes += 1
        member.failed_ns = self._now_ns()

    def probe_delay_ns(self, member: M) -> int:
        """How long to wait for the next probe.

        Raises:
            Exception: Whatever a wait object of the user's raises; so not under a lock.
        """
        attempt = min(member.probes + 1, MOST_BACKOFF)
        delay_ns = self.rules.backoff.next_delay_ns(attempt, elapsed_ns=0, error=None)
        return NEVER if delay_ns is None else delay_ns

    # Warming up

    def weight(self, member: M) -> int:
        """The weight of a member at this moment, 1 at least (Dubbo `AbstractLoadBalance`)."""
        weight, warmup_ns = member.instance.weight, self.rules.warmup_ns
        uptime_ns = self._now_ns() - member.began_ns
        if warmup_ns and uptime_ns < warmup_ns:
            weight = weight * max(0, uptime_ns) // warmup_ns
        return max(1, weight)

    def wake_ns(self) -> int | None:
        """How long until weights have grown by a step; None if none grows."""
        warmup_ns, now_ns = self.rules.warmup_ns, self._now_ns()
        if warmup_ns and any(now_ns - one.began_ns < warmup_ns for one in self.members):
            return max(1, warmup_ns // WARM_STEPS)
        return None

    def _began_ns(self, instance: ServiceInstance, wall_s: float) -> int:
        """When it began, on the timer's clock; not in the future, whatever its own clock said."""
        if not instance.started_at:
            return -NEVER
        return self._now_ns() - max(0, to_ns(wall_s - instance.started_at))


def _address(instance: ServiceInstance) -> tuple[str, int, str]:
    return instance.host, instance.port, instance.protocol


def _longest_down(members: Sequence[M]) -> Pick[M]:
    """In turn, from the one that was found to be down the longest ago."""
    size, turn = len(members), iter(range(1 << 62)).__next__

    def pick(_: str, __: Any, ___: Any) -> M:
        return members[turn() % size]

    return pick
