"""Each check of the backend contract fails a backend that breaks its rule, and names the rule."""

import re
import threading
from dataclasses import replace

from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.backend import Settings, View
from rpcwheel.registry.backends import memory
from rpcwheel.registry.backends.memory import MemoryBackend
from rpcwheel.registry.backends.watch_notifier import WatchNotifier
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import BACKEND_CHECKS, _harness, _publishing
from rpcwheel.timer import ManualTimer

# Backends that break a rule of publishing


class ForgetsZones(MemoryBackend):
    def publish(self, instances):
        super().publish([one.changed(zone="") for one in instances])


class KeepsTheFirst(MemoryBackend):
    def publish(self, instances):
        super().publish([one for one in instances if not self._found(one)])


class KeepsAPage(MemoryBackend):
    def publish(self, instances):
        super().publish(instances[:128])


class Keeps(MemoryBackend):
    def withdraw(self, instances):
        pass


class WithdrawsAnyEpoch(MemoryBackend):
    def withdraw(self, instances):
        for one in instances:
            if found := self._found(one):
                super().withdraw([one.changed(epoch=found.epoch)])


class WantsSome(MemoryBackend):
    def publish(self, instances):
        if not instances:
            raise RegistryUnavailable("an empty transaction")
        super().publish(instances)


class KnowsNoUnknown(MemoryBackend):
    def lookup(self, service):
        return View({self._engine.records[self._where(service)]: b""})


class ListsAsItComes(MemoryBackend):
    def services(self):
        return [name for _, name in self._engine.records]


class FindsByPrefix(MemoryBackend):
    def lookup(self, service):
        found = [super(FindsByPrefix, self).lookup(name) for name in self.services()]
        names = self.services()
        merged = {}
        for name, view in zip(names, found, strict=True):
            if name.startswith(service):
                merged |= view.records
        return View(merged)


class NeverForgets(MemoryBackend):
    def __init__(self, url, settings):
        super().__init__(url, replace(settings, lease_s=1e6))
        self.settings = settings


class SaysAllIsWell(MemoryBackend):
    def renew(self, instances):
        super().renew(instances)
        return {}


class IsOfAscii(MemoryBackend):
    def publish(self, instances):
        super().publish([one for one in instances if one.id.isascii()])


class RenewsNoLease(MemoryBackend):
    def renew(self, instances):
        before = self._lease.ends_ns
        lost = super().renew(instances)
        self._lease.ends_ns = before
        return lost


class MissesNothing(MemoryBackend):
    def renew(self, instances):
        super().renew(instances)
        return {}


class MissesOnlyAbsence(MemoryBackend):
    def renew(self, instances):
        return {key: why for key, why in super().renew(instances).items() if not self._at(key)}

    def _at(self, key):
        return self._engine.records.get(self._where(key[0]), {}).get(key[1])


class SaysWhyInItsOwnWords(MemoryBackend):
    def renew(self, instances):
        return dict.fromkeys(super().renew(instances), "no idea")


class GivesItsOwnDict(MemoryBackend):
    def __init__(self, url, settings):
        super().__init__(url, settings)
        self.views = {}

    def lookup(self, service):
        kept = self.views.setdefault(service, {})
        kept.clear()
        kept.update(super().lookup(service).records)
        return View(kept)

    def publish(self, instances):
        super().publish(instances)
        for one in instances:
            if one.service in self.views:
                self.lookup(one.service)


class IsOfOneThread(MemoryBackend):
    def __init__(self, url, settings):
        super().__init__(url, settings)
        self.thread = threading.get_ident()

    def renew(self, instances):
        if threading.get_ident() != self.thread:
            raise ValueError("used in another thread than the one that made it")
        return super().renew(instances)


class LeavesItsLease(MemoryBackend):
    def close(self):
        self._lease.keys.clear()
        super().close()


class AnswersWhenClosed(MemoryBackend):
    def _check_open(self):
        pass


class CloseFails(MemoryBackend):
    def close(self):
        self._check_open()
        super().close()


class LeavesATimeout(MemoryBackend):
    def publish(self, instances):
        super().publish(instances)
        self.settings.timer.new_timeout(print, 60)


class LeavesAThread(MemoryBackend):
    ended: threading.Event

    def publish(self, instances):
        super().publish(instances)
        threading.Thread(target=self.ended.wait, daemon=True).start()


class HasNoSettings(MemoryBackend):
    def __init__(self, url, settings):
        super().__init__(url, settings)
        del self.settings


# Backends that break a rule of watching


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


class TellsNoEmptiness(MemoryBackend):
    def watch(self, service, watcher):
        return super().watch(service, Filter(watcher, lambda _, view: view.records))


class TellsNoChange(MemoryBackend):
    def watch(self, service, watcher):
        def differs(before, view):
            return before is None or before.records.keys() != view.records.keys()

        return super().watch(service, Filter(watcher, differs))


