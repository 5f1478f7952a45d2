"""Every call ends in time: one deadline over all its attempts, passed on to what it calls.

    from rpcwheel import current_deadline, deadline_scope

    with deadline_scope(2.0):                 # all calls in here share two seconds
        order = orders.Get(request)
        stock = stocks.Get(order.item)        # gets what is left

A server with rpcwheel's interceptors does the same for each call that it serves: the client's
deadline becomes `current_deadline()`, and calls made meanwhile get what is left of it.
"""

from .context import Deadline, current_deadline, deadline_scope
from .policy import DeadlinePolicy, RetryPolicy

__all__ = [
    "Deadline",
    "DeadlinePolicy",
    "RetryPolicy",
    "current_deadline",
    "deadline_scope",
]
