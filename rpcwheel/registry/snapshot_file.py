"""The snapshot file: the last known instances, so that a process can start without the registry.

One file for each registry and namespace, for all processes of a user. It is a cache: whatever goes
wrong with it is an event, once until it works again, and has no other effect. Several processes may
write it because of three things: a lock of the system on a file beside it (`<file>.lock`, never
deleted, because another process may hold it), a merge with the content (of each service the newer
entry), and a rename of a new file that was written completely and synced. So a reader never sees
half a file.

The file names servers to which clients send their credentials. So it is read only if it belongs to
the user of this process or to root, and no one else can write to it. It is readable by the user
alone, because metadata may be private.

Form: `{"v": 1, "registry": url, "services": {name: {"written": unix time, "instances": [...]}}}`,
each instance as in a registry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
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

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rpcwheel.timer.api import Timer

    from .policy import RegistryPolicy
    from .url import RegistryUrl

VERSION: Final = 1
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

LOCK_TIMEOUT_S: Final = 0.3
"""Seconds to wait for another process that writes."""

REFRESH_S: Final = 15.0
"""Seconds until an unchanged entry gets a new time: half of the default `stale_timeout`, because
after a crash an entry older than `stale_timeout` does not count."""

LEAST_REFRESH_S: Final = 1.0
FORGET_S: Final = 30 * 86_400.0
"""Seconds until an entry that was not written again is dropped."""

LATEST_S: Final = 1e11
"""No time of this millennium, as seconds since 1970. NaN is not below it either."""

MAX_BYTES: Final = 64 * 2**20
"""A larger file is not a snapshot file."""

READ: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags for `os.open` that do not block, even for a pipe without a writer."""

ROOT: Final = 0
"""The user id of root, who can write to any file anyway."""


class _Kept(NamedTuple):
    """The instances of a service that this process knows."""

    written_s: float
    instances: tuple[ServiceInstance, ...]
    agrees: Callable[[], bool | None] | None = None


class _Entry(NamedTuple):
    """One service in the file."""

    written_s: float
    text: str
    """The list of instances, in JSON."""


