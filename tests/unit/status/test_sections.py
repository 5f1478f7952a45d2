"""The list of sections names fields that exist."""

from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from rpcwheel.admission.method import MethodAdmissionStatus
from rpcwheel.failback.queue import QueueStatus
from rpcwheel.heartbeat.monitor import HeartbeatStatus
from rpcwheel.idle.detector import ConnectionStatus
from rpcwheel.journal.journal import JournalStatus
from rpcwheel.limit.server import LimitStatus
from rpcwheel.publisher.publisher import PublisherStatus
from rpcwheel.registry.session import RegistryStatus
from rpcwheel.status.sections import FIELD, RATE, SECTIONS
from rpcwheel.status.snapshot import Status
from rpcwheel.telemetry.call_counts import MethodStatus
from rpcwheel.timer.api import TimerStatus
from rpcwheel.transport.status import ChannelStatus

CLASSES = {
    cls.__name__: cls
    for cls in (
        ChannelStatus,
        ConnectionStatus,
        HeartbeatStatus,
        JournalStatus,
        LimitStatus,
        MethodAdmissionStatus,
        MethodStatus,
        PublisherStatus,
        QueueStatus,
        RegistryStatus,
        TimerStatus,
    )
}
"""What `snapshot` imports for the type checker only."""


def classes_of(path):
    """The classes of the rows at a path: of the outer row, or None, and of the row itself."""
    outer, row = None, Status
    for name in path.split("."):
        outer, row = row, get_args(get_type_hints(row, localns=CLASSES)[name])[0]
    return (None if outer is Status else outer), row


def owner_of(path, field):
    """The class that has the last name of a field."""
    outer, cls = classes_of(path)
    for name in field.split(".")[:-1]:
        cls = outer if name == "outer" else get_type_hints(cls)[name]
    return cls, field.rpartition(".")[2]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_each_column_has_fields_of_the_status(section):
    for column in section.columns:
        for field in column.fields:
            owner, name = owner_of(section.path, field)
            assert name in {each.name for each in fields(owner)} or field == RATE


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_each_metric_has_fields_or_properties_of_the_status(section):
    for metric in section.metrics:
        for field in (*metric.fields, *metric.labels.values()):
            owner, name = owner_of(metric.path or section.path, field)
            assert hasattr(owner, name) or field == FIELD


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_a_problem_is_a_field_because_json_has_no_properties(section):
    _, row = classes_of(section.path)
    assert not hasattr(row, "problem") or "problem" in {each.name for each in fields(row)}
