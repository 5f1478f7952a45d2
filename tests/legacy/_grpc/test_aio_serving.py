"""What a server of grpc.aio says of itself."""

import grpc

from rpcwheel._grpc.aio_serving import is_running


async def test_a_server_runs_from_its_start_to_its_stop():
    server = grpc.aio.server()
    assert is_running(server) is False
    await server.start()
    assert is_running(server) is True
    await server.stop(None)
    assert is_running(server) is False


def test_of_anything_else_it_is_not_known():
    assert is_running(object()) is None
    assert is_running(None) is None
