"""An asyncio client of google-cloud, which appends to private lists of the channel."""

import contextlib

import grpc
import pytest

from fixtures.grpc_servers import aio_running
from fixtures.waiting import WAIT_S
from rpcwheel import RetryPolicy
from rpcwheel.aio import Kit
from rpcwheel.transport.aio import ReconnectingChannel

tasks = pytest.importorskip("google.cloud.tasks_v2")
transports = pytest.importorskip("google.cloud.tasks_v2.services.cloud_tasks.transports")

SERVICE = "google.cloud.tasks.v2.CloudTasks"
QUEUE = "projects/shop/locations/here/queues/orders"
SETTINGS = {
    "timeout": WAIT_S,
    "retry": RetryPolicy(retry_on={"INTERNAL"}, max_attempts=3, backoff=0.01),
    "idempotent": True,
}


class Emulator:
    """Serves one method of Cloud Tasks; its first call fails."""

    def __init__(self) -> None:
        self.calls = 0

    async def get_queue(self, request, context):
        self.calls += 1
        if self.calls == 1:
            await context.abort(grpc.StatusCode.INTERNAL, "try again")
        return tasks.Queue(name=request.name)

    @contextlib.asynccontextmanager
    async def serving(self):
        handler = grpc.unary_unary_rpc_method_handler(
            self.get_queue, tasks.GetQueueRequest.deserialize, tasks.Queue.serialize
        )
        service = grpc.method_handlers_generic_handler(SERVICE, {"GetQueue": handler})
        async with aio_running(service) as server:
            yield server.target


CHANNELS = {
    "kit.channel": lambda kit, target: kit.channel(target, options=None),
    "kit.intercept_channel": lambda kit, target: kit.intercept_channel(
        ReconnectingChannel(target, options=None)
    ),
}


@pytest.mark.parametrize("maker", CHANNELS.values(), ids=CHANNELS)
async def test_a_google_cloud_client_is_retried_on_a_channel_of_rpcwheel(maker):
    emulator = Emulator()
    async with (
        emulator.serving() as target,
        Kit(**SETTINGS) as kit,
        maker(kit, target) as channel,
    ):
        transport = transports.CloudTasksGrpcAsyncIOTransport(channel=channel)
        client = tasks.CloudTasksAsyncClient(transport=transport)
        answer = await client.get_queue(name=QUEUE, timeout=WAIT_S)
    assert (answer.name, emulator.calls) == (QUEUE, 2)
