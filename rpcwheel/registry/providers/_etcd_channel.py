"""How a connection to a member of etcd is made: over TLS or not, and what ends it when it is dead.

Keepalives are of 10 s: etcd ends a connection that pings more often than each 5 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from rpcwheel.errors import ConfigurationError, RegistryUnavailable

if TYPE_CHECKING:
    from rpcwheel.registry.url import RegistryUrl

    Options = list[tuple[str, str | int]]

__all__ = ["channel_options", "check_tls", "open_channel"]

KEEPALIVE_MS: Final = 10_000
PING_TIMEOUT_MS: Final = 3_000


def check_tls(url: RegistryUrl) -> None:
    """See that what the URL says of TLS makes sense, and that its files can be read.

    Raises:
        ConfigurationError: It does not, or they can't.
    """
    of_tls = [name for name in ("ca", "cert", "key", "server_name") if name in url.options]
    if not _is_tls(url) and of_tls:
        raise ConfigurationError(f"{url}: {', '.join(of_tls)}: only over TLS, with etcds://")
    if ("cert" in url.options) != ("key" in url.options):
        raise ConfigurationError(f"{url}: cert and key go together: two files in PEM")
    try:
        _files(url)
    except OSError as error:
        raise ConfigurationError(f"{url}: a file can't be read: {error}") from error


def channel_options(url: RegistryUrl) -> Options:
    """What each channel is made with."""
    options: Options = [
        ("grpc.use_local_subchannel_pool", 1),  # or a new channel would have the old connection
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", -1),  # a service of 10,000 instances has 4 MB
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]
    if "server_name" in url.options:
        options.append(("grpc.ssl_target_name_override", url.options["server_name"]))
    return options


def open_channel(url: RegistryUrl, target: str, options: Options) -> grpc.Channel:
    """Make a channel to one member; connects when it is used.

    Raises:
        RegistryUnavailable: A file of the TLS can't be read any more.
    """
    if not _is_tls(url):
        plain: grpc.Channel = grpc.insecure_channel(target, options)
        return plain
    try:
        root, key, chain = _files(url)
    except OSError as error:
        raise RegistryUnavailable(f"{url}: a file can't be read: {error}") from error
    credentials = grpc.ssl_channel_credentials(root, key, chain)
    secure: grpc.Channel = grpc.secure_channel(target, credentials, options)
    return secure


def _is_tls(url: RegistryUrl) -> bool:
    if url.scheme == "etcds" and not url.flag("tls", default=True):
        raise ConfigurationError(f"{url}: etcds:// is over TLS; without it etcd://")
    return url.flag("tls", default=url.scheme == "etcds")


def _files(url: RegistryUrl) -> list[bytes | None]:
    """Root, key and chain, as they are now: they may be renewed while the process lives."""
    paths = [url.options.get(name) for name in ("ca", "key", "cert")]
    return [None if path is None else Path(path).expanduser().read_bytes() for path in paths]
