"""Names of the balancer for `rpcwheel.cluster`, as long as channels by name are built on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rpcwheel.cluster.arguments import checked_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.cluster.pickers import Picker
    from rpcwheel.cluster.policy import ClusterPolicy

__all__ = ["cluster_settings"]

BALANCES: Final = {
    "weighted_round_robin": "round_robin",
    "least_request": "least_active",
    "ring_hash": "consistent_hash",
}


def cluster_settings(
    lb_policy: str | Picker | None,
    policy: ClusterPolicy | None,
    zone: str | None,
    on_subchannel: Callable[[Any], object] | None,
) -> dict[str, Any]:
    """The settings of a `ClusterChannel`.

    Raises:
        TypeError: The policy is none.
    """
    checked = checked_policy(policy)
    balance = "round_robin" if lb_policy is None else lb_policy
    if isinstance(balance, str):
        name, colon, header = balance.partition(":")
        balance = f"{BALANCES.get(name, name)}{colon}{header}"
    return {
        "balance": balance,
        "policy": checked if zone is None else checked.changed(zone=zone),
        "on_member": on_subchannel,
    }
