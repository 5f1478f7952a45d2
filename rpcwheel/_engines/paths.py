"""Paths in the URL of an engine, which may begin with the user's home directory, or be relative."""

from pathlib import Path

from rpcwheel.errors import ConfigurationError


def expanded(path: str, url: object) -> Path:
    """Return an absolute path, as the program may change its directory; `~` is replaced.

    Args:
        path: The path in a URL.
        url: The URL, for the message.

    Raises:
        ConfigurationError: The home directory, or the working directory, is not known.
    """
    try:
        return Path(path).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise ConfigurationError(
            f"{url}: the directory of {path!r} is not known ({error}); give an absolute path"
        ) from error
