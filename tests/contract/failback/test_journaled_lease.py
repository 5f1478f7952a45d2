"""The lease of a queue with a journal."""

import pytest

from fixtures.waiting import wait_until
from rpcwheel.failback import FailbackInvoker, FailbackPolicy


@pytest.mark.parametrize(("lease", "interval_s"), [(2, 0.5), (15, 1.0)])
def test_the_journal_is_asked_several_times_in_a_lease(
    lease, interval_s, timer, tmp_path, monkeypatch
):
    policy = FailbackPolicy(
        retry_on=ConnectionError, journal=f"sqlite://{tmp_path}/journal.db?lease={lease}"
    )
    with FailbackInvoker(policy, timer=timer) as invoker:
        looks = []
        backend = invoker._queue.journal.backend
        monkeypatch.setattr(backend, "take", lambda *given: looks.append(given) or [])
        invoker.add_route("orders:443", lambda *_: None, lambda: True)
        wait_until(lambda: len(looks) == 1)
        for number in range(3):
            timer.advance(interval_s)
            wait_until(lambda number=number: len(looks) == 2 + number)
