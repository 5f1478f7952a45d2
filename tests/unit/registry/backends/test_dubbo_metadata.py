"""Look-ups of the metadata of Dubbo's applications."""

import weakref

import pytest

from fixtures.leaks import no_garbage_collector
from fixtures.ports import free_port
from fixtures.waiting import wait_until
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


class NotingCalls(dict):
    """Has a weak reference to the last call."""

    def __setitem__(self, revision, call):
        if call is not None:
            self.left = weakref.ref(call)
        super().__setitem__(revision, call)


def test_a_call_that_has_failed_is_freed_without_the_garbage_collector():
    """In a cycle it would live until the interpreter ends, where its finalizer can hang."""
    cache = MetadataCache(1.0, lambda: None)
    cache._under_way = calls = NotingCalls()
    with no_garbage_collector():
        cache.ask(REVISIONS[0], [("127.0.0.1", free_port())])
        assert wait_until(lambda: "UNAVAILABLE" in cache.get(REVISIONS[0]))
        assert wait_until(lambda: calls.left() is None)
