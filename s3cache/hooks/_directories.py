"""torch's directories: remember the hash of its source, and replace caches that are not signed.

torch reads and hashes all its Python files in each process that looks up a key. We keep the hash
with a fingerprint of names, sizes and times of the files. We also keep the list of files: listing
hundreds of directories takes as long as reading the times of the files.

Files in torch's caches are not signed: code of graphs, which torch runs if the file exists,
libraries, kernels of Triton, profiles, and graphs that it unpickles. With ``trust="require"`` torch
gets a separate directory for each policy. If this is not possible, because this torch has other
internals, its caches are off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias, cast

from s3cache.errors import ConfigError, StoreError
from s3cache.hooks._state import Patches
from s3cache.store import Directory, own_directory, private_directory
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of
from s3cache.util.threads import DeadlineExecutor, close_unshared

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import Function

logger = logger_of("trust")

# -- torch's hash of its own source

_FILE = "installation"
_MAX_BYTES = 1 << 20  # ten times what is usual
_SKIPPED = ("__pycache__", "lib", "include", "bin", "share")
_SOURCES = (".py", ".so", ".cpp", ".ld")
# Two changes within the resolution of a file system's clock have the same time.
_SETTLED_NS = 2 * 10**9

#: Directories by path: the time of the last change, and the names of the source files.
Listing: TypeAlias = "dict[str, tuple[int, list[str]]]"


def remember_installation(directory: str) -> None:
    """Give torch the hash that an earlier process computed; else compute it and keep it.

    If the file belongs to another user, or the disk hangs, compute the hash and do not keep it.
    """
    executor = DeadlineExecutor.of(os.path.abspath(directory))
    try:
        before: dict[str, object] = {}
        with contextlib.suppress(OSError, ValueError, ConfigError, StoreError):
            before = executor.call(lambda: _read(directory))
        listing = listing_of(internals.torch_directory().rstrip(os.sep), before.get("listing"))
        fingerprint, key = fingerprint_of(listing), str(before.get("key"))
        if before.get("digest") == _digest(key, fingerprint):
            with contextlib.suppress(AssertionError, RuntimeError):  # torch has computed it
                internals.set_key.get()(bytes.fromhex(key))
        else:
            key = internals.torch_key.get()().hex()
        is_settled = max(changed for changed, _ in listing.values()) < time.time_ns() - _SETTLED_NS
        new = {"key": key, "digest": _digest(key, fingerprint), "listing": is_settled and listing}
        if new != before:
            with contextlib.suppress(OSError, ConfigError, StoreError):
                executor.call(lambda: _write(directory, json.dumps(new).encode()))
    finally:
        executor.release()


def _digest(key: str, fingerprint: str) -> str:
    """Return a digest that binds the hash to the installation and detects partial writes."""
    return hashlib.sha256(f"{key} {fingerprint}".encode()).hexdigest()


@contextlib.contextmanager
def _opened(directory: str, flags: int) -> Iterator[int]:
    place = Directory.at(directory)
    fd = place.open_private(_FILE, flags)
    try:
        yield fd
    finally:
        close_unshared(fd)


def _read(directory: str) -> dict[str, object]:
    with _opened(directory, os.O_RDONLY) as fd:
        known = json.loads(os.read(fd, _MAX_BYTES))
    return known if isinstance(known, dict) else {}


def _write(directory: str, content: bytes) -> None:
    with _opened(directory, os.O_WRONLY | os.O_CREAT) as fd:
        os.ftruncate(fd, 0)
        os.write(fd, content)


def listing_of(root: str, known: object = None) -> Listing:
    """Return all source files below ``root``: the ``known`` listing if it is up to date."""
    with contextlib.suppress(OSError, AttributeError, TypeError, ValueError):
        kept = cast("Listing", known)
        is_changed = (os.stat(place).st_mtime_ns != at for place, (at, _) in kept.items())
        if root in kept and not any(is_changed):
            return kept
    listing: Listing = {}
    places = [root]
    while places:
        place = places.pop()
        names: list[str] = []
        changed = os.stat(place).st_mtime_ns  # first, so that the next time sees a later change
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.endswith(_SOURCES):
                    names.append(entry.name)
                elif entry.name not in _SKIPPED and entry.is_dir():
                    places.append(entry.path)
        listing[place] = changed, sorted(names)
    return listing


def fingerprint_of(listing: Listing) -> str:
    """Return a digest of names, sizes and times of all files in a listing."""
    lines: list[str] = []
    for place, (_, names) in sorted(listing.items()):
        for name in names:
            path = f"{place}{os.sep}{name}"
            try:
                status = os.stat(path)
            except OSError:  # a link to nothing
                lines.append(path)
            else:
                lines.append(f"{path}\0{status.st_size}\0{status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


# -- torch's caches, if only signed entries may be used


def lock_down(policy: str, patches: Patches, *, supported: bool = True) -> None:
    """Keep torch from using unsigned files; if this fails, turn its caches off."""
    try:
        if supported:
            install_lockdown(policy, patches)
            return
    except Exception:
        patches.close()
        logger.warning(
            "torch cannot be kept from using unsigned files, so its caches are off", exc_info=True
        )
    try:
        disable_torch_caches(patches)
    except Exception:
        logger.warning("torch may use unsigned files", exc_info=True)


def install_lockdown(policy: str, patches: Patches) -> None:
    """Give torch separate directories for this ``policy``, and keep it from all other caches.

    Remote profiles, and artifacts that programs load into its caches, are not used.
    """
    name = f"s3cache-{policy}"
    with contextlib.suppress(OSError):  # another user may own the directory
        internals.cache_dir.get()()  # sets the variable first, unless it is set
    for variable in internals.DIRECTORIES:
        before = os.environ.get(variable)
        if before is None or os.path.basename(before) == name:
            continue
        place, forget = kept_directory(os.path.join(before, name))
        patches.callback(forget)
        patches.callback(internals.clear_caches.get())
        patches.set_variable(variable, place)
        internals.clear_caches.get()()  # some remember the paths of their files
    patches.wrap(internals.populate_caches, _populate_with_nothing)
    patches.wrap(internals.remote_profiles, lambda _: None)


def lock_down_triton(policy: str, patches: Patches) -> None:
    """Give Triton, which is already imported, a separate directory for this ``policy``."""
    try:
        from triton import knobs

        before, name = knobs.cache.dir, f"s3cache-{policy}"
        if os.path.basename(before) != name:
            place, forget = kept_directory(os.path.join(before, name))
            patches.callback(forget)
            patches.set_variable("TRITON_CACHE_DIR", place)
            if "dir" in vars(knobs.cache):  # set in Python, which overrides the variable
                knobs.cache.dir = place
                patches.callback(setattr, knobs.cache, "dir", before)
    except Exception:
        logger.warning("Triton may use unsigned files", exc_info=True)


def _populate_with_nothing(original: Function[object], _: object) -> object:
    logger.warning(
        "trust is 'require', and artifacts of "
        "torch.compiler.load_cache_artifacts are not signed: they are not loaded"
    )
    return original({})


def disable_torch_caches(patches: Patches) -> None:
    """Turn all of torch's caches off, with a public option and the environment alone.

    torch's files go to a directory that is removed at the end. Child processes inherit the
    environment.
    """
    for variable in internals.DIRECTORIES:
        place, forget = private_directory()
        patches.callback(forget)
        patches.set_variable(variable, place)
    patches.set_variable(internals.NO_CACHES, "1")
    owner, name = internals.force_disable_caches.owner()
    patches.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, True)


def kept_directory(path: str) -> tuple[str, Callable[[], None]]:
    """Return a directory that other users can neither write nor replace, and a clean-up function.

    It is ``path``, which is kept, unless other users can change that.
    """
    try:
        own_directory(path)
    except (ConfigError, OSError) as exc:
        logger.warning("torch does not keep what it compiles after this process: %s", exc)
        return private_directory()
    return path, lambda: None
