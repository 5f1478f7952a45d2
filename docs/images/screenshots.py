"""Makes the pictures of the live view again, with Chromium: `python docs/images/screenshots.py`."""

import http.client
import json
import struct
import subprocess
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
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
    shrink(HERE / name)


def shrink(path: Path) -> None:
    """Give a PNG of Chromium a palette of at most 256 colors, which takes a quarter of the size."""
    data, chunks, at = path.read_bytes(), {}, 8
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        chunks[kind] = chunks.get(kind, b"") + data[at + 8 : at + 8 + size]
        at += 12 + size
    width, height, depth, color = struct.unpack_from(">IIBB", chunks[b"IHDR"])
    channels = {2: 3, 6: 4}[color]
    if depth != 8:
        raise ValueError(f"{path}: {depth} bits per channel")
    raw, stride = zlib.decompress(chunks[b"IDAT"]), width * channels
    lines, above = [], bytes(stride)
    for start in range(0, len(raw), stride + 1):
        above = unfiltered(raw[start], raw[start + 1 : start + 1 + stride], above, channels)
        lines.append(above)
    for step in (1, 5, 15, 17, 51):  # the finest with at most 256 colors
        levels = bytes(round(value / step) * step for value in range(256))
        palette: dict[bytes, int] = {}
        packed = bytearray()
        for line in lines:
            coarse = line.translate(levels)
            packed.append(0)
            for pixel in range(0, stride, channels):
                packed.append(palette.setdefault(coarse[pixel : pixel + 3], len(palette)) & 255)
        if len(palette) <= 256:
            break
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    body = zlib.compress(bytes(packed), 9)
    parts = [(b"IHDR", header), (b"PLTE", b"".join(palette)), (b"IDAT", body), (b"IEND", b"")]
    path.write_bytes(
        data[:8]
        + b"".join(
            struct.pack(">I", len(one)) + kind + one + struct.pack(">I", zlib.crc32(kind + one))
            for kind, one in parts
        )
    )


def unfiltered(kind: int, line: bytes, above: bytes, channels: int) -> bytes:
    """Return a line of a PNG without its filter (RFC 2083, section 6)."""
    made = bytearray(line)
    for index, value in enumerate(line):
        left = made[index - channels] if index >= channels else 0
        corner = above[index - channels] if index >= channels else 0
        up = above[index]
        guess = left + up - corner
        nearest = min((left, up, corner), key=lambda one: abs(guess - one))
        made[index] = (value + (0, left, up, (left + up) // 2, nearest)[kind]) & 255
    return bytes(made)


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
