"""Events are frozen records whose fields say their unit, and each event has a log line."""

import dataclasses
import inspect
import re

from rpcwheel.events import events

KINDS = [
    kind
    for _, kind in inspect.getmembers(events, inspect.isclass)
    if dataclasses.is_dataclass(kind)
]


def test_events_are_frozen_slotted_dataclasses_derived_from_event():
    for kind in KINDS:
        assert issubclass(kind, events.Event), kind
        assert kind.__dataclass_params__.frozen, kind
        assert "__dict__" not in dir(kind), kind


def test_the_subject_of_a_log_line_and_its_template_name_fields_or_log_texts():
    computed = {"call", "details", "action", "next", "waiting", "state"}
    for kind in KINDS:
        names = {field.name for field in dataclasses.fields(kind)}
        subject = kind.log_line.subject
        subject = kind.subject_fields if subject is None else subject
        assert names.issuperset(subject.split()), kind
        named = re.findall(r"%\((\w+)\)", kind.log_line.template)
        assert {*named} - computed <= names, kind


def test_fields_that_end_with_s_are_the_times():
    for kind in KINDS:
        for field in dataclasses.fields(kind):
            is_time = field.type in {float, float | None}
            assert is_time == field.name.endswith("_s"), (kind, field.name)


def test_every_event_class_is_exported():
    from rpcwheel import events

    assert {"Event", *(kind.__name__ for kind in KINDS)} <= set(events.__all__)
