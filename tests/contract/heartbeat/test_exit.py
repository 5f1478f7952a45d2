"""Heartbeats when the program ends, in processes of their own."""

import subprocess
import sys

import pytest

from fixtures.waiting import WAIT_S

CLIENTS = """
import asyncio, sys, threading, time
import rpcwheel, rpcwheel.aio

def sync_heartbeat(target):
    global keep
    manager = rpcwheel.HeartbeatManager(interval=0.05, timeout=60)
    channel = rpcwheel.ReconnectingChannel(target)
    keep = manager, channel
    channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30)
    return manager.attach(channel)

def aio_heartbeat(target):
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def attach():
        global keep
        manager = rpcwheel.aio.HeartbeatManager(interval=0.05, timeout=60)
        channel = rpcwheel.aio.ReconnectingChannel(target)
        keep = manager, channel
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30)
        return manager.attach(channel)

    return asyncio.run_coroutine_threadsafe(attach(), loop).result()

def answered(heartbeat, count):
    until = heartbeat.answered + count
    while heartbeat.answered < until:
        time.sleep(0.005)
"""

SERVER_IN_PROCESS = """
from concurrent import futures
import grpc

def check(request, context):
    return b"\\x08\\x01"

server = grpc.server(futures.ThreadPoolExecutor(4))
handlers = {"Check": grpc.unary_unary_rpc_method_handler(check)}
server.add_registered_method_handlers("grpc.health.v1.Health", handlers)
target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
heartbeat = WORLD_heartbeat(target)
answered(heartbeat, 3)
threading.Thread(target=time.sleep, args=(0.5,)).start()  # heartbeats would be sent meanwhile
print("end")
"""

SERVER_ELSEWHERE = """
heartbeat = WORLD_heartbeat(sys.argv[1])
answered(heartbeat, 3)

def go_on():
    threading.main_thread().join()
    answered(heartbeat, 3)
    print(heartbeat.state.name)

threading.Thread(target=go_on).start()
"""


def run(program, world, pytestconfig, *args):
    """What a program has printed; it must end by itself."""
    ran = subprocess.run(
        [sys.executable, "-c", f"{CLIENTS}{program.replace('WORLD', world)}", *args],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    return ran.stdout, ran.stderr


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_a_program_ends_though_its_server_was_not_stopped(pytestconfig, world):
    """A call that comes after `concurrent.futures` was shut down would hang gRPC's end."""
    assert run(SERVER_IN_PROCESS, world, pytestconfig) == ("end\n", "")


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_a_client_sends_heartbeats_while_threads_outlive_the_main_one(asked, pytestconfig, world):
    stdout, stderr = run(SERVER_ELSEWHERE, world, pytestconfig, asked.target)
    assert (stdout in {"ALIVE\n", "PROBING\n", "SUSPECT\n"}, stderr) == (True, "")
