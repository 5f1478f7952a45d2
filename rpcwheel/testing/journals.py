"""The conformance checks of journal backends, to be run against a real engine.

    @pytest.mark.parametrize("check", JOURNAL_CHECKS.values(), ids=JOURNAL_CHECKS)
    def test_my_journal_keeps_the_contract(check, engine):
        check(lambda: open_journal_backend(engine.url))

A check that fails raises AssertionError, which says what a backend must do and what yours did. The
checks do not kill, freeze or fill the engine: only you can do that to yours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from rpcwheel.journal.backend import JournalBackend

from .conformance.journal_checks import CHECKS
from .conformance.journal_harness import JournalHarness
from .conformance.registry_harness import run_check

if TYPE_CHECKING:
    from collections.abc import Mapping

Make = Callable[[], JournalBackend]
Check = Callable[[Make], None]


def check_journal(make: Make) -> None:
    """Run all `JOURNAL_CHECKS`, one after the other. This takes about 10 seconds.

    Args:
        make: Returns a new backend on the same engine, with the same data; called whenever a check
            needs one. The lease in its URL is not used.

    Raises:
        AssertionError: A check failed.
    """
    for check in JOURNAL_CHECKS.values():
        check(make)


def _run(check: Callable[[JournalHarness], None], make: Make) -> None:
    allowed_errors = "JournalUnavailable, JournalFull and JournalRefused"
    run_check(check, partial(JournalHarness, make), allowed_errors)


JOURNAL_CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {check.__name__: update_wrapper(partial(_run, check), check) for check in CHECKS}
)
"""The checks by name. Each takes `make`, as `check_journal` does, closes the backends that it made,
and deletes its calls. Queues have new names each time, so checks may share an engine, also
concurrently."""
