"""Events and their sinks.

rpcwheel emits an event when a call, connection, instance or task fails, is delayed or recovers. An
event is a frozen record such as `FailbackQueued`. A sink is a function that is called with each
event. By default there is one, `log_event`, which logs events at a limited rate and the number of
suppressed lines as a `Suppressed`. `remove_sink(log_event)` removes it. Add your own::

    from rpcwheel.events import FailbackGaveUp, Event, add_sink

    def count_losses(event: Event) -> None:
        if isinstance(event, FailbackGaveUp):
            LOSSES.labels(event.name).inc()

    add_sink(count_losses)

A sink runs on the thread on which the event happened, and must not block. The first exception that
a sink raises is logged; the call or the timer is not affected.
"""

from . import events
from .events import *
from .hub import Sink, add_sink, emit, remove_sink
from .log import log_event
from .rate_limit import Suppressed

__all__ = ["Sink", "Suppressed", "add_sink", "emit", "log_event", "remove_sink"]
__all__ += events.__all__
