"""Paths in the URL of an engine, which may begin with the user's home directory."""

from pathlib import Path

from rpcwheel.errors import ConfigurationError


def expanded(path: str, url: object) -> Path:
    """Return a path with `~` or `~user` replaced. `url` has it, for the message.

    Raises:
        ConfigurationError: The user has no home directory, or is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{url}: the home directory of {path!r} is not known; give an absolute path"
        ) from error
