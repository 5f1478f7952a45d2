"""The timeout and the request of a call that failback delivers."""

import threading
from datetime import timedelta

import pytest

from rpcwheel.call import DeadlinePolicy, MethodPolicy
from rpcwheel.call.config import MethodConfig
from rpcwheel.call.failed_calls import delivery_timeout, queued_request


@pytest.mark.parametrize(
    ("own", "policy", "seconds"),
    [
        (None, None, 60.0),
        (None, 5.0, 5.0),
        (2.0, 5.0, 2.0),
        (9.0, None, 9.0),
        (timedelta(seconds=3), 5.0, 3.0),
        (float("inf"), 5.0, 5.0),
        (float("inf"), None, 60.0),
        (0, 5.0, 5.0),
        (-1.0, None, 60.0),
    ],
)
def test_the_timeout_of_a_delivery_is_that_of_the_call_or_the_policy(own, policy, seconds):
    timeout = None if policy is None else DeadlinePolicy(timeout=policy)
    assert delivery_timeout(own, MethodConfig.from_policy(MethodPolicy(timeout=timeout))) == seconds


def test_a_queued_request_is_a_copy():
    request = {"items": [1]}
    kept = queued_request(request)
    request["items"].append(2)
    assert kept == {"items": [1]}
    assert queued_request(data := b"bytes") is data


def test_a_request_that_can_not_be_copied_is_queued_itself():
    lock = threading.Lock()
    assert queued_request(lock) is lock
