"""The hub hands events to sinks, and no sink can hurt whoever emits."""

import logging
import os
import threading

import pytest

from rpcwheel.events import TooManyTimers, add_sink, emit, log_event, remove_sink
from rpcwheel.events.hub import _Hub

EVENT = TooManyTimers(live=65, limit=64)


@pytest.fixture
def hub():
    hub = _Hub()
    hub.remove_sink(log_event)
    return hub


def test_an_event_reaches_every_sink_in_the_order_they_were_added(hub):
    got = []
    hub.add_sink(lambda event: got.append(("first", event)))
    hub.add_sink(lambda event: got.append(("second", event)))
    hub.emit(EVENT)
    assert got == [("first", EVENT), ("second", EVENT)]


def test_a_sink_added_twice_is_called_once(hub):
    got = []
    hub.add_sink(got.append)
    hub.add_sink(got.append)
    hub.emit(EVENT)
    assert got == [EVENT]


def test_a_removed_sink_is_not_called_and_removing_it_again_is_no_error(hub):
    got = []
    hub.add_sink(got.append)
    hub.remove_sink(got.append)
    hub.remove_sink(got.append)
    hub.emit(EVENT)
    assert got == []


def test_a_sink_that_raises_is_logged_once_and_felt_by_nobody(hub, caplog):
    got = []

    def broken(event):
        raise ZeroDivisionError

    hub.add_sink(broken)
    hub.add_sink(got.append)
    for _ in range(3):
        hub.emit(EVENT)
    assert got == [EVENT] * 3
    (record,) = caplog.records
    assert record.name == "rpcwheel"
    assert record.levelno == logging.ERROR
    assert "broken" in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_a_sink_added_again_after_its_removal_is_reported_again(hub, caplog):
    def broken(event):
        raise ZeroDivisionError

    for _ in range(2):
        hub.add_sink(broken)
        hub.emit(EVENT)
        hub.remove_sink(broken)
    assert len(caplog.records) == 2


def test_a_sink_that_emits_for_ever_does_not_hurt_the_emitter(hub):
    hub.add_sink(hub.emit)
    hub.emit(EVENT)


def test_a_sink_may_remove_itself_while_it_is_called(hub):
    got = []

    def once(event):
        got.append(event)
        hub.remove_sink(once)

    hub.add_sink(once)
    hub.emit(EVENT)
    hub.emit(EVENT)
    assert got == [EVENT]


def test_what_is_not_callable_is_refused_with_what_to_give(hub):
    with pytest.raises(TypeError, match=r"callable as sink\(event\), not 'stdout'"):
        hub.add_sink("stdout")


def test_no_sink_is_lost_when_threads_add_at_once(hub):
    sinks = [[] for _ in range(64)]
    threads = [
        threading.Thread(target=lambda part: [hub.add_sink(s.append) for s in part], args=(part,))
        for part in (sinks[:32], sinks[32:])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub.emit(EVENT)
    assert all(sink == [EVENT] for sink in sinks)


def test_the_log_is_a_sink_from_the_start(caplog):
    emit(EVENT)
    assert [record.event for record in caplog.records] == [EVENT]


def test_the_log_can_be_replaced_by_a_sink_of_ones_own(caplog):
    got = []
    remove_sink(log_event)
    add_sink(got.append)
    try:
        emit(EVENT)
    finally:
        remove_sink(got.append)
        add_sink(log_event)
    assert got == [EVENT]
    assert not caplog.records


def test_a_forked_child_can_add_sinks_though_a_thread_held_the_lock(hub):
    from rpcwheel.events.hub import _HUB

    with _HUB._lock:
        child = os.fork()
        if child == 0:
            add_sink(print)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
