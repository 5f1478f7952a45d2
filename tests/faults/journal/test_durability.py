"""The order of the system calls of a client: a log is synchronized before the caller is answered.

SIGKILL cannot show what a power failure would lose: what was written is in the system's memory.
"""

import re
import shutil
import subprocess

import pytest

from fixtures.journal_clients import Records, Settings, store_calls

CALLS = 10
SYNC = re.compile(r"(fsync|fdatasync)\(\d+<[^>]*-wal>")
WRITE = re.compile(r"pwrite64\(\d+<[^>]*-wal>")
ANSWER = re.compile(r'write\(\d+<[^>]*answers>.*\\"queued\\"')
RESUMED = re.compile(r"<\.\.\. (fsync|fdatasync) resumed>")


@pytest.fixture
def strace(tmp_path):
    """The command that traces a client to a file, and the file."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (Debian: apt-get install strace)")
    tried = subprocess.run(["strace", "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"strace may not trace processes here: {tried.stderr.strip()}")
    trace = tmp_path / "trace"
    names = "trace=fsync,fdatasync,pwrite64,write"
    return ["strace", "-f", "-y", "-s", "200", "-e", names, "-o", str(trace)], trace


def events_in(trace):
    """List writes to the log, their synchronization when it has ended, and answers to callers."""
    events, syncing = [], set()
    for line in trace.read_text(errors="replace").splitlines():
        pid = line.split()[0]
        if SYNC.search(line) and "unfinished" in line:
            syncing.add(pid)
        elif SYNC.search(line) or (RESUMED.search(line) and pid in syncing):
            syncing.discard(pid)
            events.append("sync")
        elif WRITE.search(line):
            events.append("write")
        elif ANSWER.search(line):
            events.append("answer")
    return events


@pytest.mark.parametrize(
    ("durability", "expected"),
    [("power", {"write", "sync"}), ("process", {"write"})],
    ids=["power", "process"],
)
def test_the_log_is_synchronized_before_each_answer_only_with_durability_power(
    durability, expected, strace, start_client, server, tmp_path
):
    command, trace = strace
    answers, url = tmp_path / "answers", f"sqlite://{tmp_path}/journal.db?durability={durability}"
    store_calls(url, "elsewhere:443", ["old"])  # creating the file synchronizes it several times
    client = start_client(*command)
    client.start(
        Settings(
            url,
            server.target,
            str(answers),
            "client",
            callers=1,
            calls=CALLS,
            backoff_s=3600.0,
        )
    )
    assert client.wait() == 0
    assert len(Records.read(answers).ids("queued")) == CALLS

    *before_answers, _ = " ".join(events_in(trace)).split("answer")
    assert len(before_answers) == CALLS
    for events in before_answers[1:]:  # before the first one, the log is created
        assert set(events.split()) == expected
        assert durability == "process" or events.split()[-1] == "sync"