class TellsOnce(MemoryBackend):
    def watch(self, service, watcher):
        return super().watch(service, Filter(watcher, lambda before, _: before is None))


class TellsTheLastWatcherOnly(MemoryBackend):
    def __init__(self, url, settings):
        super().__init__(url, settings)
        self.last = None

    def watch(self, service, watcher):
        if self.last is not None:
            self.last.close()
        self.last = super().watch(service, watcher)
        return self.last


class CannotBeClosed(MemoryBackend):
    def watch(self, service, watcher):
        super().watch(service, watcher)
        return WatchNotifier(watcher)


class RefusesToBeClosedInACall(MemoryBackend):
    def watch(self, service, watcher):
        watch = super().watch(service, watcher)
        maker = threading.current_thread()

        class Closing:
            def close(self):
                if watch._queue._running:
                    raise RuntimeError("cannot join the current thread")
                assert maker.is_alive()
                watch.close()

        return Closing()


class Unordered(WatchNotifier):
    """Calls the watcher on whichever thread there is."""

    def add(self, news):
        self._view = news

    def start(self):
        if self._view is not None:
            self._watcher.saw(self._view)


class TellsAtOnce(MemoryBackend):
    pass


class ShowsOldRevisions(MemoryBackend):
    def watch(self, service, watcher):
        class Backwards:
            def saw(self, view):
                watcher.saw(type(view)(view.records, -view.revision))

            suspect = watcher.suspect

        return super().watch(service, Backwards())


BROKEN = {
    "what_is_published_is_found": (ForgetsZones, HasNoSettings),
    "what_is_published_again_is_replaced": (KeepsTheFirst,),
    "many_are_published_at_once": (KeepsAPage,),
    "what_is_withdrawn_is_gone": (Keeps,),
    "a_late_withdrawal_leaves_the_successor": (WithdrawsAnyEpoch,),
    "nothing_is_no_error": (WantsSome,),
    "an_unknown_service_has_no_instances": (KnowsNoUnknown,),
    "services_are_those_with_instances": (ListsAsItComes,),
    "a_name_is_no_prefix": (FindsByPrefix,),
    "every_id_and_text_survives": (IsOfAscii,),
    "a_lease_that_is_renewed_does_not_end": (RenewsNoLease,),
    "what_is_not_renewed_is_forgotten": (NeverForgets, SaysAllIsWell),
    "renew_tells_what_is_missing": (MissesNothing, SaysWhyInItsOwnWords),
    "renew_tells_what_another_has_taken": (MissesOnlyAbsence,),
    "a_view_stays_as_it_was": (GivesItsOwnDict,),
    "any_thread_may_ask": (IsOfOneThread,),
    "close_gives_up_the_lease": (LeavesItsLease,),
    "closing_twice_is_no_error": (AnswersWhenClosed, CloseFails),
    "closing_leaves_nothing_running": (LeavesATimeout, LeavesAThread),
    "a_watch_begins_with_what_there_is": (TellsNoEmptiness,),
    "a_watch_tells_of_each_change": (TellsNoChange, ShowsOldRevisions),
    "a_watcher_is_told_by_its_own_backend_too": (TellsOnce,),
    "a_watch_is_of_one_service": (TellsTheLastWatcherOnly,),
    "watches_of_one_service_are_independent": (TellsTheLastWatcherOnly,),
    "a_closed_watch_is_silent": (CannotBeClosed,),
    "a_watcher_may_close_its_watch": (RefusesToBeClosedInACall,),
    "a_watcher_is_called_once_at_a_time": (TellsAtOnce,),
}


def test_each_check_fails_a_backend_that_breaks_its_rule_and_names_the_rule(monkeypatch):
    assert BROKEN.keys() == BACKEND_CHECKS.keys()
    for module in (_harness, _publishing):
        monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    monkeypatch.setattr(LeavesAThread, "ended", ended := threading.Event(), raising=False)
    wrong = []
    for name, kinds in BROKEN.items():
        for broken in kinds:
            said = failure_of(name, broken, monkeypatch)
            if not re.match(rf"{name}: \w.{{20}}", said):
                wrong.append((name, broken.__name__, said))
    ended.set()
    assert wrong == []


def failure_of(name, broken, monkeypatch):
    """What the check says of this backend."""
    url = parse_url(f"memory://{broken.__name__}")
    with ManualTimer() as timer, monkeypatch.context() as patch:
        if broken is TellsAtOnce:
            patch.setattr(memory, "WatchNotifier", Unordered)
        try:
            BACKEND_CHECKS[name](lambda: broken(url, Settings(1.0, 1.0, timer)))
        except AssertionError as error:
            return str(error)
    return "nothing"
