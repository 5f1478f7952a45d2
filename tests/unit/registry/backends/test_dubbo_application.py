"""The records of Dubbo's application level."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.dubbo_applications import (
    field,
    local,
    message,
    metadata,
    node,
    remote,
    service,
    varint,
)
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backends.dubbo_application import (
    ApplicationMetadata,
    instance_of_application,
    metadata_of,
    metadata_request,
    read_instance,
    read_metadata,
    read_metadata_message,
    records_of,
    with_application,
)

ORDERS = ("com.example.Orders", "com.example.Orders", {"group": "g1", "weight": "50"})


@pytest.mark.parametrize(
    ("mapping", "changed"),
    [(b"", b"shop"), (b"java", b"java,shop"), (b"java,shop,go", None), (b"shop", None)],
)
def test_an_application_is_added_to_a_mapping_once(mapping, changed):
    assert with_application(mapping, "shop") == changed


def test_the_revision_follows_the_content():
    revision, metadata = metadata_of("shop", 1, [ORDERS])
    assert json.loads(metadata)["revision"] == revision
    assert metadata_of("shop", 1, [ORDERS]) == (revision, metadata)
    other = ("com.example.Orders", "com.example.Orders", {"group": "g1", "weight": "51"})
    for changed in (
        metadata_of("shop", 1, [other]),
        metadata_of("shop", 2, [ORDERS]),
        metadata_of("shop", 1, []),
    ):
        assert changed[0] != revision


def test_a_restarted_server_has_the_revision_of_the_one_before():
    """The metadata of its process are never deleted."""
    interface, path, parameters = ORDERS
    before, after = (
        metadata_of("shop", 1, [(interface, path, parameters | own)])
        for own in (
            {"rpcwheel.epoch": "e1", "timestamp": "1"},
            {"rpcwheel.epoch": "e2", "timestamp": "2"},
        )
    )
    assert before == after


def test_the_node_of_a_server_has_the_form_of_curator():
    record = json.loads(instance_of_application("shop", "::1", 7, "r1", "1795350893030"))
    assert record["id"] == "[::1]:7"
    assert (record["address"], record["port"]) == ("::1", 7)
    assert record["registrationTimeUTC"] == 1795350893030
    assert record["payload"]["metadata"] == {
        "dubbo.endpoints": '[{"port":7,"protocol":"tri"}]',
        "dubbo.metadata.revision": "r1",
        "dubbo.metadata.storage-type": "remote",
        "timestamp": "1795350893030",
        "rpcwheel.interfaces": "true",
    }
    assert "timestamp" not in instance_of_application("shop", "a", 7, "r1", "").decode()


# Reading

INTERFACE = "com.example.Orders"
SERVICES = (
    service(INTERFACE, path="shop.Orders", port=50051, params={"weight": "50", "side": "provider"}),
    service("com.example.Stock", group="g1", version="1.2", port=50051, params={}),
)


def services_of(read):
    return [
        (each.interface, each.group, each.version, each.port, each.path, dict(each.parameters))
        for each in read.services
    ]


def test_metadata_in_zookeeper_and_of_the_metadata_service_are_the_same():
    read = services_of(read_metadata(metadata(*SERVICES)))
    assert read == services_of(read_metadata_message(message(*SERVICES)))
    assert read == [
        (INTERFACE, "", "", 50051, "shop.Orders", {"weight": "50", "side": "provider"}),
        ("com.example.Stock", "g1", "1.2", 50051, "com.example.Stock", {}),
    ]


@pytest.mark.parametrize("revision", ["r1", "x" * 200])
def test_a_request_names_the_revision(revision):
    assert metadata_request(revision) == field(1, revision)


def test_what_was_written_is_read():
    revision, data = metadata_of("shop", 7, [ORDERS])
    read = read_instance(instance_of_application("shop", "10.0.0.1", 7, revision, "1795350893030"))
    assert (read.host, read.port, read.revision) == ("10.0.0.1", 7, revision)
    assert read.metadata_address is None
    assert read.is_beside_interfaces
    (record,) = records_of(read, read_metadata(data), "com.example.Orders", INTERFACE).values()
    instance = ServiceInstance.decoded(record)
    assert (instance.group, instance.weight, instance.port) == ("g1", 50, 7)


def test_a_process_says_where_its_metadata_are():
    assert read_instance(remote("r1")).metadata_address is None
    assert read_instance(local("r1", 20880, host="a")).metadata_address == ("a", 20880)
    assert not read_instance(remote("r1")).is_beside_interfaces


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"port": 70000}', "is no port"),
        (b'{"port": 100000}', "is no port"),
        (b'{"port": 1, "payload": 7}', "no JSON object"),
        (node("r1"), "only 'tri' with 2.0.0 can be called: set metadata-type=remote"),
        (local("r1", 1, **{"meta-v": "1.0.0"}), "the version '1.0.0'"),
    ],
)
def test_a_process_that_cannot_be_read_is_refused_with_the_reason(data, said):
    with pytest.raises(ValueError, match=said):
        read_instance(data)


def test_values_of_a_process_belong_to_its_services_unless_these_have_their_own():
    process = read_instance(remote("r1", **{"dubbo.tag": "blue", "timestamp": "5000000000000"}))
    own = service(INTERFACE, port=2, params={"dubbo.tag": "red"})
    read = read_metadata(metadata(service("com.example.Stock"), service(INTERFACE), own))
    records = records_of(process, read, "shop.Orders", INTERFACE)
    instances = {id_: ServiceInstance.decoded(record) for id_, record in records.items()}
    tags = {id_: instance.metadata["dubbo.tag"] for id_, instance in instances.items()}
    assert tags == {"10.0.0.1:1": "blue", "10.0.0.1:2": "red"}
    assert {(each.epoch, each.started_at) for each in instances.values()} == {
        ("5000000000000", 5e9)
    }


def test_a_service_of_another_protocol_is_a_record_that_says_so():
    read = read_metadata(metadata(service(INTERFACE, protocol="dubbo", port=20880)))
    records = records_of(read_instance(remote("r1")), read, "shop.Orders", INTERFACE)
    with pytest.raises(ValueError, match="its protocol is 'dubbo'"):
        ServiceInstance.decoded(records["dubbo:10.0.0.1:20880"])


VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda each: (
        st.lists(each)
        | st.dictionaries(
            st.sampled_from(["services", "params", "port", "payload", "metadata", "x"]), each
        )
    ),
)


@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_whatever_is_stored_is_read_or_refused_with_a_value_error(data):
    for read in (read_instance, read_metadata, read_metadata_message):
        with contextlib.suppress(ValueError):
            read(data)


@pytest.mark.parametrize("number", [*range(1, 8), 100])
def test_fields_of_fixed_size_are_skipped_whatever_their_number_is(number):
    fixed = bytes([*varint(number << 3 | 5), *b"EVIL", *varint(number << 3 | 1), *bytes(8)])
    entry = field(1, "0") + field(2, field(1, INTERFACE) + fixed) + fixed
    read = read_metadata_message(fixed + field(3, entry))
    assert [(each.interface, each.port) for each in read.services] == [(INTERFACE, 0)]


@given(st.integers(0, len(message(*SERVICES)) - 1), st.integers(0, 255))
def test_a_damaged_answer_is_read_or_refused_with_a_value_error(at, byte):
    data = bytearray(message(*SERVICES))
    data[at] = byte
    with contextlib.suppress(ValueError):
        assert isinstance(read_metadata_message(bytes(data)), ApplicationMetadata)
