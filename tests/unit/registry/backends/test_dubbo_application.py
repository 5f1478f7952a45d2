"""The records of Dubbo's application level."""

import json

import pytest

from rpcwheel.registry.backends.dubbo_application import (
    instance_of_application,
    metadata_of,
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
    revision, metadata = metadata_of("shop", "10.0.0.1", 1, [ORDERS])
    assert json.loads(metadata)["revision"] == revision
    assert metadata_of("shop", "10.0.0.1", 1, [ORDERS]) == (revision, metadata)
    other = ("com.example.Orders", "com.example.Orders", {"group": "g1", "weight": "51"})
    for changed in (
        metadata_of("shop", "10.0.0.1", 1, [other]),
        metadata_of("shop", "10.0.0.2", 1, [ORDERS]),
        metadata_of("shop", "10.0.0.1", 2, [ORDERS]),
        metadata_of("shop", "10.0.0.1", 1, []),
    ):
        assert changed[0] != revision


def test_a_restarted_server_has_the_revision_of_the_one_before():
    """The metadata of its process are never deleted."""
    interface, path, parameters = ORDERS
    before, after = (
        metadata_of("shop", "a", 1, [(interface, path, parameters | own)])
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
    }
    assert "timestamp" not in instance_of_application("shop", "a", 7, "r1", "").decode()
