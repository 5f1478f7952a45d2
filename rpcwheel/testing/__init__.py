"""For tests: a registry that fails on command, and the conformance checks of backends.

`check_backend` checks whether a backend of yours keeps the contract of `RegistryBackend`.
`FlakyBackend` shows your own tests a registry that is down, frozen or has lost its data.
"""

from .flaky import FlakyBackend
from .registries import BACKEND_CHECKS, check_backend

__all__ = ["BACKEND_CHECKS", "FlakyBackend", "check_backend"]
