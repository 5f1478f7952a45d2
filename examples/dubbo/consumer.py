"""A client in Python of all providers of the service, those in Java and those in Python.

    python consumer.py [SECONDS] [ZOOKEEPER]

Prints how many calls each server has answered, and the calls that failed.
"""

import sys
import time
from collections import Counter

import grpc
import shop_pb2
import shop_pb2_grpc

import rpcwheel

URL = (
    "dubbo+zookeeper://{}/shop.v1.Orders?interface=com.example.shop.Orders&application=py-consumer"
)


def main(seconds: str = "5", zookeeper: str = "127.0.0.1:2181") -> None:
    """Call for some seconds."""
    retry = rpcwheel.RetryPolicy(retry_on={"UNAVAILABLE"})
    with rpcwheel.Kit(timeout=3.0, retry=retry, idempotent=True) as kit:
        orders = shop_pb2_grpc.OrdersStub(kit.channel(URL.format(zookeeper)))
        answers: Counter[str] = Counter()
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            try:
                answers[orders.Place(shop_pb2.Order(item="tea")).server] += 1
            except grpc.RpcError as error:
                answers[f"failed: {error}"] += 1
        for answer, count in sorted(answers.items()):
            print(f"{count:6} {answer}")


if __name__ == "__main__":
    main(*sys.argv[1:])
