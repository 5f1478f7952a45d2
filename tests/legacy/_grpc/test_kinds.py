"""The four kinds take what grpc's take, and hand all of it on."""

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
WAYS = [
    ("UnaryUnary", "__call__", "wait"),
    ("UnaryUnary", "with_call", "wait"),
    ("UnaryUnary", "future", "begin"),
    ("StreamUnary", "__call__", "wait"),
    ("StreamUnary", "with_call", "wait"),
    ("StreamUnary", "future", "begin"),
    ("UnaryStream", "__call__", "begin"),
    ("StreamStream", "__call__", "begin"),
]


class Ways:
    """Says what it was given."""

    def _wait(self, *given):
        return "wait", *given

    def _begin(self, *given):
        return "begin", *given


@pytest.mark.parametrize(("kind", "name", "way"), WAYS)
def test_a_call_takes_what_grpc_s_takes_and_hands_all_of_it_on(kind, name, way):
    theirs, ours = getattr(grpc, kind + "MultiCallable"), getattr(multicallable, kind)
    assert [(one.name, one.kind, one.default) for one in parameters(ours, name)] == [
        (one.name, one.kind, one.default) for one in parameters(theirs, name)
    ]
    method = type(kind, (Ways, ours), {})()
    assert isinstance(method, theirs)
    given = (way, name, "what is sent", *OPTIONS.values())
    assert getattr(method, name)("what is sent", **OPTIONS) == given
    assert getattr(method, name)("what is sent", *OPTIONS.values()) == given


def parameters(kind, name):
    return inspect.signature(getattr(kind, name)).parameters.values()
