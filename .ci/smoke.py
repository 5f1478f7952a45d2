"""Tries an installed rpcwheel in a new environment: `python .ci/smoke.py [native|pure]`.

Makes calls to a real server, with retries and with failback, and examines it with `rpcwheel doctor`
if the extra `cli` is installed. The argument is the form that the timer must have.
"""

import logging
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import grpc

import rpcwheel
from rpcwheel import FailbackPolicy, MethodPolicy, RetryPolicy
from rpcwheel.timer.queue import FORM

if sys.argv[1:] not in ([], [FORM]):
    sys.exit(f"the timer is {FORM}, not {sys.argv[1]}")

logging.getLogger("rpcwheel").addHandler(logging.NullHandler())  # it expects the failures
failures = ["the first attempt"]


def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
    """Fail once, then answer."""
    if failures:
        context.abort(grpc.StatusCode.UNAVAILABLE, failures.pop())
    return b"answer to " + request


handler = grpc.unary_unary_rpc_method_handler(answer)
server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers(
    [grpc.method_handlers_generic_handler("shop.Orders", {"Get": handler})]
)
port = server.add_insecure_port("127.0.0.1:0")
server.start()

failback = FailbackPolicy(retry_on="UNAVAILABLE", default=b"queued")
policies = {
    "/shop.Orders/*": MethodPolicy(idempotent=True),
    "/shop.Audit/*": MethodPolicy(failback=failback),
}
retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=0.01)
with rpcwheel.Kit(timeout=10.0, retry=retry, methods=policies) as kit:
    with kit.channel(f"127.0.0.1:{port}") as channel:
        response = channel.unary_unary("/shop.Orders/Get")(b"1")
    with kit.channel("127.0.0.1:1") as channel:
        default = channel.unary_unary("/shop.Audit/Push")(b"1")
    undelivered = kit.close(drain_timeout=0.0)
if (response, default, len(undelivered)) != (b"answer to 1", b"queued", 1):
    sys.exit(f"unexpected responses: {response!r}, {default!r}, {undelivered!r}")

command = shutil.which("rpcwheel", path=sysconfig.get_path("scripts"))
if command is None:
    sys.exit("the command rpcwheel is not installed")
examined = subprocess.run(
    [command, "doctor", f"127.0.0.1:{port}"], capture_output=True, text=True, check=False
)
has_cli = "rpcwheel[cli]" not in examined.stderr
if has_cli and examined.returncode:
    sys.exit(f"rpcwheel doctor: {examined.returncode}\n{examined.stdout}{examined.stderr}")
server.stop(None)
print(
    f"rpcwheel {rpcwheel.__version__}, Python {sys.version.split()[0]}, {FORM} timer,"
    f" grpcio {version('grpcio')}: calls{' and doctor' if has_cli else ''} work"
)
