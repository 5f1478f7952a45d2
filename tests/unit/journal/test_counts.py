"""How long a process relies on its count of the stored calls."""

from contextlib import nullcontext
from types import SimpleNamespace

from rpcwheel.journal import counts


class Backend:
    """Counting takes 0.1 s."""

    def __init__(self, clock):
        self.clock, self.counted = clock, 0

    def depths(self):
        self.clock.now_s += 0.1
        self.counted += 1
        return []


def test_counting_takes_at_most_one_percent_of_the_time(monkeypatch):
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(counts, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    backend = Backend(clock)
    outage = SimpleNamespace(is_failing=False, succeeded=lambda: None, failed=print)
    stored = counts.Counts(backend, outage, lambda: 0, nullcontext)
    for _ in range(200):
        stored.refresh("*", 1000)
        clock.now_s += 0.5
    assert backend.counted == 10
