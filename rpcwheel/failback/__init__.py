"""Failback: answer now, deliver later.

A call is tried once on the spot. If it fails in a way that the policy's `retry_on` names, it is
queued, its caller gets `default` at once, and it is made again in the background until it succeeds
or has no attempts left. For what must arrive but need not arrive now: audit lines, metrics,
notifications. It may arrive more than once (a server can do the work and lose the answer), so the
call must bear that. The idea and the default rhythm are those of Dubbo's `FailbackClusterInvoker`::

    @with_failback(retry_on="UNAVAILABLE", backoff=wait_exponential_jitter(max=60), max_attempts=9)
    def audit(event):
        return stub.Push(event, timeout=2.0)       # a deadline, or a hanging call never fails

    audit(event)                                   # the answer, or None when it was queued
    audit.failback.close(drain_timeout=5.0)        # at the end: [] if nothing waits any more

The function makes the whole call: it takes its stub and channel afresh at each try, and it reads a
response stream to its end, as a stream that was handed out cannot be tried again. A message that is
an argument is kept as it was when the call was queued; other arguments are the caller's to leave
unchanged, and an iterator cannot be queued, because the first try has used it up.

Nothing is lost in silence: a full queue raises `FailbackFull`, and a call given up goes to
`dead_letter`, the log and an event. `close(drain_timeout)` tries queued calls again for that many
seconds, however many retries the policy allows, and returns those that are not delivered by then
(not those given up before: `stats().abandoned` counts them). The queue lives in memory and ends
with the process, which then logs what it held.

`FailbackInvoker` does the same without a decorator; its twin for coroutines, of the same name, is
in `rpcwheel.failback.aio`.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .core import FailbackStats
    from .decorator import with_failback
    from .entry import FailedCall
    from .policy import FailbackPolicy
    from .sync import FailbackInvoker
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".core": "FailbackStats",
            ".decorator": "with_failback",
            ".entry": "FailedCall",
            ".policy": "FailbackPolicy",
            ".sync": "FailbackInvoker",
        },
        submodules="aio sync",
    )

__all__ = [
    "FailbackInvoker",
    "FailbackPolicy",
    "FailbackStats",
    "FailedCall",
    "with_failback",
]
