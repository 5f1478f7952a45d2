"""Names, calls and weak references of user callbacks."""

import functools
import gc

import pytest

from rpcwheel._concurrency.callbacks import (
    CloseCallbacks,
    callable_name,
    run_callback,
    weak_callback,
)
from rpcwheel.events import CallbackFailed


def fail(error):
    raise error


@pytest.fixture
def closing():
    return CloseCallbacks("orders")


class Counter:
    def __init__(self):
        self.calls = []

    def call(self, *args):
        self.calls.append(args)


def test_an_exception_of_a_callback_is_an_event(events):
    error = ValueError("no")
    run_callback("orders", fail, error)
    run_callback("orders", fail, error, name="listener")
    assert events == [
        CallbackFailed("orders", f"{__name__}.fail", error),
        CallbackFailed("orders", "listener", error),
    ]


def test_the_name_of_a_callable_has_no_address():
    class Hidden:
        def __getattr__(self, name):
            raise ValueError

    counter = Counter()
    assert callable_name(fail) == f"{__name__}.fail"
    assert callable_name(counter.call) == f"{__name__}.Counter.call"
    assert callable_name(counter) == f"{__name__}.Counter"
    assert callable_name(functools.partial(fail, 1)) == f"{__name__}.fail"
    assert callable_name(Hidden()) == "Hidden"


def test_system_exit_of_a_callback_is_an_event_only_with_catch_base_exception(events):
    with pytest.raises(SystemExit):
        run_callback("orders", fail, SystemExit())
    assert events == []
    run_callback("orders", fail, SystemExit(), catch=BaseException)
    assert [type(event) for event in events] == [CallbackFailed]


def test_a_weak_callback_calls_its_object_while_it_exists():
    counter = Counter()
    calls, callback = counter.calls, weak_callback(counter.call, 1)
    callback(2)
    del counter
    gc.collect()
    callback(3)
    assert calls == [(1, 2)]


def test_close_callbacks_run_once_and_those_added_later_run_immediately(closing):
    counter = Counter()
    closing.add(counter.call)
    closing.run()
    closing.run()
    assert counter.calls == [()]
    closing.add(counter.call)
    assert counter.calls == [(), ()]


def test_a_removed_close_callback_does_not_run(closing):
    counter = Counter()
    remove = closing.add(counter.call)
    remove()
    remove()
    closing.run()
    assert counter.calls == []


def test_close_callbacks_after_one_that_raises_run(closing, events):
    counter, error = Counter(), ValueError("no")
    closing.add(lambda: fail(error))
    closing.add(counter.call)
    closing.run()
    assert counter.calls == [()]
    assert [event.error for event in events] == [error]
