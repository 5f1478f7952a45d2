"""Each check of watching finds the provider that breaks its rule, and says which rule that is."""

import threading

import pytest

from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import memory
from rpcwheel.registry.providers._telling import Telling
from rpcwheel.registry.providers.memory import MemoryProvider
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import PROVIDER_CHECKS, _stand, _watching


class Filter:
    """A watcher that passes on what `lets` says."""

    def __init__(self, watcher, lets):
        self.watcher = watcher
        self.lets = lets
        self.seen = None

    def saw(self, view):
        before, self.seen = self.seen, view
        if self.lets(before, view):
            self.watcher.saw(view)

    def suspect(self, reason):
        self.watcher.suspect(reason)


class TellsNoEmptiness(MemoryProvider):
    def watch(self, service, watcher):
        return super().watch(service, Filter(watcher, lambda _, view: view.records))


class TellsNoChange(MemoryProvider):
    def watch(self, service, watcher):
        def differs(before, view):
            return before is None or before.records.keys() != view.records.keys()

        return super().watch(service, Filter(watcher, differs))


class TellsOnce(MemoryProvider):
    def watch(self, service, watcher):
        return super().watch(service, Filter(watcher, lambda before, _: before is None))


class TellsTheLastWatcherOnly(MemoryProvider):
    def __init__(self, url, settings):
        super().__init__(url, settings)
        self.last = None

    def watch(self, service, watcher):
        if self.last is not None:
            self.last.close()
        self.last = super().watch(service, watcher)
        return self.last


class CannotBeClosed(MemoryProvider):
    def watch(self, service, watcher):
        super().watch(service, watcher)
        return Telling(watcher)


class RefusesToBeClosedInACall(MemoryProvider):
    def watch(self, service, watcher):
        watch = super().watch(service, watcher)
        maker = threading.current_thread()

        class Closing:
            def close(self):
                if watch._telling:
                    raise RuntimeError("cannot join the current thread")
                assert maker.is_alive()
                watch.close()

        return Closing()


class Unordered(Telling):
    """Tells on whichever thread there is."""

    def note(self, news):
        self._view = news

    def tell(self):
        if self._view is not None:
            self._watcher.saw(self._view)


class TellsAtOnce(MemoryProvider):
    pass


class ShowsOldRevisions(MemoryProvider):
    def watch(self, service, watcher):
        class Backwards:
            def saw(self, view):
                watcher.saw(type(view)(view.records, -view.revision))

            suspect = watcher.suspect

        return super().watch(service, Backwards())


BROKEN = {
    "a_watch_begins_with_what_there_is": (TellsNoEmptiness,),
    "a_watch_tells_of_each_change": (TellsNoChange, ShowsOldRevisions),
    "a_watcher_is_told_by_its_own_provider_too": (TellsOnce,),
    "a_watch_is_of_one_service": (TellsTheLastWatcherOnly,),
    "watches_of_one_service_are_independent": (TellsTheLastWatcherOnly,),
    "a_closed_watch_is_silent": (CannotBeClosed,),
    "a_watcher_may_close_its_watch": (RefusesToBeClosedInACall,),
    "a_watcher_is_called_once_at_a_time": (TellsAtOnce,),
}
CASES = [(name, broken) for name, kinds in BROKEN.items() for broken in kinds]


@pytest.mark.parametrize(("name", "broken"), CASES)
def test_a_check_finds_who_breaks_its_rule_and_names_itself(name, broken, timer, monkeypatch):
    monkeypatch.setattr(_stand, "PATIENCE_S", 0.1)
    if broken is TellsAtOnce:
        monkeypatch.setattr(memory, "Telling", Unordered)
    url, settings = parse_url(f"memory://{broken.__name__}"), Settings(1.0, 1.0, timer)
    with pytest.raises(AssertionError, match=rf"^{name}: a watcher \w.{{10}}"):
        PROVIDER_CHECKS[name](lambda: broken(url, settings))


def test_there_is_one_for_every_check():
    assert set(BROKEN) == {check.__name__ for check in _watching.CHECKS}


@pytest.mark.parametrize("name", BROKEN)
def test_a_sound_provider_passes(name, timer):
    url = parse_url("memory://sound")
    PROVIDER_CHECKS[name](lambda: MemoryProvider(url, Settings(1.0, 1.0, timer)))
