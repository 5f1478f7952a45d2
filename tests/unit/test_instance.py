"""`ServiceInstance`: values, targets, encoding; and the differences of two tuples of them."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.forks import holds_in_child
from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import ServiceInstance, Snapshot, differences, record_epoch, started_now

ONE = ServiceInstance(service="shop.Orders", host="10.0.0.7", port=50051)


def test_default_values_of_an_instance():
    defaults = {"group": "", "version": "", "zone": "", "weight": 100, "protocol": "grpc"}
    defaults |= {"metadata": {}, "status": "UP", "started_at": 0.0, "extra": {}}
    assert ONE.replace(**defaults, id="10.0.0.7:50051") == ONE
    assert ONE.address == "10.0.0.7:50051"
    assert ONE.target == "ipv4:10.0.0.7:50051"
    assert ONE.key == ("shop.Orders", "10.0.0.7:50051")


def test_default_values_of_a_snapshot():
    assert Snapshot("a") == Snapshot("a", (), 0, "live", frozenset(), 0.0)


def test_all_instances_of_a_process_have_its_epoch_and_a_forked_child_another():
    assert ServiceInstance(service="a", host="b", port=1).epoch == ONE.epoch != ""

    def has_another():
        return ServiceInstance(service="a", host="b", port=1).epoch not in {ONE.epoch, ""}

    assert holds_in_child(has_another)


def test_extra_that_is_not_json_is_refused():
    loop = {}
    loop["again"] = loop
    for extra in [{"tags": {1, 2}}, {"a": b"b"}, {"a": float("nan")}, {"a": {1: 2, "b": 3}}, loop]:
        with pytest.raises(ConfigurationError, match="it must be JSON"):
            ServiceInstance(service="a", host="b", port=1, extra=extra)
        with pytest.raises(ConfigurationError, match="it must be JSON"):
            ONE.replace(extra=extra)


def test_a_changed_copy_keeps_the_id_and_the_other_values():
    changed = ONE.replace(port=1, weight=3)
    assert (changed.id, changed.port, changed.weight) == (ONE.id, 1, 3)
    assert changed.epoch == ONE.epoch


def test_equal_instances_have_equal_hashes():
    with_more = ONE.replace(metadata={"a": "b"})
    assert {ONE: 1, ONE.replace(): 2, with_more: 3} == {ONE: 2, with_more: 3}
    assert hash(ONE) == hash(with_more)


def test_an_address_has_brackets_around_ipv6_and_a_target_always_names_its_scheme():
    for host, address, target in [
        ("10.0.0.7", "10.0.0.7:1", "ipv4:10.0.0.7:1"),
        ("::1", "[::1]:1", "ipv6:[::1]:1"),
        ("[::1]", "[::1]:1", "ipv6:[::1]:1"),
        ("2001:DB8:0::1", "[2001:db8::1]:1", "ipv6:[2001:db8::1]:1"),
        ("fe80::1%eth0", "[fe80::1%eth0]:1", "dns:///[fe80::1%25eth0]:1"),
        ("shop-1.example", "shop-1.example:1", "dns:///shop-1.example:1"),
        ("localhost", "localhost:1", "dns:///localhost:1"),
        ("unix", "unix:1", "dns:///unix:1"),
        ("unix-abstract", "unix-abstract:1", "dns:///unix-abstract:1"),
        ("vsock", "vsock:1", "dns:///vsock:1"),
        ("xds", "xds:1", "dns:///xds:1"),
        ("ipv4", "ipv4:1", "dns:///ipv4:1"),
        ("ipv6", "ipv6:1", "dns:///ipv6:1"),
        ("dns", "dns:1", "dns:///dns:1"),
    ]:
        one = ServiceInstance(service="a", host=host, port=1)
        assert (one.address, one.target) == (address, target)


LONGEST_LABEL = "x" * 63
LONGEST_NAME = ".".join([LONGEST_LABEL] * 3 + ["x" * 61])

HOSTS = [
    "shop",
    "shop.example",
    "shop.example.",
    "Shop-1.Example",
    "shop_orders",
    "_shop._tcp.example",
    "10.example",
    "xn--bcher-kva.example",
    "10.0.0.7",
    "::1",
    "fe80::1%4",
    "fe80::1%eth0.100",
    "fe80::1%br-a_b~1",
]


def record_of(host):
    return json.dumps({"v": 1, "service": "a", "host": host, "port": 1, "id": "a"})


def test_a_host_is_a_dns_name_or_an_ip_address():
    for host in (*HOSTS, LONGEST_LABEL, LONGEST_NAME, LONGEST_NAME + "."):
        assert ServiceInstance(service="a", host=host, port=1).host == host
        assert ServiceInstance.decoded(record_of(host)).host == host


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INSTANCES = st.builds(
    ServiceInstance,
    service=NAMES,
    host=st.from_regex(r"[A-Za-z_]([A-Za-z0-9_\-]{0,20}[A-Za-z0-9_])?", fullmatch=True)
    | st.ip_addresses().filter(lambda address: not address.is_unspecified).map(str),
    port=st.integers(1, 65535),
    group=TEXTS,
    version=TEXTS,
    weight=st.integers(0, 1000),
    protocol=st.sampled_from(["grpc", "grpcs"]),
    zone=TEXTS,
    metadata=st.dictionaries(TEXTS, TEXTS, max_size=3),
    status=st.sampled_from(["UP", "DRAINING"]),
    started_at=st.floats(0, 1e12),
    extra=st.dictionaries(TEXTS.map("x-{}".format), st.none() | st.integers() | TEXTS, max_size=3),
)


@given(INSTANCES)
def test_decoded_reverses_encoded(instance):
    assert ServiceInstance.decoded(instance.encoded()) == instance


def test_the_encoded_form():
    """The form is read by other programs and versions."""
    one = ONE.replace(epoch="e", weight=7, extra={"new": [1]})
    assert json.loads(one.encoded()) == {
        "v": 1,
        "service": "shop.Orders",
        "host": "10.0.0.7",
        "port": 50051,
        "id": "10.0.0.7:50051",
        "epoch": "e",
        "weight": 7,
        "new": [1],
    }


def test_fields_of_a_newer_version_are_kept():
    newer = b'{"v": 2, "service": "a", "host": "b", "port": 1, "shiny": {"deep": [true]}}'
    one = ServiceInstance.decoded(newer)
    assert (one.epoch, one.extra) == ("", {"shiny": {"deep": [True]}})
    assert json.loads(one.replace(weight=1).encoded())["shiny"] == {"deep": [True]}


def test_an_invalid_record_raises_value_error_with_the_reason():
    for data, message in [
        (b"\xff", "no JSON: .*utf-8"),
        (b"", "no JSON"),
        (b"hello", "no JSON"),
        (b"[" * 100_000, "no JSON: .*(recursion|overflow)"),
        (b'{"v": 1, "port": ' + b"9" * 5000 + b"}", "no JSON: .*integer"),
        (b"3", "no record of an instance"),
        (b"{}", "no record of an instance"),
        (b'{"v": 1}', "`service` is missing"),
        (b'{"v": 1, "service": "a", "host": "0.0.0.0", "port": 1}', "an address to listen on"),
        (b'{"v": 1, "service": "a", "host": "b:1", "port": 1}', "IP address, without a port"),
        (b'{"v": 1, "service": "a", "host": "b", "port": "1"}', "port"),
        (b'{"v": 1, "service": "a", "host": "b", "port": 1, "started_at": NaN}', "started_at"),
    ]:
        with pytest.raises(ValueError, match=message):
            ServiceInstance.decoded(data)


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_record_is_decoded_or_raises_value_error(data):
    with contextlib.suppress(ValueError):
        assert isinstance(ServiceInstance.decoded(data), ServiceInstance)


@pytest.mark.parametrize("data", [b"\xff", b"{", b"[]", b'{"epoch": 1}', b"[" * 100_000])
def test_data_that_are_no_record_have_no_epoch(data):
    assert record_epoch(data) is None


def test_started_now_is_the_time_since_1970():
    assert started_now() > 1_700_000_000


POOL = [ONE.replace(port=port) for port in range(1, 9)]
ORDERED = st.sets(st.sampled_from(range(8))).map(
    lambda found: tuple(POOL[n] for n in sorted(found))
)


@given(before=ORDERED, after=ORDERED)
def test_differences_contain_all_removed_and_added_instances(before, after):
    removed, added = differences(before, after)
    assert set(map(id, before)) - set(map(id, removed)) == set(map(id, after)) - set(map(id, added))
    if before == after:
        assert (removed, added) == ((), ())


def test_differences_of_one_change_contain_one_instance():
    many = tuple(POOL[0].replace(port=port) for port in range(1, 2001))
    changed = many[700].replace(weight=7)
    assert differences(many, (*many[:700], changed, *many[701:])) == ((many[700],), (changed,))
    assert differences(many, (*many[:700], *many[701:])) == ((many[700],), ())
    assert differences(many[1:], many) == ((), (many[0],))
