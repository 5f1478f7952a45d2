"""What the journal and the registry in Redis share: options of redis-py, and its errors."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    DataError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from rpcwheel.errors import ConfigurationError, RpcWheelError

from .tls import ENDED, ENDED_ADVICE, TLS_ADVICE, refused_by_tls, ssl_error_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from redis import Redis

    from .tls import Tls

PORT: Final = 6379

CLUSTER: Final = "Redis Cluster is not supported: give the URL of a Redis server outside a cluster"

FULL: Final = (
    "Redis has reached its maxmemory and accepts nothing new: raise maxmemory, delete data, or "
    "use another Redis"
)


class RedisProblem(enum.Enum):
    """How long a failed request will fail."""

    REFUSED = enum.auto()
    """Until somebody changes the server or the URL."""
    FULL = enum.auto()
    """Until the server has memory, or its disk space, again."""
    TEMPORARY = enum.auto()
    """For a while: there is no connection, or the server is busy, starting, or a replica."""


_E = TypeVar("_E", bound=RpcWheelError)
_P = RedisProblem

PROBLEMS: Final[tuple[tuple[tuple[type[RedisError], ...], str, RedisProblem, str], ...]] = (
    (
        (AuthenticationError, NoPermissionError),
        "",
        _P.REFUSED,
        "look at the user, the password and the rights",
    ),
    ((BusyLoadingError, MasterDownError, ReadOnlyError), "", _P.TEMPORARY, ""),
    ((AskError, ClusterDownError, TryAgainError), "", _P.REFUSED, CLUSTER),  # and MovedError
    ((OutOfMemoryError,), "", _P.FULL, FULL),
    ((RedisError,), "-OOM ", _P.FULL, FULL),  # in a script; by the text only, before Redis 7
    ((RedisError,), "-READONLY ", _P.TEMPORARY, ""),  # as well
    ((ResponseError,), "No space left", _P.FULL, ""),
    ((ResponseError,), "MISCONF", _P.TEMPORARY, ""),  # the last write to its disk has failed
    ((ResponseError,), "BUSY", _P.TEMPORARY, ""),  # it runs a script
    ((DataError, ResponseError), "", _P.REFUSED, ""),
    ((RedisError,), "", _P.TEMPORARY, ""),
)
"""Classes of errors, a part of their texts, what they mean, and advice. The first match counts."""


def redis_error(url: object, error: RedisError, classes: Mapping[RedisProblem, type[_E]]) -> _E:
    """Return the error of a backend for one of redis-py's, with advice."""
    if refused_by_tls(error):
        return classes[_P.REFUSED](f"{url}: {TLS_ADVICE} ({error})")
    text = str(error) or type(error).__name__
    problem, advice = next(
        (problem, advice)
        for types, part, problem, advice in PROBLEMS
        if isinstance(error, types) and part in text
    )
    if isinstance(ssl_error_of(error), ENDED):
        advice = ENDED_ADVICE
    if isinstance(error, AskError):
        text = f"slot {error.slot_id} is at {error.host}:{error.port}"
    return classes[problem](f"{url}: {text}" + (f"; {advice}" if advice else ""))


def leave_replica(client: Redis, error: RedisError) -> None:
    """Close the idle connections of a client if the error says that its server is a replica.

    After a fail-over, new connections to the same address may lead to the new primary.
    """
    if isinstance(error, ReadOnlyError) or "-READONLY " in str(error):
        client.connection_pool.disconnect(inuse_connections=False)


def redis_options(
    url: object, db: str, timeout_s: float, tls: Tls | None, **address: Any
) -> dict[str, Any]:
    """Return arguments of `redis.Redis`, to which `address` adds the host, the user and so on.

    The timeout is that of the connection, and of each request.

    Raises:
        ConfigurationError: `db` is no number.
    """
    if not db.isdecimal():
        raise ConfigurationError(f"{url}: db must be a number from 0, not {db!r}")
    options = {
        **address,
        "db": int(db),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        # For operators. It also makes a missing login an error at once: Redis cuts clients without
        # one that begin with a long request.
        "client_name": "rpcwheel",
        "protocol": 2,
        # Without a retry policy, redis-py repeats a request for up to 15 s.
        "retry": Retry(NoBackoff(), 0),
    }
    if tls is not None:
        options |= {
            "ssl": True,
            "ssl_check_hostname": True,
            "ssl_ca_certs": tls.ca,
            "ssl_certfile": tls.cert,
            "ssl_keyfile": tls.key,
        }
    return options
