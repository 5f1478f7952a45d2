"""The order in which a use of a journal ends."""

from concurrent.futures import ThreadPoolExecutor

from fixtures.journals import store, stored
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.journal.backend import CallState, Route
from rpcwheel.journal.journal import _OPEN, open_journal


def test_a_worker_is_released_before_its_use_of_the_journal_ends(tmp_path):
    """Another thread may end the last use next, and close the connection."""
    url = f"sqlite://{tmp_path}/calls.db"
    store(url)
    journal = open_journal(url)
    journal.take("w", [Route("*", "", 1)], 0.0)
    with ThreadPoolExecutor() as pool:
        with _OPEN.lock:  # no use ends
            closing = pool.submit(journal.close, "w")
            wait_until(lambda: stored(url, CallState.READY))
        closing.result(WAIT_S)
