"""Which subchannels the calls with a tag of Dubbo's get."""

import pytest

from fixtures.subchannel_pools import CONNECTING, FAILING, IDLE, READY, at
from rpcwheel.balancer.dubbo import DubboClient

TAGS = {1: "", 2: "blue", 3: "green", 4: ""}


def metadata(tag="", *, force=None):
    pairs = (("dubbo.tag", tag),) if tag else ()
    return pairs if force is None else (*pairs, ("dubbo.force.tag", force))


@pytest.fixture
def tagged_pool(make_pool):
    """Makes pools of a registry of Dubbo's, with these tags by port."""

    def make(tags=TAGS, *, tag="", **policy):
        pool = make_pool(**policy)
        pool.follow_registry(lambda: None, None, DubboClient(tag=tag))
        pool.update([at(port, metadata={"dubbo.tag": each}) for port, each in tags.items()])
        pool.connects_as = READY
        return pool

    return make


def picked(pool, pairs):
    """The ports that calls with this metadata get."""
    chosen = (pool.pick("/shop.Orders/Get", b"", pairs) for _ in range(12))
    return {each and each.instance.port for each in chosen}


@pytest.mark.parametrize(
    ("tag", "pairs", "ports"),
    [
        ("", None, {1, 4}),
        ("", metadata("blue"), {2}),
        ("", (("x", "y"), ("dubbo.tag", b"green")), {3}),
        ("", metadata("red"), {1, 4}),  # as there is none
        ("", metadata("blue", force="true"), {2}),
        ("", metadata("red", force="false"), {1, 4}),
        ("", metadata("red", force="TRUE"), {None}),
        ("", metadata(force="true"), {1, 4}),
        ("blue", None, {2}),
        ("blue", metadata("green"), {3}),
        ("blue", metadata("red"), {1, 4}),
        ("blue", metadata(force="true"), {2}),
    ],
)
def test_the_tag_of_a_call_or_else_of_its_channel_selects_its_servers_or_those_without_a_tag(
    tagged_pool, tag, pairs, ports
):
    assert picked(tagged_pool(tag=tag), pairs) == ports


def test_a_forced_tag_gets_no_server_also_if_none_has_a_tag(tagged_pool):
    assert picked(tagged_pool({1: ""}), metadata("red", force="true")) == {None}


def test_calls_without_a_tag_never_go_to_servers_with_one(tagged_pool):
    pool = tagged_pool({1: "blue", 2: "green"})
    assert picked(pool, None) == {None}
    reason = pool.router.empty_reason("shop.Orders", 2, None)
    assert "shop.Orders has 2 instances, but only with a tag;" in reason
    assert picked(pool, metadata("red")) == {None}
    reason = pool.router.empty_reason("shop.Orders", 1, metadata("red"))
    assert reason == "shop.Orders has 1 instance, but only with another tag than 'red'"


def test_only_servers_of_dubbo_have_tags(make_pool):
    pool = make_pool()
    pool.follow_registry(lambda: None, None, None)
    pool.connects_as = READY
    blue = {"dubbo.tag": "blue"}
    pool.update([at(1), at(2, metadata=blue)])
    assert picked(pool, None) == picked(pool, metadata("blue")) == {1, 2}
    pool.update([at(1), at(2, metadata=blue | {"dubbo.interface": "com.example.Orders"})])
    assert (picked(pool, None), picked(pool, metadata("blue"))) == ({1}, {2})


@pytest.mark.parametrize(("client", "count"), [(None, 4), (DubboClient(), 8)])
def test_each_tag_has_a_subset_of_its_own_if_calls_use_tags(make_pool, client, count):
    pool = make_pool(subset_size=4)
    pool.follow_registry(lambda: None, None, client)
    tags = {port: {"dubbo.tag": "blue"} if port % 2 else {} for port in range(1, 21)}
    pool.update([at(port, metadata=each) for port, each in tags.items()])
    assert len(pool.subchannels) == count


def test_the_state_of_a_channel_is_that_of_the_servers_of_all_tags(tagged_pool):
    pool = tagged_pool({1: "blue"})
    assert pool.whole_state() is IDLE
    assert picked(pool, metadata("blue")) == {1}
    assert pool.whole_state() is READY


def test_a_server_with_the_tag_counts_whatever_its_state_health_or_zone(tagged_pool):
    pool = tagged_pool(zone="eu")
    assert picked(pool, None) == {1, 4}
    pool.connects_as = CONNECTING
    assert picked(pool, metadata("blue")) == {None}
    pool.set_states(p2=FAILING)
    assert picked(pool, metadata("blue")) == {None}
    pool.set_states(p2=READY)
    pool.checker.mark_unhealthy(pool.subchannel(2), "test")
    assert picked(pool, metadata("blue")) == {2}


def test_only_servers_whose_tag_is_used_are_connected(tagged_pool):
    pool = tagged_pool()
    picked(pool, metadata("blue"))
    pool.refresh()
    assert set(pool.connected) == {1, 2, 4}  # those without a tag are the channel's
    pool = tagged_pool(tag="blue")
    picked(pool, None)
    pool.refresh()
    assert pool.connected == [2]
    assert pool.whole_state() is READY


def test_a_call_that_waits_connects_the_servers_of_its_tag_when_they_are_known(tagged_pool):
    pool = tagged_pool({})
    pending = pool.rules.begin("/shop.Orders/Get", b"", metadata("blue"), 9.0, True, now_s=1.0)
    assert pool.try_pick(pending, 1.0) is None
    pool.update([at(1), at(2, metadata={"dubbo.tag": "blue"})])
    assert pool.try_pick(pending, 2.0) is None
    pool.refresh()  # connects them
    pool.refresh()
    assert pool.try_pick(pending, 3.0) is pool.subchannel(2)


def test_an_attempt_goes_to_another_server_of_the_same_tag(tagged_pool):
    pool = tagged_pool({1: "", 2: "blue", 3: "blue"})
    assert (picked(pool, None), picked(pool, metadata("blue"))) == ({1}, {2, 3})
    tried = []
    for _ in range(2):
        pool.pick_other(tried, "/shop.Orders/Get", b"", metadata("blue"))
    assert {each.instance.port for each in tried} == {2, 3}
    assert not pool.has_other(pool.subchannel(2), tried)
    assert not pool.has_other(pool.subchannel(1), [pool.subchannel(1)])
    assert pool.has_other(pool.subchannel(2), [pool.subchannel(2)])


def test_tags_change_with_the_instances(tagged_pool):
    pool = tagged_pool()
    assert picked(pool, metadata("blue")) == {2}
    pool.update([at(port, metadata={"dubbo.tag": "blue"}) for port in (1, 3)])
    assert picked(pool, metadata("blue")) == {1, 3}
    assert picked(pool, None) == {None}
    pool.update([at(1)])
    assert picked(pool, metadata("blue")) == {1}


def test_a_closed_pool_has_no_subchannels_of_any_tag(tagged_pool):
    pool = tagged_pool()
    pool.close_all()
    for pairs in (None, metadata("blue")):
        assert pool.subchannels_for(pairs) == ()
        assert picked(pool, pairs) == {None}
