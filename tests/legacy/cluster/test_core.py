"""Which members there are and which is called: each rule by itself."""

import pytest

from rpcwheel.cluster import ClusterPolicy, Picker, RoundRobin
from rpcwheel.cluster.core import MOST_DOWN, Roster
from rpcwheel.cluster.member import MemberCore, Rules
from rpcwheel.durations import NEVER
from rpcwheel.instance import ServiceInstance

SECOND = 1_000_000_000
CALL = ("/shop.Orders/Get", b"", ())


def at(port, **settings):
    return ServiceInstance(service="shop.Orders", host="10.0.0.7", port=port, **settings)


class World:
    """A roster, its clock, and shorter words."""

    def __init__(self, picker=None, **policy):
        self.now_ns = 1000 * SECOND
        rules = Rules.of(ClusterPolicy(**policy))
        self.roster = Roster(
            "shop.Orders", MemberCore, picker or RoundRobin(), rules, lambda: self.now_ns
        )

    def tell(self, *instances, wall_s=0.0):
        return self.roster.update(instances, wall_s)

    def pass_(self, seconds):
        self.now_ns += int(seconds * SECOND)

    def member(self, port):
        return next(one for one in self.roster.members if one.instance.port == port)

    def down(self, *ports):
        for port in ports:
            self.roster.down(self.member(port), "no connection")

    def called(self, times=24):
        return {self.roster.pick(*CALL).instance.port for _ in range(times)}


@pytest.fixture
def world():
    return World()


# Who there is


def test_nothing_is_called_before_it_is_known_what_there_is(world):
    assert (world.roster.pick, world.roster.known, world.roster.refusal()) == (None, False, None)


def test_why_nothing_is_known_is_said(world):
    world.roster.fail("the registry can't be reached")
    assert world.roster.refusal() == (
        "no instance of shop.Orders is known: the registry can't be reached"
    )
    world.tell(at(1))
    world.roster.fail("the registry can't be reached")
    assert world.roster.refusal() is None


def test_a_service_without_instances_has_nobody_to_call(world):
    world.tell()
    assert (world.roster.pick, world.roster.known) == (None, True)
    assert world.roster.refusal() == "no instance of shop.Orders is known"


def test_members_are_told_in_the_order_of_their_ids(world):
    world.tell(at(3), at(1), at(2))
    assert [one.instance.port for one in world.roster.members] == [1, 2, 3]


def test_an_update_touches_only_what_has_changed(world):
    world.tell(at(1), at(2))
    kept = world.member(2)
    change = world.tell(at(2), at(3))
    assert [one.instance.port for one in change.added] == [3]
    assert [one.instance.port for one in change.removed] == [1]
    assert world.member(2) is kept
    assert world.called() == {2, 3}


@pytest.mark.parametrize(
    "change", [{"weight": 7}, {"zone": "b"}, {"metadata": {"a": "b"}}, {"status": "DRAINING"}]
)
def test_a_change_of_what_is_said_of_an_instance_keeps_its_member(world, change):
    world.tell(at(1))
    member = world.member(1)
    changed = at(1, **change)
    assert world.tell(changed) == ((), (), ())
    assert (world.member(1), member.instance) == (member, changed)


@pytest.mark.parametrize("change", [{"host": "10.0.0.8"}, {"port": 2}, {"protocol": "grpcs"}])
def test_an_instance_that_has_moved_is_another_member(world, change):
    world.tell(at(1, id="a"))
    old = world.member(1)
    change = world.tell(at(1, id="a").changed(**change))
    assert change.removed == (old,)
    assert change.added == world.roster.members != (old,)


def test_of_two_instances_with_one_id_the_last_counts(world):
    world.tell(at(1, id="a"), at(2, id="a"))
    assert world.called() == {2}


def test_what_is_no_instance_changes_nothing(world):
    world.tell(at(1))
    with pytest.raises(TypeError):
        world.tell(at(2), "10.0.0.7:3")
    assert world.called() == {1}


def test_who_was_never_called_is_gone_at_once_and_others_drain(world):
    world.tell(at(1), at(2))
    called = world.member(1)
    called.used = True
    world.tell()
    assert world.roster.leaving == [called]
    world.roster.left(called)
    assert (world.roster.leaving, called.state) == ([], "CLOSED")


