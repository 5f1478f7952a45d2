"""The book alone: who waits, who ends it, what is remembered, what is counted."""

import pytest

from rpcwheel.durations import NEVER
from rpcwheel.errors import CallError, CallsClosed, ConfigurationError, DuplicateKey, TooManyCalls
from rpcwheel.pending.core import REMEMBERED, Book, Ending, Entry, PendingStats, Stray

S = 1_000_000_000


def entry(key, number=1, *, now=0, timeout=2 * S):
    return Entry(key, number, object(), now, timeout)


def book_with(*keys, connection=None, max_pending=None):
    book = Book("orders", max_pending)
    for number, key in enumerate(keys, 1):
        book.open(entry(key, number), connection)
    return book


def test_a_key_that_waits_is_not_given_twice_and_the_first_call_goes_on():
    book = book_with()
    first = entry(7)
    book.open(first, None)
    with pytest.raises(
        DuplicateKey, match="orders: a call with the key 7 waits already"
    ) as refused:
        book.open(entry(7, 2), None)
    assert isinstance(refused.value, CallError)
    assert not isinstance(refused.value, ConfigurationError)
    assert book.stats().opened == 1
    assert book.answer(7, Ending.ANSWERED, 0) is first


def test_an_end_meant_for_a_former_use_of_the_key_does_not_touch_the_new_call():
    book = book_with()
    book.open(entry(7, 1), None)
    book.answer(7, Ending.ANSWERED, 0)
    book.open(entry(7, 2), None)
    assert book.end(7, 1, Ending.TIMED_OUT, 0) is None
    assert len(book) == 1


def test_a_full_book_says_so_and_takes_calls_again_when_one_has_ended():
    book = book_with(1, max_pending=1)
    with pytest.raises(TooManyCalls, match="1 calls wait for an answer already"):
        book.open(entry(2), None)
    book.answer(1, Ending.FAILED, 0)
    book.open(entry(2), None)


def test_a_closed_book_takes_no_calls():
    book = book_with(1, 2)
    assert [gone.key for gone in book.close(0)] == [1, 2]
    with pytest.raises(CallsClosed, match="orders: closed"):
        book.open(entry(3), None)
    assert book.close(0) == []


def test_a_connection_takes_only_its_own_calls_with_it_in_order():
    book = book_with(1, 2, connection="a")
    book.open(entry(3, 3), "b")
    book.open(entry(4, 4), None)
    assert [gone.key for gone in book.lose("a", 0)] == [1, 2]
    assert book.lose("a", 0) == []
    assert len(book) == 2


def test_a_connection_is_forgotten_with_its_last_call():
    book = book_with(1, 2, connection="a")
    book.answer(1, Ending.ANSWERED, 0)
    assert list(book._of) == ["a"]
    book.end(2, 2, Ending.CANCELLED, 0)
    assert not book._of


@pytest.mark.parametrize("key", [[], {}])
def test_what_is_not_hashable_leaves_no_trace(key):
    book = book_with()
    with pytest.raises(TypeError):
        book.open(entry(key), "a")
    with pytest.raises(TypeError):
        book.open(entry(1), key)
    assert not len(book)
    assert not book._of
    assert book.stats().opened == 0


@pytest.mark.parametrize("ending", [Ending.TIMED_OUT, Ending.CANCELLED])
def test_an_answer_after_an_end_without_one_is_late_once_and_then_unknown(ending):
    book = book_with(7)
    book.end(7, 1, ending, 2 * S)
    assert book.answer(7, Ending.ANSWERED, 5 * S) == Stray(ending, 3 * S)
    assert book.answer(7, Ending.ANSWERED, 6 * S) == Stray(None, 0)
    assert (book.stats().late, book.stats().unknown) == (1, 1)


def test_answers_after_a_lost_connection_and_after_close_are_late():
    book = book_with(1, connection="a")
    book.lose("a", 0)
    book.open(entry(2), None)
    book.close(0)
    assert book.answer(1, Ending.ANSWERED, 0).ending is Ending.LOST
    assert book.answer(2, Ending.ANSWERED, 0).ending is Ending.CLOSED


@pytest.mark.parametrize("ending", [Ending.ANSWERED, Ending.FAILED])
def test_a_second_answer_is_unknown(ending):
    book = book_with(7)
    book.answer(7, ending, 0)
    assert book.answer(7, Ending.ANSWERED, 0) == Stray(None, 0)


def test_only_the_last_ones_are_remembered():
    book = book_with(*range(REMEMBERED + 1))
    for key in range(REMEMBERED + 1):
        book.end(key, key + 1, Ending.TIMED_OUT, 0)
    assert len(book._gone) == REMEMBERED
    assert book.answer(0, Ending.ANSWERED, 0).ending is None
    assert book.answer(1, Ending.ANSWERED, 0).ending is Ending.TIMED_OUT


def test_a_key_that_is_used_again_has_no_past():
    book = book_with(7)
    book.end(7, 1, Ending.TIMED_OUT, 0)
    book.open(entry(7, 2), None)
    book.answer(7, Ending.ANSWERED, 0)
    assert book.answer(7, Ending.ANSWERED, 0).ending is None


def test_a_revoked_call_was_never_opened():
    book = book_with()
    call = entry(7)
    book.open(call, "a")
    book.revoke(call)
    assert book.stats() == PendingStats(0, 0, 0, 0, 0, 0, 0, 0)
    assert not book._of
    book.revoke(call)
    assert book.stats().opened == 0


def test_a_call_that_has_ended_takes_no_timeout_nor_its_successor():
    book = book_with()
    first = entry(7)
    book.open(first, None)
    book.answer(7, Ending.ANSWERED, 0)
    assert not book.arm(first, object())
    book.open(entry(7, 2), None)
    assert not book.arm(first, object())


def test_the_first_time_of_sending_counts():
    book = book_with()
    call = entry(7)
    book.open(call, None)
    assert book.sent(7, 1)
    assert book.sent(7, 2)
    assert call.sent_ns == 1
    assert not book.sent(8, 1)


@pytest.mark.parametrize(
    ("sent_ns", "side"), [(None, "client"), (2 * S - 1, "server"), (2 * S, "client"), (0, "server")]
)
def test_the_side_that_used_up_the_time_is_the_slow_one(sent_ns, side):
    call = entry(7, now=0, timeout=2 * S)
    call.sent_ns = sent_ns
    error = call.overdue(3 * S, "orders")
    assert (error.side, error.timeout, error.elapsed, error.start) == (side, 2.0, 3.0, 0.0)
    assert error.sent == (None if sent_ns is None else sent_ns / 1e9)
    assert (error.key, error.name) == (7, "orders")


def test_a_call_without_limit_is_measured_against_none():
    call = entry(7, timeout=NEVER)
    call.sent_ns = 10 * S
    assert call.overdue(11 * S, "orders").side == "server"


def test_the_figures_add_up():
    book = book_with(*range(6))
    book.answer(0, Ending.ANSWERED, 0)
    book.answer(1, Ending.FAILED, 0)
    book.end(2, 3, Ending.TIMED_OUT, 0)
    book.end(3, 4, Ending.CANCELLED, 0)
    assert book.stats() == PendingStats(
        pending=2, opened=6, answered=1, failed=1, timed_out=1, cancelled=1, late=0, unknown=0
    )
    book.close(0)
    assert book.stats().failed == 3
