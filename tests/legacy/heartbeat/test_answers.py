"""Who reads the answers to heartbeats: few workers while they come, more where they don't."""

import threading

import pytest

from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._concurrency.executor import SerialExecutor
from rpcwheel.heartbeat.answers import Answers
from rpcwheel.observe import TaskFailed


class Call:
    """Ends when it is told to."""

    def __init__(self, *, ended=False):
        self.gate = threading.Event()
        self.thread = None
        if ended:
            self.gate.set()

    def read(self):
        self.thread = threading.get_ident()
        assert self.gate.wait(WAIT_S)
        return "OK", b"x"


@pytest.fixture
def books():
    return SerialExecutor()


@pytest.fixture
def send(books):
    """Sends some together, and gives what became of them, in order."""

    def send(*calls):
        got, answers = [], Answers(books)

        def go():
            for call in calls:
                answers.expect(call, lambda *what, call=call: got.append((call, *what)))

        books.submit(go)
        return got

    return send


def test_what_is_answered_at_once_is_read_in_a_row_by_one_worker(send):
    calls = [Call(ended=True) for _ in range(20)]
    got = send(*calls)
    assert wait_until(lambda: len(got) == 20)
    assert got == [(call, "OK", b"x") for call in calls]


def test_it_is_not_the_worker_that_sends(send, books):
    stuck = Call()
    send(stuck)
    assert wait_until(lambda: stuck.thread)
    went_on = threading.Event()
    books.submit(went_on.set)
    assert went_on.wait(WAIT_S)
    stuck.gate.set()


def test_answers_behind_one_that_does_not_come_are_read_all_the_same(send):
    stuck, others = Call(), [Call(ended=True) for _ in range(20)]
    got = send(stuck, *others)
    assert wait_until(lambda: len(got) == 20)
    stuck.gate.set()
    assert wait_until(lambda: len(got) == 21)


def test_of_many_that_are_not_answered_each_has_a_worker_in_the_end(send):
    stuck = [Call() for _ in range(30)]
    last = Call(ended=True)
    got = send(*stuck, last)
    assert wait_until(lambda: len(got) == 1)
    assert len({call.thread for call in stuck}) == 30
    for call in stuck:
        call.gate.set()
    assert wait_until(lambda: len(got) == 31)


def test_one_whose_end_goes_wrong_holds_up_none_of_the_others(books, events):
    answers, got = Answers(books), []

    def broken(*_):
        raise ValueError("a bug of ours")

    def note(*what):
        got.append(what)

    def fill():
        answers.expect(Call(ended=True), broken)
        answers.expect(Call(ended=True), note)

    books.submit(fill)
    assert wait_until(lambda: got == [("OK", b"x")])
    assert wait_until(lambda: any(isinstance(event, TaskFailed) for event in events))


def test_a_forked_child_has_none_to_read(books):
    answers, got = Answers(books), []
    gate = threading.Event()
    books.submit(lambda: gate.wait(WAIT_S))
    answers.expect(Call(ended=True), lambda *what: got.append(what))
    answers.reset()  # as `reset_after_fork` has it
    gate.set()
    done = threading.Event()
    books.submit(done.set)
    assert done.wait(WAIT_S)
    assert got == []
