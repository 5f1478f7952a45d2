"""The conformance checks of backends, to be run against a real engine.

    @pytest.mark.parametrize("check", BACKEND_CHECKS.values(), ids=BACKEND_CHECKS)
    def test_my_registry_keeps_the_contract(check, engine):
        namespace = secrets.token_hex(4)
        check(lambda: open_backend(engine.url(namespace=namespace), Settings(2.0, 2.0)))

    @pytest.mark.parametrize("check", JOURNAL_CHECKS.values(), ids=JOURNAL_CHECKS)
    def test_my_journal_keeps_the_contract(check, engine):
        check(lambda: open_journal_backend(engine.url))

A check that fails raises AssertionError, which says what a backend must do and what yours did. The
checks do not kill, freeze, empty or fill the engine: only you can do that to yours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.journal.backend import JournalBackend
from rpcwheel.registry.backend import RegistryBackend

from .conformance import journal_checks, registry_checks
from .conformance.journal_harness import JournalHarness
from .conformance.registry_harness import ConformanceHarness, run_check

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Check = Callable[[Callable[[], RegistryBackend]], None]
JournalCheck = Callable[[Callable[[], JournalBackend]], None]


def check_backend(make: Callable[[], RegistryBackend]) -> None:
    """Run all `BACKEND_CHECKS`, one after the other. This takes several leases.

    Args:
        make: Returns a new backend on the same engine and in the same namespace; called whenever a
            check needs one. Two seconds are a good lease. With a `ManualTimer` in the settings no
            real time passes.

    Raises:
        AssertionError: A check failed.
    """
    for check in BACKEND_CHECKS.values():
        check(make)


def check_journal(make: Callable[[], JournalBackend]) -> None:
    """Run all `JOURNAL_CHECKS`, one after the other. This takes about 10 seconds.

    Args:
        make: Returns a new backend on the same engine, with the same data; called whenever a check
            needs one. The lease in its URL is not used.

    Raises:
        AssertionError: A check failed.
    """
    for check in JOURNAL_CHECKS.values():
        check(make)


def _by_name(
    checks: Iterable[Callable[[Any], None]], harness: Callable[[Any], Any], allowed_errors: str
) -> Mapping[str, Any]:
    def run(check: Callable[[Any], None], make: Callable[[], Any]) -> None:
        run_check(check, partial(harness, make), allowed_errors)

    return MappingProxyType(
        {check.__name__: update_wrapper(partial(run, check), check) for check in checks}
    )


BACKEND_CHECKS: Final[Mapping[str, Check]] = _by_name(
    registry_checks.CHECKS,
    ConformanceHarness,
    "RegistryUnavailable, RegistryRefused and RegistryClosed",
)
"""The checks by name. Each takes `make`, as `check_backend` does, and closes the backends that it
made. Services have new names each time, so checks may share an engine and a namespace."""

JOURNAL_CHECKS: Final[Mapping[str, JournalCheck]] = _by_name(
    journal_checks.CHECKS, JournalHarness, "JournalUnavailable, JournalFull and JournalRefused"
)
"""The checks by name. Each takes `make`, as `check_journal` does, closes the backends that it made,
and deletes its calls. Queues have new names each time, so checks may share an engine, also
concurrently."""
