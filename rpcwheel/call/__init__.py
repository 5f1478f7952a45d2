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
    from .config import call_options
    from .deadline import Deadline, current_deadline, deadline_scope
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
            ".deadline": "Deadline current_deadline deadline_scope",
            ".policy": (
                "CallPolicy DeadlinePolicy DefaultResponsePolicy HedgingPolicy MethodPolicy "
                "RetryPolicy RetryThrottling"
            ),
        },
    )

__all__ = [
    "CallPolicy",
    "Deadline",
    "DeadlinePolicy",
    "DefaultResponsePolicy",
    "HedgingPolicy",
    "MethodPolicy",
    "RetryPolicy",
    "RetryThrottling",
    "call_options",
    "current_deadline",
    "deadline_scope",
]
