"""Orders that survive the client: python client_journal.py place tea."""

import logging

from client import make_calls

import rpcwheel
from rpcwheel import FailbackPolicy, MethodPolicy
from rpcwheel.options import channel_options

logging.basicConfig(level="INFO", format="    log: %(message).90s")
failback = FailbackPolicy(
    retry_on={"UNAVAILABLE", "DEADLINE_EXCEEDED"},
    backoff=2.0,
    default="will be ordered later",
    journal="sqlite://./journal.db?lease=5",  # in the current directory
)
kit = rpcwheel.Kit(timeout=2.0, methods={"/shop.Orders/Place": MethodPolicy(failback=failback)})
options = channel_options(longest_reconnect=2.0)
with kit, kit.channel("127.0.0.1:50051", options=options) as channel:
    make_calls(channel)
    input("press Enter to end\n")
