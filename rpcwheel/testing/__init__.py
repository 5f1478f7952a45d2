"""For the tests of those who use this package: a registry that fails on command, and the contract.

`check_backend` tells whether a backend of yours does what `rpcwheel.registry` needs;
`FlakyBackend` lets your own tests see a registry that is down, frozen or has lost its memory.
"""

from .flaky import FlakyBackend
from .registries import BACKEND_CHECKS, check_backend

__all__ = ["BACKEND_CHECKS", "FlakyBackend", "check_backend"]
