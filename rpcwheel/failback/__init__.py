"""Failback: a failed call is answered at once and retried in the background.

The first attempt of a call is made at once. If it fails with an error that the policy's `retry_on`
names, the call is queued, its caller gets `default`, and the call is attempted again in the
background until it succeeds or has no attempts left. It is meant for calls whose delivery matters
and may be late: audit lines, metrics, notifications. A call may be executed more than once (a
server can do the work while its response is lost), so the server must allow that. The idea and the
default waits are those of Dubbo's `FailbackClusterInvoker`::

    @with_failback(retry_on="UNAVAILABLE", backoff=wait_exponential_jitter(max=60), max_attempts=9)
    def audit(event):
        return stub.Push(event, timeout=2.0)    # without a deadline, a call that hangs never fails

    audit(event)                                # the response, or None if the call was queued
    audit.failback.entries()                    # what is queued, and when it is attempted again
    audit.failback.close(drain_timeout=5.0)     # at the end: [] if no call is queued any more

The function makes the whole call: each attempt gets the stub and the channel again, and reads a
response stream to its end, because a stream that the caller has begun to read cannot be retried. A
protobuf message among the arguments is kept as it was when the call was queued; do not change other
arguments meanwhile. A call with an iterator as an argument is not queued, because its first attempt
has used the iterator up.

No call is lost without notice. A full queue raises `FailbackFull`. A call that is given up goes to
`dead_letter`, the log and an event. `close(drain_timeout)` retries queued calls for that many
seconds, however many attempts the policy allows, and returns those that are not delivered by then
(not those given up before: `stats().gave_up` counts them). The queue is kept in memory; if the
process ends, it logs what was queued.

With `journal="sqlite:///var/lib/shop/failback.db"` queued calls survive the process: each is stored
before its caller is answered, and delivered by this process, or by any other with that journal. See
`rpcwheel.journal`.

`FailbackInvoker` does the same without a decorator. `rpcwheel.failback.aio` has the class of that
name for coroutines.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from rpcwheel.call.failback_policy import FailbackPolicy, FailedCall
    from rpcwheel.call.idempotency import idempotency_key

    from . import aio, sync
    from .decorator import with_failback
    from .held_calls import FailbackStats
    from .queued_call import QueueEntry
    from .sync import FailbackInvoker
    from .worker import JournalWorker
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".decorator": "with_failback",
            ".held_calls": "FailbackStats",
            ".queued_call": "QueueEntry",
            ".sync": "FailbackInvoker",
            ".worker": "JournalWorker",
            "rpcwheel.call.failback_policy": "FailbackPolicy FailedCall",
            "rpcwheel.call.idempotency": "idempotency_key",
        },
        submodules="aio sync",
    )

__all__ = [
    "FailbackInvoker",
    "FailbackPolicy",
    "FailbackStats",
    "FailedCall",
    "JournalWorker",
    "QueueEntry",
    "idempotency_key",
    "with_failback",
]
