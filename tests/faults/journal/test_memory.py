"""The memory of a client whose journal has many calls."""

import re
from functools import partial
from pathlib import Path

from fixtures.journal_clients import Settings, store_calls
from fixtures.recording_server import succeed
from fixtures.waiting import WAIT_S, wait_until

FEW, MANY = 4_000, 50_000

SIZE = 1000
"""Bytes of a call. All of them need more than 50 MB."""

DELIVERED = 3000
"""The number of calls after which memory is measured. By then, the window has its largest size."""

LIMIT_MB = 30.0


def peak_mb(pid):
    """The largest memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def has_delivered(server, client):
    """Whether a client has delivered enough."""
    return sum(attempt.client == client for attempt in list(server.attempts)) >= DELIVERED


def test_memory_does_not_grow_with_the_number_of_waiting_calls(server, start_client, tmp_path):
    server.answer = succeed
    clients = {}
    for name, calls in (("few", FEW), ("many", MANY)):
        url = f"sqlite://{tmp_path}/{name}.db"
        names = (f"{name}-{number}-{'x' * SIZE}" for number in range(calls))
        store_calls(url, server.target, names)
        clients[name] = start_client()
        clients[name].start(Settings(url, server.target, str(tmp_path / "answers"), name))
        wait_until(partial(has_delivered, server, name), timeout=3 * WAIT_S)
    assert peak_mb(clients["many"].pid) - peak_mb(clients["few"].pid) <= LIMIT_MB
