"""Each conformance check fails for a backend that breaks its rule, and names the rule."""

import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.backend import Settings, View
from rpcwheel.registry.backends import memory
from rpcwheel.registry.backends.memory import MemoryBackend
from rpcwheel.registry.backends.watch_notifier import WatchNotifier
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import BACKEND_CHECKS, check_backend

MODEL = "requests_agree_with_a_reference"


@pytest.fixture
def failure_of(timer, set_limit):
    """Return the message of a check that fails for a class of backends."""
    for module in ("registry_checks", "registry_harness"):
        set_limit(f"testing.conformance.{module}.TIMEOUT_S", 0.1)

    def run(name, kind):
        with pytest.raises(AssertionError) as failed:
            BACKEND_CHECKS[name](make(kind, timer))
        return str(failed.value)

    return run


def make(kind, timer):
    return lambda: kind(parse_url(f"memory://{kind.__name__}"), Settings(1.0, 1.0, timer))


# Backends that break a rule of requests


def publishing(change):
    """A class of backends that publish `change(backend, instances)` instead of the instances."""

    class Changes(MemoryBackend):
        def publish(self, instances):
            super().publish(change(self, instances))

    return Changes


class WithdrawsNothing(MemoryBackend):
    def withdraw(self, instances):
        pass


class WithdrawsAnyEpoch(MemoryBackend):
    def withdraw(self, instances):
        for one in instances:
            if found := self._find(one):
                super().withdraw([one.replace(epoch=found.epoch)])


class NeedsInstances(MemoryBackend):
    def publish(self, instances):
        if not instances:
            raise RegistryUnavailable("an empty transaction")
        super().publish(instances)


class RaisesForUnknownServices(MemoryBackend):
    def lookup(self, service):
        return View({self._engine.records[self._where(service)]: b""})


class ListsServicesUnordered(MemoryBackend):
    def services(self):
        return [name for _, name in self._engine.records]


class LooksUpByPrefix(MemoryBackend):
    def lookup(self, service):
        records = {}
        for name in self.services():
            if name.startswith(service):
                records |= super().lookup(name).records
        return View(records)


class NeverEndsLeases(MemoryBackend):
    def __init__(self, url, settings):
        super().__init__(url, replace(settings, lease_s=1e6))
        self.settings = settings


class RenewsNoLease(MemoryBackend):
    def renew(self, instances):
        before = self._lease.ends_ns
        lost = super().renew(instances)
        self._lease.ends_ns = before
        return lost


def renewing(change):
    """A class of backends whose `renew` returns `change(backend, lost)`."""

    class Changes(MemoryBackend):
        def renew(self, instances):
            return change(self, super().renew(instances))

    return Changes


ReportsNoLoss = renewing(lambda *_: {})


def without_replaced(backend, lost):
    def is_there(service, key):
        return key in backend._engine.records.get(backend._where(service), {})

    return {key: why for key, why in lost.items() if not is_there(*key)}


class ChangesItsViews(MemoryBackend):
    def __init__(self, url, settings):
        super().__init__(url, settings)
        self.views = {}

    def lookup(self, service):
        kept = self.views.setdefault(service, {})
        kept.clear()
        kept.update(super().lookup(service).records)
        return View(kept)


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


class RaisesAtTheSecondClose(MemoryBackend):
    def close(self):
        self._check_open()
        super().close()


class LeavesATimeout(MemoryBackend):
    def publish(self, instances):
        super().publish(instances)
        self.settings.timer.new_timeout(print, 60)


class LeavesAThread(MemoryBackend):
    ended = threading.Event()

    def publish(self, instances):
        super().publish(instances)
        threading.Thread(target=self.ended.wait, daemon=True).start()


# Backends that break a rule of watching


