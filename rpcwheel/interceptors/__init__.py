"""Where gRPC's calls come in: client and server interceptors for all four kinds, sync and aio.

(manual to come)
"""

from .policy import CallPolicy, FailsafePolicy, MethodPolicy

__all__ = ["CallPolicy", "FailsafePolicy", "MethodPolicy"]
