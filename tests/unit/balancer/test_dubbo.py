"""What calls to Dubbo's providers need: headers, and the warm-up."""

import pytest

from rpcwheel.balancer.dubbo import (
    NO_CONVENTIONS,
    DubboClient,
    conventions_of,
    with_headers,
)
from rpcwheel.instance import ServiceInstance

INTERFACE = {"dubbo.interface": "com.example.Orders"}


def provider(*, metadata=None, **settings):
    metadata = INTERFACE | (metadata or {})
    return ServiceInstance(service="a", host="b", port=1, metadata=metadata, **settings)


def test_only_instances_of_dubbo_have_conventions():
    plain = ServiceInstance(service="a", host="b", port=1, group="g", metadata={"dubbo.tag": "x"})
    assert conventions_of(plain, DubboClient("shop", "x")) is NO_CONVENTIONS


def test_calls_carry_group_version_and_tag_and_the_name_of_the_client():
    headers = conventions_of(
        provider(group="g1", version="1.2"), DubboClient("shop", "blue")
    ).headers
    assert dict(headers) == {
        "tri-service-group": "g1",
        "tri-service-version": "1.2",
        "tri-consumer-appname": "shop",
        "dubbo.tag": "blue",
    }
    assert conventions_of(provider(), DubboClient()).headers == ()


@pytest.mark.parametrize(
    ("warmup", "warmup_ns"),
    [("600000", 600_000_000_000), ("0", 0), ("", None), ("-1", None), ("9" * 12, None)],
)
def test_the_warmup_is_that_of_the_provider(warmup, warmup_ns):
    metadata = {"dubbo.warmup": warmup}
    assert conventions_of(provider(metadata=metadata), DubboClient()).warmup_ns == warmup_ns


def test_headers_that_a_call_has_already_are_not_replaced():
    headers = (("dubbo.tag", "blue"), ("tri-service-group", "g1"))
    assert with_headers(None, headers) == headers
    given = (("dubbo.tag", "red"), ("x", b"y"))
    assert with_headers(iter(given), headers) == (*given, ("tri-service-group", "g1"))
