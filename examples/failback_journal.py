"""Queued calls survive SIGKILL in a journal; run it: python examples/failback_journal.py.

A second process makes calls while the server is down, and is killed. This one delivers them.
"""

import os
import signal
import subprocess
import sys
import tempfile

from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditStub
from audit_server import AuditServer

from rpcwheel import FailbackPolicy, Kit, MethodPolicy

QUEUED = Receipt(number=0)
ORDERS = (1, 2, 3)


def make_kit(journal: str) -> Kit:
    """Make the kit of both processes. The calls of the first are delivered by the second."""
    failback = FailbackPolicy(retry_on="UNAVAILABLE", default=QUEUED, journal=journal)
    return Kit(timeout=20.0, methods={"/shop.Audit/*": MethodPolicy(failback=failback)})


def call(journal: str, target: str) -> None:
    """Make calls without a server, in a process that is killed afterwards."""
    channel = make_kit(journal).channel(target)
    for number in ORDERS:
        answer = AuditStub(channel).Push(Line(text=f"order {number}"))
        print(f"order {number}: queued={answer is QUEUED}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Run the other process, start the server, and deliver what the journal has."""
    with tempfile.TemporaryDirectory() as directory:
        journal = f"sqlite://{directory}/failback.db"  # as in sqlite:///var/lib/shop/failback.db
        server = AuditServer()
        command = [sys.executable, __file__, journal, server.target]
        ended = subprocess.run(command, check=False)  # noqa: S603 - this file
        print("the process was killed:", ended.returncode == -signal.SIGKILL)
        with server, make_kit(journal) as kit, kit.channel(server.target):
            print("the server is up, and this process has the journal")
            kit.flush(timeout=20.0)
            delivered = sum(stats.redelivered for stats in kit.stats().values())
        print("delivered by this process:", delivered)
    return 0 if delivered == len(ORDERS) else 1


if __name__ == "__main__":
    if sys.argv[1:]:
        call(*sys.argv[1:])
    sys.exit(main())
