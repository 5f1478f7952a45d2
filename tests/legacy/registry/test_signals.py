"""Whoever is told of the signals that end a process, and who was before."""

import asyncio
import os
import signal
import threading

import pytest

from rpcwheel.registry.signals import (
    SIGNAL_HANDLERS,
    SignalHandlers,
    is_main_thread,
    signal_handled_by_loop,
)


@pytest.fixture(autouse=True)
def handlers():
    """Those of before the test come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_each_signal_is_told_to_all_who_want_to_know():
    signals, one, other = SignalHandlers(), [], []
    signals.add(one.append)
    signals.add(other.append)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert one == other == ["SIGTERM", "SIGINT"]


def test_the_handlers_of_before_come_back_with_the_last_who_leaves():
    mine = []
    signal.signal(signal.SIGTERM, lambda *_: mine.append("mine"))
    signals, one, other = SignalHandlers(), [], []
    signals.add(one.append)
    signals.add(other.append)
    signals.remove(one.append)
    signal.raise_signal(signal.SIGTERM)
    assert (one, other, mine) == ([], ["SIGTERM"], [])
    signals.remove(other.append)
    signal.raise_signal(signal.SIGTERM)
    assert (other, mine) == (["SIGTERM"], ["mine"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_set_meanwhile_stays():
    signals, told = SignalHandlers(), print
    signals.add(told)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signals.remove(told)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_handler_that_a_loop_has_added_is_known():
    async def added():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, print)
        known = signal_handled_by_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        return known, signal_handled_by_loop()

    assert asyncio.run(added()) == ("SIGTERM", "")


def test_what_was_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals, told = SignalHandlers(), []
    signals.add(told.append)
    signal.raise_signal(signal.SIGINT)
    assert told == []


def on_another_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)


def test_off_the_main_thread_no_handler_is_set():
    signals, may = SignalHandlers(), []
    before = signal.getsignal(signal.SIGTERM)
    on_another_thread(lambda: (may.append(is_main_thread()), signals.add(print)))
    assert may == [False]
    assert is_main_thread()
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_leaves_on_another_thread_has_the_next_signal_go_to_who_was_there_before():
    mine, signals, told = [], SignalHandlers(), []
    signal.signal(signal.SIGTERM, lambda *_: mine.append("mine"))
    tell = told.append
    signals.add(tell)
    on_another_thread(lambda: signals.remove(tell))
    signal.raise_signal(signal.SIGTERM)
    assert (told, mine) == ([], ["mine"])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_dies_of_a_signal_as_if_nobody_had_wanted_to_know(handlers):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    SIGNAL_HANDLERS.add(told := print)
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    SIGNAL_HANDLERS.remove(told)
    assert os.WTERMSIG(status) == signal.SIGTERM
