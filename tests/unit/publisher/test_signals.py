"""The handlers of signals that end a process, and the previous handlers."""

import asyncio
import os
import signal

import pytest

from fixtures.event_loops import uvloop
from fixtures.timers import run_threads
from rpcwheel.publisher.signals import (
    SIGNAL_HANDLERS,
    SignalHandlers,
    is_main_thread,
    signal_handled_by_loop,
)


@pytest.fixture(autouse=True)
def handlers():
    """Restore the handlers after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_each_signal_calls_all_callbacks_and_removing_the_last_restores_the_previous_handlers():
    mine = []
    signal.signal(signal.SIGTERM, lambda *_: mine.append("mine"))
    signals, one, other = SignalHandlers(), [], []
    signals.add(one.append)
    signals.add(other.append)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert one == other == ["SIGTERM", "SIGINT"]
    signals.remove(one.append)
    signal.raise_signal(signal.SIGTERM)
    assert (len(one), len(other), mine) == (2, 3, [])
    signals.remove(other.append)
    signal.raise_signal(signal.SIGTERM)
    assert (len(other), mine) == (3, ["mine"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_set_meanwhile_is_not_replaced():
    signals = SignalHandlers()
    signals.add(print)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signals.remove(print)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.parametrize("previous", ["of the application", "default"])
def test_a_handler_that_calls_the_replaced_one_works_after_the_removal(previous):
    calls, signals = [], SignalHandlers()
    own = (lambda *_: calls.append("previous")) if previous != "default" else signal.SIG_DFL
    signal.signal(signal.SIGTERM, own)
    signals.add(calls.append)
    replaced = signal.getsignal(signal.SIGTERM)

    def chained(number, frame):
        calls.append("chained")
        replaced(number, frame)

    signal.signal(signal.SIGTERM, chained)
    signal.raise_signal(signal.SIGTERM)
    signals.remove(calls.append)
    signal.raise_signal(signal.SIGTERM)
    after = [] if previous == "default" else ["previous"]
    assert calls == ["chained", "SIGTERM", "chained", *after]
    assert signal.getsignal(signal.SIGTERM) is chained


def test_a_previous_handler_need_not_be_hashable():
    class Handler:
        __hash__ = None

        def __call__(self, number, frame):
            """Nothing to do."""

    previous, signals, seen = Handler(), SignalHandlers(), []
    signal.signal(signal.SIGTERM, previous)
    signals.add(seen.append)
    signal.raise_signal(signal.SIGTERM)
    signals.remove(seen.append)
    assert seen == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is previous


@pytest.mark.parametrize("loops", [asyncio, uvloop], ids=["asyncio", "uvloop"])
def test_a_handler_of_a_loop_is_detected(loops):
    if loops is None:
        pytest.skip("uvloop is not installed")

    async def added():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, print)
        known = signal_handled_by_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        return known, signal_handled_by_loop()

    with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
        assert runner.run(added()) == ("SIGTERM", "")


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals, seen = SignalHandlers(), []
    signals.add(seen.append)
    signal.raise_signal(signal.SIGINT)
    assert seen == []


def test_no_handler_is_set_on_another_thread():
    signals, may = SignalHandlers(), []
    before = signal.getsignal(signal.SIGTERM)
    run_threads(lambda: (may.append(is_main_thread()), signals.add(print)))
    assert may == [False]
    assert is_main_thread()
    assert signal.getsignal(signal.SIGTERM) is before


def test_after_a_removal_on_another_thread_the_next_signal_restores_the_handlers():
    mine, signals, seen = [], SignalHandlers(), []
    signal.signal(signal.SIGTERM, lambda *_: mine.append("mine"))
    callback = seen.append
    signals.add(callback)
    run_threads(lambda: signals.remove(callback))
    signal.raise_signal(signal.SIGTERM)
    assert (seen, mine) == ([], ["mine"])


def test_a_callback_may_remove_another_one():
    signals, seen = SignalHandlers(), []
    callbacks = [seen.append, lambda _: signals.remove(callbacks[0]), print]
    for callback in callbacks:
        signals.add(callback)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert seen == ["SIGTERM"]
    for callback in callbacks:
        signals.remove(callback)


def test_a_signal_during_the_removal_of_the_last_callback_is_of_the_previous_handler(monkeypatch):
    mine, signals, getsignal = [], SignalHandlers(), signal.getsignal
    signal.signal(signal.SIGINT, lambda *_: mine.append("SIGINT"))
    signals.add(print)

    def interrupted(number):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return getsignal(number)

    monkeypatch.setattr(signal, "getsignal", interrupted)
    signals.remove(print)
    assert mine == ["SIGINT"]


class Callback:
    """A callback whose comparison, as a point in the midst of a removal, runs a function."""

    def __init__(self, compared):
        self.compared = compared

    def __call__(self, name):
        """Nothing to do."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        self.compared()
        return True


def test_a_callback_that_is_added_during_a_removal_is_called():
    signal.signal(signal.SIGTERM, lambda *_: None)
    signals, seen = SignalHandlers(), []
    signals.add(Callback(lambda: signals.add(seen.append)))
    signals.remove(Callback(int))  # equal, as two bound methods of one object are
    signal.raise_signal(signal.SIGTERM)
    assert seen == ["SIGTERM"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_the_previous_handlers(handlers):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    SIGNAL_HANDLERS.add(print)
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    SIGNAL_HANDLERS.remove(print)
    assert os.WTERMSIG(status) == signal.SIGTERM
