"""Any story of a registry, beside a naive model that remembers all of it and looks back."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fixtures.seen_worlds import HOLD, LEASE, Sight
from rpcwheel.observe.events import InstancesChanged

KEYS = st.sets(st.sampled_from("abcdef"))
FEW = 3


@dataclass
class Past:
    """All that has happened, in order; what is true now is found by looking through it."""

    now: int = 0
    doubts: list[list[float]] = field(default_factory=list)
    """From when to when the registry was suspect; without an end yet: for ever."""
    losses: list[tuple[int, str, bool]] = field(default_factory=list)
    """When an instance vanished without a word, and whether the registry was suspect by then."""
    there: dict[str, str] = field(default_factory=dict)
    """What is there by the last view, with its status; before the first, what a file says."""
    live: bool = False
    written: int | None = None
    contacts: list[list[float]] = field(default_factory=list)
    """From when to when the registry answered."""
    cut_off: bool = False
    """Contact was lost, and is not back."""
    shown_before: bool = False
    """What the file says was shown."""

    def suspect_at(self, at: float) -> bool:
        return any(begin <= at < end for begin, end in self.doubts)

    def end_of(self, at: float) -> float:
        """When the doubt of that time ended, with those that began before it was over."""
        end = at
        for begun, ended in sorted(self.doubts):
            if begun <= at < ended or at < begun < end:
                end = max(end, ended)
        return end

    def held(self) -> set[str]:
        return {
            key
            for at, key, doubted in self.losses
            if doubted and key not in self.there and self.now < self.end_of(at)
        }

    def shown(self) -> set[str] | None:
        if self.live:
            return set(self.there) | self.held()
        return set(self.there) if self.shown_before else None

    def look(self) -> None:
        """See whether the file has to do."""
        waited = self.cut_off or self.now >= 1
        self.shown_before |= bool(self.there) and not self.live and waited

    def lose_contact(self) -> None:
        if not self.cut_off:
            self.doubts.append([self.now, float("inf")])
            if self.live:
                self.contacts[-1][1] = self.now
        self.cut_off = True
        self.look()

    def contact_since(self, at: float) -> float:
        """Seconds in which the registry answered, each time at most `hold` of them."""
        return sum(
            min(ended - begun, HOLD) - min(max(0, at - begun), HOLD)
            for begun, ended in self.contacts
            if ended >= at
        )

    def forget(self) -> None:
        """Contact is back: what was missing in twice `hold` of it is gone."""
        self.losses = [
            (at, key, doubted and self.contact_since(at) < 2 * HOLD)
            for at, key, doubted in self.losses
        ]

    def see(self, up: set[str], draining: set[str], bad: set[str], *, news: bool) -> None:
        """The registry has those; `news`: a bad content is there that was not before."""
        self.look()
        if self.cut_off:
            self.forget()
        if self.cut_off or not self.live:
            self.contacts.append([self.now, float("inf")])
        before, held = dict(self.there), self.held()
        known = self.shown() if self.live else set(before)
        first, self.live = not self.live, True
        view = dict.fromkeys(up, "UP") | dict.fromkeys(draining, "DRAINING")
        view |= {key: before.get(key, "UP") for key in bad & known}
        old = first and self.written is not None and self.now - self.written > HOLD
        if self.cut_off:
            self.cut_off, self.doubts[-1][1] = False, self.now + HOLD
        elif not view and (news or (first and known and (not old or self.shown_before))):
            self.doubts.append([self.now, self.now + HOLD])
        lost = {key for key in known - held - set(view) if before[key] == "UP"}
        self.there = view
        if old and not self.suspect_at(self.now):
            return
        self.losses = [loss for loss in self.losses if loss[1] not in view]  # forgiven
        lately = {key for at, key, _ in self.losses if at > self.now - LEASE} | lost
        together = len(view) + len(lately)
        if lost and together >= FEW and 2 * len(lately) > together:
            self.doubts.append([self.now, self.now + HOLD])
        self.losses += [(self.now, key, self.suspect_at(self.now)) for key in lost]


class Story(RuleBasedStateMachine):
    """Views, contact lost, time, in any order, with or without a file."""

    @initialize(keys=KEYS, age=st.sampled_from([0, HOLD - 1, HOLD, HOLD + 1, 3600]))
    def begin(self, keys, age):
        self.sight, self.past = Sight(), Past()
        self.revision, self.bad, self.last = 0, set(), (set(), set(), set())
        self.sight.remember(sorted(keys), age)
        self.past.there = dict.fromkeys(keys, "UP")
        self.past.written = -age if keys else None

    @rule(up=KEYS, draining=KEYS, bad=KEYS | st.just(set()))
    def the_registry_tells(self, up, draining, bad):
        draining, bad = draining - up, bad - up - draining
        self.past.see(up, draining, bad, news=bool(bad - self.bad))
        self.last, self.bad = (up, draining, bad), bad
        self.sight.saw(sorted(up), draining=draining, bad=bad)

    @rule(up=KEYS)
    def some_are_left(self, up):
        left = {key for key, status in self.past.there.items() if status == "UP"} & up
        self.the_registry_tells(left, set(), set())

    @rule()
    def the_registry_tells_the_same_again(self):
        self.the_registry_tells(*self.last)

    @rule()
    def nothing_is_left(self):
        self.the_registry_tells(set(), set(), set())

    @rule(ups=st.lists(KEYS, min_size=2, max_size=8), seconds=st.sampled_from([5, LEASE, HOLD - 1]))
    def contact_comes_and_goes(self, ups, seconds):
        for up in ups:
            self.contact_is_lost()
            self.the_registry_tells(up, set(), set())
            self.time_passes(seconds)

    @rule()
    def contact_is_lost(self):
        self.past.lose_contact()
        self.sight.suspect()

    @rule(seconds=st.sampled_from([1, 2, LEASE - 1, LEASE, HOLD - 1, HOLD, HOLD + 1]))
    def time_passes(self, seconds):
        self.past.now += seconds
        self.past.look()
        self.sight.at(self.past.now)

    @invariant()
    def what_is_shown_is_what_the_past_says(self):
        shown = self.past.shown()
        assert self.sight.keys == (None if shown is None else "".join(sorted(shown)))
        if shown is not None:
            snapshot = self.sight.snapshot
            assert set(snapshot.stale) == (self.past.held() if self.past.live else set())
            live = "stale" if snapshot.stale else "live"
            assert snapshot.source == (live if self.past.live else "cache")
            agrees = self.past.live and not snapshot.stale and not self.past.cut_off
            assert snapshot.age_s == 0 or not agrees

    @invariant()
    def events_add_up_to_what_is_shown(self):
        changes = self.sight.told(InstancesChanged)
        snapshot = self.sight.snapshot
        if snapshot is None:
            assert not changes
            return
        number = self.revision + sum(change.added - change.removed for change in changes)
        assert number == len(snapshot.instances)
        self.revision = number

    @invariant()
    def it_wakes_by_itself_only_if_something_ends(self):
        waits = not self.past.live and bool(self.past.there) and not self.past.shown_before
        due = self.sight.seen.next_wake_ns < 2**62
        held = bool(self.past.live and self.past.held()) and not self.past.cut_off
        assert due == (waits or held)


TestStory = Story.TestCase
TestStory.settings = settings(stateful_step_count=30, max_examples=60)
