"""The example registry.py with the registry in etcd; run it: python examples/registry_etcd.py.

Set ETCD_URL=etcd://HOST:PORT to use a running etcd; otherwise one is started from the PATH. Servers
and client start before etcd answers: the servers are published, and found, as soon as it does.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import registry

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def etcd() -> Iterator[str]:
    """Start an etcd; yield its URL."""
    with socket.socket() as client, socket.socket() as peer:
        for each in client, peer:
            each.bind(("127.0.0.1", 0))
        host, own = (f"127.0.0.1:{each.getsockname()[1]}" for each in (client, peer))
    with TemporaryDirectory() as directory:
        command = ["etcd", "--data-dir", directory, "--log-level", "error"]
        for option in "listen-client-urls", "advertise-client-urls":
            command += [f"--{option}", f"http://{host}"]
        for option in "listen-peer-urls", "initial-advertise-peer-urls":
            command += [f"--{option}", f"http://{own}"]
        command += ["--initial-cluster", f"default=http://{own}"]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:  # noqa: S603 - the command made above
            try:
                yield f"etcd://{host}"
            finally:
                process.terminate()


def main() -> int:
    """Run the example; return the exit status."""
    if given := os.environ.get("ETCD_URL"):
        return not registry.story(f"{given.rstrip('/')}/shop.Audit")
    if shutil.which("etcd") is None:
        print("etcd is missing: set ETCD_URL, or (Debian) apt-get install etcd-server")
        return 2
    with etcd() as url:
        return not registry.story(f"{url}/shop.Audit")


if __name__ == "__main__":
    sys.exit(main())
