"""Events are frozen records whose fields say their unit."""

import dataclasses
import inspect

import pytest

from rpcwheel.observe import events

KINDS = [kind for _, kind in inspect.getmembers(events, inspect.isclass)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_is_a_frozen_record_with_slots(kind):
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert "__dict__" not in dir(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_in_an_event_names_its_unit(kind):
    for field in dataclasses.fields(kind):
        is_time = field.type in {float, float | None}
        assert is_time == field.name.endswith("_s"), field.name


def test_every_event_is_public():
    from rpcwheel import observe  # noqa: PLC0415

    assert {kind.__name__ for kind in KINDS} <= set(observe.__all__)
