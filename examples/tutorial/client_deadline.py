"""Calls with a deadline: python client_deadline.py price tea."""

import grpc
from client import make_calls

import rpcwheel

kit = rpcwheel.Kit(timeout=1.0)
with kit, kit.intercept_channel(grpc.insecure_channel("127.0.0.1:50051")) as channel:
    make_calls(channel)
