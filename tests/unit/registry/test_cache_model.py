"""Random histories of a registry, compared with a naive model that keeps all of the history."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.cache_worlds import LEASE_S, REGISTRY, SERVICE, STALE_S, CacheDriver
from rpcwheel.events.events import InstancesChanged, InstancesRetained, RecordSkipped

ALL = "abcdef"
IDS = st.sets(st.sampled_from(ALL))
AGES = st.sampled_from([0, STALE_S - 1, STALE_S, STALE_S + 1, 3600])
MIN_COUNT = 3


@dataclass
class History:
    """All that has happened; what is shown now is found by searching it."""

    self_preservation: bool = True
    now: int = 0
    stale_periods: list[list[float]] = field(default_factory=list)
    """From when to when instances that disappear are stale; infinity: no end yet."""
    disappeared: list[tuple[int, str, bool]] = field(default_factory=list)
    """When an instance disappeared that was not draining, and whether it is stale since."""
    listed: dict[str, str] = field(default_factory=dict)
    """The instances of the last view with their status; before the first, those of the file."""
    live: bool = False
    written: int | None = None
    contacts: list[list[float]] = field(default_factory=list)
    """From when to when the registry answered."""
    cut_off: bool = False
    """Whether contact was lost and is not back."""
    cut_off_at: int = 0
    reason: str = ""
    """Why instances that disappear are stale."""
    expired: set[str] = field(default_factory=set)
    """The ids that were removed last, at the end of the time in which they were stale."""
    file_used: bool = False
    """Whether the instances of the file were shown."""

    def is_stale_at(self, at: float) -> bool:
        return any(begin <= at < end for begin, end in self.stale_periods)

    def end_of(self, at: float) -> float:
        """When an instance that disappeared then is removed; later periods may extend that."""
        end = at
        for begun, ended in sorted(self.stale_periods):
            if begun <= at < ended or at < begun < end:
                end = max(end, ended)
        return end

    def stale(self) -> set[str]:
        return {
            key
            for at, key, is_stale in self.disappeared
            if is_stale and key not in self.listed and self.now < self.end_of(at)
        }

    def shown(self) -> set[str] | None:
        if self.live:
            return set(self.listed) | self.stale()
        return set(self.listed) if self.file_used else None

    def update_file_used(self) -> None:
        """Note whether the file is used by now."""
        waited = self.cut_off or self.now >= 1
        self.file_used |= bool(self.listed) and not self.live and waited

    def unconfirmed_since(self) -> int | None:
        """Since when what is shown is not confirmed; None: it is."""
        if not self.live:
            return self.written
        stale = self.stale()
        times = [at for at, key, is_stale in self.disappeared if is_stale and key in stale]
        return min([*times, self.cut_off_at] if self.cut_off else times, default=None)

    def read_file(self, ids: set[str], age: int) -> None:
        """Take the instances of a file, if the registry has not answered and there is no other."""
        if not self.live and self.written is None and ids:
            self.listed = dict.fromkeys(ids, "UP")
            self.written = self.now - age
        self.update_file_used()

    def pass_time(self, seconds: int, *, suspended: bool) -> None:
        """After its suspension the process keeps stale instances for a second."""
        stale = self.stale()
        end = max((end for _, end in self.stale_periods), default=0)
        self.now += seconds
        if stale and suspended and self.now > end + 1:
            self.stale_periods.append([end - 0.5, self.now + 1])
        self.expired = stale - self.stale() or self.expired
        self.update_file_used()

    def suspect(self, reason: str) -> None:
        """What disappears is stale from now on; if it is already, the earlier reason stays."""
        if not self.is_stale_at(self.now):
            self.reason = reason
        self.stale_periods.append([self.now, self.now + STALE_S])

    def lose_contact(self, reason: str) -> None:
        if not self.cut_off:
            self.stale_periods.append([self.now, float("inf")])
            self.cut_off_at = self.now
            if self.live:
                self.contacts[-1][1] = self.now
        self.cut_off, self.reason = True, reason
        self.update_file_used()

    def contact_since(self, at: float) -> float:
        """Seconds with contact since then, of each time at most `STALE_S`."""
        return sum(
            min(ended - begun, STALE_S) - min(max(0, at - begun), STALE_S)
            for begun, ended in self.contacts
            if ended >= at
        )

    def regain_contact(self) -> None:
        """What was missing in twice `STALE_S` of contact is stale no more."""
        self.disappeared = [
            (at, key, is_stale and self.contact_since(at) < 2 * STALE_S)
            for at, key, is_stale in self.disappeared
        ]

    def update(
        self, up: set[str], draining: set[str], unreadable: set[str], *, is_new: bool
    ) -> None:
        """Take a view; `is_new`: an unreadable record is there that was not before."""
        knows_nothing = not self.live and not self.listed
        if knows_nothing and unreadable and not up | draining and self.self_preservation:
            return
        if self.cut_off:
            self.regain_contact()
        if self.cut_off or not self.live:
            self.contacts.append([self.now, float("inf")])
        before, stale = dict(self.listed), self.stale()
        known = self.shown() if self.live else set(before)
        first, self.live = not self.live, True
        view = dict.fromkeys(up, "UP") | dict.fromkeys(draining, "DRAINING")
        view |= {key: before.get(key, "UP") for key in unreadable & known}
        self.expired = self.expired - view.keys()
        if not self.self_preservation:
            self.listed, self.cut_off = view, False
            return
        old = first and self.written is not None and self.now - self.written > STALE_S
        if self.cut_off:
            self.cut_off, self.stale_periods[-1][1] = False, self.now + STALE_S
        elif not view and first and known and (not old or self.file_used):
            self.suspect("the registry's first answer is empty")
        elif not view and is_new:
            self.suspect("none of the registry's records can be read")
        lost = {key for key in known - stale - set(view) if before[key] == "UP"}
        self.listed = view
        if old and not self.is_stale_at(self.now):
            return
        self.disappeared = [loss for loss in self.disappeared if loss[1] not in view]
        lately = {key for at, key, _ in self.disappeared if at > self.now - LEASE_S} | lost
        together = len(view) + len(lately)
        if lost and together >= MIN_COUNT and 2 * len(lately) > together:
            self.suspect(f"more than half of them disappeared within {LEASE_S} s")
            lost |= lately - stale  # those that were removed first are back
            self.disappeared = [loss for loss in self.disappeared if loss[1] not in lost]
        self.disappeared += [(self.now, key, self.is_stale_at(self.now)) for key in lost]


class CacheHistory(RuleBasedStateMachine):
    """Views, losses of contact and time in any order, with or without a file."""

    @initialize(ids=IDS, age=AGES, self_preservation=st.sampled_from([True] * 7 + [False]))
    def begin(self, ids, age, self_preservation):
        self.driver = CacheDriver(self_preservation=self_preservation)
        self.history = History(self_preservation)
        self.revision, self.unreadable, self.last = 0, set(), (set(), set(), set())
        self.read_file(ids, age)

    @rule(ids=IDS, age=AGES)
    def read_file(self, ids, age):
        self.driver.remember(sorted(ids), age)
        self.history.read_file(ids, age)

    @rule(up=IDS, draining=IDS, unreadable=IDS | st.just(set()))
    def a_view(self, up, draining, unreadable):
        draining, unreadable = draining - up, unreadable - up - draining
        stale, new = self.history.stale(), unreadable - self.unreadable
        self.history.update(up, draining, unreadable, is_new=bool(new))
        self.last, self.unreadable = (up, draining, unreadable), unreadable
        self.driver.update(sorted(up), draining=draining, unreadable=unreadable)
        assert [event.key for event in self.driver.take_events(RecordSkipped)] == sorted(new)
        count, reason = len(self.history.stale()), self.history.reason
        is_retained = bool(self.history.stale() - stale)
        retained = [InstancesRetained(REGISTRY, SERVICE, count, reason)] * is_retained
        assert self.driver.take_events(InstancesRetained) == retained

    @rule(up=IDS)
    def a_view_with_fewer(self, up):
        left = {key for key, status in self.history.listed.items() if status == "UP"} & up
        self.a_view(left, set(), set())

    @rule(count=st.integers(2, 3))
    def some_disappear_one_by_one(self, count):
        for _ in range(count):
            left = sorted(key for key, status in self.history.listed.items() if status == "UP")
            self.a_view(set(left[1:]), set(), set())
            self.pass_time(1, suspended=False)

    @precondition(lambda self: self.history.cut_off)
    @rule()
    def an_equal_view(self):
        self.a_view(*self.last)

    @rule()
    def an_unreadable_view(self):
        """Of instances that are not known."""
        known = self.history.listed.keys() | self.history.stale()
        self.a_view(set(), set(), set(ALL) - known)

    @rule()
    def an_empty_view(self):
        self.a_view(set(), set(), set())

    @rule(
        ups=st.lists(IDS, min_size=2, max_size=8),
        seconds=st.sampled_from([5, LEASE_S, STALE_S - 1]),
    )
    def lose_contact_repeatedly(self, ups, seconds):
        for up in ups:
            self.lose_contact("the lease was lost")
            self.a_view(up, set(), set())
            self.pass_time(seconds, suspended=False)

    @rule(reason=st.sampled_from(["the connection was lost", "the lease was lost"]))
    def lose_contact(self, reason):
        self.history.lose_contact(reason)
        self.driver.lose_contact(reason)

    @rule(
        seconds=st.sampled_from([1, 2, LEASE_S - 1, LEASE_S, STALE_S - 1, STALE_S, STALE_S + 1]),
        suspended=st.sampled_from([False, False, True]),
    )
    def pass_time(self, seconds, suspended):
        self.history.pass_time(seconds, suspended=suspended)
        pass_ = self.driver.step_late_at if suspended else self.driver.advance_to
        pass_(self.history.now)

    @invariant()
    def the_snapshot_is_that_of_the_model(self):
        shown = self.history.shown()
        assert self.driver.ids == (None if shown is None else "".join(sorted(shown)))
        if shown is not None:
            snapshot = self.driver.snapshot
            assert set(snapshot.stale) == (self.history.stale() if self.history.live else set())
            live = "stale" if snapshot.stale else "live"
            assert snapshot.source == (live if self.history.live else "cache")
            since = self.history.unconfirmed_since()
            assert snapshot.age_s == (0 if since is None else self.history.now - since)
            assert snapshot.expired == self.history.expired

    @invariant()
    def the_numbers_of_events_add_up_to_the_snapshot(self):
        changes = self.driver.take_events(InstancesChanged)
        snapshot = self.driver.snapshot
        if snapshot is None:
            assert not changes
            return
        number = self.revision + sum(change.added - change.removed for change in changes)
        assert number == len(snapshot.instances)
        self.revision = number

    @invariant()
    def a_wake_is_planned_only_if_something_is_due(self):
        waits = not self.history.live and bool(self.history.listed) and not self.history.file_used
        due = self.driver.cache.next_wake_ns < 2**62
        stale = bool(self.history.live and self.history.stale()) and not self.history.cut_off
        assert due == (waits or stale)


TestCacheHistory = CacheHistory.TestCase
TestCacheHistory.settings = settings(stateful_step_count=30, max_examples=60)
