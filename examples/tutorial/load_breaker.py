"""Load from a client with a circuit breaker: python load_breaker.py CALLS_PER_SECOND."""

import logging

from load import run_load

import rpcwheel

logging.basicConfig(level="INFO", format="    log: %(message).150s")
kit = rpcwheel.Kit(timeout=1.0, breaker=0.5)
with kit, kit.channel("127.0.0.1:50051") as channel:
    run_load(channel)
