"""What the private parts of gRPC tell of calls, and what follows if gRPC renames them."""

from types import SimpleNamespace

import grpc._server

from rpcwheel._grpc.serving import is_receiving


def test_a_call_without_the_state_of_grpc_is_not_known_to_receive():
    assert is_receiving(object()) is False


def test_a_call_is_not_known_to_receive_if_grpc_has_no_such_token(monkeypatch):
    context = SimpleNamespace(_state=SimpleNamespace(due={grpc._server._RECEIVE_MESSAGE_TOKEN}))
    assert is_receiving(context) is True
    monkeypatch.delattr(grpc._server, "_RECEIVE_MESSAGE_TOKEN")
    assert is_receiving(context) is False
