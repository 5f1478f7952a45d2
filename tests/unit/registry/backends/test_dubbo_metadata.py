"""Look-ups of the metadata of Dubbo's applications."""

import pytest

from rpcwheel.registry.backends import dubbo_metadata
from rpcwheel.registry.backends.dubbo_metadata import MAX_THREADS, MetadataCache

REVISIONS = [("shop", f"r{number}") for number in range(60)]


class Jobs(list):
    """An executor that keeps its jobs."""

    def submit(self, key, job):
        self.append((key, job))


@pytest.fixture
def jobs(monkeypatch):
    jobs = Jobs()
    monkeypatch.setattr(dubbo_metadata, "EXECUTOR", jobs)
    return jobs


def test_the_lookups_of_many_revisions_share_a_few_threads(jobs):
    cache = MetadataCache(1.0, lambda: None)
    for revision in REVISIONS:
        assert cache.ask(revision, [("10.0.0.7", 1)])
    assert len(jobs) == len(REVISIONS)
    assert len({key for key, _ in jobs}) <= MAX_THREADS


def test_a_lookup_that_has_not_begun_when_the_registry_is_closed_asks_nobody(jobs):
    learned = []
    cache = MetadataCache(1.0, lambda: learned.append(True))
    cache.ask(REVISIONS[0], [("10.0.0.7", 1)])
    cache.close()
    for _, job in jobs:
        job()
    assert "the registry was closed" in cache.get(REVISIONS[0])
    assert learned == []
