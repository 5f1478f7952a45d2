"""For the tests of those who use this package: a registry that fails on command, and the contract.

`check_provider` tells whether a provider of yours does what `rpcwheel.registry` needs;
`FlakyProvider` lets your own tests see a registry that is down, frozen or has lost its memory.
"""

from .flaky import FlakyProvider
from .registries import PROVIDER_CHECKS, check_provider

__all__ = ["PROVIDER_CHECKS", "FlakyProvider", "check_provider"]
