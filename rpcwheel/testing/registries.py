"""What every backend must do, as checks that run over a real engine.

    @pytest.mark.parametrize("check", BACKEND_CHECKS.values(), ids=BACKEND_CHECKS)
    def test_my_engine_keeps_the_contract(check, engine):
        namespace = secrets.token_hex(4)
        check(lambda: open_backend(engine.url(namespace=namespace), Settings(2.0, 2.0)))

A check that fails raises AssertionError, which says what a backend must do and what yours did.
What an engine does when it dies, hangs or forgets is not in here: only you can do that to yours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import RpcWheelError
from rpcwheel.registry.backend import RegistryBackend

from . import _publishing, _watching
from ._harness import ConformanceHarness

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BACKEND_CHECKS", "check_backend"]

Make = Callable[[], RegistryBackend]
Check = Callable[[Make], None]


def check_backend(make: Make) -> None:
    """Run all of `BACKEND_CHECKS`, one after the other; takes some leases' time.

    Args:
        make: Gives a new backend, on the same engine and in the same namespace each time; called
            as often as a check wants one. Two seconds are a good lease. With a `ManualTimer` in the
            settings no real time passes.

    Raises:
        AssertionError: Of the first check that fails.
    """
    for check in BACKEND_CHECKS.values():
        check(make)


def _run(check: Callable[[ConformanceHarness], None], make: Make) -> None:
    """Make a check's failure say which it was, whatever it was."""
    try:
        with ConformanceHarness(make) as stand:
            check(stand)
    except AssertionError as error:
        raise AssertionError(f"{check.__name__}: {error}") from error
    except RpcWheelError as error:
        raise AssertionError(
            f"{check.__name__}: the engine did not do it: {type(error).__name__}: {error}"
        ) from error
    except Exception as error:
        raise AssertionError(
            f"{check.__name__}: a backend raised {error!r}; only RegistryUnavailable, "
            "RegistryRefused and RegistryClosed may come out of it"
        ) from error


BACKEND_CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        check.__name__: update_wrapper(partial(_run, check), check)
        for check in (*_publishing.CHECKS, *_watching.CHECKS)
    }
)
"""By name. Each calls `make()` for each backend that it wants on the one engine, and closes them
all; its services have new names each time, so that checks may share an engine and a namespace."""
