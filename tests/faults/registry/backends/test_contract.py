"""Every engine keeps the contract of backends."""

import secrets
import threading

import pytest

from fixtures.engine_watchers import ABOUT_LEASES, contract_settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.testing import BACKEND_CHECKS


@pytest.mark.parametrize("name", ["etcd", "redis", "zookeeper", "dubbo"])
def test_a_backend_of_each_engine_keeps_the_contract(name, request):
    engine = request.getfixturevalue(name)
    options = {"application": f"app-{secrets.token_hex(4)}"} if name == "dubbo" else {}
    url = engine.url(namespace=f"test-{secrets.token_hex(4)}", **options)
    failed = []

    def run(check):
        try:
            check(lambda: open_backend(url, contract_settings(check)))
        except AssertionError as error:
            failed.append(str(error))

    checks = dict(BACKEND_CHECKS)
    run(checks.pop("close_ends_threads_and_timeouts"))  # which counts all threads
    waiting = [threading.Thread(target=run, args=(checks.pop(each),)) for each in ABOUT_LEASES]
    for thread in waiting:
        thread.start()
    for check in checks.values():
        run(check)
    for thread in waiting:
        thread.join()
    assert failed == []
