"""Calls: deadlines, retries, default responses, and the policies that set them.

    from rpcwheel import current_deadline, deadline_scope

    with deadline_scope(2.0):                 # all calls in here share two seconds
        order = orders.Get(request)
        stock = stocks.Get(order.item)        # gets what is left

A server with rpcwheel's interceptors does the same for each call that it serves: the client's
deadline becomes `current_deadline()`, and calls made meanwhile get what is left of it.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from rpcwheel.rpc import Criticality

    from .config import call_options
    from .criticality import current_criticality
    from .deadline import Deadline, current_deadline, deadline_scope
    from .function_breaker import with_breaker
    from .policy import (
        CallPolicy,
        DeadlinePolicy,
        DefaultResponsePolicy,
        HedgingPolicy,
        MethodPolicy,
        RetryPolicy,
        RetryThrottling,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".config": "call_options",
            ".criticality": "current_criticality",
            ".deadline": "Deadline current_deadline deadline_scope",
            ".function_breaker": "with_breaker",
            ".policy": (
                "CallPolicy DeadlinePolicy DefaultResponsePolicy HedgingPolicy MethodPolicy "
                "RetryPolicy RetryThrottling"
            ),
            "rpcwheel.rpc": "Criticality",
        },
    )

__all__ = [
    "CallPolicy",
    "Criticality",
    "Deadline",
    "DeadlinePolicy",
    "DefaultResponsePolicy",
    "HedgingPolicy",
    "MethodPolicy",
    "RetryPolicy",
    "RetryThrottling",
    "call_options",
    "current_criticality",
    "current_deadline",
    "deadline_scope",
    "with_breaker",
]
