"""Clients are killed at random moments under load, and the next ones continue with the journal.

`TEST_KILLS` sets the number of clients that are killed: half of them in each world.
"""

import os
import random
import sqlite3
import time
from functools import partial

import pytest

from fixtures.journal_clients import (
    Records,
    Settings,
    check_deliveries,
    stored_calls,
    wait_until_none_is_stored,
)
from fixtures.recording_server import answer_at_random, succeed
from fixtures.waiting import WAIT_S, wait_until

KILLS = int(os.environ.get("TEST_KILLS", "200"))
LONGEST_LIFE_S = 0.15
"""How long a client is under load at most."""

pytestmark = pytest.mark.timeout(4 * WAIT_S + KILLS)


def is_under_load(answers, start):
    """Whether calls were queued and refused according to the file, from `start` on."""
    answers.seek(start)
    written = answers.read()
    return '"queued"' in written and ('"refused"' in written or '"failed"' in written)


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_kill_9_at_random_moments_loses_no_queued_call_and_delivers_no_refused_one(
    world, server, client, tmp_path
):
    server.answer = answer_at_random
    file, answers = tmp_path / "journal.db", tmp_path / "answers"
    url = f"sqlite://{file}?lease=1"

    def start(number, callers=4):
        client.start(
            Settings(
                url,
                server.target,
                str(answers),
                f"{world}{number}",
                world,
                callers=callers,
                pause_s=0.002,
                max_pending=50 if number % 4 == 2 else 1_000_000,  # some refuse almost all calls
            )
        )

    answers.touch()
    with server.going_up_and_down(), answers.open() as read:
        for number in range(KILLS // 2):
            read.seek(0, os.SEEK_END)
            start(number)
            if number % 2:  # otherwise it may be killed while it opens the journal
                wait_until(partial(is_under_load, read, read.tell()))
            time.sleep(random.uniform(0.0, LONGEST_LIFE_S))
            client.kill()

    records, waiting = Records.read(answers), stored_calls(url)
    queued, refused = records.ids("queued"), records.ids("refused", "failed")
    assert min(len(queued), len(refused)) >= KILLS // 4
    assert not queued - server.delivered() - waiting.keys(), "calls were lost"
    assert not refused & waiting.keys(), "refused calls were stored"

    server.answer = succeed
    start(KILLS, callers=0)
    wait_until_none_is_stored(url)  # up to 15,000
    client.kill()

    assert queued <= server.delivered()
    check_deliveries(server, refused, waiting)
    with sqlite3.connect(file) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()
