"""Multicallables have the signatures of gRPC's own and pass on all arguments."""

import inspect

import grpc
import pytest

from rpcwheel._grpc import multicallable

OPTIONS = {
    "timeout": 1.5,
    "metadata": (("key", "value"),),
    "credentials": None,
    "wait_for_ready": True,
    "compression": grpc.Compression.Gzip,
}
METHODS = [
    ("UnaryUnary", "__call__", "wait"),
    ("UnaryUnary", "with_call", "wait"),
    ("UnaryUnary", "future", "begin"),
    ("StreamUnary", "__call__", "wait"),
    ("StreamUnary", "with_call", "wait"),
    ("StreamUnary", "future", "begin"),
    ("UnaryStream", "__call__", "begin"),
    ("StreamStream", "__call__", "begin"),
]


class Recording:
    """Returns the arguments."""

    def _wait(self, *given):
        return "wait", *given

    def _begin(self, *given):
        return "begin", *given


@pytest.mark.parametrize(("kind", "name", "way"), METHODS)
def test_a_multicallable_has_grpcs_signature_and_passes_on_all_arguments(kind, name, way):
    theirs, ours = getattr(grpc, kind + "MultiCallable"), getattr(multicallable, kind)
    assert [(one.name, one.kind, one.default) for one in parameters(ours, name)] == [
        (one.name, one.kind, one.default) for one in parameters(theirs, name)
    ]
    method = type(kind, (Recording, ours), {})()
    assert isinstance(method, theirs)
    passed = (way, name, b"request", *OPTIONS.values())
    assert getattr(method, name)(b"request", **OPTIONS) == passed
    assert getattr(method, name)(b"request", *OPTIONS.values()) == passed


def parameters(kind, name):
    return inspect.signature(getattr(kind, name)).parameters.values()
