"""The command line: `rpcwheel`, or `python -m rpcwheel`. It needs the extra `rpcwheel[cli]`.

`doctor` finds out why a gRPC server cannot be reached (`cli/doctor/`). `registry` shows, watches
and changes the instances in a registry (`cli/registry.py`). `journal` does so for the calls in a
journal of failback, and delivers them (`cli/journal.py`). `config` checks a settings file
(`cli/config.py`). `top` shows what runs in a process (`cli/top.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["main"]

NOT_WRITTEN: Final = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of standard output that is a pipe without a reader, or a file."""

INTERRUPTED: Final = 130
"""The exit status after Ctrl-C, as shells have it."""

PACKAGES: Final = {"typer", "rich", "hyperframe"}
"""What the extra installs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments without the program's name; those of the process by default.

    Returns:
        The exit status: 0 for success, 1 for a failure that the command has printed, 2 for a wrong
        argument or a missing package, 130 after Ctrl-C, 143 after SIGTERM.
    """
    _open_missing_streams()
    if isinstance(sys.stdout, TextIOWrapper):  # a server's text may not fit the encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    if (
        argv is None
    ):  # grpcio before 1.80 notices a restored connection only every 5 s (grpc #38290)
        os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "100")
    try:
        from .app import app

        try:
            with _sigterm_as_exit():
                app(argv, prog_name="rpcwheel")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 0
        finally:
            sys.stdout.flush()  # at the exit of the interpreter, an error would be a traceback
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PACKAGES:
            raise
        print(
            "rpcwheel: the command line needs typer, rich and hyperframe: "
            "pip install 'rpcwheel[cli]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:  # during the imports
        return INTERRUPTED
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        if error.errno != errno.EPIPE:
            print(f"rpcwheel: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - until the end
        return 1
    return 0


def _open_missing_streams() -> None:
    """Replace standard streams that were closed when the process started, which are None.

    Their descriptors are taken too: otherwise a file or socket that is opened later would have
    them, and get what libraries in C print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - until the end


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that `finally` blocks run."""

    def leave(signum: int, _frame: object) -> NoReturn:
        sys.exit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
