"""The file of what was known last, so that a process can start while the registry is down.

One file for each registry and namespace, for all processes of a user. It is a cache: whatever goes
wrong with it is an event, told once until it goes well again, and nothing else. Many writers are
sound by three things: a lock of the system on a file beside it (`<file>.lock`, never deleted, as
somebody may hold it), a merge with what stands there (of a service, the newer entry), and a rename
of a new file that was written to the end and synced; so a reader never sees half of one.

The file names servers to which clients send their credentials. So it is read only if it belongs to
the user of this process, or to root, and nobody else can write to it.

Form: `{"v": 1, "registry": url, "services": {name: {"written": unix time, "instances": [...]}}}`,
each instance as in a registry. Readable by the user alone, as metadata may tell what others need
not know.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rpcwheel._concurrency.executor import SerialExecutor, reset_after_fork
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.instance import ServiceInstance, Snapshot
from rpcwheel.observe import emit
from rpcwheel.observe.events import RecordSkipped, SnapshotFailed
from rpcwheel.timer.clock import checked_timer

from .one_shot_timer import OneShotTimer
from .policy import RegistryRules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rpcwheel.errors import TimerError
    from rpcwheel.timer.api import Timer

    from .policy import RegistryPolicy
    from .url import RegistryUrl

    Entry = dict[str, Any]
    from collections.abc import Iterator

__all__ = ["SnapshotFile", "locked", "open_snapshot_file", "replace_whole"]


VERSION: Final = 1

DEBOUNCE_S: Final = 0.5
"""Seconds from a change to the file (Dubbo's); a rolling restart is one write, not a hundred."""

AGAIN_S: Final = 60.0
"""Seconds until what could not be written is tried again, if nothing changes before."""

CLOSE_S: Final = 1.0
"""Seconds that `close` waits for the last write: the disk may be one that hangs."""

REFRESH_S: Final = 15.0
"""Seconds until it is written again that nothing has changed: half of the default `stale_timeout`,
because after a crash an entry older than `stale_timeout` does not count."""

LEAST_REFRESH_S: Final = 1.0

FORGET_S: Final = 30 * 86_400.0
"""Seconds until a service that nobody asks for is left out."""

LATEST_S: Final = 1e11
"""No time of this millennium, as seconds since 1970; nor is NaN below it."""

MOST_BYTES: Final = 64 * 2**20
"""A larger file is none of ours."""

READ: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags for `os.open` that do not block, even for a pipe without a writer."""

ROOT: Final = 0
"""The user id of root, who can write to any file anyway."""


class _Kept(NamedTuple):
    """What a service was kept as last."""

    written_s: float
    instances: tuple[ServiceInstance, ...]
    agrees: Callable[[], bool | None] | None = None


class SnapshotFile:
    """One file. Thread-safe; close it when the registry's directories are closed.

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
        """Take note; nothing is read or written yet.

        Args:
            path: Of the file; its directory is made when it is first written. `~` is the home.
            registry: Its name in events and in the file: the URL without a password.
            timer: None for `shared_timer()`.
            refresh_s: Seconds between two writes, at most, while a service is followed: so old is
                an entry after a crash.
        """
        self.path = Path(path).expanduser()
        self._registry = registry
        self._timer = checked_timer(timer)
        self._refresh_s = refresh_s
        self._serial = SerialExecutor()
        self._closed = False
        self._told: set[str] = set()  # what fails, and has been told
        self._skipped: dict[str, frozenset[int]] = {}
        """By service: hashes of the unreadable records in the file, which have been reported."""
        self._known: tuple[object, dict[str, Entry]] = (
            None,
            {},
        )  # by what the file looked like
        self._kept: dict[str, _Kept] = {}
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin anew in a forked child."""
        self._lock = threading.Lock()
        self._dirty: set[str] = set()
        self._writing = False
        self._alarm = OneShotTimer(self._timer, self._due, self._refused)
        self._timerless = False

    def load(self, service: str) -> Snapshot | None:
        """What is remembered of a service.

        Returns:
            A snapshot with the source "cache" and its age, or None: nothing that can be read.

        Reads the file, unless it is the same as at the last time: may block. Never raises.
        """
        with self._lock:
            kept = self._kept.get(service)
        entry, now_s = None, time.time()
        try:
            entry = self._services().get(service)
            self._told.discard("read")
        except (OSError, ValueError) as error:
            self._failed("read", error)
        if entry and (kept is None or kept.written_s < _written_s(entry) <= now_s):
            written_s, instances = _written_s(entry), self._instances(service, entry)
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
        """Have it written, soon. Never blocks, never raises; nothing after `close`.

        Args:
            service: Its name.
            instances: What is known of it now; none: it is taken out of the file.
            agrees: Asked now and then whether that is still so, so that the file says it; None: it
                is not to be asked any more. It must not block.
        """
        with self._lock:
            if self._closed:
                return
            self._kept[service] = _Kept(time.time(), tuple(instances), agrees)
            self._dirty.add(service)
            self._timerless = False
            self._arm(DEBOUNCE_S)
            if self._timerless:  # it has ended before us: at once, then
                self._serial.submit(self._write)

    def close(self) -> None:
        """Write what is not written yet, and end. Idempotent; at most a second; never raises."""
        with self._lock:
            self._closed = True
            self._alarm.clear()
            waits = self._writing or bool(self._dirty)
        if waits:
            self._serial.submit(self._write)
            self._serial.wait(CLOSE_S)

    # On the workers

    def _arm(self, delay_s: float) -> None:
        """Have it written then, or before; under the lock."""
        if not self._closed:
            self._alarm.wake(self._alarm.now_ns() + to_ns(delay_s))

    def _refused(self, _: TimerError) -> None:
        self._timerless = True

    def _due(self) -> None:
        with self._lock:
            self._alarm.rang()
        self._serial.submit(self._write)

    def _write(self) -> None:
        agreeing = self._agreeing()
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            self._writing = bool(dirty or agreeing)
            for service in agreeing:
                self._kept[service] = self._kept[service]._replace(written_s=time.time())
            dirty |= agreeing
            entries = {service: self._kept[service] for service in dirty}
        try:
            if entries:
                self._write_down(entries)
        finally:
            with self._lock:
                self._writing = False
                if any(kept.agrees is not None for kept in self._kept.values()):
                    self._arm(self._refresh_s)

    def _agreeing(self) -> set[str]:
        """Services of which it is to be written that nothing has changed."""
        with self._lock:
            kept = dict(self._kept)
        agree = {name: one.agrees() for name, one in kept.items() if one.agrees is not None}
        over = {name for name, answer in agree.items() if answer is None}
        with self._lock:
            for name in over:
                if self._kept[name] is kept[name]:
                    self._kept[name] = kept[name]._replace(agrees=None)
        try:
            there = self._services()
        except (OSError, ValueError):  # told when it is written
            there = {}
        now_s = time.time()
        since_s = now_s - 0.9 * self._refresh_s  # another process may have done it
        fresh = {name for name, one in there.items() if since_s < _written_s(one) <= now_s}
        return {name for name, answer in agree.items() if answer and name not in fresh}

    def _write_down(self, entries: dict[str, _Kept]) -> None:
        dirty = set(entries)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self.path) as held:
                if held is not False:
                    suffix = "new" if held else str(os.getpid())
                    replace_whole(self.path, self._merged(entries), suffix)
        except (OSError, ValueError) as error:
            self._failed("write", error)
            self._put_off(dirty, AGAIN_S)
        else:
            self._told.discard("write")
            if held is False:
                self._put_off(dirty, DEBOUNCE_S)

    def _put_off(self, dirty: set[str], delay_s: float) -> None:
        with self._lock:
            self._dirty |= dirty
            self._arm(delay_s)

    def _merged(self, ours: dict[str, _Kept]) -> bytes:
        """What is to stand in the file: ours, and what is there of others and not too old."""
        try:
            services = dict(self._services())
        except ValueError as error:  # torn: as if it were not there
            self._failed("read", error)
            services = {}
        oldest_s = time.time() - FORGET_S
        services = {name: entry for name, entry in services.items() if _written_s(entry) > oldest_s}
        for service, (written_s, instances, _) in ours.items():
            if service in services and written_s < _written_s(services[service]) <= time.time():
                continue
            records = [json.loads(instance.encoded()) for instance in instances]
            services[service] = {"written": written_s, "instances": records}
        services = {name: entry for name, entry in services.items() if entry["instances"]}
        told = {"v": VERSION, "registry": self._registry, "services": services}
        return json.dumps(told).encode()

    def _services(self) -> dict[str, Entry]:
        """The entries of the file as it is now; none if there is no file.

        Raises:
            OSError: It can't be read.
            ValueError: It is not ours, or torn.
        """
        try:
            descriptor = os.open(self.path, READ)
        except FileNotFoundError:
            return {}
        try:
            looks = os.fstat(descriptor)
            if not stat.S_ISREG(looks.st_mode) or looks.st_size > MOST_BYTES:
                raise ValueError("it is not a snapshot file")
            self._check_writers(looks)
            form = looks.st_ino, looks.st_size, looks.st_mtime_ns
            known = self._known
            if known[0] != form:
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    known = self._known = form, _parsed(file.read())
        finally:
            os.close(descriptor)
        return known[1]

    def _check_writers(self, looks: os.stat_result) -> None:
        """Raise ValueError if a user other than ours and root can write to the file."""
        if not hasattr(os, "geteuid"):
            return
        user, mode = os.geteuid(), stat.S_IMODE(looks.st_mode)
        others_write = bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
        chmod = f"chmod 600 {self.path}"
        if looks.st_uid not in {user, ROOT}:
            chown = f"chown {user} {self.path}"
            raise ValueError(
                f"the file is not read because its owner is the user {looks.st_uid}, not the user "
                f"{user} of this process or root: delete the file, or run as root: "
                + (f"{chown}; {chmod}" if others_write else chown)
            )
        if others_write:
            raise ValueError(
                f"the file is not read because its mode {mode:04o} lets other users write to it: "
                f"delete the file, or run: {chmod}"
            )

    def _instances(self, service: str, entry: Entry) -> tuple[ServiceInstance, ...]:
        """Return the instances in the order of their ids. Reports each unreadable record once."""
        found: dict[str, ServiceInstance] = {}
        reported = self._skipped.get(service, frozenset())
        skipped: set[int] = set()
        for record in entry["instances"]:
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
                found[instance.id] = instance
        self._skipped[service] = frozenset(skipped)
        return tuple(found[key] for key in sorted(found))

    def _failed(self, what: str, error: Exception) -> None:
        if what not in self._told:
            self._told.add(what)
            emit(SnapshotFailed(self._registry, str(self.path), error))


def open_snapshot_file(
    url: RegistryUrl, policy: RegistryPolicy, *, timer: Timer | None = None
) -> SnapshotFile | None:
    """The file that a policy asks for; None if it asks for none.

    None too for `memory://`, whose registry ends with the process, unless a path is given; and,
    with an event, if there is no home.
    """
    refresh_s = max(LEAST_REFRESH_S, to_seconds(RegistryRules.of(policy).stale_timeout_ns) / 2)
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
    """Of the XDG Base ServiceWatch Specification, by which a relative path does not count."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "rpcwheel"


def _file_name(url: RegistryUrl) -> str:
    """One for each registry, user and namespace; without ":", for Windows (Dubbo #5158)."""
    hosts = sorted(f"{host}:{port}" for host, port in url.hosts)
    options = sorted(url.options.items())
    whole = json.dumps([url.scheme, hosts, url.path, url.user, url.namespace, options])
    shown = re.sub(r"[^\w.]+", "-", f"{url.scheme} {' '.join(hosts) or url.path}")[:60]
    return f"{shown.strip('-')}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}.json"


def _parsed(data: bytes) -> dict[str, Entry]:
    try:
        told = json.loads(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    services = told.get("services") if isinstance(told, dict) else None
    if not isinstance(services, dict):
        raise ValueError("it is not a snapshot file")  # noqa: TRY004 - of a file, not an argument
    return {name: entry for name, entry in services.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("written"), (int, float))
        and abs(entry["written"]) < LATEST_S
        and isinstance(entry.get("instances"), list)
    )


def _written_s(entry: Entry) -> float:
    return float(entry["written"])


if sys.platform != "win32":
    import fcntl

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
