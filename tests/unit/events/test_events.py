"""Events are frozen records whose fields say their unit."""

import dataclasses
import inspect

from rpcwheel.events import events

KINDS = [
    kind for _, kind in inspect.getmembers(events, inspect.isclass) if kind is not events.Event
]


def test_an_event_is_a_frozen_record_with_slots():
    for kind in KINDS:
        assert dataclasses.is_dataclass(kind), kind
        assert kind.__dataclass_params__.frozen, kind
        assert "__dict__" not in dir(kind), kind


def test_every_event_derives_from_event():
    assert [kind for kind in KINDS if not issubclass(kind, events.Event)] == []


def test_a_time_in_an_event_names_its_unit():
    for kind in KINDS:
        for field in dataclasses.fields(kind):
            is_time = field.type in {float, float | None}
            assert is_time == field.name.endswith("_s"), (kind, field.name)


def test_every_event_is_public():
    from rpcwheel import events

    assert {"Event", *(kind.__name__ for kind in KINDS)} <= set(events.__all__)
