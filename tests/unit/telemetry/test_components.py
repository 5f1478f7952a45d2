"""Which components a process reports, and what it counts of those that end."""

import gc

import pytest

from rpcwheel.telemetry.components import _Components


class Component:
    """Anything."""


class Ending:
    """A component with counters, which reports them at its end."""

    name, stats = "ending", dict

    def __init__(self, components, end):
        self.itself = self  # a cycle
        self.end = end
        components.add("timer", self, ends=True)

    def status(self):
        return "counts"

    def __del__(self):
        self.end(self)


@pytest.fixture
def ended():
    return []


@pytest.fixture
def components(ended):
    components = _Components()
    components.on_end(ended.append)
    return components


@pytest.fixture(params=["end", "end_timer"])
def component(components, request):
    """The one component that can end, in a list."""
    ends = {
        "end": lambda component: components.end("timer", component),
        "end_timer": components.end_timer,
    }
    return [Ending(components, ends[request.param])]


def test_a_forked_child_reports_only_its_timers_and_queues(components):
    made = {}
    for name in ("timer", "failback", "channel", "heartbeat", "detector", "registry", "publisher"):
        made[name] = Component()
        components.add(name, made[name])
    components.reset()
    assert [name for name in made if components.of_kind(name)] == ["timer", "failback"]
    assert components.of_kind("timer") == [made["timer"]]


def test_the_counts_of_a_component_in_a_cycle_of_references_are_reported(component, ended):
    component.clear()
    gc.collect()
    assert len(ended) == 1


def test_a_component_that_is_not_reported_any_more_reports_no_counts(components, component, ended):
    components.remove("timer", component[0])
    component.clear()
    gc.collect()
    assert ended == []
