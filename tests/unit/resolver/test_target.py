"""What a channel's target and its arguments name together."""

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import ServiceInstance, Snapshot, explicit_target
from rpcwheel.registry.url import parse_url
from rpcwheel.resolver.target import Target, is_registry_url


def test_a_registry_url_is_distinguished_from_a_grpc_target():
    for target, is_url in (
        ("etcd://127.0.0.1:2379/shop.Orders", True),
        ("sqlite:///run/shop.db?service=shop.Orders", True),
        ("own://somewhere", True),
        ("etcd://dns:2379/unix", True),
        ("127.0.0.1:50051", False),
        ("localhost", False),
        ("dns:50051", False),
        ("unix:50051", False),
        ("dns:///orders:50051", False),
        ("DNS:///orders:50051", False),
        ("dns://8.8.8.8/orders:50051", False),
        ("unix:///run/shop.sock", False),
        ("unix:/run/shop.sock", False),
        ("unix-abstract:///shop", False),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", False),
        ("xds:///orders", False),
        (None, False),
    ):
        assert is_registry_url(target) is is_url, target


def test_a_host_and_port_is_not_parsed_as_a_scheme():
    for host in ("unix", "dns", "DNS", "ipv4", "xds", "vsock", "unix-abstract", "google-c2p"):
        assert explicit_target(f"{host}:50051") == f"dns:///{host}:50051"


def test_grpc_targets_are_not_changed():
    for target in (
        "127.0.0.1:50051",
        "[::1]:50051",
        "orders:50051",
        "orders",
        "dns:orders",
        "dns:orders:50051",
        "dns:///unix:50051",
        "unix:shop.sock",
        "unix:./50051",
        "unix:///run/shop.sock",
        "unix:0",
        "unix:65536",
        "unix:100000",
        "unix:\u0661",
        "vsock:2:50051",
        "ipv4:10.0.0.1:1",
        "",
    ):
        assert explicit_target(target) == target


def of(target, has_registry=False, **given):
    return Target.of(target, has_registry=has_registry, **given)


def selected(target):
    return target.service, target.group, target.version


def test_arguments_take_precedence_over_the_url():
    url = "memory://a/shop.Orders?group=blue&version=1"
    assert selected(of(url)) == ("shop.Orders", "blue", "1")
    assert selected(of(url, service="shop.Orders", group="", version="*")) == (
        "shop.Orders",
        "",
        "*",
    )
    assert selected(of("memory://a", service="shop.Audit")) == ("shop.Audit", "*", "*")


def test_with_a_registry_the_target_is_the_name_of_the_service():
    assert of("shop.Orders", True) == of("", True, service="shop.Orders") == Target("shop.Orders")
    assert selected(of("shop.Orders", True, group="", version="1")) == ("shop.Orders", "", "1")
    for target, given, error, message in (
        (7, {}, TypeError, "the service's name, not 7"),
        ("memory://a/shop.Orders", {}, ConfigurationError, "a URL or registry=, not both"),
        ("shop.Orders", {"service": "shop.Audit"}, ConfigurationError, "two services are named"),
        ("", {}, ConfigurationError, "no service is named"),
    ):
        with pytest.raises(error, match=message):
            of(target, True, **given)


def test_services_and_hosts_may_have_the_names_of_schemes():
    target = of("etcd://unix:2379,dns:2379/dns")
    assert target.service == "dns"
    assert target.url.hosts == (("unix", 2379), ("dns", 2379))


def test_instances_are_selected_by_group_and_version():
    instances = tuple(
        ServiceInstance(service="shop.Orders", host="a", port=port, group=group, version=version)
        for port, (group, version) in enumerate([("", ""), ("blue", "1"), ("blue", "2")], start=1)
    )
    snapshot = Snapshot("shop.Orders", instances)

    def ports(**given):
        return [one.port for one in Target("shop.Orders", **given).select(snapshot)]

    assert ports() == [1, 2, 3]
    assert ports(group="") == [1]
    assert ports(group="blue", version="2") == [3]
    assert ports(version="1") == [2]


def test_urls_of_one_registry_have_one_key_whatever_service_they_name():
    def key(url):
        return of(url, service=parse_url(url).service or "shop.Audit").registry_key

    assert key("redis://u:p@a/shop.Orders?group=blue&db=1") == key("redis://u:p@a?db=1")
    assert key("redis://u:p@a") != key("redis://u:q@a")
    assert key("redis://a?db=1") != key("redis://a?db=2")
    assert key("redis://a?namespace=x") != key("redis://a")
