"""Claims: one process of a machine compiles a missing entry while the others wait.

A claim is a lock on a file in ``claims/`` of the local tier, named by the digest of the key. The
kernel releases the lock when its holder dies. The file contains the name of the holder
(``PID@HOST``, and whether it is a fork). A holder that saves an entry removes the file. One that
does not writes ``failed``: then all waiting processes go on at once, not one after another.

A process that holds a claim waits for no other claim, and no claim is held while user code runs. So
two processes never wait for each other, and a holder that hangs delays others by the bound, once.
The bound is lower for a holder that was forked from another process: it may hang for lack of a
thread that only its parent has.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from s3cache.cache import Retry
from s3cache.features.single_flight import WAITED
from s3cache.store import Directory
from s3cache.tier import DiskTier
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer
from s3cache.util.threads import close_unshared, is_forked

_FAILED = b"failed"
_FORK = ", a fork"
# Between two looks at a claim: about a fifth of the time waited so far.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_READ_BYTES = 200
# Waits for leases that gave no entry: a file with one byte for each second, so that processes can
# append without a lock. It counts until an hour has passed without such a wait.
_WASTED, _WASTED_FOR_S = "wasted", 3600.0


@dataclass(eq=False)
class Claim:
    """The right to compile a missing entry, until :meth:`release`.

    Attributes:
        key: of the entry.
        began: when its compile began, on the monotonic clock.
        is_published: whether the others can use the entry.
        end_lease: ends the lease (see ``leases``) for the same key, if there is one.
    """

    _claims: Claims
    _name: str
    _fd: int
    key: str
    began: float = 0.0
    is_published: bool = False
    end_lease: Callable[[bool], object] | None = None

    def release(self, *, published: bool) -> None:
        """Let waiting processes go on: they load the entry, or compile it themselves.

        Raises:
            StoreError: the disk fails; the claim ends nevertheless.
        """
        if self.end_lease is not None:
            self.end_lease(published)

        def release(root: Directory) -> None:
            try:
                if published:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._name, dir_fd=root.fd)
                else:
                    _write(self._fd, _FAILED)
            finally:
                close_unshared(self._fd)

        self._claims.disk.within("claims", release)

    def drop(self) -> None:
        """Let others go on, one after another. It never waits for the disk, as finalizers need."""
        close_unshared(self._fd)


@dataclass(frozen=True)
class WaitOutcome:
    """The outcome of an attempt to take a claim or a lease.

    Attributes:
        claim: the claim that was taken, or None.
        seconds: how long we waited for another process.
        holder: the name of that process in its claim or lease; ``""`` if we waited for none.
        timed_out: whether that process still held it after the bound, now or at an earlier attempt.
        is_remote: whether the entry is in the bucket now.
        waste: counts a wait for a lease that gave no entry after all; None if there was no wait.
    """

    claim: Claim | None = None
    seconds: float = 0.0
    holder: str = ""
    timed_out: bool = False
    is_remote: bool = False
    waste: Callable[[], None] | None = None

    def retry(self) -> Retry:
        """Return how a lookup goes on."""
        return Retry(
            in_remote=self.is_remote,
            reason=WAITED if self.timed_out else None,
            in_vain=self.waste,
            work=self.claim,
        )


@dataclass(eq=False)
class Claims:
    """The claims of one process, in the directory of a disk tier.

    Attributes:
        fork_bound_s: how long we wait at most for a process that was forked from another one.
        notice_s: after waiting this long, we say once which process we wait for.
    """

    disk: DiskTier
    fork_bound_s: float = 30.0
    notice_s: float = 10.0
    _is_noticed: bool = False
    _overdue: set[str] = field(default_factory=set)  # holders that we no longer wait for

    def take(self, key: str, bound_s: float) -> WaitOutcome:
        """Claim ``key``, or wait at most ``bound_s`` until another process has released it.

        In both cases look the entry up again: another process may have saved it meanwhile.

        Raises:
            StoreError: the disk cannot be used.
        """
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        started, pause_s, holder = time.monotonic(), _FIRST_PAUSE_S, ""
        while True:
            fd, content = self.disk.within("claims", lambda root: _try(root, name))
            seconds = time.monotonic() - started
            if fd is not None:
                claim = Claim(self, name, fd, key)
                if not holder:
                    return WaitOutcome(claim)
                if content == _FAILED:
                    claim.release(published=False)
                return WaitOutcome(None if content == _FAILED else claim, seconds, holder)
            holder = content.decode(errors="replace") or holder
            if holder.endswith(_FORK):
                bound_s = min(bound_s, self.fork_bound_s)
            if seconds >= self.notice_s and not self._is_noticed:
                self._is_noticed = True
                logger_of("lookups").warning(
                    "waiting since %.0f s, at most %.0f s, for process %s, which compiles a graph "
                    "that this process needs %s",
                    *(seconds, bound_s, holder, pointer("waited")),
                )
            if holder in self._overdue or seconds >= bound_s:
                self._overdue.add(holder)
                return WaitOutcome(None, seconds, holder, timed_out=True)
            time.sleep(min(pause_s, max(bound_s - seconds, 0.0)))
            pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)

    def wasted_s(self) -> int:
        """Return how long this machine has waited for leases in vain, or raise StoreError."""
        return self.disk.within("claims", _wasted_s)

    def waste(self, seconds: float) -> None:
        """Count a wait for a lease that gave no entry, or raise StoreError."""

        def waste(root: Directory) -> None:
            is_over = not _wasted_s(root)
            fd = root.open_private(_WASTED, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                if is_over:
                    os.ftruncate(fd, 0)
                os.write(fd, b"." * math.ceil(seconds))
            finally:
                close_unshared(fd)

        self.disk.within("claims", waste)


def _wasted_s(root: Directory) -> int:
    try:
        status = os.stat(_WASTED, dir_fd=root.fd, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return status.st_size if time.time() - status.st_mtime < _WASTED_FOR_S else 0


def _try(root: Directory, name: str) -> tuple[int | None, bytes]:
    """Return the locked file with its previous content, or None with the name of its holder."""
    fd = root.try_lock(name)
    if fd is not None:
        said = os.pread(fd, _READ_BYTES, 0)
        fork = _FORK if is_forked() else ""
        _write(fd, f"{os.getpid()}@{socket.gethostname()}{fork}".encode())
        return fd, said
    with contextlib.suppress(FileNotFoundError):
        other = root.open_private(name, os.O_RDONLY)
        try:
            return None, os.pread(other, _READ_BYTES, 0)
        finally:
            close_unshared(other)
    return None, b""


def _write(fd: int, text: bytes) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text, 0)
