"""Fixtures for the tests of journals with real processes."""

import contextlib

import pytest

from fixtures.journal_clients import JournalClient
from fixtures.recording_server import RecordingServer


@pytest.fixture
def server():
    """A server at which the first attempts of calls fail, and all others succeed."""
    with RecordingServer() as server:
        yield server


@pytest.fixture
def start_client():
    """Make a `JournalClient`, which is closed at the end of the test."""
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(JournalClient())


@pytest.fixture
def client(start_client):
    """A `JournalClient`."""
    return start_client()
