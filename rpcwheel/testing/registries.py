"""The conformance checks of registry backends, to be run against a real engine.

    @pytest.mark.parametrize("check", BACKEND_CHECKS.values(), ids=BACKEND_CHECKS)
    def test_my_engine_keeps_the_contract(check, engine):
        namespace = secrets.token_hex(4)
        check(lambda: open_backend(engine.url(namespace=namespace), Settings(2.0, 2.0)))

A check that fails raises AssertionError, which says what a backend must do and what yours did. The
checks do not kill, freeze or empty the engine: only you can do that to yours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from rpcwheel.registry.backend import RegistryBackend

from .conformance.registry_checks import CHECKS
from .conformance.registry_harness import ConformanceHarness, run_check

if TYPE_CHECKING:
    from collections.abc import Mapping

Make = Callable[[], RegistryBackend]
Check = Callable[[Make], None]


def check_backend(make: Make) -> None:
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


def _run(check: Callable[[ConformanceHarness], None], make: Make) -> None:
    allowed_errors = "RegistryUnavailable, RegistryRefused and RegistryClosed"
    run_check(check, partial(ConformanceHarness, make), allowed_errors)


BACKEND_CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {check.__name__: update_wrapper(partial(_run, check), check) for check in CHECKS}
)
"""The checks by name. Each takes `make`, as `check_backend` does, and closes the backends that it
made. Services have new names each time, so checks may share an engine and a namespace."""