def test_after_the_end_nothing_changes_any_more(world):
    world.tell(at(1))
    member = world.member(1)
    assert world.roster.close() == (member,)
    assert world.roster.close() == ()
    assert world.tell(at(2)) == ((), (), ())
    assert (world.roster.members, world.roster.pick, member.state) == ((), None, "CLOSED")


# Who is called


def test_who_is_down_is_not_called_while_another_is_up(world):
    world.tell(at(1), at(2), at(3))
    world.down(2)
    assert world.called() == {1, 3}
    world.roster.up(world.member(2))
    assert world.called() == {1, 2, 3}


def test_if_all_are_down_they_are_called_from_the_longest_down_on(world):
    world.tell(at(1), at(2), at(3))
    for port in (2, 3, 1):
        world.pass_(1)
        world.down(port)
    assert world.roster.all_down
    assert [world.roster.pick(*CALL).instance.port for _ in range(4)] == [2, 3, 1, 2]


def test_who_wants_no_new_calls_gets_none_unless_all_others_are_down(world):
    world.tell(at(1), at(2, status="DRAINING"))
    assert world.called() == {1}
    world.down(1)
    assert world.called() == {2}


def test_if_all_want_no_new_calls_they_get_them(world):
    world.tell(at(1, status="DRAINING"), at(2, status="DRAINING"))
    assert world.called() == {1, 2}


def test_weight_zero_is_called_only_if_nobody_has_more(world):
    world.tell(at(1, weight=0), at(2, weight=1), at(3, weight=0))
    assert world.called() == {2}
    world.down(2)
    assert world.called() == {1, 3}


def test_the_own_zone_is_preferred_as_long_as_one_of_it_is_up():
    world = World(zone="b")
    world.tell(at(1, zone="a"), at(2, zone="b"), at(3, zone="b", weight=0))
    assert world.called() == {2}
    world.down(2)
    assert world.called() == {1}


def test_without_a_zone_all_are_alike(world):
    world.tell(at(1, zone="a"), at(2))
    assert world.called() == {1, 2}


def test_weights_are_the_pickers_matter():
    seen = []

    class Note(Picker):
        def prepare(self, members, weights):
            seen.append((tuple(one.instance.port for one in members), tuple(weights)))
            return lambda *_: members[0]

    World(Note()).tell(at(1, weight=7), at(2), at(3, weight=0))
    assert seen == [((1, 2), (7, 100))]


# Another one


def test_a_call_goes_to_each_member_at_most_once(world):
    world.tell(*(at(port) for port in range(1, 6)))
    tried = []
    while (member := world.roster.other(tried, CALL)) is not None:
        assert member not in tried
        tried.append(member)
    assert len(tried) == 5


def test_of_those_that_are_down_a_call_tries_few(world):
    world.tell(*(at(port) for port in range(1, 9)))
    world.down(*range(1, 9))
    tried = []
    while (member := world.roster.other(tried, CALL)) is not None:
        tried.append(member)
    assert len(tried) == MOST_DOWN


def test_without_members_there_is_no_other(world):
    assert world.roster.other((), CALL) is None


@pytest.mark.parametrize("left_out", [{"weight": 0}, {"status": "DRAINING"}, {"zone": "b"}, {}])
def test_several_are_different_and_all_of_those_that_any_call_goes_to(left_out):
    world = World(zone="a")
    others = [at(port, zone="a") for port in (1, 2, 4)]
    world.tell(*others, at(3, **{"zone": "a"} | left_out))
    if not left_out:
        world.down(3)
    for count in (3, 9):
        several = world.roster.several(count, CALL)
        assert sorted(one.instance.port for one in several) == [1, 2, 4]


def test_if_all_are_down_several_are_a_few_of_them(world):
    world.tell(*(at(port) for port in range(1, MOST_DOWN + 3)))
    world.down(*range(1, MOST_DOWN + 3))
    assert len(set(world.roster.several(9, CALL))) == MOST_DOWN


# Up and down


def test_only_the_first_time_is_news(world):
    world.tell(at(1))
    member = world.member(1)
    assert world.roster.down(member, "first")
    assert not world.roster.down(member, "second")
    assert (member.state, member.reason) == ("DOWN", "first")
    world.pass_(2.5)
    assert world.roster.up(member) == 2.5 * SECOND
    assert world.roster.up(member) is None


