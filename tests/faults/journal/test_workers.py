"""Two processes deliver the calls of one journal."""

import threading

import grpc
import pytest

from fixtures.journal_clients import (
    Records,
    Settings,
    store_calls,
    stored_calls,
    wait_until_none_is_stored,
)
from fixtures.waiting import WAIT_S, wait_until

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def start_worker(start_client, server, tmp_path):
    """Starts a client that makes no calls, but delivers those of the journal."""

    def start(name, url):
        client = start_client()
        client.start(Settings(url, server.target, str(tmp_path / "answers"), name))
        return client

    return start


def attempted_by(server, client):
    """The ids of the calls of which a client has made an attempt."""
    return {attempt.id for attempt in list(server.attempts) if attempt.client == client}


def keys_of(server):
    """The keys of each call."""
    return {name: {one.key for one in made} for name, made in server.by_id().items()}


def test_two_live_workers_never_attempt_the_same_call(journal_url, server, start_worker):
    url = journal_url()
    names = [str(number) for number in range(200)]
    answers = threading.Event()
    server.answer = lambda _: answers.wait(WAIT_S) and None
    start_worker("a", url)
    start_worker("b", url)
    store_calls(url, server.target, names)
    wait_until(lambda: attempted_by(server, "a") and attempted_by(server, "b"))
    answers.set()
    wait_until_none_is_stored(url)
    assert sorted(attempt.id for attempt in server.attempts) == sorted(names)


def test_the_calls_of_a_killed_worker_are_delivered_by_the_other(journal_url, server, start_worker):
    url = journal_url(lease=2)
    answers = threading.Event()
    server.answer = lambda _: answers.wait(WAIT_S) and None
    killed = start_worker("a", url)
    start_worker("b", url)
    store_calls(url, server.target, map(str, range(40)))
    wait_until(lambda: attempted_by(server, "a") and attempted_by(server, "b"))
    killed.kill()
    answers.set()
    wait_until_none_is_stored(url)
    assert attempted_by(server, "b") >= attempted_by(server, "a")
    assert all(keys == {name} for name, keys in keys_of(server).items())


def test_results_of_a_worker_that_was_paused_beyond_its_lease_are_ignored(
    journal_url, server, start_worker, tmp_path
):
    url = journal_url(lease=2)
    names = {str(number) for number in range(4)}  # attempted at the same time
    continued, succeeds = threading.Event(), threading.Event()
    held = set()

    def answer(attempt):
        if attempt.client == "a" and attempt.id not in held:
            held.add(attempt.id)
            continued.wait(WAIT_S)
            return None
        return None if succeeds.is_set() else UNAVAILABLE

    server.answer = answer
    store_calls(url, server.target, names)
    paused = start_worker("a", url)
    wait_until(lambda: attempted_by(server, "a") == names)
    paused.stop()
    start_worker("b", url)
    wait_until(lambda: attempted_by(server, "b") == names)
    paused.cont()
    continued.set()  # its attempts have succeeded, but it does not have the calls any more
    wait_until(lambda: "a FailbackLeaseLost" in Records.read(tmp_path / "answers").events)
    paused.end()
    assert stored_calls(url).keys() == names
    succeeds.set()
    wait_until_none_is_stored(url)
    assert all(keys == {name} for name, keys in keys_of(server).items())
