"""What is known of one member of a channel, and what follows from a call to it that has failed.

==========  =====================================================================================
`IDLE`      Not called yet; it has no connection.
`UP`        Called.
`DOWN`      Unreachable when it was last called; waits for a probe to be answered.
`DRAINING`  Its instance wants no new calls, or is gone; calls in flight go on.
`CLOSED`    Its connection is closed.
==========  =====================================================================================
"""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tenacity import wait_random_exponential

from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import ServiceInstance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .policy import ClusterPolicy

__all__ = [
    "MemberCore",
    "MemberState",
    "Rules",
    "Verdict",
    "address_dialled",
    "checked_count",
    "checked_instances",
    "checked_name",
    "judged",
    "proves_unsent",
]

MemberState = Literal["IDLE", "UP", "DOWN", "DRAINING", "CLOSED"]

HANDSHAKE_NS: Final = 1_000_000_000
"""How long the making of a connection may take before it counts as none: over TLS, and far away."""

DEFAULT_PROBE: Final = wait_random_exponential(multiplier=0.5, max=10)
"""Full jitter: a thousand clients of a member that is down do not ask it at once."""


class Rules(NamedTuple):
    """A policy, in integers."""

    wait_ns: int
    drain_ns: int
    probe_timeout_ns: int
    warmup_ns: int
    zone: str
    backoff: Backoff

    @classmethod
    def of(cls, policy: ClusterPolicy) -> Rules:
        """Those of a policy.

        Raises:
            TypeError, ConfigurationError: Its wait object is none.
        """
        return cls(
            wait_ns=to_ns(policy.wait),
            drain_ns=NEVER if policy.drain is None else to_ns(policy.drain),
            probe_timeout_ns=to_ns(policy.probe_timeout),
            warmup_ns=0 if policy.warmup is None else to_ns(policy.warmup),
            zone=policy.zone,
            backoff=Backoff(DEFAULT_PROBE if policy.probe is None else policy.probe),
        )


class MemberCore:
    """What is known of one member; both worlds build their `Member` on it."""

    def __init__(self, instance: ServiceInstance, now_ns: int) -> None:
        self.instance = instance
        self.began_ns = now_ns
        """When the instance began to serve, on the timer's clock; `-NEVER`: long ago."""
        self.down_ns: int | None = None
        """Since when it is down; None: it is not."""
        self.failed_ns = 0
        """When it was last found to be down."""
        self.reason = ""
        """Why it is down."""
        self.probes = 0
        """How many probes have failed since it is down."""
        self.spell = 0
        """Counts up each time that it goes down, so that a late answer is known to be late."""
        self.used = False
        """Whether it was called."""
        self.leaving = False
        """Whether its instance is gone."""
        self.closed = False
        """Whether its connection is closed."""
        self.dark_ns: int | None = None
        """Since when calls of little time have found no connection; None: none has, since it was
        found to answer."""

    @property
    def id(self) -> str:
        """Of its instance."""
        return self.instance.id

    @property
    def address(self) -> str:
        """Host and port of its instance: `10.0.0.7:50051`."""
        return self.instance.address

    @property
    def calls(self) -> int:
        """Calls in flight on it."""
        return 0

    @property
    def state(self) -> MemberState:
        """See above."""
        if self.closed:
            return "CLOSED"
        if self.leaving or self.instance.status == "DRAINING":
            return "DRAINING"
        if self.down_ns is not None:
            return "DOWN"
        return "UP" if self.used else "IDLE"

    def judged(
        self,
        code: str,
        connection: str,
        *,
        cut_off: bool,
        began_ns: int,
        read_ns: int | None,
        now_ns: int,
    ) -> Verdict:
        """Judge a call to it that has failed, and take note of it.

        One whose time was over while a connection was still being made proves nothing by itself:
        its time may have been shorter than the handshake. Such calls in a row do, if nothing was
        heard for as long as a handshake may take.

        Args:
            code: As for the function `judged`.
            connection: As there.
            cut_off: As there.
            began_ns: When it began.
            read_ns: When something was last read from the member; None: never.
            now_ns: The time.
        """
        verdict = judged(code, connection, cut_off=cut_off)
        if not verdict.is_down or code != "DEADLINE_EXCEEDED" or connection != "CONNECTING":
            return verdict
        return verdict._replace(is_down=self._is_dark(began_ns, read_ns, now_ns))

    def _is_dark(self, began_ns: int, read_ns: int | None, now_ns: int) -> bool:
        """Whether calls have found no connection for so long that there is none."""
        if self.dark_ns is None or (read_ns is not None and read_ns >= self.dark_ns):
            self.dark_ns = began_ns
        return now_ns - self.dark_ns >= HANDSHAKE_NS

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.instance.service!r}, {self.state}>"


