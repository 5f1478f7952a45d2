"""Each check of publishing finds the provider that breaks its rule, and says which rule that is."""

import threading
from dataclasses import replace

import pytest

from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.provider import Settings, View
from rpcwheel.registry.providers.memory import MemoryProvider
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import PROVIDER_CHECKS, _publishing, _stand


class ForgetsZones(MemoryProvider):
    def publish(self, instances):
        super().publish([one.changed(zone="") for one in instances])


class KeepsTheFirst(MemoryProvider):
    def publish(self, instances):
        super().publish([one for one in instances if not self._found(one)])


class KeepsAPage(MemoryProvider):
    def publish(self, instances):
        super().publish(instances[:128])


class Keeps(MemoryProvider):
    def withdraw(self, instances):
        pass


class WithdrawsAnyEpoch(MemoryProvider):
    def withdraw(self, instances):
        for one in instances:
            if found := self._found(one):
                super().withdraw([one.changed(epoch=found.epoch)])


class WantsSome(MemoryProvider):
    def publish(self, instances):
        if not instances:
            raise RegistryUnavailable("an empty transaction")
        super().publish(instances)


class KnowsNoUnknown(MemoryProvider):
    def lookup(self, service):
        return View({self._engine.records[self._where(service)]: b""})


class ListsAsItComes(MemoryProvider):
    def services(self):
        return [name for _, name in self._engine.records]


class FindsByPrefix(MemoryProvider):
    def lookup(self, service):
        found = [super(FindsByPrefix, self).lookup(name) for name in self.services()]
        names = self.services()
        merged = {}
        for name, view in zip(names, found, strict=True):
            if name.startswith(service):
                merged |= view.records
        return View(merged)


class NeverForgets(MemoryProvider):
    def __init__(self, url, settings):
        super().__init__(url, replace(settings, lease_s=1e6))
        self.settings = settings


class SaysAllIsWell(MemoryProvider):
    def renew(self, instances):
        super().renew(instances)
        return {}


class IsOfAscii(MemoryProvider):
    def publish(self, instances):
        super().publish([one for one in instances if one.id.isascii()])


class RenewsNoLease(MemoryProvider):
    def renew(self, instances):
        before = self._lease.ends_ns
        lost = super().renew(instances)
        self._lease.ends_ns = before
        return lost


class MissesNothing(MemoryProvider):
    def renew(self, instances):
        super().renew(instances)
        return {}


class MissesOnlyAbsence(MemoryProvider):
    def renew(self, instances):
        return {key: why for key, why in super().renew(instances).items() if not self._at(key)}

    def _at(self, key):
        return self._engine.records.get(self._where(key[0]), {}).get(key[1])


class SaysWhyInItsOwnWords(MemoryProvider):
    def renew(self, instances):
        return dict.fromkeys(super().renew(instances), "no idea")


class GivesItsOwnDict(MemoryProvider):
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


class IsOfOneThread(MemoryProvider):
    def __init__(self, url, settings):
        super().__init__(url, settings)
        self.thread = threading.get_ident()

    def renew(self, instances):
        if threading.get_ident() != self.thread:
            raise ValueError("used in another thread than the one that made it")
        return super().renew(instances)


class LeavesItsLease(MemoryProvider):
    def close(self):
        self._lease.keys.clear()
        super().close()


class AnswersWhenClosed(MemoryProvider):
    def _check_open(self):
        pass


class CloseFails(MemoryProvider):
    def close(self):
        self._check_open()
        super().close()


class LeavesATimeout(MemoryProvider):
    def publish(self, instances):
        super().publish(instances)
        self.settings.timer.new_timeout(print, 60)


class LeavesAThread(MemoryProvider):
    ended: threading.Event

    def publish(self, instances):
        super().publish(instances)
        threading.Thread(target=self.ended.wait, daemon=True).start()


class HasNoSettings(MemoryProvider):
    def __init__(self, url, settings):
        super().__init__(url, settings)
        del self.settings


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
}
CASES = [(name, broken) for name, kinds in BROKEN.items() for broken in kinds]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(_stand, "PATIENCE_S", 0.1)
    monkeypatch.setattr(_publishing, "PATIENCE_S", 0.1)


@pytest.mark.parametrize(("name", "broken"), CASES)
def test_a_check_finds_who_breaks_its_rule_and_names_itself(name, broken, timer, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(LeavesAThread, "ended", ended, raising=False)
    url, settings = parse_url(f"memory://{broken.__name__}"), Settings(1.0, 1.0, timer)
    try:
        with pytest.raises(AssertionError, match=rf"^{name}: \w.{{20}}"):
            PROVIDER_CHECKS[name](lambda: broken(url, settings))
    finally:
        ended.set()


def test_there_is_one_for_every_check():
    assert set(BROKEN) == {check.__name__ for check in _publishing.CHECKS}


@pytest.mark.parametrize("name", BROKEN)
def test_a_sound_provider_passes(name, timer):
    url = parse_url("memory://sound")
    PROVIDER_CHECKS[name](lambda: MemoryProvider(url, Settings(1.0, 1.0, timer)))
