"""`emit` passes events to all sinks; exceptions of sinks do not reach the emitter."""

import asyncio
import logging
from unittest.mock import Mock

import pytest

from fixtures.forks import held_by_another_thread, holds_in_child
from fixtures.timers import run_threads
from rpcwheel.events import TooManyTimers, add_sink, emit, log_event
from rpcwheel.events.hub import _SINKS, SinkList

EVENT = TooManyTimers(live=65, limit=64)


def broken(event):
    raise ZeroDivisionError


@pytest.fixture
def sink_list():
    sink_list = SinkList()
    sink_list.remove_sink(log_event)
    return sink_list


def test_each_sink_is_called_once_in_the_order_of_its_addition_until_it_is_removed(sink_list):
    got = []

    def first(event):
        got.append(("first", event))

    for sink in (first, got.append, first):
        sink_list.add_sink(sink)
    sink_list.emit(EVENT)
    assert got == [("first", EVENT), EVENT]
    for _ in range(2):
        sink_list.remove_sink(first)
    sink_list.emit(EVENT)
    assert got[2:] == [EVENT]


def test_an_exception_of_a_sink_is_logged_once_and_other_sinks_get_the_event(sink_list, caplog):
    got = []
    sink_list.add_sink(broken)
    sink_list.add_sink(got.append)
    for _ in range(3):
        sink_list.emit(EVENT)
    assert got == [EVENT] * 3
    (record,) = caplog.records
    assert record.name == "rpcwheel"
    assert record.levelno == logging.ERROR
    assert "broken" in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_a_sink_ends_no_thread_except_the_main_one(sink_list, caplog):
    """On the main thread, a signal handler may have raised the exception."""
    sink_list.add_sink(Mock(side_effect=SystemExit))
    run_threads(lambda: sink_list.emit(EVENT))
    assert [record.exc_info[0] for record in caplog.records] == [SystemExit]
    with pytest.raises(SystemExit):
        sink_list.emit(EVENT)


def test_a_sink_that_raises_cancelled_error_does_not_cancel_the_emitter(sink_list, caplog):
    sink_list.add_sink(Mock(side_effect=asyncio.CancelledError))
    sink_list.emit(EVENT)
    assert [record.exc_info[0] for record in caplog.records] == [asyncio.CancelledError]


def test_an_exception_of_logging_does_not_reach_the_emitter(sink_list, monkeypatch):
    monkeypatch.setattr(logging.getLogger("rpcwheel"), "filters", [broken])
    sink_list.add_sink(broken)
    sink_list.emit(EVENT)


def test_an_exception_of_a_sink_that_was_added_again_is_logged_again(sink_list, caplog):
    for _ in range(2):
        sink_list.add_sink(broken)
        sink_list.emit(EVENT)
        sink_list.remove_sink(broken)
    assert len(caplog.records) == 2


def test_a_finalizer_may_emit_an_event_while_a_sink_is_added(sink_list):
    class Sink:
        def __call__(self, event):
            raise ZeroDivisionError

        def __eq__(self, other):
            """Emit, as a finalizer may do at any time while the lock is held."""
            sink_list.emit(EVENT)
            return self is other

        __hash__ = None

    def add():
        for _ in range(2):
            sink_list.add_sink(Sink())

    run_threads(add)


def test_a_sink_that_emits_recursively_does_not_raise_in_the_emitter(sink_list):
    sink_list.add_sink(sink_list.emit)
    sink_list.emit(EVENT)


def test_a_sink_may_remove_itself_while_it_is_called(sink_list):
    got = []

    def once(event):
        got.append(event)
        sink_list.remove_sink(once)

    sink_list.add_sink(once)
    sink_list.emit(EVENT)
    sink_list.emit(EVENT)
    assert got == [EVENT]


def test_sinks_added_by_concurrent_threads_are_all_called(sink_list):
    sinks = [[] for _ in range(64)]
    run_threads(
        lambda: [sink_list.add_sink(sink.append) for sink in sinks[:32]],
        lambda: [sink_list.add_sink(sink.append) for sink in sinks[32:]],
    )
    sink_list.emit(EVENT)
    assert all(sink == [EVENT] for sink in sinks)


def test_log_event_is_installed_by_default(caplog):
    emit(EVENT)
    assert [record.rpcwheel_event for record in caplog.records] == [type(EVENT).__name__]


def test_a_child_forked_while_the_lock_was_held_can_add_sinks():
    with held_by_another_thread(_SINKS._lock):
        assert holds_in_child(lambda: add_sink(print) is None)
