"""Each conformance check fails for a backend that breaks its rule, and names the rule."""

import re
import threading
from dataclasses import replace

from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.backend import Settings, View
from rpcwheel.registry.backends import memory
from rpcwheel.registry.backends.memory import MemoryBackend
from rpcwheel.registry.backends.watch_notifier import WatchNotifier
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import BACKEND_CHECKS
from rpcwheel.testing.conformance import registry_checks as _checks
from rpcwheel.testing.conformance import registry_harness as _harness
from rpcwheel.timer import ManualTimer

# Backends that break a rule of publishing


def publishing(name, change):
    """A class of backends that publish `change(backend, instances)` instead of the instances."""

    def publish(self, instances):
        MemoryBackend.publish(self, change(self, instances))

    return type(name, (MemoryBackend,), {"publish": publish})


ForgetsZones = publishing("ForgetsZones", lambda _, all_: [one.replace(zone="") for one in all_])
KeepsTheFirst = publishing(
    "KeepsTheFirst", lambda self, all_: [one for one in all_ if not self._found(one)]
)
KeepsAPage = publishing("KeepsAPage", lambda _, all_: all_[:128])
IsOfAscii = publishing("IsOfAscii", lambda _, all_: [one for one in all_ if one.id.isascii()])


class Keeps(MemoryBackend):
    def withdraw(self, instances):
        pass


class WithdrawsAnyEpoch(MemoryBackend):
    def withdraw(self, instances):
        for one in instances:
            if found := self._found(one):
                super().withdraw([one.replace(epoch=found.epoch)])


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
    """A watcher that passes on the calls that `lets` accepts."""

    def __init__(self, watcher, lets):
        self.watcher = watcher
        self.lets = lets
        self.seen = None

    def on_view(self, view):
        before, self.seen = self.seen, view
        if self.lets(before, view):
            self.watcher.on_view(view)

    def on_contact_lost(self, reason):
        self.watcher.on_contact_lost(reason)


def telling(name, lets):
    """A class of backends that pass on the views that `lets(before, view)` accepts."""

    def watch(self, service, watcher):
        return MemoryBackend.watch(self, service, Filter(watcher, lets))

    return type(name, (MemoryBackend,), {"watch": watch})


TellsNoEmptiness = telling("TellsNoEmptiness", lambda _, view: view.records)
TellsNoChange = telling(
    "TellsNoChange", lambda old, new: old is None or old.records.keys() != new.records.keys()
)
TellsOnce = telling("TellsOnce", lambda before, _: before is None)


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
    """Calls the watcher on the calling thread."""

    def add(self, news):
        self._view = news

    def start(self):
        if self._view is not None:
            self._watcher.on_view(self._view)


class TellsAtOnce(MemoryBackend):
    pass


class ShowsOldRevisions(MemoryBackend):
    def watch(self, service, watcher):
        class Backwards:
            def on_view(self, view):
                watcher.on_view(type(view)(view.records, -view.revision))

            on_contact_lost = watcher.on_contact_lost

        return super().watch(service, Backwards())


BROKEN = {
    "published_instances_are_found": (ForgetsZones, HasNoSettings),
    "publishing_again_replaces_an_instance": (KeepsTheFirst,),
    "many_instances_are_published_at_once": (KeepsAPage,),
    "withdrawn_instances_are_removed": (Keeps,),
    "a_late_withdrawal_keeps_the_successor": (WithdrawsAnyEpoch,),
    "empty_requests_are_accepted": (WantsSome,),
    "an_unknown_service_has_no_instances": (KnowsNoUnknown,),
    "services_have_instances": (ListsAsItComes,),
    "names_do_not_match_by_prefix": (FindsByPrefix,),
    "all_ids_and_texts_are_kept": (IsOfAscii,),
    "a_renewed_lease_does_not_end": (RenewsNoLease,),
    "a_lease_that_is_not_renewed_ends": (NeverForgets, MissesNothing),
    "renew_reports_missing_instances": (MissesNothing, SaysWhyInItsOwnWords),
    "renew_reports_replaced_instances": (MissesOnlyAbsence,),
    "a_view_does_not_change": (GivesItsOwnDict,),
    "methods_may_be_called_on_any_thread": (IsOfOneThread,),
    "close_gives_up_the_lease": (LeavesItsLease,),
    "close_is_idempotent_and_refuses_later_requests": (AnswersWhenClosed, CloseFails),
    "close_ends_threads_and_timeouts": (LeavesATimeout, LeavesAThread),
    "a_watch_begins_with_the_present_view": (TellsNoEmptiness,),
    "a_watch_reports_each_change": (TellsNoChange, ShowsOldRevisions),
    "a_watch_reports_changes_by_its_own_backend": (TellsOnce,),
    "a_watch_reports_only_its_service": (TellsTheLastWatcherOnly,),
    "watches_of_one_service_are_independent": (TellsTheLastWatcherOnly,),
    "a_closed_watch_reports_nothing": (CannotBeClosed,),
    "a_watcher_may_close_its_watch": (RefusesToBeClosedInACall,),
    "a_watcher_is_not_called_concurrently": (TellsAtOnce,),
}


def test_each_check_fails_a_backend_that_breaks_its_rule_and_names_the_rule(monkeypatch):
    assert BROKEN.keys() == BACKEND_CHECKS.keys()
    for module in (_checks, _harness):
        monkeypatch.setattr(module, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(LeavesAThread, "ended", ended := threading.Event(), raising=False)
    wrong = []
    for name, kinds in BROKEN.items():
        for broken in kinds:
            text = failure_of(name, broken, monkeypatch)
            if not re.match(rf"{name}: \w.{{20}}", text):
                wrong.append((name, broken.__name__, text))
    ended.set()
    assert wrong == []


def failure_of(name, broken, monkeypatch):
    """Return the message of the check for a backend."""
    url = parse_url(f"memory://{broken.__name__}")
    with ManualTimer() as timer, monkeypatch.context() as patch:
        if broken is TellsAtOnce:
            patch.setattr(memory, "WatchNotifier", Unordered)
        try:
            BACKEND_CHECKS[name](lambda: broken(url, Settings(1.0, 1.0, timer)))
        except AssertionError as error:
            return str(error)
    return "nothing"
