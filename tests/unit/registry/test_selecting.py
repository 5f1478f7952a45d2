"""What a URL and the arguments say together."""

import pytest

from rpcwheel.cluster.policy import ClusterPolicy
from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import ServiceInstance, Snapshot
from rpcwheel.registry.selecting import (
    Selection,
    checked_cluster,
    identity,
    is_by_name,
    select_by,
    split,
    without_service,
)
from rpcwheel.registry.url import parse_url


def test_a_target_that_is_no_address_of_grpc_is_the_url_of_a_registry():
    for target, by_name in (
        ("etcd://127.0.0.1:2379/shop.Orders", True),
        ("sqlite:///run/shop.db?service=shop.Orders", True),
        ("own://somewhere", True),
        ("127.0.0.1:50051", False),
        ("localhost", False),
        ("dns:///orders:50051", False),
        ("dns://8.8.8.8/orders:50051", False),
        ("unix:///run/shop.sock", False),
        ("unix:/run/shop.sock", False),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", False),
        ("xds:///orders", False),
        (None, False),
    ):
        assert is_by_name(target) is by_name, target


def test_arguments_hold_against_the_url():
    url = parse_url("memory://a/shop.Orders?group=blue&version=1")
    assert select_by(url, None, None, None) == Selection("shop.Orders", "blue", "1")
    assert select_by(url, "shop.Orders", "", "*") == Selection("shop.Orders", "", "*")
    assert select_by(None, "shop.Audit", None, None) == Selection("shop.Audit", "*", "*")


def test_a_service_is_named_once():
    with pytest.raises(ConfigurationError, match="leave out one"):
        select_by(parse_url("memory://a/shop.Orders"), "shop.Audit", None, None)
    with pytest.raises(ConfigurationError, match="which service is meant"):
        select_by(parse_url("memory://a"), None, None, None)


def test_the_error_says_how_a_url_names_a_service():
    for url, meant in (
        ("memory://a", "etcd://127.0.0.1:2379/shop.Orders"),
        ("sqlite:///x.db/shop.Orders", "sqlite:///x.db?service=shop.Orders"),
        ("sqlite://./x.sqlite/shop.Orders", "sqlite://./x.sqlite?service=shop.Orders"),
        ("sqlite:///run/app.v2/x.db", "sqlite:///run/app.v2/x.db?service=shop.Orders"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            select_by(parse_url(url), None, None, None)
        assert f"{meant!r}" in str(caught.value)


def test_only_those_of_the_group_and_the_version_are_meant():
    instances = tuple(
        ServiceInstance(service="shop.Orders", host="a", port=port, group=group, version=version)
        for port, (group, version) in enumerate([("", ""), ("blue", "1"), ("blue", "2")], start=1)
    )
    snapshot = Snapshot("shop.Orders", instances)

    def ports(**given):
        return [one.port for one in Selection("shop.Orders", **given).of(snapshot)]

    assert ports() == [1, 2, 3]
    assert ports(group="") == [1]
    assert ports(group="blue", version="2") == [3]
    assert ports(version="1") == [2]


def test_urls_of_one_registry_have_one_identity_whatever_service_they_name():
    def of(text):
        return identity(without_service(parse_url(text)))

    assert of("redis://u:p@a/shop.Orders?group=blue&db=1") == of("redis://u:p@a?db=1")
    assert of("redis://u:p@a") != of("redis://u:q@a")
    assert of("redis://a?db=1") != of("redis://a?db=2")
    assert of("redis://a?namespace=x") != of("redis://a")


def test_with_a_registry_the_first_argument_is_a_name():
    assert split("shop.Orders", object(), None) == (None, "shop.Orders")
    assert split("", object(), "shop.Orders") == (None, "shop.Orders")
    with pytest.raises(TypeError, match="the service's name, not 7"):
        split(7, object(), None)


def test_the_zone_goes_into_the_policy():
    assert checked_cluster(None, None) == ClusterPolicy()
    assert checked_cluster(ClusterPolicy(wait=1), "eu-1") == ClusterPolicy(wait=1, zone="eu-1")
