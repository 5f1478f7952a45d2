"""Who can't be reached is left alone until it answers a probe."""

import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import STREAM_UNARY, UNARY_UNARY, Fail
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster import BroadcastInvoker, ClusterPolicy
from rpcwheel.observe import ListenerFailed
from rpcwheel.observe.events import MemberDown, MemberUp
from rpcwheel.timer import ManualTimer

PROBED = ClusterPolicy(probe=1.0)


def call_of(channel):
    method = channel.unary_unary(UNARY_UNARY)
    return lambda: method(b"x", timeout=WAIT_S)


def test_who_is_unreachable_is_called_no_more(shops, dead, open_cluster, events):
    channel = open_cluster(dead, shops[0])
    call = call_of(channel)
    for _ in range(10):
        assert call() == b"x"
    bad = next(one for one in channel.members if one.instance.port == dead)
    assert (bad.state, bad.reason) == ("DOWN", "no connection")
    assert events == [MemberDown("test.Shop", f"127.0.0.1:{dead}", "no connection")]


def test_it_is_called_again_once_it_answers_a_probe(shops, open_cluster, timer, events):
    channel = open_cluster(shops[0], shops[1], policy=PROBED)
    call = call_of(channel)
    for _ in range(2):
        call()
    shops[0].kill()
    for _ in range(4):
        assert call() == b"x"
    assert [type(event) for event in events] == [MemberDown]
    shops[0].start()
    for _ in range(3):  # UNIMPLEMENTED is an answer: this server has no health service
        timer.advance(1.1)
        if wait_until(lambda: len(events) == 2):
            break
    assert events[1] == MemberUp("test.Shop", f"127.0.0.1:{shops[0].port}", events[1].after_s)
    assert events[1].after_s >= 1.0
    before = len(shops[0].calls)
    for _ in range(4):
        call()
    assert len(shops[0].calls) == before + 2


def test_a_probe_that_is_not_answered_is_followed_by_another(dead, shops, timer, open_cluster):
    policy = ClusterPolicy(probe=lambda state: float(state.attempt_number), probe_timeout=0.05)
    channel = open_cluster(dead, shops[0], policy=policy)
    call = call_of(channel)
    call(), call()
    bad = next(one for one in channel.members if one.instance.port == dead)
    for failed in (1, 2, 3):
        timer.advance(failed + 0.1)
        assert wait_until(lambda failed=failed: bad.probes == failed)
        assert wait_until(lambda: timer.pending == 1)
    assert bad.state == "DOWN"


def unary(channel):
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=0.1)


def future(channel):
    channel.unary_unary(UNARY_UNARY).future(b"x", timeout=0.1).result()


def pushed(channel):
    channel.stream_unary(STREAM_UNARY)(iter([b"x"]), timeout=0.1)


def to_all(channel):
    BroadcastInvoker(channel).unary_unary(UNARY_UNARY)(b"x", timeout=0.1)


@pytest.mark.parametrize("call", [unary, future, pushed, to_all])
def test_a_call_of_little_time_does_not_prove_that_there_is_no_connection(
    call, open_cluster, timer, events
):
    with socket.create_server(("127.0.0.1", 0)) as slow:  # which never says that it is there
        channel = open_cluster(slow.getsockname()[1], policy=ClusterPolicy(probe=1000))
        for state in ("UP", "UP", "DOWN"):
            timer.advance(0.6)
            with pytest.raises(grpc.RpcError) as caught:
                call(channel)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert wait_until(lambda state=state: channel.members[0].state == state)
    assert wait_until(lambda: events)
    assert [event.reason for event in events] == ["DEADLINE_EXCEEDED: no connection"]


class Sick(grpc.GenericRpcHandler):
    """Says NOT_SERVING until it is well, and echoes all else."""

    answer = b"\x08\x02"

    def service(self, details):
        if details.method.startswith("/grpc.health"):
            return grpc.unary_unary_rpc_method_handler(lambda *_: self.answer)
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)


def test_who_answers_that_it_does_not_serve_stays_down(timer, shops, open_cluster):
    sick = Sick()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[sick])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channel = open_cluster(port, shops[0], policy=PROBED)
        member = next(one for one in channel.members if one.instance.port == port)
        member.down("the test says so")
        timer.advance(1.1)
        assert wait_until(lambda: member.probes == 1)
        assert member.state == "DOWN"
        Sick.answer = b"\x08\x01"
        assert wait_until(lambda: timer.pending == 1)
        timer.advance(1.1)
        assert wait_until(lambda: member.state == "UP")
        server.stop(None).wait()


def test_if_all_are_down_they_are_called_and_an_answer_brings_one_back(shops, open_cluster, events):
    channel = open_cluster(shops[0], shops[1])
    for member in channel.members:
        member.down("the test says so")
    assert call_of(channel)() == b"x"
    assert [type(event) for event in events] == [MemberDown, MemberDown, MemberUp]
    assert sorted(one.state for one in channel.members) == ["DOWN", "UP"]


def test_an_error_that_is_an_answer_brings_one_back_too(shops, open_cluster):
    channel = open_cluster(shops[0])
    channel.members[0].down("the test says so")
    shops[0].then(Fail("NOT_FOUND"))
    with pytest.raises(grpc.RpcError):
        call_of(channel)()
    assert channel.members[0].state == "UP"


def test_it_can_be_said_that_a_member_is_up(shops, open_cluster, timer):
    channel = open_cluster(shops[0])
    member = channel.members[0]
    member.down("the test says so")
    assert timer.pending == 1
    member.up()
    assert (member.state, timer.pending) == ("IDLE", 0)


def test_who_was_published_by_a_new_process_is_asked_at_once(shops, open_cluster, timer):
    channel = open_cluster()
    channel.update([instance(shops[0], epoch="a"), instance(shops[1])])
    member = next(one for one in channel.members if one.instance.port == shops[0].port)
    member.down("the test says so")
    channel.update([instance(shops[0], epoch="b"), instance(shops[1])])
    assert wait_until(lambda: member.state == "UP")  # no time has passed
    assert timer.pending == 0


def test_no_probe_outlives_its_member(dead, shops, open_cluster, timer):
    channel = open_cluster(dead, shops[0])
    call = call_of(channel)
    call(), call()
    assert timer.pending == 1
    channel.update([instance(shops[0])])
    assert timer.pending == 0


def test_a_wait_object_that_raises_is_told_and_stands_for_a_second(
    shops, open_cluster, timer, events
):
    def wait(_):
        raise RuntimeError("no")

    channel = open_cluster(shops[0], policy=ClusterPolicy(probe=wait))
    channel.members[0].down("the test says so")
    assert [type(event) for event in events] == [MemberDown, ListenerFailed]
    timer.advance(1.1)
    assert wait_until(lambda: channel.members[0].state == "UP")


def test_a_timer_that_has_stopped_is_stood_in_for(shops, open_cluster):
    stopped = ManualTimer()
    stopped.stop()
    channel = open_cluster(shops[0], timer=stopped, policy=ClusterPolicy(probe=0.01))
    channel.members[0].down("the test says so")
    assert wait_until(lambda: channel.members[0].state == "UP")
