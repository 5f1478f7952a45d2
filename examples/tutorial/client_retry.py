"""Calls that are retried: python client_retry.py price tea."""

import logging

from client import make_calls

import rpcwheel
from rpcwheel import MethodPolicy, RetryPolicy

logging.basicConfig(level="INFO", format="    log: %(message).90s")
kit = rpcwheel.Kit(
    timeout=2.0,
    retry=RetryPolicy(retry_on="UNAVAILABLE"),
    methods={"/shop.Orders/Price": MethodPolicy(idempotent=True)},
)
with kit, kit.channel("127.0.0.1:50051") as channel:
    make_calls(channel)
