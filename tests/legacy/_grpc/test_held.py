"""What a caller holds answers as the call that it ends with, and ends when nobody holds it."""

import gc

import grpc

from rpcwheel._grpc.calls import AnsweredCall, EndedCall
from rpcwheel._grpc.held import HeldCall, HeldStream


class Over:
    """A course that has ended with a call; `log` has what it was asked."""

    def __init__(self, final):
        self.final = final
        self.log = []

    def wait(self, timeout=None):
        self.log.append(("wait", timeout))
        return self.final

    def initial_metadata(self):
        return (("a", "b"),)

    def next_message(self):
        return next(self.final)

    def cancel(self):
        return False

    def drop(self):
        self.log.append("drop")

    def look(self):
        self.log.append("look")

    def add_hook(self, hook, *args):
        return False

    def seconds_left(self):
        return 1.5


def test_its_answers_are_those_of_the_call_that_it_ends_with():
    call = HeldCall(Over(AnsweredCall(b"x", "why", trailing=(("c", "d"),))))
    assert (call.result(3), call.exception(), call.traceback()) == (b"x", None, None)
    assert (call.code(), call.details()) == (grpc.StatusCode.OK, "why")
    assert (call.initial_metadata(), call.trailing_metadata()) == ((("a", "b"),), (("c", "d"),))
    assert call.debug_error_string() == ""
    assert (call.done(), call.running(), call.is_active()) == (True, False, False)
    assert (call.cancel(), call.cancelled(), call.time_remaining()) == (False, False, 1.5)
    assert call._course.log[0] == ("wait", 3)
    assert repr(call) == repr(call._course.final)


def test_one_that_runs_is_not_done():
    call = HeldCall(Over(None))
    assert (call.done(), call.running(), call.is_active(), call.cancelled()) == (
        False,
        True,
        True,
        False,
    )
    assert repr(call) == "<HeldCall object>"


def test_who_comes_late_is_told_at_once():
    call, told = HeldCall(Over(EndedCall(grpc.StatusCode.ABORTED, "no"))), []
    call.add_done_callback(told.append)
    assert told == [call]
    assert not call.add_callback(print)


def test_dropping_it_tells_the_course():
    course = Over(None)
    HeldCall(course)
    gc.collect()
    assert course.log == ["drop"]


def test_a_stream_gives_messages():
    stream = HeldStream(Over(iter([b"a", b"b"])))
    assert [*stream] == [b"a", b"b"]
