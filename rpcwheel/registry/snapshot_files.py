"""The snapshot files: the last known instances, so that a process can start without the registry.

One directory for each registry and namespace, for all processes of a user, with one file for each
service. It is in the directory that the user has chosen, or in the cache directory. It is a cache:
whatever goes wrong with it is an event, once until it works again, and has no other effect. A file
is replaced by a new one that was written completely and synced, so a reader never sees half a file,
and writers of different services do not meet. Of two processes that write the same service, the
later change stays. The time of an entry is the modification time of its file, which is also set
while the registry confirms the instances.

The files name servers to which clients send their credentials. So a file is read only if it belongs
to the user of this process or to root, and no one else can write to it. It is readable by the user
alone, because metadata may be private.

In a directory that the user has chosen there may be other files. Only a file that begins as a
snapshot file does is deleted because of its age.

Form of `shop.Orders.json`: `{"v": 1, "registry": url, "service": "shop.Orders", "instances":
[...]}`, each instance as in a registry. SQLite is not used here: of a file in a directory to which
others can write, it also executes the journal that another user has put beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from rpcwheel._concurrency.executor import SerialExecutor, reset_after_fork
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.events import emit
from rpcwheel.events.events import RecordSkipped, SnapshotFailed
from rpcwheel.instance import ServiceInstance, Snapshot

from .one_shot_timer import OneShotTimer
from .policy import RegistryRules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rpcwheel.timer.api import Timer

    from .policy import RegistryPolicy
    from .url import RegistryUrl

VERSION: Final = 1
BEGIN: Final = f'{{"v": {VERSION}, "registry": '
"""How a snapshot file begins."""

DEBOUNCE_S: Final = 0.5
"""Seconds from a change to the file (Dubbo's), so that several changes are one write."""

PAUSE_FACTOR: Final = 20
LONGEST_PAUSE_S: Final = 10.0
"""After a write that took long, for so many times as long, at most so many seconds, there is no
other: a rolling restart of 2,000 instances must not cost a core."""

RETRY_S: Final = 60.0
"""Seconds until a failed write is repeated, if nothing changes before."""

CLOSE_TIMEOUT_S: Final = 1.0
"""Seconds that `close` waits for the last write: the disk may hang."""

REFRESH_S: Final = 15.0
"""Seconds until an unchanged entry gets a new time: half of the default `stale_timeout`, because
after a crash an entry older than `stale_timeout` does not count."""

LEAST_REFRESH_S: Final = 1.0
FORGET_S: Final = 30 * 86_400.0
"""The age in seconds of snapshot files that the first write of a process deletes."""

MAX_BYTES: Final = 64 * 2**20
"""A larger file is not a snapshot file."""

READ: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags for `os.open` that do not block, even for a pipe without a writer."""

ROOT: Final = 0
"""The user id of root, who can write to any file anyway."""


class _Kept(NamedTuple):
    """The instances of a service that is watched, or that are not written yet."""

    written_s: float
    instances: tuple[ServiceInstance, ...]
    agrees: Callable[[], bool | None] | None = None


class SnapshotFiles:
    """The files of one registry. Thread-safe; close it after the watches that use it.

    In a forked child nothing is waiting to be written.
    """

    def __init__(
        self,
        directory: str | Path,
        registry: str,
        *,
        timer: Timer | None = None,
        refresh_s: float = REFRESH_S,
    ) -> None:
        """Neither read nor write yet.

        Args:
            directory: Made at the first write.
            registry: Its name in events and in the files: the URL without a password.
            timer: None for `shared_timer()`.
            refresh_s: Seconds between two writes, at most, while a service is watched. An entry is
                so old after a crash.
        """
        self.directory = Path(directory)
        self._registry = registry
        self._refresh_s = refresh_s
        self._serial = SerialExecutor()
        self._timer = OneShotTimer(timer, partial(self._serial.submit, self._write))
        self._closed = False
        self._is_prepared = False
        self._reported: set[str | Path] = set()  # what fails, and was reported
        self._skipped: dict[str, frozenset[int]] = {}
        """Hashes of the unreadable records that were reported, by service."""
        self._kept: dict[str, _Kept] = {}
        self._pause_s = 0.0
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget everything, in a forked child."""
        self._lock = threading.Lock()
        self._dirty: set[str] = set()
        self._writing = False

    def load(self, service: str) -> Snapshot | None:
        """Return the last known instances of a service.

        Reads the file: may block. Never raises.

        Returns:
            A snapshot with the source "cache" and its age; None: there is nothing to read.
        """
        with self._lock:
            kept = self._kept.get(service)
        now_s, path = time.time(), self._path(service)
        written_s, instances, _ = kept or _Kept(0.0, ())
        try:
            read = self._read(path)
            if read is not None and (kept is None or written_s < read[0] <= now_s):
                written_s, instances = read[0], self._instances(service, _parse(service, read[1]))
            self._reported.discard(path)
        except (OSError, ValueError) as error:
            self._failed(path, path, error)
        if not instances:
            return None
        age_s = max(0.0, now_s - written_s)
        return Snapshot(service, instances, source="cache", age_s=age_s)

    def keep(
        self,
        service: str,
        instances: Sequence[ServiceInstance],
        agrees: Callable[[], bool | None] | None = None,
    ) -> None:
        """Have the instances of a service written soon. Never blocks, never raises.

        After `close` it does nothing. It also does nothing if a watch keeps the entry, even one
        that has lost contact, and these instances are those of a lookup, or of an earlier watch:
        they would not be confirmed.

        Args:
            service: Its name.
            instances: Those that are known now; none: the file of the service is deleted.
            agrees: Called every `refresh_s`: whether the registry still has these instances, and
                the entry gets a new time; None: it is not to be called again. Also called by
                `keep`, under the lock: must not block, take a lock or raise.
        """
        with self._lock:
            if self._closed:
                return
            kept = self._kept.get(service)
            if kept is not None and _is_watched(kept.agrees) and not _is_watched(agrees):
                return
            self._kept[service] = _Kept(time.time(), tuple(instances), agrees)
            self._dirty.add(service)
            self._arm(max(DEBOUNCE_S, self._pause_s))

    def close(self) -> None:
        """Write pending changes and end. Idempotent; takes at most a second; never raises."""
        with self._lock:
            self._closed = True
            self._timer.clear()
            waits = self._writing or bool(self._dirty)
        if waits:
            self._serial.submit(self._write)
            self._serial.wait(CLOSE_TIMEOUT_S)

    def _arm(self, delay_s: float) -> None:
        """Write then, or earlier. Under the lock."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # no thread: with the next change, or `close`
                self._timer.wake(self._timer.now_ns() + to_ns(delay_s))

    def _path(self, service: str) -> Path:
        return self.directory / f"{service}.json"

    # On workers

    def _write(self) -> None:
        with self._lock:
            dirty, self._dirty, kept = self._dirty, set(), dict(self._kept)
            self._writing = bool(kept)
        began_s, failed = time.monotonic(), set()
        try:
            for service, entry in kept.items():
                try:
                    self._update(service, entry, is_changed=service in dirty)
                except OSError as error:
                    failed.add(service)
                    self._failed("write", self._path(service), error)
            if not failed:
                self._reported.discard("write")
        finally:
            took_s = time.monotonic() - began_s
            with self._lock:
                self._writing = False
                self._pause_s = min(PAUSE_FACTOR * took_s, LONGEST_PAUSE_S)
                if failed:
                    self._dirty |= failed
                    self._arm(RETRY_S)
                self._kept = {
                    service: entry
                    for service, entry in self._kept.items()
                    if entry.agrees is not None or service in self._dirty
                }  # others are in their files
                if any(entry.agrees is not None for entry in self._kept.values()):
                    self._arm(self._refresh_s)

    def _update(self, service: str, kept: _Kept, *, is_changed: bool) -> None:
        """Write a service if it has changed; give its file a new time if the registry agrees."""
        agrees = kept.agrees() if kept.agrees is not None else False
        now_s, path = time.time(), self._path(service)
        written_s = now_s if agrees else kept.written_s
        with self._lock:
            if self._kept[service] is kept:
                again = None if agrees is None else kept.agrees
                self._kept[service] = _Kept(written_s, kept.instances, again)
        if not is_changed and not agrees:
            return
        try:
            stored_s, stored = self._read(path) or (0.0, b"")
        except (PermissionError, ValueError) as error:  # it can be replaced nevertheless
            self._failed(path, path, error)
            stored_s, stored = 0.0, b""
        # Another process may have written a later change, or have set the time.
        since_s = kept.written_s if is_changed else now_s - 0.9 * self._refresh_s
        if since_s < stored_s <= now_s:
            return
        self._prepare()
        if not kept.instances:
            path.unlink(missing_ok=True)
        elif (data := self._encoded(service, kept.instances)) == stored:
            os.utime(path, (written_s, written_s))
        else:
            replace_file(path, data, written_s)

    def _encoded(self, service: str, instances: tuple[ServiceInstance, ...]) -> bytes:
        names = f'{json.dumps(self._registry)}, "service": {json.dumps(service)}'
        texts = ", ".join(instance.encoded().decode() for instance in instances)
        return f'{BEGIN}{names}, "instances": [{texts}]}}'.encode()

    def _prepare(self) -> None:
        """Make the directory, and delete old snapshot files, once."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._is_prepared:
            self._is_prepared = True
            for path in self.directory.iterdir():
                with contextlib.suppress(OSError):  # another process deletes it, or it is not ours
                    if path.stat().st_mtime < time.time() - FORGET_S and _is_snapshot(path):
                        path.unlink()

    def _read(self, path: Path) -> tuple[float, bytes] | None:
        """Return the time and the content of a file; None if there is no file.

        Raises:
            OSError: It can't be read.
            ValueError: It is not a snapshot file, or others can write to it.
        """
        try:
            descriptor = os.open(path, READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise ValueError("it is not a snapshot file")
            _check_writers(path, status)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return status.st_mtime, file.read()
        finally:
            os.close(descriptor)

    def _instances(self, service: str, records: list[object]) -> tuple[ServiceInstance, ...]:
        """Return the instances in the order of their ids. Reports each unreadable record once."""
        instances: dict[str, ServiceInstance] = {}
        reported = self._skipped.get(service, frozenset())
        skipped: set[int] = set()
        for record in records:
            text = json.dumps(record)
            try:
                instance = ServiceInstance.decoded(text)
            except (ValueError, RecursionError) as error:
                content = hash(text)
                if content not in reported and content not in skipped:
                    key = record.get("id") if isinstance(record, dict) else None
                    emit(RecordSkipped(self._registry, service, str(key or "?"), error))
                skipped.add(content)
            else:
                instances[instance.id] = instance
        self._skipped[service] = frozenset(skipped)
        return tuple(instances[key] for key in sorted(instances))

    def _failed(self, operation: str | Path, path: Path, error: Exception) -> None:
        if operation not in self._reported:
            self._reported.add(operation)
            emit(SnapshotFailed(self._registry, str(path), error))


def open_snapshot_files(
    url: RegistryUrl, policy: RegistryPolicy, *, timer: Timer | None = None
) -> SnapshotFiles | None:
    """Return the files of a policy; None if it has none.

    None also for `memory://`, whose registry ends with the process, unless a path is given; and,
    with an event, if the home directory or the working directory that the path needs is not known.
    """
    refresh_s = max(
        LEAST_REFRESH_S, to_seconds(RegistryRules.from_policy(policy).stale_timeout_ns) / 2
    )
    if not policy.snapshot or (policy.snapshot is True and url.scheme == "memory"):
        return None
    try:
        parent = (
            _cache_directory() if policy.snapshot is True else Path(policy.snapshot).expanduser()
        )
        directory = (parent / _directory_name(url)).absolute()  # the program may change its own
    except (RuntimeError, OSError) as error:
        path = "~" if policy.snapshot is True else str(policy.snapshot)
        emit(SnapshotFailed(str(url), path, error))
        return None
    return SnapshotFiles(directory, str(url), timer=timer, refresh_s=refresh_s)


def _cache_directory() -> Path:
    """Return the XDG Base Directory for caches; the specification ignores relative paths."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "rpcwheel"


def _directory_name(url: RegistryUrl) -> str:
    """Name the files of a registry, user and namespace; without ":", for Windows (Dubbo #5158)."""
    hosts = sorted(f"{host}:{port}" for host, port in url.hosts)
    options = sorted(url.options.items())
    whole = json.dumps([url.scheme, hosts, url.path, url.user, url.namespace, options])
    shown = re.sub(r"[^\w.]+", "-", f"{url.scheme} {' '.join(hosts) or url.path}")[:60]
    return f"{shown.strip('-')}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


def _is_watched(agrees: Callable[[], bool | None] | None) -> bool:
    """Whether a watch that is not closed has given this callback."""
    return agrees is not None and agrees() is not None


def _is_snapshot(path: Path) -> bool:
    """Whether there is a file that begins as a snapshot file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(BEGIN)) == BEGIN.encode()


def _parse(service: str, data: bytes) -> list[object]:
    """Return the records of the file of a service, or raise ValueError."""
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    records = content.get("instances") if isinstance(content, dict) else None
    if not isinstance(records, list):
        raise ValueError("it is not a snapshot file")  # noqa: TRY004 - a file, no argument
    owner = content.get("service")
    if owner != service:  # on a file system that ignores case
        raise ValueError(f"it is the snapshot file of {owner!r}, not of {service!r}")
    return records


def _check_writers(path: Path, status: os.stat_result) -> None:
    """Raise ValueError if a user other than ours and root can write to the file."""
    if not hasattr(os, "geteuid"):
        return
    user, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    others_write = bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
    chmod = f"chmod 600 {path}"
    if status.st_uid not in {user, ROOT}:
        chown = f"chown {user} {path}"
        raise ValueError(
            f"the file is not read because its owner is the user {status.st_uid}, not the user "
            f"{user} of this process or root: delete the file, or run as root: "
            + (f"{chown}; {chmod}" if others_write else chown)
        )
    if others_write:
        raise ValueError(
            f"the file is not read because its mode {mode:04o} lets other users write to it: "
            f"delete the file, or run: {chmod}"
        )


def replace_file(path: Path, data: bytes, written_s: float) -> None:
    """Replace a file, completely or not at all; its time is `written_s`."""
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")  # of mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.utime(new, (written_s, written_s))
        Path(new).replace(path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise
