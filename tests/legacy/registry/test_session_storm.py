"""Threads that change their minds, over an engine that comes and goes: the latest intent wins."""

import random
import threading

from fixtures.registry_worlds import POLICY, flaky, held, instance
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.registry.entry import State
from rpcwheel.registry.session import Session

KEYS = 4
ROUNDS = 200


def test_after_a_storm_all_is_as_each_thread_wanted_it_last(timer):
    provider = flaky(timer, timeout_s=0.01)
    session = Session(provider, POLICY.changed(retry=0.05), timer=timer)
    ended = threading.Event()
    last: dict[int, int | None] = {}

    def change_minds(key: int) -> None:
        chance = random.Random(key)
        for number in range(ROUNDS):
            port = 1 + key
            if chance.random() < 0.5:
                session.want(instance(port, weight=number), hasty=chance.random() < 0.5)
                last[port] = number
            else:
                session.drop(instance(port), hasty=False)
                last[port] = None
            if chance.random() < 0.3:
                session.look_up("shop.Orders")
            threading.Event().wait(chance.random() * 0.003)

    def trouble() -> None:
        chance = random.Random("engine")
        troubles = ("down", "up", "refuse", "lose_answers", "forget", "freeze", "up")
        while not ended.is_set():
            getattr(provider, chance.choice(troubles))()
            timer.advance(chance.random() * 0.5)
            ended.wait(chance.random() * 0.005)

    engine = threading.Thread(target=trouble, daemon=True)
    engine.start()
    run_threads(*(lambda key=key: change_minds(key) for key in range(KEYS)))
    ended.set()
    engine.join(20)
    provider.up()
    wanted = sorted(f"10.0.0.1:{port}" for port, number in last.items() if number is not None)

    def calm() -> bool:
        timer.advance(0.2)
        states = {entry.state for entry in session.entries()}
        return held(provider) == wanted and states <= {State.PUBLISHED}

    assert wait_until(calm)
    for entry in session.entries():
        assert entry.instance.weight == last[entry.instance.port]
    for _ in range(100):  # leases and leases later, too
        timer.advance(0.2)
    assert wait_until(calm)
    assert session.close().result(5)
    assert timer.pending == 0
