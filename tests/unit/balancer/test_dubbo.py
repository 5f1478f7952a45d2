"""What calls to Dubbo's providers need: headers, tags, and the warm-up."""

import pytest

from rpcwheel.balancer.dubbo import NO_CONVENTIONS, conventions_of, tagged, with_headers
from rpcwheel.instance import ServiceInstance

INTERFACE = {"dubbo.interface": "com.example.Orders"}


def provider(port=1, *, metadata=None, **settings):
    metadata = INTERFACE | (metadata or {})
    return ServiceInstance(service="a", host="b", port=port, metadata=metadata, **settings)


def test_only_instances_of_dubbo_have_conventions():
    plain = ServiceInstance(service="a", host="b", port=1, group="g", metadata={"dubbo.tag": "x"})
    assert conventions_of(plain, "shop", "x") is NO_CONVENTIONS


def test_calls_carry_group_version_and_tag_and_the_name_of_the_client():
    headers = conventions_of(provider(group="g1", version="1.2"), "shop", "blue").headers
    assert dict(headers) == {
        "tri-service-group": "g1",
        "tri-service-version": "1.2",
        "tri-consumer-appname": "shop",
        "dubbo.tag": "blue",
    }
    assert conventions_of(provider(), "", "").headers == ()


@pytest.mark.parametrize(
    ("warmup", "warmup_ns"),
    [("600000", 600_000_000_000), ("0", 0), ("", None), ("-1", None), ("9" * 12, None)],
)
def test_the_warmup_is_that_of_the_provider(warmup, warmup_ns):
    metadata = {"dubbo.warmup": warmup}
    assert conventions_of(provider(metadata=metadata), "", "").warmup_ns == warmup_ns


def test_headers_that_a_call_has_already_are_not_replaced():
    headers = (("dubbo.tag", "blue"), ("tri-service-group", "g1"))
    assert with_headers(None, headers) == headers
    given = (("dubbo.tag", "red"), ("x", b"y"))
    assert with_headers(iter(given), headers) == (*given, ("tri-service-group", "g1"))


@pytest.mark.parametrize(
    ("tag", "ports"),
    [
        ("", [1, 4]),
        ("blue", [2]),
        ("red", [1, 4]),  # as there is none
    ],
)
def test_a_tag_selects_its_providers_or_those_without_a_tag(tag, ports):
    tags = {1: "", 2: "blue", 3: "green", 4: ""}
    instances = [
        provider(port, metadata={"dubbo.tag": name} if name else None)
        for port, name in tags.items()
    ]
    assert [one.port for one in tagged(instances, tag)] == ports


def test_calls_without_a_tag_never_go_to_providers_with_one():
    assert list(tagged([provider(metadata={"dubbo.tag": "blue"})], "")) == []


def test_without_any_tag_the_instances_are_not_copied():
    instances = (provider(1), provider(2))
    assert tagged(instances, "") is instances
