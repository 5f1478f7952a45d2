"""Orders that are delivered later, if the server is down: python client_failback.py place tea."""

from client import make_calls

import rpcwheel
from rpcwheel import FailbackPolicy, MethodPolicy, RetryPolicy
from rpcwheel.options import channel_options

failback = FailbackPolicy(
    retry_on={"UNAVAILABLE", "DEADLINE_EXCEEDED"},
    backoff=2.0,  # the wait before each retry: 1 to 2 s, at random
    default="will be ordered later",  # what the caller gets
)
kit = rpcwheel.Kit(
    timeout=2.0,
    retry=RetryPolicy(retry_on="UNAVAILABLE"),
    methods={
        "/shop.Orders/Price": MethodPolicy(idempotent=True),
        "/shop.Orders/Place": MethodPolicy(failback=failback),
    },
)
options = channel_options(longest_reconnect=2.0)  # by default gRPC waits up to two minutes
with kit.channel("127.0.0.1:50051", options=options) as channel:
    make_calls(channel)
    print("queued:", kit.pending)
    undelivered = kit.close(drain_timeout=60.0)  # waits until all calls are delivered
    print("not delivered:", len(undelivered))
