"""A client of all servers in the registry: python client_balanced.py price tea tea tea."""

import logging

from client import make_calls

import rpcwheel
from rpcwheel import MethodPolicy, RetryPolicy
from rpcwheel.kit import KitPolicy

SHOP = "sqlite://./registry.db?service=shop.Orders"
SETTINGS = KitPolicy(
    timeout=2.0,
    # A server that dies may have had many calls, which are all retried at the same time.
    retry=RetryPolicy(retry_on="UNAVAILABLE", min_retries=200),
    methods={"/shop.Orders/Price": MethodPolicy(idempotent=True)},
    heartbeat=0.3,  # a silent connection is dead after three times as many seconds
)

logging.basicConfig(level="INFO", format="    log: %(message).90s")

if __name__ == "__main__":
    kit = rpcwheel.Kit.from_policy(SETTINGS)
    with kit, kit.channel(SHOP) as channel:
        make_calls(channel)
