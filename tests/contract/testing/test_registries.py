"""`check_backend`, and the messages of failed checks."""

import re
from types import SimpleNamespace

import pytest

from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.backend import Settings, View
from rpcwheel.registry.backends.memory import MemoryBackend
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import BACKEND_CHECKS, check_backend


def make(kind, timer):
    return lambda: kind(parse_url(f"memory://{kind.__name__}"), Settings(1.0, 1.0, timer))


def failure_of(name, kind, timer):
    """Return the message of a check that fails."""
    with pytest.raises(AssertionError) as failed:
        BACKEND_CHECKS[name](make(kind, timer))
    return str(failed.value)


def test_a_correct_backend_passes_all_checks(timer):
    check_backend(make(MemoryBackend, timer))
    assert timer.pending == 0


def test_the_message_of_a_failed_check_has_the_expected_and_the_actual_result(timer, set_limit):
    class IgnoresWeights(MemoryBackend):
        def publish(self, instances):
            super().publish([one.replace(weight=3) for one in instances])

    class IsDeaf(MemoryBackend):
        def watch(self, service, watcher):
            return SimpleNamespace(close=lambda: None)

    set_limit("testing.conformance.registry_harness.TIMEOUT_S", 0.05)
    found = failure_of("many_instances_are_published_at_once", IgnoresWeights, timer)
    assert re.search(r"must find .*\(weight 100\) and 296 more, but found .*\(weight 3\)", found)
    found = failure_of("a_watch_begins_with_the_present_view", IsDeaf, timer)
    assert "a watcher must see nothing, but was not called (after 0.05 s)" in found


def test_a_factory_that_returns_no_backend_is_reported():
    with pytest.raises(
        AssertionError, match=r"make\(\) must return a .*RegistryBackend, not 'etcd'"
    ):
        BACKEND_CHECKS["published_instances_are_found"](lambda: "etcd")


def test_records_that_are_changed_or_have_another_id_are_reported(timer):
    class Renames(MemoryBackend):
        def lookup(self, service):
            return View({f"{key}0": one for key, one in super().lookup(service).records.items()})

    class Garbles(MemoryBackend):
        def lookup(self, service):
            return View(dict.fromkeys(super().lookup(service).records, b"?"))

    name = "published_instances_are_found"
    assert "'127.0.0.1:50001' is found under '127.0.0.1:500010'" in failure_of(name, Renames, timer)
    assert "'127.0.0.1:50001' is not the stored one" in failure_of(name, Garbles, timer)


def test_check_backend_ends_with_the_first_failure(timer):
    class Deaf(MemoryBackend):
        def watch(self, service, watcher):
            raise RegistryUnavailable("no watches here")

    text = (
        "^a_lease_that_is_not_renewed_ends: a request failed: RegistryUnavailable: no watches here"
    )
    with pytest.raises(AssertionError, match=text):
        check_backend(make(Deaf, timer))


def test_errors_that_a_backend_must_not_raise_are_reported(timer):
    class Careless(MemoryBackend):
        def lookup(self, service):
            raise KeyError(service)

    check = BACKEND_CHECKS["published_instances_are_found"]
    with pytest.raises(AssertionError, match=r"raised KeyError.*; only RegistryUnavailable"):
        check(make(Careless, timer))


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