class SnapshotFile:
    """One file. Thread-safe; close it after the watches that use it.

    In a forked child nothing is waiting to be written.
    """

    def __init__(
        self,
        path: str | Path,
        registry: str,
        *,
        timer: Timer | None = None,
        refresh_s: float = REFRESH_S,
    ) -> None:
        """Neither read nor write yet.

        Args:
            path: Of the file; its directory is made at the first write. `~` is the home.
            registry: Its name in events and in the file: the URL without a password.
            timer: None for `shared_timer()`.
            refresh_s: Seconds between two writes, at most, while a service is watched. An entry is
                so old after a crash.
        """
        self.path = Path(path).expanduser()
        self._registry = registry
        self._refresh_s = refresh_s
        self._serial = SerialExecutor()
        self._timer = OneShotTimer(timer, partial(self._serial.submit, self._write))
        self._closed = False
        self._reported: set[str] = set()  # what fails, and was reported
        self._skipped: dict[str, frozenset[int]] = {}
        """Hashes of the unreadable records in the file that were reported, by service."""
        self._content: tuple[object, dict[str, _Entry]] = None, {}  # by the look of the file
        self._kept: dict[str, _Kept] = {}
        self._encoded: dict[str, dict[int, tuple[ServiceInstance, str]]] = {}
        """Instances and their JSON, by service and `id()` of the instance."""
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

        Reads the file, unless it has not changed since the last time: may block. Never raises.

        Returns:
            A snapshot with the source "cache" and its age; None: there is nothing to read.
        """
        with self._lock:
            kept = self._kept.get(service)
        entry, now_s = None, time.time()
        try:
            entry = self._entries().get(service)
            self._reported.discard("read")
        except (OSError, ValueError) as error:
            self._failed("read", error)
        if entry and (kept is None or kept.written_s < entry.written_s <= now_s):
            written_s, instances = entry.written_s, self._instances(service, entry)
        else:
            written_s, instances, _ = kept or _Kept(0.0, ())
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

        After `close` it does nothing.

        Args:
            service: Its name.
            instances: Those that are known now; none: the service is removed from the file.
            agrees: Called every `refresh_s`: whether the registry still has these instances, and
                the entry gets a new time; None: it is not to be called again. Must not block.
        """
        with self._lock:
            if self._closed:
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
            self._timer.wake(self._timer.now_ns() + to_ns(delay_s))

    # On workers

    def _write(self) -> None:
        agreeing = self._agreeing()
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            self._writing = bool(dirty or agreeing)
            for service in agreeing:
                self._kept[service] = self._kept[service]._replace(written_s=time.time())
            dirty |= agreeing
            kept = {service: self._kept[service] for service in dirty}
        began_s = time.monotonic()
        try:
            if kept:
                self._write_services(kept)
        finally:
            took_s = time.monotonic() - began_s
            with self._lock:
                self._writing = False
                self._pause_s = min(PAUSE_FACTOR * took_s, LONGEST_PAUSE_S)
                if any(entry.agrees is not None for entry in self._kept.values()):
                    self._arm(self._refresh_s)

    def _agreeing(self) -> set[str]:
        """Return the services for which the file is to say again that nothing has changed."""
        with self._lock:
            kept = dict(self._kept)
        agree = {name: entry.agrees() for name, entry in kept.items() if entry.agrees is not None}
        over = {name for name, answer in agree.items() if answer is None}
        with self._lock:
            for name in over:
                if self._kept[name] is kept[name]:
                    self._kept[name] = kept[name]._replace(agrees=None)
        try:
            entries = self._entries()
        except (OSError, ValueError):  # reported when it is written
            entries = {}
        now_s = time.time()
        since_s = now_s - 0.9 * self._refresh_s  # another process may have written it
        fresh = {name for name, entry in entries.items() if since_s < entry.written_s <= now_s}
        return {name for name, answer in agree.items() if answer and name not in fresh}

    def _write_services(self, kept: dict[str, _Kept]) -> None:
        services = set(kept)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self.path) as held:
                if held is not False:
                    entries = self._merge(kept)
                    suffix = "new" if held else str(os.getpid())
                    look = replace_file(self.path, self._text(entries).encode(), suffix)
                    self._content = look, entries
        except (OSError, ValueError) as error:
            self._failed("write", error)
            self._put_off(services, RETRY_S)
        else:
            self._reported.discard("write")
            if held is False:
                self._put_off(services, DEBOUNCE_S)

    def _put_off(self, services: set[str], delay_s: float) -> None:
        with self._lock:
            self._dirty |= services
            self._arm(delay_s)

    def _merge(self, kept: dict[str, _Kept]) -> dict[str, _Entry]:
        """Return the new content: the given services, and the others that are not too old."""
        try:
            entries = dict(self._entries())
        except ValueError as error:  # damaged: as if there were no file
            self._failed("read", error)
            entries = {}
        now_s = time.time()
        entries = {
            name: entry for name, entry in entries.items() if entry.written_s > now_s - FORGET_S
        }
        for service, (written_s, instances, _) in kept.items():
            previous = entries.get(service)
            if previous is None or not written_s < previous.written_s <= now_s:
                entries[service] = _Entry(written_s, self._text_of(service, instances))
        return {name: entry for name, entry in entries.items() if entry.text != "[]"}

    def _text_of(self, service: str, instances: tuple[ServiceInstance, ...]) -> str:
        """Return instances in JSON; each object is encoded once."""
        before, now = self._encoded.get(service, {}), {}
        for instance in instances:
            now[id(instance)] = before.get(id(instance)) or (instance, instance.encoded().decode())
        self._encoded[service] = now
        return f"[{', '.join(text for _, text in now.values())}]"

    def _text(self, entries: dict[str, _Entry]) -> str:
        services = ", ".join(
            f'{json.dumps(name)}: {{"written": {entry.written_s!r}, "instances": {entry.text}}}'
            for name, entry in entries.items()
        )
        registry = json.dumps(self._registry)
        return f'{{"v": {VERSION}, "registry": {registry}, "services": {{{services}}}}}'

    def _entries(self) -> dict[str, _Entry]:
        """Return the content of the file; nothing if there is no file.

        Raises:
            OSError: It can't be read.
            ValueError: It is no snapshot file, or damaged.
        """
        try:
            descriptor = os.open(self.path, READ)
        except FileNotFoundError:
            return {}
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise ValueError("it is not a snapshot file")
            self._check_writers(status)
            content, look = self._content, _look_of(status)
            if content[0] != look:
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    content = self._content = look, _parse(file.read())
        finally:
            os.close(descriptor)
        return content[1]

    def _check_writers(self, status: os.stat_result) -> None:
        """Raise ValueError if a user other than ours and root can write to the file."""
        if not hasattr(os, "geteuid"):
            return
        user, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
        others_write = bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
        chmod = f"chmod 600 {self.path}"
        if status.st_uid not in {user, ROOT}:
            chown = f"chown {user} {self.path}"
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

    def _instances(self, service: str, entry: _Entry) -> tuple[ServiceInstance, ...]:
        """Return the instances in the order of their ids. Reports each unreadable record once."""
        instances: dict[str, ServiceInstance] = {}
        reported = self._skipped.get(service, frozenset())
        skipped: set[int] = set()
        for record in json.loads(entry.text):
            text = ""
            try:
                text = json.dumps(record)
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

    def _failed(self, operation: str, error: Exception) -> None:
        if operation not in self._reported:
            self._reported.add(operation)
            emit(SnapshotFailed(self._registry, str(self.path), error))


