"""Engines of journals are killed and started again under load."""

import random
import time

import pytest

from fixtures.journal_clients import (
    Records,
    Settings,
    check_deliveries,
    stored_calls,
    wait_until_none_is_stored,
)
from fixtures.recording_server import answer_at_random, succeed
from fixtures.waiting import wait_until

KILLS = 5
LONGEST_LIFE_S = 0.3
"""How long the engine is under load at most until it is killed."""


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_killed_engines_lose_no_queued_call_and_store_no_refused_one(
    world, engine, server, client, tmp_path
):
    answers, url = tmp_path / "answers", engine.journal_url(lease="2")
    server.answer = answer_at_random
    settings = Settings(url, server.target, str(answers), "first", world, callers=4, pause_s=0.002)
    client.start(settings)
    answers.touch()
    with answers.open() as read:

        def wait_for(outcome):
            read.seek(0, 2)
            start = read.tell()
            wait_until(lambda: read.seek(start) == start and f'"{outcome}"' in read.read())

        for _ in range(KILLS):
            wait_for("queued")
            time.sleep(random.uniform(0.0, LONGEST_LIFE_S))
            engine.kill9()
            wait_for("refused")
            engine.start()
        wait_for("queued")
    client.kill()

    records, waiting = Records.read(answers), stored_calls(url)
    queued, refused = records.ids("queued"), records.ids("refused", "failed")
    assert not queued - server.delivered() - waiting.keys(), "calls were lost"
    server.answer = succeed
    client.start(Settings(url, server.target, str(answers), "last", world))
    wait_until_none_is_stored(url)
    assert queued <= server.delivered()
    check_deliveries(server, refused, waiting)
