"""What an error of redis-py means for a journal or a registry."""

import ssl

import pytest
import redis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    DataError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from rpcwheel._engines.redis import RedisProblem, redis_error
from rpcwheel.errors import JournalFull, JournalRefused, JournalUnavailable

CLASSES = {
    RedisProblem.REFUSED: JournalRefused,
    RedisProblem.FULL: JournalFull,
    RedisProblem.TEMPORARY: JournalUnavailable,
}
CLUSTER = "Redis Cluster is not supported"
MAXMEMORY = "raise maxmemory"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (AuthenticationError("wrong"), JournalRefused, "look at the user"),
        (NoPermissionError("no rights"), JournalRefused, "look at the user"),
        (MovedError("3 10.0.0.1:7"), JournalRefused, f"slot 3 is at 10.0.0.1:7; {CLUSTER}"),
        (AskError("3 10.0.0.1:7"), JournalRefused, CLUSTER),
        (ClusterDownError("down"), JournalRefused, CLUSTER),
        (TryAgainError("again"), JournalRefused, CLUSTER),
        (OutOfMemoryError("full"), JournalFull, MAXMEMORY),
        (ResponseError("in script: -OOM full"), JournalFull, MAXMEMORY),
        (ResponseError("MISCONF: No space left on device"), JournalFull, "No space left"),
        (ResponseError("MISCONF Errors writing"), JournalUnavailable, "MISCONF"),
        (ResponseError("in script: -READONLY replica"), JournalUnavailable, "READONLY"),
        (ReadOnlyError("a replica"), JournalUnavailable, "a replica"),
        (MasterDownError("link is down"), JournalUnavailable, "link is down$"),
        (BusyLoadingError("loading"), JournalUnavailable, "loading"),
        (ResponseError("BUSY running a script"), JournalUnavailable, "BUSY"),
        (ResponseError("unknown command"), JournalRefused, "unknown command$"),
        (DataError("not a number"), JournalRefused, "not a number$"),
        (redis.ConnectionError("reset"), JournalUnavailable, "reset$"),
        (redis.TimeoutError(), JournalUnavailable, "redis://a: TimeoutError$"),
    ],
)
def test_an_error_of_redis_is_one_of_the_backend_with_advice(error, kind, text):
    ours = redis_error("redis://a", error, CLASSES)
    assert type(ours) is kind
    with pytest.raises(kind, match=rf"^redis://a: .*{text}" if "://" not in text else text):
        raise ours


def test_a_failed_tls_handshake_is_refused():
    error = redis.ConnectionError("closed")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed")
    ours = redis_error("redis://a", error, CLASSES)
    assert type(ours) is JournalRefused
    assert "the TLS handshake failed" in str(ours)


def test_a_connection_that_ends_in_tls_may_need_another_client_certificate():
    error = redis.ConnectionError("closed")
    error.__context__ = ssl.SSLEOFError("EOF occurred in violation of protocol")
    ours = redis_error("redis://a", error, CLASSES)
    assert type(ours) is JournalUnavailable
    assert str(ours).endswith("client certificate: ?cert=chain.pem&key=key.pem")