def watching(lets, change=lambda view: view):
    """A class of backends that pass on `change(view)` if `lets(view before, view)` is true."""

    class Filter:
        def __init__(self, watcher):
            self.watcher, self.seen = watcher, None
            self.on_contact_lost = watcher.on_contact_lost

        def on_view(self, view):
            before, self.seen = self.seen, view
            if lets(before, view):
                self.watcher.on_view(change(view))

    class Watches(MemoryBackend):
        def watch(self, service, watcher):
            return super().watch(service, Filter(watcher))

    return Watches


class HasOneWatch(MemoryBackend):
    last = None

    def watch(self, service, watcher):
        if self.last is not None:
            self.last.close()
        self.last = super().watch(service, watcher)
        return self.last


class ClosesNoWatch(MemoryBackend):
    def watch(self, service, watcher):
        super().watch(service, watcher)
        return WatchNotifier(watcher)


class ClosesNoWatchInACall(MemoryBackend):
    def watch(self, service, watcher):
        watch = super().watch(service, watcher)

        class Closing:
            def close(self):
                if watch._queue._running:
                    raise RuntimeError("cannot join the current thread")
                watch.close()

        return Closing()


class CallsWatchersConcurrently(MemoryBackend):
    class Unordered(WatchNotifier):
        """Calls the watcher on the calling thread."""

        def add(self, news):
            self._view = news

        def start(self):
            if self._view is not None:
                self._watcher.on_view(self._view)

    def watch(self, service, watcher):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "WatchNotifier", self.Unordered)
            return super().watch(service, watcher)


RULES = {
    "an_unknown_service_has_no_instances": [RaisesForUnknownServices],
    "published_instances_are_found": [
        publishing(lambda _, instances: [one.replace(zone="") for one in instances])
    ],
    "publishing_again_replaces_an_instance": [
        publishing(lambda self, instances: [one for one in instances if not self._find(one)])
    ],
    "withdrawn_instances_are_removed": [WithdrawsNothing],
    "a_late_withdrawal_keeps_the_successor": [WithdrawsAnyEpoch],
    "empty_requests_are_accepted": [NeedsInstances],
    "services_have_instances": [ListsServicesUnordered],
    "names_do_not_match_by_prefix": [LooksUpByPrefix],
    "renew_reports_missing_and_replaced_instances": [
        ReportsNoLoss,
        renewing(without_replaced),
        renewing(lambda _, lost: dict.fromkeys(lost, "no idea")),
    ],
    "a_view_does_not_change": [ChangesItsViews],
    "close_gives_up_the_lease": [LeavesItsLease],
    "a_watch_begins_with_the_present_view": [watching(lambda old, _: old is not None)],
    "a_watch_reports_each_change": [
        watching(lambda _, view: view.records),
        watching(lambda old, new: old is None or old.records.keys() != new.records.keys()),
        watching(lambda old, _: old is None),
        watching(lambda *_: True, lambda view: View(view.records, 10**6 - view.revision)),
        HasOneWatch,
    ],
}
"""Classes that break a rule of the random check, which names it."""

CHECKS = {
    "many_instances_are_published_at_once": [publishing(lambda _, instances: instances[:128])],
    "all_ids_and_texts_are_kept": [
        publishing(lambda _, instances: [one for one in instances if one.id.isascii()])
    ],
    "a_renewed_lease_does_not_end": [RenewsNoLease],
    "a_lease_that_is_not_renewed_ends": [NeverEndsLeases, ReportsNoLoss],
    "methods_may_be_called_on_any_thread": [IsOfOneThread],
    "close_is_idempotent_and_refuses_later_requests": [AnswersWhenClosed, RaisesAtTheSecondClose],
    "close_ends_threads_and_timeouts": [LeavesATimeout, LeavesAThread],
    "a_closed_watch_reports_nothing": [ClosesNoWatch],
    "a_watcher_may_close_its_watch": [ClosesNoWatchInACall],
    "a_watcher_is_not_called_concurrently": [CallsWatchersConcurrently],
}
"""Classes that break the rule of a check of its own."""


