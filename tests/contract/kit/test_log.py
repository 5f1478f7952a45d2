"""Log lines of failing calls: their number, length and characters."""

import io
import logging
from types import SimpleNamespace

import grpc
import pytest

from fixtures.shop import UNARY_UNARY, Fail
from rpcwheel import DefaultResponsePolicy, FailbackPolicy, Kit, RetryPolicy
from rpcwheel.events import log as log_module

HOSTILE = "gone\r\n2026-01-01 ERROR forged\x1b[31m \u202eevil"


@pytest.fixture
def log():
    """A stream with the lines of rpcwheel's loggers."""
    stream = io.StringIO()
    logger, handler = logging.getLogger("rpcwheel"), logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "failback": FailbackPolicy(
                retry_on="UNAVAILABLE", max_attempts=2, backoff=0, max_pending=1000
            )
        },
        {"failback": FailbackPolicy(retry_on="UNAVAILABLE", max_pending=1, overflow="drop")},
        {"default_response": DefaultResponsePolicy(on="UNAVAILABLE", default=b"")},
        {"retry": RetryPolicy(retry_on="UNAVAILABLE", backoff=0), "idempotent": True},
    ],
    ids=["failback", "full failback", "default_response", "retry"],
)
def test_300_failing_calls_are_logged_in_few_lines_without_control_characters(
    shop, shop_channel, log, settings, monkeypatch
):
    """At most 10 lines per event class and error, and a count of the others at the end."""
    monkeypatch.setattr(log_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    shop.then(
        *[Fail(grpc.StatusCode.UNAVAILABLE, details=HOSTILE)] * 100_000
    )  # more than a slow machine retries
    with Kit(timeout=10.0, **settings) as kit:
        call = kit.intercept_channel(shop_channel).unary_unary(UNARY_UNARY)
        for _ in range(300):
            try:
                call(b"1")
            except grpc.RpcError as error:
                assert error.details() == HOSTILE  # noqa: PT017 - some of the settings answer
        kit.close(drain_timeout=0)
    lines = log.getvalue().split("\n")
    assert "Traceback" not in log.getvalue()
    assert lines.pop() == ""
    assert [line for line in lines if not line.isprintable() or len(line) > 600] == []
    assert 0 < len(lines) < 150, log.getvalue()