def test_what_short_calls_have_proved_is_forgotten_with_it(world):
    world.tell(at(1))
    member = world.member(1)

    def is_proved():
        now_ns = world.now_ns
        told = {"cut_off": False, "began_ns": now_ns, "read_ns": None, "now_ns": now_ns}
        return member.judged("DEADLINE_EXCEEDED", "CONNECTING", **told).is_down

    assert not is_proved()
    world.pass_(1)
    assert is_proved()
    world.down(1)
    world.roster.up(member)  # it has answered a probe, which is no traffic of its channel's
    assert not is_proved()


def test_who_is_gone_can_not_go_down(world):
    world.tell(at(1))
    member = world.member(1)
    member.used = True
    world.tell(at(2))
    assert not world.roster.down(member, "no connection")


def test_a_probe_is_wanted_as_long_as_the_member_is_down(world):
    world.tell(at(1))
    member = world.member(1)
    world.down(1)
    spell = member.spell
    assert world.roster.wants_probe(member, spell)
    world.roster.up(member)
    assert not world.roster.wants_probe(member, spell)
    world.down(1)
    assert not world.roster.wants_probe(member, spell)  # an answer of the time before
    assert world.roster.wants_probe(member, member.spell)
    world.tell()
    assert not world.roster.wants_probe(member, member.spell)


def test_probes_follow_the_rhythm_that_was_set():
    world = World(probe=lambda state: 10.0 * state.attempt_number)
    world.tell(at(1))
    member = world.member(1)
    world.down(1)
    delays = []
    for _ in range(3):
        delays.append(world.roster.probe_delay_ns(member) // SECOND)
        world.roster.probe_failed(member)
    assert delays == [10, 20, 30]
    world.roster.up(member)
    world.down(1)
    assert world.roster.probe_delay_ns(member) == 10 * SECOND


def test_the_wait_for_a_probe_does_not_overflow(world):
    world.tell(at(1))
    world.down(1)
    world.member(1).probes = 100_000
    assert world.roster.probe_delay_ns(world.member(1)) <= 10 * SECOND


def test_who_is_down_and_was_published_by_a_new_process_is_asked_at_once(world):
    world.tell(at(1, epoch="a"), at(2, epoch="a"))
    world.down(1)
    old = world.member(1).spell
    world.member(1).probes = 9
    change = world.tell(at(1, epoch="b"), at(2, epoch="b"))
    assert change.returned == (world.member(1),)
    assert not world.roster.wants_probe(world.member(1), old)  # the one that waits
    assert world.member(1).probes == 0
    assert world.tell(at(1, epoch="b")).returned == ()


# Warming up


def weights_over(world, seconds):
    got = []
    for _ in range(seconds):
        got.append(world.roster.weight(world.member(1)))
        world.pass_(1)
    return got


def test_the_weight_of_a_young_instance_grows_with_its_age():
    world = World(warmup=10)
    world.tell(at(1, weight=50, started_at=500.0), at(2), wall_s=502.0)
    assert weights_over(world, 10) == [10, 15, 20, 25, 30, 35, 40, 45, 50, 50]
    assert world.roster.weight(world.member(2)) == 100


def test_whose_clock_is_ahead_has_just_begun_and_gets_a_little():
    world = World(warmup=10)
    world.tell(at(1, started_at=9000.0), wall_s=502.0)
    assert weights_over(world, 3) == [1, 10, 20]


def test_without_warm_up_every_weight_is_full_at_once(world):
    world.tell(at(1, started_at=500.0), wall_s=500.0)
    assert weights_over(world, 1) == [100]
    assert world.roster.wake_ns() is None


def test_weights_grow_in_steps_until_they_are_full():
    world = World(warmup=10)
    world.tell(at(1, started_at=500.0), wall_s=500.0)
    assert world.roster.wake_ns() == SECOND // 2
    world.pass_(10)
    assert world.roster.wake_ns() is None


def test_the_default_drain_has_an_end_and_none_has_not():
    assert World().roster.rules.drain_ns == 30 * SECOND
    assert World(drain=None).roster.rules.drain_ns == NEVER


def test_why_nothing_is_known_yet_is_for_those_who_have_waited_in_vain(world):
    before = world.roster.too_late()
    world.roster.doubt("the registry is away")
    assert world.roster.refusal() is None
    assert world.roster.too_late() == f"{before}: the registry is away"
