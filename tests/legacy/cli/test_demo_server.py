"""The server as a program: what it records, when it answers, when it leaves."""

from pathlib import Path

import grpc
import pytest

from fixtures.waiting import WAIT_S
from rpcwheel.cli.audit_pb2 import Event
from rpcwheel.cli.audit_pb2_grpc import AuditStub
from rpcwheel.cli.demo_server import PORTS, main, read_journal
from rpcwheel.cli.server_process import ServerProcess

EVENT = Event(id=7, text="注文 \N{ROCKET}", payload=bytes(range(256)), at_unix_ns=-1)


def test_it_answers_and_has_recorded_the_bytes_by_then(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server") as server:
        assert server.port in PORTS
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            receipt = AuditStub(channel).Push(EVENT, timeout=WAIT_S)
        assert (receipt.id, receipt.server_pid) == (7, server.pid)
        assert read_journal(server.journal) == [EVENT.SerializeToString()]


def test_a_record_cut_short_by_the_kill_does_not_count(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_text("00ff\n0a0b\n0c")
    assert read_journal(journal) == [b"\x00\xff", b"\x0a\x0b"]
    assert read_journal(tmp_path / "none") == []


def test_a_journal_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("00ff\nnot hex\n")
    with pytest.raises(ValueError, match="non-hexadecimal"):
        read_journal(tmp_path / "journal")


def test_it_wants_a_journal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "--journal" in capsys.readouterr().err
