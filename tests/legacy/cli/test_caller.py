"""The demo's client, against a real server that is killed."""

import time
from pathlib import Path

from rpcwheel.cli.audit_pb2 import Event
from rpcwheel.cli.caller import Caller
from rpcwheel.cli.checks import Answer, When
from rpcwheel.cli.demo_server import read_journal
from rpcwheel.cli.server_process import ServerProcess


def test_a_call_that_no_server_answers_is_queued_as_it_was_when_made(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "first") as server,
        Caller(f"127.0.0.1:{server.port}", max_pending=10) as caller,
    ):
        answered = caller.call(1, When.UP)
        server.kill()
        queued = caller.call(2, When.DOWN)
        assert (answered.answer, queued.answer) == (Answer.SERVER, Answer.QUEUED)
        assert caller.pending == 1
        with ServerProcess(tmp_path / "second", port=server.port) as again:
            end = time.monotonic() + 20.0
            while caller.pending and time.monotonic() < end:
                time.sleep(0.01)
            assert read_journal(again.journal) == [queued.request]
    assert Event.FromString(queued.request).id == 2
    assert queued.altered != queued.request
    assert 0 < queued.ended - queued.began < 5.0


def test_a_call_that_fails_is_recorded_with_its_error(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "server") as server,
        Caller(f"127.0.0.1:{server.port}", max_pending=1) as caller,
    ):
        server.kill()
        caller.call(1, When.DOWN)
        refused = caller.call(2, When.DOWN)  # the queue is full
    assert refused.answer is Answer.ERROR
    assert refused.error.startswith("event 2: ")
