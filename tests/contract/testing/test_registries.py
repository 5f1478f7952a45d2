"""The contract of backends as a whole: what runs it, and how it says what is wrong."""

import pytest

from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends.memory import MemoryBackend
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import BACKEND_CHECKS, check_backend


def make(kind, timer):
    return lambda: kind(parse_url(f"memory://{kind.__name__}"), Settings(1.0, 1.0, timer))


def test_a_sound_backend_passes_all_checks_at_once(timer):
    check_backend(make(MemoryBackend, timer))


def test_the_first_check_that_fails_ends_it(timer):
    class Deaf(MemoryBackend):
        def watch(self, service, watcher):
            raise RegistryUnavailable("no watches here")

    said = "^what_is_not_renewed_is_forgotten: the engine did not do it: .*no watches here"
    with pytest.raises(AssertionError, match=said):
        check_backend(make(Deaf, timer))


def test_an_error_that_may_not_come_out_of_a_backend_is_told(timer):
    class Careless(MemoryBackend):
        def lookup(self, service):
            raise KeyError(service)

    check = BACKEND_CHECKS["what_is_published_is_found"]
    with pytest.raises(AssertionError, match=r"raised KeyError.*; only RegistryUnavailable"):
        check(make(Careless, timer))


def test_the_checks_of_leases_pass_though_the_machine_stands_still_for_longer_than_a_lease(timer):
    class StandsStill(MemoryBackend):
        publishings = 0

        def publish(self, instances):
            super().publish(instances)
            StandsStill.publishings += 1
            if StandsStill.publishings == 1:
                timer.advance(5.0)

    for name in ("a_lease_that_is_renewed_does_not_end", "what_is_not_renewed_is_forgotten"):
        StandsStill.publishings = 0
        BACKEND_CHECKS[name](make(StandsStill, timer))
        assert StandsStill.publishings > 1
