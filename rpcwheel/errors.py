"""Every exception of rpcwheel.

Each class says whose fault it is and what to do next::

    RpcWheelError
    ├── ConfigurationError    yours: an argument or policy makes no sense  (a ValueError too)
    ├── TimerError
    │   ├── TimerStopped      yours: the timer was stopped; make another   (a RuntimeError too)
    │   └── TooManyTimeouts   load: `max_pending` timeouts wait already
    └── FailbackError
        ├── FailbackFull      load: `max_pending` failed calls wait already
        └── FailbackClosed    yours: the call failed after `close()`

An argument of the wrong type raises the built-in `TypeError`: that is a bug in the calling code,
not a state to handle.
"""

__all__ = [
    "ConfigurationError",
    "FailbackClosed",
    "FailbackError",
    "FailbackFull",
    "RpcWheelError",
    "TimerError",
    "TimerStopped",
    "TooManyTimeouts",
]


class RpcWheelError(Exception):
    """The root of every exception that rpcwheel defines."""


class ConfigurationError(RpcWheelError, ValueError):
    """A value that can't work was given; the message says which are allowed."""


class TimerError(RpcWheelError):
    """A timer did not take the timeout; nothing was started and nothing counted."""


class TimerStopped(TimerError, RuntimeError):
    """The timer was stopped before; make a new one, or use `shared_timer()`."""


class TooManyTimeouts(TimerError):
    """The timer holds `max_pending` timeouts already; cancel some, wait, or raise the limit."""


class FailbackError(RpcWheelError):
    """A failed call could not be queued; it is chained to the error of the call itself."""


class FailbackFull(FailbackError):
    """`max_pending` failed calls wait for a retry already; this one was not queued."""


class FailbackClosed(FailbackError):
    """The call failed after `close()`; it was not queued."""
