"""Fixtures for the failback tests."""

from fixtures.failback_invokers import aio_invoker, decorate, invoker, new_failback  # noqa: F401
from fixtures.failback_queues import aio_run_until_empty, run_until_empty  # noqa: F401
from fixtures.grpc_servers import aio_channel, channel  # noqa: F401
from fixtures.journaled_clients import client, new_queues, policy, push  # noqa: F401
from fixtures.journals import backend, manual_time, script, url, worker_url  # noqa: F401
from fixtures.shop import shop  # noqa: F401
from fixtures.worlds import world  # noqa: F401
