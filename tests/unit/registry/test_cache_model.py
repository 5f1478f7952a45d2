"""Random histories of a registry, compared with a naive model that keeps all of the history."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fixtures.cache_worlds import LEASE_S, STALE_S, CacheDriver
from rpcwheel.events.events import InstancesChanged

IDS = st.sets(st.sampled_from("abcdef"))
MIN_COUNT = 3


@dataclass
class History:
    """All that has happened; what is shown now is found by searching it."""

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

    def lose_contact(self) -> None:
        if not self.cut_off:
            self.stale_periods.append([self.now, float("inf")])
            if self.live:
                self.contacts[-1][1] = self.now
        self.cut_off = True
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
        self.update_file_used()
        if self.cut_off:
            self.regain_contact()
        if self.cut_off or not self.live:
            self.contacts.append([self.now, float("inf")])
        before, stale = dict(self.listed), self.stale()
        known = self.shown() if self.live else set(before)
        first, self.live = not self.live, True
        view = dict.fromkeys(up, "UP") | dict.fromkeys(draining, "DRAINING")
        view |= {key: before.get(key, "UP") for key in unreadable & known}
        old = first and self.written is not None and self.now - self.written > STALE_S
        if self.cut_off:
            self.cut_off, self.stale_periods[-1][1] = False, self.now + STALE_S
        elif not view and (is_new or (first and known and (not old or self.file_used))):
            self.stale_periods.append([self.now, self.now + STALE_S])
        lost = {key for key in known - stale - set(view) if before[key] == "UP"}
        self.listed = view
        if old and not self.is_stale_at(self.now):
            return
        self.disappeared = [loss for loss in self.disappeared if loss[1] not in view]
        lately = {key for at, key, _ in self.disappeared if at > self.now - LEASE_S} | lost
        together = len(view) + len(lately)
        if lost and together >= MIN_COUNT and 2 * len(lately) > together:
            self.stale_periods.append([self.now, self.now + STALE_S])
            lost |= lately - stale  # those that were removed first are back
            self.disappeared = [loss for loss in self.disappeared if loss[1] not in lost]
        self.disappeared += [(self.now, key, self.is_stale_at(self.now)) for key in lost]


class CacheHistory(RuleBasedStateMachine):
    """Views, losses of contact and time in any order, with or without a file."""

    @initialize(
        ids=IDS,
        age=st.sampled_from([0, STALE_S - 1, STALE_S, STALE_S + 1, 3600]),
    )
    def begin(self, ids, age):
        self.driver, self.history = CacheDriver(), History()
        self.revision, self.unreadable, self.last = 0, set(), (set(), set(), set())
        self.driver.remember(sorted(ids), age)
        self.history.listed = dict.fromkeys(ids, "UP")
        self.history.written = -age if ids else None

    @rule(up=IDS, draining=IDS, unreadable=IDS | st.just(set()))
    def a_view(self, up, draining, unreadable):
        draining, unreadable = draining - up, unreadable - up - draining
        self.history.update(up, draining, unreadable, is_new=bool(unreadable - self.unreadable))
        self.last, self.unreadable = (up, draining, unreadable), unreadable
        self.driver.update(sorted(up), draining=draining, unreadable=unreadable)

    @rule(up=IDS)
    def a_view_with_fewer(self, up):
        left = {key for key, status in self.history.listed.items() if status == "UP"} & up
        self.a_view(left, set(), set())

    @rule(count=st.integers(2, 3))
    def some_disappear_one_by_one(self, count):
        for _ in range(count):
            left = sorted(key for key, status in self.history.listed.items() if status == "UP")
            self.a_view(set(left[1:]), set(), set())
            self.pass_time(1)

    @rule()
    def an_equal_view(self):
        self.a_view(*self.last)

    @rule()
    def an_empty_view(self):
        self.a_view(set(), set(), set())

    @rule(
        ups=st.lists(IDS, min_size=2, max_size=8),
        seconds=st.sampled_from([5, LEASE_S, STALE_S - 1]),
    )
    def lose_contact_repeatedly(self, ups, seconds):
        for up in ups:
            self.lose_contact()
            self.a_view(up, set(), set())
            self.pass_time(seconds)

    @rule()
    def lose_contact(self):
        self.history.lose_contact()
        self.driver.lose_contact()

    @rule(seconds=st.sampled_from([1, 2, LEASE_S - 1, LEASE_S, STALE_S - 1, STALE_S, STALE_S + 1]))
    def pass_time(self, seconds):
        self.history.now += seconds
        self.history.update_file_used()
        self.driver.advance_to(self.history.now)

    @invariant()
    def the_snapshot_is_that_of_the_model(self):
        shown = self.history.shown()
        assert self.driver.ids == (None if shown is None else "".join(sorted(shown)))
        if shown is not None:
            snapshot = self.driver.snapshot
            assert set(snapshot.stale) == (self.history.stale() if self.history.live else set())
            live = "stale" if snapshot.stale else "live"
            assert snapshot.source == (live if self.history.live else "cache")
            agrees = self.history.live and not snapshot.stale and not self.history.cut_off
            assert snapshot.age_s == 0 or not agrees

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
