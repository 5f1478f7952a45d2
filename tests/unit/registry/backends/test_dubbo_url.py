"""Dubbo's provider URLs: what is written is read without loss, and what Java writes is read."""

import json
import re
from urllib.parse import quote_plus, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import Consumer
from rpcwheel.registry.backends.dubbo_url import (
    consumer_of,
    node_name,
    parsed,
    record_of,
)

SERVICE, INTERFACE = "shop.v1.Orders", "com.example.shop.Orders"

JAVA = (
    "tri%3A%2F%2F10.99.0.1%3A50051%2Fshop.v1.Orders%3Fapplication%3Djava-shop%26deprecated%3Dfalse"
    "%26dubbo%3D2.0.2%26dubbo.tag%3Dblue%26dynamic%3Dtrue%26generic%3Dfalse%26group%3Dg1"
    "%26interface%3Dcom.example.shop.Orders%26methods%3Dchat%2Cplace%26place.weight%3D7"
    "%26prefer.serialization%3Dhessian2%2Cfastjson2%26proxy%3Dnativestub%26release%3D3.3.6"
    "%26revision%3D1.2%26service-name-mapping%3Dtrue%26side%3Dprovider%26timestamp%3D1795350893030"
    "%26version%3D1.2%26weight%3D50"
)
"""The name of a node of Dubbo Java 3.3.6."""

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SPECIAL_KEYS = [
    *("dubbo.application", "dubbo.warmup", "dubbo.tag", "dubbo.path", "application", "warmup"),
    *("side", "interface", "group", "timestamp", "rpcwheel.epoch", "rpcwheel.m.side", "a=b&c%26"),
]
INSTANCES = st.builds(
    ServiceInstance,
    service=st.just(SERVICE),
    host=st.sampled_from(["10.0.0.7", "::1", "orders.example", "fe80::1%eth0"]),
    port=st.integers(1, 65535),
    id=st.sampled_from(["", "10.0.0.7:1", "..", "a%2Fb&c=d?e#f+g~", "\u00e4"]),
    group=TEXTS,
    version=TEXTS,
    weight=st.integers(0, 1000),
    protocol=st.sampled_from(["grpc", "grpcs"]),
    zone=TEXTS,
    metadata=st.dictionaries(TEXTS | st.sampled_from(SPECIAL_KEYS), TEXTS, max_size=6),
    status=st.sampled_from(["UP", "DRAINING"]),
    epoch=TEXTS,
    started_at=st.floats(0, allow_nan=False, allow_infinity=False) | st.integers(0, 2**40),
    extra=st.dictionaries(st.sampled_from(["later", "more"]), TEXTS | st.integers() | st.none()),
)


def name_of(instance, interface=INTERFACE):
    return node_name(instance, interface=interface, application="py-shop", release="rpcwheel-1")


def instance_of(name, service, interface):
    return ServiceInstance.decoded(record_of(name, service, interface)[1])


@given(INSTANCES)
def test_an_instance_is_read_as_it_was_written(instance):
    key, record = record_of(name_of(instance), SERVICE, INTERFACE)
    assert (key, record) == (instance.id, instance.encoded())


@given(st.text(max_size=80))
def test_any_name_is_an_instance_or_a_record_that_is_refused_with_the_reason(text):
    key, record = record_of(text, SERVICE, INTERFACE)
    reason = json.loads(record).get("unreadable")
    if reason is None:
        assert ServiceInstance.decoded(record).id == key
    else:
        assert key == text
        with pytest.raises(ValueError, match=re.escape(reason)):
            ServiceInstance.decoded(record)