class Verdict(NamedTuple):
    """What follows from a call that has failed."""

    is_down: bool
    """Whether its member could not be reached."""
    may_move: bool
    """Whether it is sure that nothing was sent, so that it may go to another member."""


def judged(code: str, connection: str, *, cut_off: bool) -> Verdict:
    """Judge a call that has failed.

    Args:
        code: The name of its status code.
        connection: The name of the state of its member's connection just after; "" if unknown.
        cut_off: Whether it is sure that it found no connection (`proves_unsent`).
    """
    if code == "UNAVAILABLE":
        return Verdict(is_down=cut_off or connection not in {"READY", ""}, may_move=cut_off)
    no_connection = connection in {"CONNECTING", "TRANSIENT_FAILURE"}
    return Verdict(is_down=code == "DEADLINE_EXCEEDED" and no_connection, may_move=False)


def address_dialled(instance: ServiceInstance) -> str | None:
    """What gRPC writes of an address that it could not connect to (1.60 to 1.85).

    None: the host is a name, whose addresses are not known.
    """
    try:
        host = ip_address(instance.host)
    except ValueError:
        return None
    if isinstance(host, IPv4Address):
        return f"ipv4:{host}:{instance.port}: "
    return None if host.scope_id else f"ipv6:%5B{host}%5D:{instance.port}: "


def proves_unsent(
    instance: ServiceInstance, details: str, *, had_none: bool, has_none: bool
) -> bool:
    """Whether a call was surely not sent, given that the words of its status say so.

    The words alone prove nothing: a server that hands on the failure of a server behind it says the
    same. So two of three things more are asked for: there was no connection when it began; there is
    none now; the words name the address that we called. One may be missing: by now there may be a
    connection again, one may break just when a call begins on it, and what a host name or a proxy
    stands for we do not know.

    Args:
        instance: Whom it was for.
        details: The words.
        had_none: Whether there was no connection when it began; False if unknown.
        has_none: Whether there is none now.
    """
    dialled = address_dialled(instance)
    named = dialled is not None and dialled in details
    return had_none + has_none + named > 1


def checked_instances(instances: Iterable[ServiceInstance]) -> list[ServiceInstance]:
    """Give them as a list.

    Raises:
        TypeError: One is no instance.
    """
    found = list(instances)
    for one in found:
        if not isinstance(one, ServiceInstance):
            raise TypeError(f"instances must be rpcwheel.ServiceInstance, not {one!r}")
    return found


def checked_name(name: str) -> str:
    """Give it back.

    Raises:
        TypeError, ConfigurationError: It is no string, or an empty one.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string such as 'shop.Orders', not {name!r}")
    if not name:
        raise ConfigurationError("name must not be empty; give the service's: 'shop.Orders'")
    return name


def checked_count(count: int, *, what: str) -> int:
    """Give it back.

    Raises:
        TypeError, ConfigurationError: It is no whole number, or less than one.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{what} must be a whole number, not {count!r}")
    if count < 1:
        raise ConfigurationError(f"{what} must be 1 or more, not {count}")
    return count
