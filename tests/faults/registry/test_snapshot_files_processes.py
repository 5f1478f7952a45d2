"""The files of what was known last, while processes that write them are killed."""

import json
import subprocess
import sys

import pytest

from fixtures.cache_worlds import REGISTRY, instances
from fixtures.waiting import wait_until
from rpcwheel.registry.snapshot_files import SnapshotFiles

WRITER = """
import sys
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import snapshot_files
snapshot_files.DEBOUNCE_S = 0.0
path, *services = sys.argv[1:]
one = snapshot_files.SnapshotFiles(path, "memory://")
turn = 0
while True:
    turn += 1
    weight = turn % 1000
    for name in services:
        one.keep(name, [ServiceInstance(service=name, host=f"h{n}", port=1, weight=weight)
                        for n in range(9)])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is open can be replaced")
def test_a_reader_never_sees_half_a_file_however_its_writers_are_killed(tmp_path):
    directory = tmp_path / "cache"
    files = {name: directory / f"{name}.json" for name in ("a", "b", "both")}
    command = [sys.executable, "-c", WRITER, str(directory)]
    writers = [subprocess.Popen([*command, name, "both"]) for name in ("a", "b")]
    try:
        assert wait_until(lambda: all(one.exists() for one in files.values()))
        for _ in range(100):
            for file in files.values():
                found = json.loads(file.read_text())["instances"]
                assert len({record.get("weight", 100) for record in found}) == 1
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    after = SnapshotFiles(directory, REGISTRY)
    after.keep("c", instances("a"))
    after.close()
    assert wait_until((directory / "c.json").exists)
    assert after.load("both").instances
