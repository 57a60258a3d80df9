"""torch's directories: remember the hash of its source, and replace caches that are not signed.

torch reads and hashes all its Python files in each process that looks up a key, in 0.3 s. We keep
the hash with a fingerprint of names, sizes and times of the files.

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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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

_MAX_BYTES = 4096
_SKIPPED = {"__pycache__", "lib", "include", "bin", "share"}
_SOURCES = (".py", ".so", ".cpp", ".ld")


def remember_installation(directory: str) -> None:
    """Give torch the hash that an earlier process computed; else compute it and keep it.

    If the file belongs to another user, or the disk hangs, compute the hash and do not keep it.
    """
    fingerprint = fingerprint_of(internals.torch_directory().rstrip(os.sep))

    def noted(key: str) -> dict[str, object]:
        # The digest binds the hash to the installation, and detects partial writes.
        digest = hashlib.sha256(f"{key} {fingerprint}".encode()).hexdigest()
        return {"key": key, "digest": digest}

    executor = DeadlineExecutor.of(os.path.abspath(directory))
    try:
        with contextlib.suppress(OSError, TypeError, ValueError, ConfigError, StoreError):
            known = {**json.loads(executor.call(lambda: _read(directory)))}
            if known == noted(key := str(known.get("key"))):
                with contextlib.suppress(AssertionError, RuntimeError):  # torch has computed it
                    internals.set_key.get()(bytes.fromhex(key))
                return
        content = json.dumps(noted(internals.torch_key.get()().hex())).encode()
        with contextlib.suppress(OSError, ConfigError, StoreError):
            executor.call(lambda: _write(directory, content))
    finally:
        executor.release()


@contextlib.contextmanager
def _opened(directory: str, flags: int) -> Iterator[int]:
    place = Directory.at(directory)
    fd = place.open_private("installation", flags)
    try:
        yield fd
    finally:
        close_unshared(fd)


def _read(directory: str) -> bytes:
    with _opened(directory, os.O_RDONLY) as fd:
        return os.read(fd, _MAX_BYTES)


def _write(directory: str, content: bytes) -> None:
    with _opened(directory, os.O_WRONLY | os.O_CREAT) as fd:
        os.ftruncate(fd, 0)
        os.write(fd, content)


def fingerprint_of(root: str) -> str:
    """Return a digest of names, sizes and times of all source files below ``root``."""
    lines = []
    for place, directories, names in os.walk(root, followlinks=True):
        directories[:] = {*directories} - _SKIPPED
        for name in names:
            if name.endswith(_SOURCES):
                state, path = None, os.path.join(place, name)
                with contextlib.suppress(OSError):  # a link to nothing
                    status = os.stat(path)
                    state = status.st_size, status.st_mtime_ns
                lines.append(f"{path} {state}")
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()


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
    with contextlib.suppress(OSError):  # another user may own the directory
        internals.cache_dir.get()()  # sets the variable first, unless it is set
    clear_caches = internals.clear_caches.get()  # some remember the paths of their files
    patches.callback(clear_caches)
    for variable in internals.DIRECTORIES:
        _separate(variable, os.environ.get(variable), policy, patches)
    clear_caches()
    patches.wrap(internals.populate_caches, _populate_with_nothing)
    patches.wrap(internals.remote_profiles, lambda _: None)


def lock_down_triton(policy: str, patches: Patches) -> None:
    """Give Triton, which is already imported, a separate directory for this ``policy``."""
    try:
        from triton import knobs

        before = knobs.cache.dir
        place = _separate("TRITON_CACHE_DIR", before, policy, patches)
        if place and "dir" in vars(knobs.cache):  # set in Python, which overrides the variable
            knobs.cache.dir = place
            patches.callback(setattr, knobs.cache, "dir", before)
    except Exception:
        logger.warning("Triton may use unsigned files", exc_info=True)


def _separate(variable: str, before: str | None, policy: str, patches: Patches) -> str | None:
    """Set a variable to a directory for this ``policy``; return it, or None if it is set already.

    It is inside of ``before``, and without that there is none.
    """
    name = f"s3cache-{policy}"
    if before is None or os.path.basename(before) == name:
        return None
    place, forget = kept_directory(os.path.join(before, name))
    patches.callback(forget)
    patches.set_variable(variable, place)
    return place


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
