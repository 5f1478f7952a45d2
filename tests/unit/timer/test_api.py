"""The types of a timer's interface, and its stats."""

from __future__ import annotations

import dataclasses

import pytest

from rpcwheel.timer import ManualTimer
from rpcwheel.timer.api import LATENESS_BOUNDS_S


def test_timer_stats_are_frozen_and_add_up() -> None:
    timer = ManualTimer()
    kept = [timer.new_timeout(print, 60.0) for _ in range(5)]
    kept[0].cancel()
    timer.new_timeout(lambda _: None, 1.0)
    timer.advance(2.0)
    stats = timer.stats()
    assert (stats.started, stats.pending, stats.fired, stats.cancelled) == (6, 4, 1, 1)
    assert stats.started == stats.pending + stats.fired + stats.cancelled
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.pending = 0  # type: ignore[misc]


def test_lateness_has_one_bucket_per_bound_and_one_more() -> None:
    timer = ManualTimer()
    for delay in (0.1, 0.1004, 0.2):
        timer.new_timeout(lambda _: None, delay)
    timer.advance(1.0)
    lateness = timer.stats().lateness
    assert sum(lateness.buckets) == lateness.count == 3
    assert len(lateness.buckets) == len(LATENESS_BOUNDS_S) + 1
    assert 0.0005 < lateness.max_s < 0.001  # a timeout at 100.4 ms fires at the tick 101
    assert lateness.buckets[:2] == (2, 1)
