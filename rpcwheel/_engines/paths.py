"""Paths in the URL of an engine, which may begin with the user's home directory, or be relative."""

from pathlib import Path

from rpcwheel.errors import ConfigurationError


def expanded(path: str, url: object) -> Path:
    """Return an absolute path, as the program may change its directory; `~` is replaced.

    Args:
        path: The path in a URL.
        url: The URL, for the message.

    Raises:
        ConfigurationError: The user has no home directory, or is not known.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{url}: the home directory of {path!r} is not known; give an absolute path"
        ) from error
