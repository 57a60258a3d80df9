"""What torch keeps in directories: the hash of its own source, and caches that are not signed.

torch reads and hashes all its Python files in each process that looks up a key. The result only
changes with the files: here it is kept with a fingerprint of their names, sizes and times, and with
a listing of them, as to list hundreds of directories takes as long as to ask about the files.

What torch writes to its caches is not signed: code of graphs, which it runs if there is a file
under its name, libraries, kernels of Triton, profiles and graphs that it unpickles. With
``trust="require"`` torch gets a directory of its own for as long as the policy stays the same.
Where that is not possible, because this torch has other internals, it has no caches at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from s3cache.errors import ConfigError, StoreError
from s3cache.hooks._keys import Patches
from s3cache.store import Directory, check_way, make_parents, private_directory
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of
from s3cache.util.threads import DeadlineExecutor

if TYPE_CHECKING:
    from s3cache.cache import Engine
    from s3cache.torch_api.protocols import Function

logger = logger_of("trust")

# -- torch's hash of its own source

#: Directories by path: when each was changed, and the names of the source files in it.
Listing: TypeAlias = dict[str, tuple[int, list[str]]]

_FILE = "installation.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe does not wait for a writer.
_OLD = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 1 << 20  # it has a tenth of that
_TORCH_KEY = re.compile("[0-9a-f]{64}")  # a SHA-256
_SKIPPED = ("__pycache__", "lib", "include", "bin", "share")
_SOURCES = (".py", ".so", ".cpp", ".ld")
# Two changes within the resolution of a file system's clock have one time.
_SETTLED_NS = 2 * 10**9


def remember_installation(directory: str) -> None:
    """Give torch the hash that an earlier process computed; else compute it, and keep it.

    A file that another user may have written is not read, and the process waits neither for a pipe
    nor for a disk that hangs: then the hash is computed, and not kept.
    """
    executor = DeadlineExecutor.of(os.path.abspath(directory))
    known: dict[str, object] = {}
    try:
        with contextlib.suppress(OSError, ConfigError, StoreError):
            known = executor.call(lambda: _read(directory))
        root = internals.torch_directory().rstrip(os.sep)
        fingerprint, listing = fingerprint_of(root, known.get("listing"))
        key = str(known.get("torch_key")) if known.get("fingerprint") == fingerprint else ""
        if is_known := _TORCH_KEY.fullmatch(key) is not None:
            internals.set_torch_key(bytes.fromhex(key))
            if listing == known.get("listing"):
                return
        torch_key: str = key if is_known else internals.torch_key.get()().hex()
        new: dict[str, object] = {
            "fingerprint": fingerprint,
            "listing": listing,
            "torch_key": torch_key,
        }
        with contextlib.suppress(OSError, ConfigError, StoreError):
            executor.call(lambda: _write(directory, new))
    finally:
        executor.release()


def _read(directory: str) -> dict[str, object]:
    """Return what is kept in a regular file that this user alone can write."""
    place = Directory.at(directory)
    fd = os.open(_FILE, _OLD, dir_fd=place.fd)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        may_be_written = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # With a second name it is a file that was made to be something else.
        if not is_ours or may_be_written or status.st_nlink != 1 or status.st_size > _MAX_BYTES:
            return {}
        with contextlib.suppress(RecursionError, ValueError):
            known = json.loads(file.read(_MAX_BYTES))
            return known if isinstance(known, dict) else {}
    return {}


def _write(directory: str, known: dict[str, object]) -> None:
    """Replace whatever is there; nothing stays of it where that fails."""
    place = Directory.at(directory)
    staged = f"{_FILE}.{secrets.token_hex(4)}"
    fd = os.open(staged, _NEW, 0o600, dir_fd=place.fd)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(known, file)
        with contextlib.suppress(OSError):  # most often it is no directory
            os.rmdir(_FILE, dir_fd=place.fd)
        os.replace(staged, _FILE, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    except BaseException:
        os.unlink(staged, dir_fd=place.fd)
        raise


def fingerprint_of(root: str, known: object = None) -> tuple[str, Listing]:
    """Return a digest of names, sizes and times of all source files below ``root``, and a listing.

    ``known`` is a listing of an earlier process. It is used unless a directory has changed since.
    """
    if isinstance(known, dict) and root in known:
        with contextlib.suppress(OSError, TypeError, ValueError):
            digest, holds = _digest_of(known)
            if holds:
                return digest, known
    listing: Listing = {}
    places = [root]
    while places:
        place = places.pop()
        names: list[str] = []
        changed = os.stat(place).st_mtime_ns  # before: a change meanwhile is seen next time
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.endswith(_SOURCES):
                    names.append(entry.name)
                elif entry.name not in _SKIPPED and entry.is_dir():
                    places.append(entry.path)
        listing[place] = changed, sorted(names)
    digest, holds = _digest_of(listing)
    is_settled = max(each for each, _ in listing.values()) < time.time_ns() - _SETTLED_NS
    return digest, listing if holds and is_settled else {}


def _digest_of(listing: Listing) -> tuple[str, bool]:
    """Return a digest of the files in a listing, and whether that is up to date."""
    lines: list[str] = []
    holds = True
    for place, (changed, names) in sorted(listing.items()):
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            holds = holds and os.fstat(fd).st_mtime_ns == changed
            lines.append(place)
            for name in names:
                try:
                    status = os.stat(name, dir_fd=fd)
                except OSError:  # a link to nothing
                    lines.append(name)
                else:
                    lines.append(f"{name}\0{status.st_size}\0{status.st_mtime_ns}")
        finally:
            os.close(fd)
    digest = hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
    return digest, holds


# -- torch's caches where only what is signed may be used


def lock_down(engine: Engine, patches: Patches, *, supported: bool = True) -> None:
    """Keep torch from using what is not signed; where that fails, it has no caches."""
    try:
        if supported:
            install_lockdown(engine.policy_digest, patches)
            return
    except Exception:
        patches.undo()
        if engine.settings.strict:
            disable_torch_caches(patches)
            raise
        logger.warning(
            "torch cannot be kept from what is not signed, so it has no caches", exc_info=True
        )
    try:
        disable_torch_caches(patches)
    except Exception:
        if engine.settings.strict:
            raise
        logger.warning("torch may use what is not signed", exc_info=True)


def install_lockdown(policy: str, patches: Patches) -> None:
    """Give torch directories of its own for this ``policy``, and nothing from elsewhere.

    Remote profiles, and artifacts that programs load into its caches, are not used.
    """
    name = f"s3cache-{policy}"
    with contextlib.suppress(OSError):  # others may sit where it is to be
        internals.cache_dir.get()()  # sets the variable first, unless it is set
    for variable in internals.DIRECTORIES:
        before = os.environ.get(variable)
        if before is None or os.path.basename(before) == name:
            continue
        place, forget = own_directory(os.path.join(before, name))
        patches.at_undo(forget)
        patches.at_undo(internals.clear_caches.get())
        _set_variable(variable, place, patches)
        internals.clear_caches.get()()  # some remember where their files are
    patches.wrap(internals.populate_caches, _populate_with_nothing)
    patches.wrap(internals.remote_profiles, lambda _: None)


def _populate_with_nothing(original: Function[object], _: object) -> object:
    logger.warning(
        "trust is 'require', and artifacts of "
        "torch.compiler.load_cache_artifacts are not signed: none is loaded"
    )
    return original({})


def disable_torch_caches(patches: Patches) -> None:
    """Turn all of torch's caches off, by a public option and the environment alone.

    What torch writes on its way goes to a directory that is removed in the end. Processes that this
    one starts inherit the environment.
    """
    for variable in internals.DIRECTORIES:
        place, forget = private_directory()
        patches.at_undo(forget)
        _set_variable(variable, place, patches)
    _set_variable(internals.NO_CACHES, "1", patches)
    patches.set(internals.force_disable_caches, True)


def _set_variable(variable: str, value: str, patches: Patches) -> None:
    before = os.environ.get(variable)
    os.environ[variable] = value
    if before is None:
        patches.at_undo(lambda: os.environ.pop(variable, None))
    else:
        patches.at_undo(lambda: os.environ.update({variable: before}))


def own_directory(path: str) -> tuple[str, Callable[[], None]]:
    """Return a directory that no other user can write to or exchange, and a clean-up function.

    It is ``path``, which stays, unless other users can change it.
    """
    try:
        make_parents(os.path.abspath(path))
        check_way(path)
        Directory.at(path, make=True)
    except (ConfigError, OSError) as exc:
        logger.warning("torch does not keep what it compiles after this process: %s", exc)
        return private_directory()
    return path, lambda: None