def open_snapshot_file(
    url: RegistryUrl, policy: RegistryPolicy, *, timer: Timer | None = None
) -> SnapshotFile | None:
    """Return the file of a policy; None if it has none.

    None also for `memory://`, whose registry ends with the process, unless a path is given; and,
    with an event, if the user has no home.
    """
    refresh_s = max(
        LEAST_REFRESH_S, to_seconds(RegistryRules.from_policy(policy).stale_timeout_ns) / 2
    )
    if isinstance(policy.snapshot, str):
        return SnapshotFile(policy.snapshot, str(url), timer=timer, refresh_s=refresh_s)
    if not policy.snapshot or url.scheme == "memory":
        return None
    try:
        path = _cache_directory() / _file_name(url)
    except RuntimeError as error:
        emit(SnapshotFailed(str(url), "~", error))
        return None
    return SnapshotFile(path, str(url), timer=timer, refresh_s=refresh_s)


def _cache_directory() -> Path:
    """Return the XDG Base Directory for caches; the specification ignores relative paths."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "rpcwheel"


def _file_name(url: RegistryUrl) -> str:
    """Name the file of a registry, user and namespace; without ":", for Windows (Dubbo #5158)."""
    hosts = sorted(f"{host}:{port}" for host, port in url.hosts)
    options = sorted(url.options.items())
    whole = json.dumps([url.scheme, hosts, url.path, url.user, url.namespace, options])
    shown = re.sub(r"[^\w.]+", "-", f"{url.scheme} {' '.join(hosts) or url.path}")[:60]
    return f"{shown.strip('-')}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}.json"


def _parse(data: bytes) -> dict[str, _Entry]:
    try:
        content = json.loads(data)
        services = content.get("services") if isinstance(content, dict) else None
        if not isinstance(services, dict):
            raise ValueError("it is not a snapshot file")  # noqa: TRY004 - a file, no argument
        return {
            name: _Entry(float(entry["written"]), json.dumps(entry["instances"]))
            for name, entry in services.items()
            if _is_entry(entry)
        }
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("written"), (int, float))
        and abs(entry["written"]) < LATEST_S
        and isinstance(entry.get("instances"), list)
    )


def _look_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return the values of `os.stat` by which a changed file is recognized."""
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool | None]:
    """Hold the lock beside the file.

    Gives True; False: another process holds it; None: the system has no locks here.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
    held = None
    try:
        held = _lock(descriptor)
        yield held
    finally:
        if held:  # closing is not enough: a child forked meanwhile has it open, too
            _unlock(descriptor)
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    if sys.platform == "win32":  # of two writers the last one wins, but the file is complete
        return None
    end_s = time.monotonic() + LOCK_TIMEOUT_S
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


def replace_file(path: Path, data: bytes, suffix: str) -> tuple[int, int, int]:
    """Replace a file, completely or not at all. Returns the look of the new one."""
    new = path.with_name(f"{path.name}.{suffix}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(new, flags, 0o600), "wb") as file:  # noqa: PTH123 - of a descriptor
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            look = _look_of(os.fstat(file.fileno()))
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return look
