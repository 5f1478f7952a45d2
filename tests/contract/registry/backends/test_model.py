"""Two backends of one engine compared with a model of it, for any sequence of events."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.timer import ManualTimer

LEASE = 6
WHO = st.integers(0, 1)
EPOCHS = st.sampled_from(["a", "b"])
NUMBERS = st.lists(st.integers(0, 3), max_size=4, unique=True)


def instance(number, epoch, weight=100):
    return ServiceInstance(
        service=f"s{number % 2}", host="h", port=1 + number, epoch=epoch, weight=weight
    )


class Memory(RuleBasedStateMachine):
    """What is held, by key: the record, whose lease it is under, and when that ends."""

    url = "memory://model"

    def __init__(self):
        super().__init__()
        self.timer = ManualTimer()
        self.open()
        self.leases = [{"ends": None, "held": {}} for _ in range(2)]  # "held" of key: instance

    def open(self):
        given = Settings(LEASE, 1.0, self.timer)
        self.backends = [open_backend(self.url, given) for _ in range(2)]

    def teardown(self):
        for backend in self.backends:
            backend.close()
        assert self.timer.pending == 0
        self.timer.stop()

    @property
    def now(self):
        return round(self.timer.now)

    def alive(self, who):
        ends = self.leases[who]["ends"]
        return ends is not None and ends > self.now

    def held(self):
        return {
            key: one
            for who in range(2)
            if self.alive(who)
            for key, one in self.leases[who]["held"].items()
        }

    @rule(who=WHO, numbers=NUMBERS, epoch=EPOCHS, weight=st.integers(0, 2))
    def publish(self, who, numbers, epoch, weight):
        given = [instance(number, epoch, weight) for number in numbers]
        self.backends[who].publish(given)
        if not given:
            return
        mine = self.leases[who]
        if not self.alive(who):
            mine["held"] = {}
        mine["ends"] = self.now + LEASE
        for one in given:
            self.leases[1 - who]["held"].pop(one.key, None)
            mine["held"][one.key] = one

    @rule(who=WHO, numbers=NUMBERS, epoch=EPOCHS)
    def withdraw(self, who, numbers, epoch):
        given = [instance(number, epoch) for number in numbers]
        self.backends[who].withdraw(given)
        for one in given:
            for lease in self.leases:
                if one.key in lease["held"] and lease["held"][one.key].epoch == epoch:
                    del lease["held"][one.key]

    @rule(who=WHO, numbers=NUMBERS.filter(bool), epoch=EPOCHS)
    def renew(self, who, numbers, epoch):
        given = [instance(number, epoch) for number in numbers]
        lost = self.backends[who].renew(given)
        mine = self.leases[who]
        if mine["ends"] is not None and not self.alive(who):
            assert lost == {one.key: "lease" for one in given}
            return
        if mine["ends"] is not None:
            mine["ends"] = self.now + LEASE
        there = {key for key, one in mine["held"].items() if one.epoch == epoch}
        assert lost == {one.key: "missing" for one in given if one.key not in there}

    @rule(seconds=st.integers(0, LEASE))
    def time_passes(self, seconds):
        self.timer.advance(seconds)

    @invariant()
    def all_see_what_is_held(self):
        held = self.held()
        for backend in self.backends:
            found = {
                (service, key): record
                for service in ("s0", "s1")
                for key, record in backend.lookup(service).records.items()
            }
            assert found == {key: one.encoded() for key, one in held.items()}
            assert backend.services() == sorted({service for service, _ in held})


class Sqlite(Memory):
    def open(self):
        self.place = Path(tempfile.mkdtemp())
        self.url = f"sqlite://{self.place}/registry.db"
        super().open()

    def teardown(self):
        super().teardown()
        shutil.rmtree(self.place)


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=30)
TestSqlite = Sqlite.TestCase
TestSqlite.settings = settings(max_examples=20, stateful_step_count=30)