@pytest.mark.parametrize("rule", [*RULES, *CHECKS])
def test_a_backend_that_breaks_a_rule_fails_a_check_that_names_the_rule(rule, failure_of):
    name, prefix = (rule, rule) if rule in CHECKS else (MODEL, f"{MODEL}: {rule}")
    LeavesAThread.ended.clear()
    for broken in (RULES | CHECKS)[rule]:
        found = failure_of(name, broken)
        assert re.match(rf"{prefix}: \w.{{20}}", found), (broken, found)
    LeavesAThread.ended.set()


def test_each_check_has_a_backend_that_fails_it():
    assert BACKEND_CHECKS.keys() == {MODEL, *CHECKS}


# Messages


def test_a_correct_backend_passes_all_checks(timer):
    check_backend(make(MemoryBackend, timer))
    assert timer.pending == 0


def test_the_message_of_a_failed_check_has_the_expected_and_the_actual_result(failure_of):
    class HasNoWatches(MemoryBackend):
        def watch(self, service, watcher):
            return SimpleNamespace(close=lambda: None)

    def lighter(_, instances):
        return [one.replace(weight=3) for one in instances]

    found = failure_of("many_instances_are_published_at_once", publishing(lighter))
    assert re.search(r"must find .*\(weight 100\) and 296 more, but found .*\(weight 3\)", found)
    found = failure_of(MODEL, HasNoWatches)
    assert re.search(r"a watcher must see .*, but was not called \(after 0.1 s\)", found)


def test_what_is_no_backend_is_reported(failure_of):
    class HasNoSettings(MemoryBackend):
        def __init__(self, url, settings):
            super().__init__(url, settings)
            del self.settings

    assert "its __init__ must call super().__init__(url, settings)" in failure_of(
        MODEL, HasNoSettings
    )
    with pytest.raises(AssertionError, match=r"must return a .*RegistryBackend, not 'etcd'"):
        BACKEND_CHECKS[MODEL](lambda: "etcd")


def test_records_that_are_changed_or_have_another_id_are_reported(failure_of):
    class Renames(MemoryBackend):
        def lookup(self, service):
            return View({f"{key}0": one for key, one in super().lookup(service).records.items()})

    class Garbles(MemoryBackend):
        def lookup(self, service):
            return View(dict.fromkeys(super().lookup(service).records, b"?"))

    def renamed(view):
        return View({f"{key}0": one for key, one in view.records.items()})

    name = "many_instances_are_published_at_once"
    assert "'127.0.0.1:50000' is found under '127.0.0.1:500000'" in failure_of(name, Renames)
    found = failure_of(MODEL, watching(lambda *_: True, renamed))
    assert re.search(r"a watcher got a wrong view: .*'127.0.0.1:5000\d' is found under", found)
    assert "'127.0.0.1:50000' is not the stored one" in failure_of(name, Garbles)


def test_errors_of_a_backend_are_reported_and_end_the_checks(failure_of, timer):
    class Careless(MemoryBackend):
        def lookup(self, service):
            raise self.error

    Careless.error = KeyError("a")
    assert "raised KeyError('a'); only RegistryUnavailable" in failure_of(MODEL, Careless)
    Careless.error = RegistryUnavailable("no lookups here")
    text = "a request failed: RegistryUnavailable: no lookups here"
    with pytest.raises(AssertionError, match=f"^{MODEL}: .*: {text}"):
        check_backend(make(Careless, timer))


def test_lease_checks_pass_if_the_process_is_suspended_for_longer_than_a_lease(timer):
    class StandsStill(MemoryBackend):
        publishings = 0

        def publish(self, instances):
            super().publish(instances)
            StandsStill.publishings += 1
            if StandsStill.publishings == 1:
                timer.advance(5.0)

    for name in ("a_renewed_lease_does_not_end", "a_lease_that_is_not_renewed_ends"):
        StandsStill.publishings = 0
        BACKEND_CHECKS[name](make(StandsStill, timer))
        assert StandsStill.publishings > 1
