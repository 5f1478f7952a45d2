"""A server that is offered four times its load; run it: python examples/overload.py.

Calls are sent at even intervals, whatever becomes of the earlier ones, each with a deadline of half
a second. A quarter is CRITICAL, the rest SHEDDABLE. First the server is gRPC's own: calls wait for
its handlers, and most are late when their turn comes. Then it has a limit: it finishes what it
begins, refuses other calls at once, and these are the sheddable ones.
"""

import subprocess
import sys
import time
from collections import Counter

from audit_pb2 import Line
from audit_pb2_grpc import AuditStub
from overload_server import CAPACITY

from rpcwheel import Criticality, Kit, call_options

OFFERED = 4 * CAPACITY
SECONDS, TIMEOUT = 3.0, 0.5
BEGINNING = 1.0  # calls of the first second do not count: the limit is found in it


def send(target: str) -> Counter[tuple[Criticality, str]]:
    """Send calls; return the number of those that ended, by criticality and status code."""
    calls = []
    with Kit(timeout=TIMEOUT) as kit, kit.channel(target) as channel:
        push = AuditStub(channel).Push.future
        push(Line(text="connect")).result()
        began = time.monotonic()
        for number in range(round(SECONDS * OFFERED)):
            time.sleep(max(0.0, began + number / OFFERED - time.monotonic()))
            criticality = Criticality.SHEDDABLE if number % 4 else Criticality.CRITICAL
            with call_options(criticality=criticality):
                call = push(Line(text=f"order {number}"))
            if number >= BEGINNING * OFFERED:
                calls.append((criticality, call))
        return Counter((criticality, call.code().name) for criticality, call in calls)


def show(kind: str) -> float:
    """Start a server, send it calls, and print what became of them; return the goodput."""
    process = subprocess.Popen(  # noqa: S603 - a file beside this one
        [sys.executable, f"{sys.path[0]}/overload_server.py", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = process.stdout.readline().strip() if process.stdout else ""
        ended = send(f"127.0.0.1:{port}")
    finally:
        process.communicate()  # ends its input, and so the process
    answered = sum(count for (_, code), count in ended.items() if code == "OK")
    goodput = answered / (SECONDS - BEGINNING) / CAPACITY
    print(f"{kind} limit: answered in time {goodput:.0%} of the capacity")
    for (criticality, code), count in sorted(ended.items()):
        print(f"    {criticality}: {count} {code}")
    return goodput


if __name__ == "__main__":
    print(f"capacity {CAPACITY:.0f} calls per second, offered {OFFERED:.0f}")
    without, adaptive = show("no"), show("adaptive")
    sys.exit(0 if adaptive > without else 1)
