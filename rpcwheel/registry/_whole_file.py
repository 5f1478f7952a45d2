"""A file that several processes write: each whole, one after the other."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Final

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["locked", "replace_whole"]

BUSY_S: Final = 0.3
"""Seconds to wait for another process that writes."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool | None]:
    """Hold the lock beside the file: True; False: others do; None: the system has no locks here."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
    held = None
    try:
        held = _lock(descriptor)
        yield held
    finally:
        if held:  # not by closing alone: a child that was forked meanwhile has it open, too
            _unlock(descriptor)
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    if sys.platform == "win32":  # the last of two writers wins, but the file is whole
        return None
    end_s = time.monotonic() + BUSY_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        except OSError:  # a file system without locks
            return None
        else:
            return True


def _unlock(descriptor: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def replace_whole(path: Path, text: bytes, suffix: str) -> None:
    """Put a new file in the place of the old one, whole or not at all."""
    new = path.with_name(f"{path.name}.{suffix}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(new, flags, 0o600), "wb") as file:  # noqa: PTH123 - of a descriptor
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
