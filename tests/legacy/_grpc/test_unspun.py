"""Calls that no thread of grpcio's waits for: what they send, how they end, and when they close."""

import os
import subprocess
import sys
import threading

import grpc
import pytest

from fixtures.small_servers import METHOD, serving
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._grpc.unspun import begin_unspun


class Answering:
    """Answers when its gate is open, with its code if it has one."""

    def __init__(self):
        self.seen = []
        self.gate = threading.Event()
        self.gate.set()
        self.code = None

    def __call__(self, request, context):
        self.seen.append((request, dict(context.invocation_metadata()), context.time_remaining()))
        self.gate.wait(WAIT_S)
        if self.code is not None:
            context.abort(self.code, "as asked")
        return request + b"!"


@pytest.fixture
def server():
    answering = Answering()
    with serving(grpc.unary_unary_rpc_method_handler(answering)) as answering.target:
        yield answering
        answering.gate.set()


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.target) as channel:
        yield channel


def begin(channel, request=b"x", *, method=METHOD, timeout=WAIT_S):
    return begin_unspun(channel, method, request, timeout=timeout, metadata=(("mark", "1"),))


def clients():
    """The threads of this process that are not the server's."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("pool")}


def test_what_is_sent_arrives_and_what_is_answered_is_read(server, channel):
    call = begin(channel, b"abc", timeout=50.0)
    assert not call.done()
    assert call.read() == ("OK", b"abc!")
    assert call.done()
    ((request, metadata, left),) = server.seen
    assert (request, metadata["mark"]) == (b"abc", "1")
    assert 40 < left <= 50.1


def test_a_failure_is_told_by_the_name_of_its_status(server, channel):
    server.code = grpc.StatusCode.FAILED_PRECONDITION
    assert begin(channel).read() == ("FAILED_PRECONDITION", None)
    assert begin(channel, method="/test.Small/None").read() == ("UNIMPLEMENTED", None)


def test_one_that_nobody_answers_ends_at_its_deadline(server, channel):
    server.gate.clear()
    assert begin(channel, timeout=0.1).read() == ("DEADLINE_EXCEEDED", None)


def test_many_are_begun_and_then_read_on_one_thread(server, channel):
    begin(channel).read()
    threads = clients()
    calls = [begin(channel, bytes([number])) for number in range(20)]
    assert clients() == threads
    answers = [call.read() for call in calls]
    assert answers == [("OK", bytes([number]) + b"!") for number in range(20)]


def test_a_call_can_be_cancelled_before_it_is_read_and_after(server, channel):
    server.gate.clear()
    call = begin(channel)
    call.cancel()
    assert call.read() == ("CANCELLED", None)
    call.cancel()


def test_who_closes_the_channel_ends_it_for_whoever_reads_it_or_will(server, channel):
    server.gate.clear()
    read, unread, got = begin(channel), begin(channel), []
    reader = threading.Thread(target=lambda: got.append(read.read()))
    reader.start()
    assert wait_until(lambda: len(server.seen) == 2)
    closing = threading.Thread(target=channel.close)
    closing.start()
    assert unread.read() == ("CANCELLED", None)
    closing.join(WAIT_S)
    reader.join(WAIT_S)
    assert got == [("CANCELLED", None)]
    assert not closing.is_alive()


def test_a_closed_channel_is_refused_in_the_words_of_grpc(channel):
    channel.close()
    with pytest.raises(ValueError, match="Cannot invoke RPC"):
        begin(channel)


def test_with_grpc_s_fork_support_they_are_left_to_futures():
    """Its threads can be stopped for a fork; a child of one that reads here would crash."""
    program = """if True:
        import grpc
        from rpcwheel._grpc.unspun import begin_unspun
        channel = grpc.insecure_channel("127.0.0.1:1")
        call = begin_unspun(channel, "/a/b", b"", timeout=0.1, metadata=())
        print(call if call is None else call.read())
    """
    for value, expected in (("1", "None"), ("0", "(")):
        env = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": value}
        told = subprocess.run(
            [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        assert expected in told.stdout


def test_a_channel_of_another_make_is_left_to_futures(server):
    class Passing(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            return continuation(details, request)

    with grpc.insecure_channel(server.target) as channel:
        assert begin(grpc.intercept_channel(channel, Passing())) is None
    assert server.seen == []