def test_a_node_of_java_becomes_an_instance():
    assert instance_of(JAVA, SERVICE, INTERFACE) == ServiceInstance(
        service=SERVICE,
        host="10.99.0.1",
        port=50051,
        id="10.99.0.1:50051,g1,1.2",
        group="g1",
        version="1.2",
        weight=50,
        started_at=1795350893.03,
        epoch="1795350893030",
        metadata={
            "dubbo.application": "java-shop",
            "dubbo.interface": INTERFACE,
            "dubbo.release": "3.3.6",
            "dubbo.tag": "blue",
            "dubbo.warmup": "600000",
            "place.weight": "7",
        },
    )


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("tri://10.0.0.1:1/x?disabled=true", {"status": "DRAINING"}),
        ("tri://10.0.0.1:1/x?enabled=false", {"status": "DRAINING"}),
        ("tri://10.0.0.1:1/x?weight=5000", {"weight": 1000}),
        ("tri://10.0.0.1:1/x?weight=-5", {"weight": 0}),
        ("tri://10.0.0.1:1/x?weight=much", {"weight": 100}),
        ("tri://10.0.0.1:1/x?ssl-enabled=true", {"protocol": "grpcs"}),
        ("tri://[::1]:1/x", {"host": "::1", "id": "[::1]:1"}),
        ("grpc://10.0.0.1:1", {"metadata": {"dubbo.interface": INTERFACE}}),
        ("tri://10.0.0.1:1/x?warmup=1&timestamp=2", {"started_at": 2.0, "epoch": "2"}),
        ("tri://10.0.0.1:1/x?timestamp=99999999999", {"started_at": 99999999999.0}),
        ("tri://10.0.0.1:1/x?timestamp=100000000000", {"started_at": 100000000.0}),
        (
            "tri://10.0.0.1:1/other.Service",
            {"metadata": {"dubbo.interface": INTERFACE, "dubbo.path": "other.Service"}},
        ),
    ],
)
def test_parameters_of_dubbo_are_fields_of_the_instance(url, fields):
    instance = instance_of(url, "x", INTERFACE)
    assert {name: getattr(instance, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("dubbo://10.0.0.1:20880/x", "its protocol is 'dubbo'; only Triple"),
        ("rest://10.0.0.1:80/x", "its protocol is 'rest'"),
        ("tri://10.0.0.1/x", "'10.0.0.1' is no host and port"),
        ("tri://0.0.0.0:1/x", "an address to listen on"),
        ("junk", "its protocol is 'junk'"),
        (f"tri://10.0.0.1:1/x?rpcwheel.extra={'[' * 10**5}", "(recursion|overflow)"),
    ],
)
def test_a_url_that_cannot_be_called_is_refused_with_the_reason(url, reason):
    with pytest.raises(ValueError, match=reason):
        instance_of(url, "x", INTERFACE)


def test_long_metadata_of_a_provider_are_left_out():
    url = f"tri://10.0.0.1:1/x?application=shop&dubbo.tag=blue&long={'y' * 9000}"
    assert instance_of(url, "x", INTERFACE).metadata == {
        "dubbo.application": "shop",
        "dubbo.interface": INTERFACE,
        "dubbo.tag": "blue",
    }


def test_the_url_has_what_consumers_and_consoles_of_dubbo_read():
    instance = ServiceInstance(
        service=SERVICE,
        host="10.0.0.7",
        port=50051,
        epoch="e",
        group="g1",
        weight=50,
        status="DRAINING",
        started_at=1795350893.03,
        metadata={"dubbo.tag": "blue", "dubbo.warmup": "5000", "env": "gray"},
    )
    name = name_of(instance)
    assert unquote(name) == (
        "tri://10.0.0.7:50051/shop.v1.Orders?application=py-shop&disabled=true&dubbo=2.0.2"
        "&dubbo.tag=blue&dynamic=true&env=gray&group=g1&interface=com.example.shop.Orders"
        "&release=rpcwheel-1&rpcwheel.epoch=e&rpcwheel.given=warmup&side=provider"
        "&timestamp=1795350893030&warmup=5000&weight=50"
    )
    assert parsed(name_of(instance.replace(metadata={})))[3]["warmup"] == "0"


def test_a_name_is_encoded_as_java_does():
    instance = ServiceInstance(
        service="a", host="b", port=1, epoch="*-._~ /", group="x y", metadata={"k": "&=%"}
    )
    name = name_of(instance, "a")
    assert "%26group%3Dx+y%26" in name
    assert "rpcwheel.epoch%3D*-._%7E+%2F" in name
    assert "%26k%3D%2526%253D%2525%26" in name


@pytest.mark.parametrize(
    ("url", "consumer"),
    [
        (
            "consumer://h/Orders?application=web&group=g1&release=3.3&timestamp=100000000000&version=2",
            Consumer(SERVICE, "web", "h", "2", "g1", "3.3", 1e8),
        ),
        (
            "consumer://10.0.0.9/shop.v1.Orders?application=web&group=&timestamp=1&version=",
            Consumer(SERVICE, "web", "10.0.0.9", started_at=1.0),
        ),
        ("consumer://10.0.0.9", Consumer(SERVICE, "", "10.0.0.9")),
        ("a note", Consumer(SERVICE, "", "")),
    ],
)
def test_a_consumer_is_read_from_its_url(url, consumer):
    assert consumer_of(quote_plus(url), SERVICE) == consumer
