"""The file of what was known last, while processes that write it are killed."""

import json
import subprocess
import sys

import pytest

from fixtures.cache_worlds import REGISTRY, instances
from fixtures.waiting import wait_until
from rpcwheel.registry.snapshot_file import SnapshotFile

WRITER = """
import sys
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import snapshot_file
snapshot_file.DEBOUNCE_S = 0.0
path, service = sys.argv[1:]
one = snapshot_file.SnapshotFile(path, "memory://")
turn = 0
while True:
    turn += 1
    weight = turn % 1000
    many = [ServiceInstance(service=service, host=f"h{n}", port=1, weight=weight) for n in range(9)]
    one.keep(service, many)
"""


def services(path):
    return json.loads(path.read_text())["services"]


@pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
def test_a_reader_never_sees_half_a_file_however_its_writers_are_killed(tmp_path):
    path = tmp_path / "cache" / "orders.json"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name]) for name in ("a", "b")]
    try:
        assert wait_until(lambda: path.exists() and len(services(path)) == 2)
        for _ in range(100):
            for service in services(path).values():
                assert len({record.get("weight", 100) for record in service["instances"]}) == 1
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    after = SnapshotFile(path, REGISTRY)
    after.keep("c", instances("a"))
    after.close()
    assert wait_until(lambda: set(services(path)) == {"a", "b", "c"})
    assert {one.name for one in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}
