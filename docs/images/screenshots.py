"""Makes the pictures of the live view again: `python docs/images/screenshots.py`.

Needs Chromium, and Pillow (`pip install pillow`).
"""

import http.client
import json
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
from PIL import Image
from rich.console import Console

from rpcwheel import FailbackPolicy, Kit, MethodPolicy, Publisher, open_registry
from rpcwheel.cli.top_view import frame

HERE = Path(__file__).parent
REGISTRY = "memory://shop"
TRAFFIC_S = 6.0
CHROMIUM = [
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-lcd-text",
    "--hide-scrollbars",
    "--virtual-time-budget=5000",
]


class Shop(grpc.GenericRpcHandler):
    """`/shop.Orders/Get` and `/shop.Orders/List`."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Answer any method."""
        return grpc.unary_unary_rpc_method_handler(self.answer)

    def answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Take a while; some orders do not exist."""
        time.sleep(0.002)
        if request == b"missing":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such order")
        return request


def run(kit: Kit, stack: ExitStack) -> None:
    """Start three servers, call them until the stack ends, and kill one of them."""
    servers = []
    registry = stack.enter_context(open_registry(REGISTRY))
    for _ in range(3):
        pool = stack.enter_context(ThreadPoolExecutor(4))
        server = grpc.server(pool, interceptors=kit.server_interceptors())
        server.add_generic_rpc_handlers([Shop()])
        port = server.add_insecure_port("127.0.0.1:0")
        detector = kit.detect_idle(server, port)
        publisher = Publisher(server, registry, "shop.Orders", port=port)
        publisher.start()
        stack.callback(publisher.stop)
        stack.callback(detector.close)
        servers.append(server)
    channel = stack.enter_context(kit.channel(f"{REGISTRY}/shop.Orders"))
    audit = stack.enter_context(kit.channel("127.0.0.1:50061"))
    get, find = (channel.unary_unary(f"/shop.Orders/{name}") for name in ("Get", "Find"))
    push = audit.unary_unary("/shop.Audit/Push")
    for number in range(4):
        push(b"%d" % number)
    ended = threading.Event()

    def call() -> None:
        while not ended.wait(0.01):
            for request in (b"1", b"2", b"missing"):
                with suppress(grpc.RpcError):
                    get(request)
                    find(b"1")

    calling = stack.enter_context(ThreadPoolExecutor(1))
    stack.callback(ended.set)
    calling.submit(call)
    time.sleep(TRAFFIC_S / 2)
    servers.pop().stop(None)
    time.sleep(TRAFFIC_S / 2)


def status_of(address: str) -> dict:
    """Read the status."""
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/status.json")
    return json.load(connection.getresponse())


def picture(url: str, name: str, width: int, height: int, profile: str) -> None:
    """Take a picture of a page."""
    subprocess.run(
        [
            *CHROMIUM,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--screenshot={HERE / name}",
            url,
        ],
        check=True,
        capture_output=True,
    )
    drawn = Image.open(HERE / name).quantize(64, dither=Image.Dither.NONE)
    drawn.save(HERE / name, optimize=True)  # a third of the size


def main() -> None:
    """Make both pictures."""
    failback = FailbackPolicy(retry_on="UNAVAILABLE", backoff=30.0, default=b"", name="audit")
    kit = Kit(
        timeout=2.0,
        methods={"/shop.Audit/*": MethodPolicy(failback=failback)},
        heartbeat=1.0,
        idle=60.0,
        status_port=0,
    )
    with ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        run(kit, stack)
        address = kit.status_address or ""
        before = status_of(address)
        time.sleep(1.0)
        console = Console(record=True, width=132, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
        console.print(frame("127.0.0.1:9090", status_of(address), [before], height=64))
        html = Path(profile, "top.html")
        html.write_text(console.export_html(inline_styles=True))
        picture(f"http://{address}/", "live-view.png", 1200, 1120, profile)
        picture(html.as_uri(), "top.png", 1290, 1210, profile)
        kit.close(0)


if __name__ == "__main__":
    main()
