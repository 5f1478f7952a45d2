"""The Python code of docs/registries.md runs, with the registry in memory."""

import ast
import inspect
import itertools
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import rpcwheel
import rpcwheel.aio

PAGE = Path(__file__).parents[3].joinpath("docs", "registries.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
INSTANCE = rpcwheel.registry.ServiceInstance(service="shop.Orders", host="10.0.0.7", port=50051)
HANDLERS = grpc.method_handlers_generic_handler(
    "shop.Orders", {"Get": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
)


class Stub:
    """In place of the generated stubs of the page."""

    def __init__(self, channel):
        self.Clear = lambda request, timeout: None


def runnable(block, url):
    """The block with a registry in memory, without fixed ports, signals and endless loops."""
    for old, new in {
        "etcd://10.0.0.1:2379": url,
        "headless://shop-orders.default:50051": "headless://localhost:50051",
        'service="shop.Orders", port=50051)': 'service="shop.Orders", port=0, lame_duck=0)',
        '"shop.Orders", port=50051, signals=True': '"shop.Orders", port=0, lame_duck=0',
        "print(len(snapshot.instances))": "break",
        "server.wait_for_termination()": "server.wait_for_termination(0.1)",
    }.items():
        block = block.replace(old, new)
    return block


@pytest.mark.parametrize("block", BLOCKS, ids=itertools.count())
async def test_the_code_in_the_manual_runs(block):
    url = f"memory://manual-{secrets.token_hex(4)}"
    is_aio = "await " in block or "async " in block
    with ThreadPoolExecutor() as pool, rpcwheel.Kit() as kit:
        server = grpc.aio.server() if is_aio else grpc.server(pool)
        server.add_generic_rpc_handlers((HANDLERS,))
        with rpcwheel.open_registry(url) as registry:
            names = {
                "grpc": grpc, "rpcwheel": rpcwheel, "server": server, "kit": kit,
                "registry": registry, "instance": INSTANCE, "OrdersStub": Stub, "CacheStub": Stub,
                "request": b"",
            }  # fmt: skip
            code = compile(runnable(block, url), "registries.md", "exec",
                           flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # fmt: skip
            if inspect.iscoroutine(running := eval(code, names)):
                await running
            left = ("channel", "every_server", "registry", "backend")
            await close_all(names[name] for name in left if name in names)


async def close_all(opened):
    """Close what a block has left open."""
    for one in opened:
        closing = one.close()
        if inspect.isawaitable(closing):
            await closing
