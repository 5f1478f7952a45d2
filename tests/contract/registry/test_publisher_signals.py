"""SIGTERM ends a server in order, in either world: real processes, real signals."""

import contextlib
import signal
import threading
import time

import grpc
import pytest

from fixtures.serving_process import WHO, ServingProcess
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.registry.named import channel

STEPS = ["withdraw", "not serving", "wait", "stop", "closed"]


@pytest.fixture(params=["sync", "aio"])
def world(request):
    return request.param


@pytest.fixture
def url(tmp_path):
    return f"sqlite://{tmp_path}/registry.db"


def started(process):
    assert wait_until(lambda: process.lines), "it has not started"
    return process


def test_no_call_fails_in_a_rolling_restart_of_three_servers_under_load(url):
    """Each of one world is replaced by one of the other, which is started first."""

    def start(world):
        return processes.enter_context(ServingProcess(world, url, lame_duck=1.0))

    with contextlib.ExitStack() as processes, channel(f"{url}?service=shop.Orders") as to_service:
        old = [started(start(world)) for world in ("sync", "aio", "sync")]
        who = to_service.unary_unary(WHO)
        answers, failures, over = [], [], threading.Event()

        def call():
            while not over.is_set():
                try:
                    answers.append(who(b"", timeout=WAIT_S))
                except grpc.RpcError as error:
                    failures.append(error)

        def known(process):
            return any(member.instance.port == process.port for member in to_service.members)

        assert wait_until(lambda: len(to_service.members) == 3)
        callers = [threading.Thread(target=call, daemon=True) for _ in range(2)]
        for one in callers:
            one.start()
        try:
            for one, world in zip(old, ("aio", "sync", "aio"), strict=True):
                new = started(start(world))
                assert wait_until(lambda: known(new))  # noqa: B023
                one.send(signal.SIGTERM)
                assert one.wait() == 0
                assert one.lines[1:] == [*STEPS, "left"]
        finally:
            over.set()
            for one in callers:
                one.join(WAIT_S)
    assert failures == []
    assert len(answers) > 300
    assert set(answers) == {b"a"}


def test_the_same_is_so_of_an_interrupt_and_the_handlers_of_before_come_back(world, url):
    with ServingProcess(world, url, mine=True, lame_duck=0.1) as process:
        started(process).send(signal.SIGINT)
        assert process.wait() == 0
        assert process.lines[1:] == [*STEPS, "left", "mine"]


def test_a_second_signal_ends_it_at_once(world, url):
    with ServingProcess(world, url, lame_duck=600, grace=600, hang=True) as process:
        with grpc.insecure_channel(f"127.0.0.1:{started(process).port}") as to_server:
            call = to_server.unary_unary(WHO).future(b"")
            time.sleep(0.3)  # until it has come in
            process.send(signal.SIGTERM)
            assert wait_until(lambda: "wait" in process.lines)
            process.send(signal.SIGTERM)
            assert wait_until(lambda: "left" in process.lines)
            assert call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
        assert process.lines[1:] == [*STEPS, "left"]


def test_a_registry_that_is_dead_holds_up_no_process():
    nobody = "redis://127.0.0.1:1"
    with ServingProcess("sync", nobody, lame_duck=0.1, host="127.0.0.1") as process:
        started(process).send(signal.SIGTERM)
        assert process.wait(15.0) == 0
        assert process.lines[1:] == [*STEPS, "left"]


def test_without_signals_the_program_dies_of_them_as_ever(world, url):
    with ServingProcess(world, url, signals=False) as process:
        started(process).send(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
        assert process.lines[1:] == []
