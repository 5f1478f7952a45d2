"""The core under its lock, and who waits for it to be empty."""

import gc
import threading

import pytest

from fixtures.waiting import WAIT_S
from rpcwheel.failback import FailbackPolicy
from rpcwheel.failback.book import Book
from rpcwheel.failback.core import Admission, Again, Last
from rpcwheel.failback.entry import Call, Entry, FailedCall, State
from rpcwheel.timer import ManualTimer

GONE = ConnectionError("gone")
S = 1_000_000_000


@pytest.fixture
def book():
    return Book(FailbackPolicy(retry_on=ConnectionError, max_pending=50))


def entry():
    return Entry(Call.at_rest(print, (), {}), GONE, 0, 0, print)


def parked(book):
    one = entry()
    assert book.admit(one)[0] is Admission.PARKED
    return one


def test_admitting_tells_how_many_are_pending_then(book):
    assert [book.admit(entry()) for _ in range(2)] == [(Admission.PARKED, 1), (Admission.PARKED, 2)]


def test_who_waits_is_told_once_when_the_last_call_is_gone(book):
    told = []
    one, other = parked(book), parked(book)
    book.when_empty(lambda: told.append("empty"))
    book.remove(one, Last.DELIVERED)
    assert told == []
    book.remove(other, Last.ABANDONED)
    book.remove(parked(book), Last.DELIVERED)
    assert told == ["empty"]


def test_who_waits_on_an_empty_book_is_told_at_once(book):
    told = []
    book.when_empty(lambda: told.append("empty"))
    assert told == ["empty"]


def test_who_has_taken_its_question_back_is_not_told(book):
    told = []
    one = parked(book)
    book.when_empty(told.clear)
    book.forget(told.clear)
    book.forget(told.clear)
    told.append("untouched")
    book.remove(one, Last.DELIVERED)
    assert told == ["untouched"]


def test_an_entry_that_is_refused_or_left_at_the_end_empties_the_book_too(book):
    told = []
    one = parked(book)
    book.when_empty(lambda: told.append("refused"))
    book.refuse(one)
    parked(book)
    book.when_empty(lambda: told.append("left"))
    book.take_left()
    assert told == ["refused", "left"]


def test_claiming_an_entry_takes_its_wake_up_off_the_timer(book):
    with ManualTimer() as timer:
        one = parked(book)
        book.arm(one, one.attempts, timer.new_timeout(print, 5))
        assert book.claim(one, 0)
        assert timer.pending == 0


def test_a_wake_up_that_comes_too_late_is_cancelled(book):
    with ManualTimer() as timer:
        one = parked(book)
        attempts, timeout = one.attempts, timer.new_timeout(print, 5)
        book.claim(one, 0)  # a flush was quicker
        book.wait_again(one, GONE, 0)
        book.arm(one, attempts, timeout)
        assert timeout.cancelled()
        assert one.timeout is None


def test_the_end_takes_all_wake_ups_off_the_timer(book):
    with ManualTimer() as timer:
        one = parked(book)
        book.arm(one, one.attempts, timer.new_timeout(print, 5))
        assert book.take_left() == ([], [(one, State.WAITING)])
        assert timer.pending == 0


def test_a_drain_hurries_from_close_to_the_end_only(book):
    def after():
        return book.after_failure(GONE, 0, started_ns=0)

    assert after() == Again(5 * S)
    assert book.close(2 * S)
    assert after() == Again(S)
    book.take_left()
    assert after() == Again(5 * S)


def test_a_second_close_does_not_prolong_the_drain(book):
    book.close(2 * S)
    assert not book.close(100 * S)
    assert book.after_failure(GONE, 0, started_ns=0) == Again(S)


def test_calls_given_up_are_kept_while_closing_only(book):
    failed = FailedCall("f", (), {}, 1, 0.0, GONE, "x")
    book.keep(failed)
    book.close(S)
    book.keep(failed)
    assert book.take_left() == ([failed], [])
    assert book.take_left() == ([], [])


def test_a_disowned_book_is_as_new(book):
    one, told = parked(book), []
    book.when_empty(lambda: told.append("the parent's"))
    book.close(S)
    holder, held, end = holding(book._lock)  # as another thread may, when this one forks
    assert held.wait(WAIT_S)
    book.disown()
    assert one.state is State.GONE
    assert book.after_failure(GONE, 0, started_ns=0) == Again(5 * S)
    assert book.stats() == Book(FailbackPolicy(retry_on=OSError)).stats()
    end.set()
    holder.join()
    assert told == []


def holding(lock):
    """A thread that holds the lock, an event for when it does, and one to end it."""
    held, end = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            end.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    return thread, held, end


def test_a_finalizer_that_makes_a_failing_call_does_not_deadlock(book):
    class Late:
        def __del__(self):
            parked(book)

    late = Late()
    late.itself = late
    with book._lock:
        del late
        gc.collect()
    assert book.pending == 1


def test_many_threads_end_every_call_exactly_once(book):
    """Four threads race for each call: one claims it, one ends it."""
    entries = [parked(book) for _ in range(50)]
    claims, ends = [], []

    def race(order):
        for one in order:
            if book.claim(one, 0):
                claims.append(one)
            if book.remove(one, Last.DELIVERED):
                ends.append(one)

    orders = [entries, entries[::-1], entries[::2] + entries[1::2], entries]
    threads = [threading.Thread(target=race, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == len(set(ends)) == 50
    assert len(claims) == len(set(claims))
    assert book.stats().delivered_later == 50
