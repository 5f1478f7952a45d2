"""Call `Price` at an even rate until Ctrl-C: python load.py CALLS_PER_SECOND."""

import signal
import sys
import time
from collections import Counter, deque
from typing import Any

import grpc
from orders import OrdersStub

import rpcwheel


def run_load(channel: grpc.Channel) -> None:
    """Send each call at its time, and print each second how the calls have ended."""
    price, rate = OrdersStub(channel).Price, int(sys.argv[1])
    stop: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: stop.append(number))
    sent, total, ended = 0, Counter[str](), deque[str]()
    began = time.monotonic()
    while not stop:
        sent += 1
        price.future("tea").add_done_callback(lambda call: ended.append(end(call)))
        time.sleep(max(0.0, began + sent / rate - time.monotonic()))
        if sent % rate == 0:
            last = Counter(ended.popleft() for _ in range(len(ended)))
            print(f"second {sent // rate}:", text(last))
            total += last
    while total.total() + len(ended) < sent:  # the last calls have not ended yet
        time.sleep(0.01)
    print("in all:", text(total + Counter(ended)))


def end(call: Any) -> str:
    """How a call has ended: its status, or that the client has not sent it."""
    return "not sent" if call.details().startswith("not sent") else str(call.code().name)


def text(ends: Counter[str]) -> str:
    """The counts in one line."""
    return ", ".join(f"{count} {name}" for name, count in sorted(ends.items())) or "none has ended"


if __name__ == "__main__":
    kit = rpcwheel.Kit(timeout=1.0)
    with kit, kit.channel("127.0.0.1:50051") as channel:
        run_load(channel)
