"""Clients of rpcwheel, sync and aio, with a server written in Go."""

import pytest

from fixtures.callers import CALLERS, REQUESTS
from fixtures.foreign_servers import BUILD_S
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import KINDS
from rpcwheel.call import CallPolicy, DeadlinePolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy

pytestmark = pytest.mark.timeout(BUILD_S + 60)  # the server is built first

ALL = b"".join(REQUESTS)

IN_TIME = (0.2, 2.0, 12.0)
"""Timeouts, one after the other, for calls that are to reach the server before; on a busy machine
they may not."""


def every_kind(turn, kinds=KINDS):
    """Each kind of call; the callers take turns."""
    rows = [(kind, CALLERS[(number + turn) % len(CALLERS)]) for number, kind in enumerate(kinds)]
    return pytest.mark.parametrize(("kind", "caller"), rows)


RETRY = RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=3, backoff=0.01)
PATIENT = CallPolicy(timeout=WAIT_S, retry=RETRY, idempotent=True)


@every_kind(0)
def test_every_kind_of_call_is_answered_under_its_deadline(go_shop, open_caller, caller, kind):
    call = go_shop.script()
    done = open_caller(caller, go_shop.target, CallPolicy(timeout=WAIT_S)).call(
        kind, metadata=call.metadata, timeout=None
    )
    assert (done.answer, done.code) == (ALL, "OK")
    (seen,) = go_shop.attempts(call)
    assert 0 < seen["deadline_ms"] < 1100 * WAIT_S  # gRPC rounds it up
    assert done.trailing["x-deadline-ms"] == str(seen["deadline_ms"])


@every_kind(1)
def test_a_retry_succeeds_and_sends_its_number(go_shop, open_caller, caller, kind):
    call = go_shop.script("UNAVAILABLE", "reset")
    done = open_caller(caller, go_shop.target, PATIENT).call(kind, metadata=call.metadata)
    assert (done.answer, done.code, done.trailing["x-attempt"]) == (ALL, "OK", "3")
    seen = go_shop.attempts(call)
    assert [attempt["previous_attempts"] for attempt in seen] == ["", "1", "2"]
    assert [attempt["ended"] for attempt in seen] == ["Unavailable", "Unavailable", "OK"]
    assert "".join(seen[2]["requests"]).encode() == ALL


@every_kind(2)
def test_a_method_that_is_not_idempotent_is_not_called_again(go_shop, open_caller, caller, kind):
    call = go_shop.script("UNAVAILABLE")
    done = open_caller(caller, go_shop.target, CallPolicy(timeout=WAIT_S, retry=RETRY)).call(
        kind, metadata=call.metadata
    )
    assert (done.answer, done.code) == (b"", "UNAVAILABLE")
    assert done.details == "scripted for attempt 1"
    assert len(go_shop.attempts(call)) == 1


@every_kind(0)
def test_a_retry_waits_as_long_as_the_server_asks(go_shop, open_caller, caller, kind):
    call = go_shop.script("UNAVAILABLE/300")
    done = open_caller(caller, go_shop.target, PATIENT).call(kind, metadata=call.metadata)
    assert done.answer == ALL
    first, second = go_shop.attempts(call)
    assert second["at_ms"] - first["at_ms"] >= 299  # both are cut to whole milliseconds


@every_kind(1)
def test_a_server_can_forbid_the_retry(go_shop, open_caller, caller, kind):
    call = go_shop.script("UNAVAILABLE/-1")
    done = open_caller(caller, go_shop.target, PATIENT).call(kind, metadata=call.metadata)
    assert (done.code, done.trailing["grpc-retry-pushback-ms"]) == ("UNAVAILABLE", "-1")
    assert len(go_shop.attempts(call)) == 1


@every_kind(2)
def test_a_call_that_hangs_ends_at_its_deadline_on_both_sides(go_shop, open_caller, caller, kind):
    for timeout in IN_TIME:
        call = go_shop.script("hang")
        done = open_caller(caller, go_shop.target, CallPolicy(timeout=timeout)).call(
            kind, metadata=call.metadata
        )
        # grpc-go resets the stream at its own deadline; 1 of 50 times that is here first.
        assert done.code in {"DEADLINE_EXCEEDED", "CANCELLED"}
        if go_shop.attempts(call, ended=False):
            break
    (seen,) = go_shop.attempts(call)
    assert seen["ended"] in {"DeadlineExceeded", "Canceled"}


@every_kind(1, ["unary_stream", "stream_stream"])
def test_a_silent_stream_is_ended_after_its_first_message(go_shop, open_caller, caller, kind):
    for silence in IN_TIME:
        call = go_shop.script("silent")
        policy = CallPolicy(timeout=DeadlinePolicy(timeout=2 * WAIT_S, message_timeout=silence))
        opened = open_caller(caller, go_shop.target, policy)
        done = opened.call(kind, metadata=call.metadata, timeout=None)
        assert done.code == "DEADLINE_EXCEEDED"
        assert done.details == f"no message for {silence:g} s (message_timeout)"
        if done.messages:
            break
    assert (done.messages[0], len(done.messages)) == (ALL[:1], 1)
    assert go_shop.attempts(call)[0]["ended"] == "Canceled"


@every_kind(0)
def test_a_cancel_reaches_the_server(go_shop, open_caller, caller, kind):
    call = go_shop.script("hang")
    done = open_caller(caller, go_shop.target, PATIENT).cancel(
        kind,
        lambda: wait_until(lambda: go_shop.attempts(call, ended=False)),
        metadata=call.metadata,
    )
    assert (done.messages, done.code) == ([], "CANCELLED")
    assert [attempt["ended"] for attempt in go_shop.attempts(call)] == ["Canceled"]


@every_kind(1)
def test_a_failed_call_gets_the_default_at_once_and_is_delivered_later(
    go_shop, open_caller, caller, kind
):
    call = go_shop.script("UNAVAILABLE", "UNAVAILABLE")
    policy = CallPolicy(
        failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01, default=b"later")
    )
    if kind.endswith("stream"):
        policy = CallPolicy(
            failback=FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01, default=[b"later"])
        )
    caller = open_caller(caller, go_shop.target, policy)
    done = caller.call(kind, metadata=call.metadata)
    assert (done.answer, done.code) == (b"later", "OK")
    assert done.trailing["rpcwheel-answer"] == "failback"
    assert caller.flush()
    *_, last = go_shop.attempts(call)
    assert (last["ended"], "".join(last["requests"]).encode()) == ("OK", ALL)
