"""Share Triton's files through the cache.

Triton asks a cache manager for the files under a key: the stages of a kernel as a group, the
measurements of ``@triton.autotune(cache_results=True)``, and C libraries that launch kernels. Our
manager is a subclass of Triton's file manager, over the same directory. It looks up only files that
are not there, once per group, and stores what it finds in the directory, as if this machine had
compiled it. Triton's own interface for remote backends would ask for each file on every start.

``enable()`` sets ``triton.knobs.cache.manager_class``. Processes without torch can set
``TRITON_CACHE_MANAGER=s3cache.features.ports.triton:CacheManager``.

Triton's key covers a kernel's source and callees, types, constants, options, target, Triton's own
code, the version of ``ptxas``, and most variables that change code. Our key adds the other
variables; for measurements the device and its driver; for libraries Python and the C library. Files
that no key can describe are not shared: see :func:`_is_unnamed`.

If several processes of a machine miss the same kernel, one compiles it, and the others wait for its
entry. No thread waits while others wait for it. If the kernel does not compile, the others' wait
ends with the error, with the next kernel of the thread, or with the process.

Kernels that Inductor compiles are not handled here: they are in the entries of their graphs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import json
import os
import platform
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton import __version__ as _version
from triton import knobs as knobs
from triton.runtime.cache import FileCacheManager

from s3cache.entries import LabelledKey
from s3cache.errors import S3CacheError
from s3cache.features.ports.files import Files, device_here, running_engine

if TYPE_CHECKING:
    from s3cache.cache import Work

_MEASURED = ".autotune.json"
_LIBRARIES = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_FIRST = "TRITON_", "AMDGCN_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_"
# Variables with these prefixes that change no code: places of files, and output.
_HARMLESS = frozenset(
    """TRITON_HOME TRITON_CACHE_DIR TRITON_DUMP_DIR TRITON_OVERRIDE_DIR TRITON_CACHE_MANAGER
    TRITON_REMOTE_CACHE_BACKEND TRITON_CACHE_AUTOTUNING TRITON_PRINT_AUTOTUNING TRITON_LIBCUDA_PATH
    TRITON_PTXAS_PATH TRITON_PTXAS_BLACKWELL_PATH TRITON_LIBDEVICE_PATH""".split()  # noqa: SIM905
)
# Intermediate code. Kernels run without it, as with TRITON_STORE_BINARY_ONLY.
_STAGES = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn")
_PLUGINS = "TRITON_PLUGIN_PATHS", "LLVM_PASS_PLUGIN_PATH"

_files = Files("triton")


class _Held(threading.local):
    """What others wait for in this thread, and a finalizer that ends it with its manager."""

    work: tuple[Work, weakref.finalize[Any, Any]] | None = None

    def add(self, manager: CacheManager, work: Work) -> None:
        ended = weakref.finalize(manager, work.drop)
        ended.atexit = False
        self.work = work, ended

    def release(self, *, published: bool) -> None:
        held, self.work = self.work, None
        if held is not None and held[1].detach() is not None:
            with contextlib.suppress(S3CacheError):
                held[0].release(published=published)


_held = _Held()


class CacheManager(FileCacheManager):  # type: ignore[misc]
    """Triton's file manager, backed by the cache. Errors of the cache fail no kernel."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._is_plain = not (override or dump)
        self._has_kernel = self._is_plain and not _is_called_by_inductor()
        if self._has_kernel:
            running_engine()  # a policy may give Triton another directory
        super().__init__(key, override=override, dump=dump)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a kernel's files; fetch those that are not here."""
        _held.release(published=False)  # the last kernel of this thread did not compile
        paths: dict[str, str] | None = super().get_group(filename)
        if paths is None and self._has_kernel and self._fetch(filename, is_group=True):
            _held.release(published=True)  # this process waited, and others wait for it
            paths = super().get_group(filename)
        return paths

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Store the list of a group's files, and share the files."""
        path: str = super().put_group(filename, group)
        if self._has_kernel:
            _held.release(published=self._share(filename, group, is_group=True))
        return path

    def get_file(self, filename: str) -> str | None:
        """Return the path of one file; fetch it if such files are shared."""
        path: str | None = super().get_file(filename)
        if path is None and self._is_plain and self._fetch(filename):
            path = super().get_file(filename)
        return path

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        """Store one file, and share it if such files are shared."""
        path: str = super().put(data, filename, binary)
        if self._is_plain:
            self._share(filename, {filename: path})
        return path

    def _fetch(self, filename: str, *, is_group: bool = False) -> bool:
        """Store the cache's files in Triton's directory; return whether there were any."""
        is_here = False
        with _files.guarded("nothing is looked up"):
            key = self._key_of(filename, is_group)
            hold = functools.partial(_held.add, self) if is_group else None
            files = None if key is None else _files.get(key, hold)
            if files is not None and filename in files and all(map(_is_name, files)):
                paths = {name: FileCacheManager.put(self, files[name], name) for name in files}
                if is_group:  # last, as this makes the others visible
                    super().put_group(filename, paths)
                is_here = True
        return is_here

    def _share(self, filename: str, paths: dict[str, str], *, is_group: bool = False) -> bool:
        """Save files as an entry; return whether they were saved."""
        variant: str | None = None
        with _files.guarded("an entry is not shared"):
            if (key := self._key_of(filename, is_group)) is not None:
                files = {name: Path(paths[name]).read_bytes() for name in paths}
                if not (is_group and json.loads(files[filename]).get("ir_override")):
                    variant = _files.put(key, filename, _portable(files) if is_group else files)
        return variant is not None

    def _key_of(self, filename: str, is_group: bool) -> LabelledKey | None:
        """Return our key; ``None`` for files that are not shared, or that no key can describe."""
        needs: str | None = None
        if is_group:
            needs = ""
        elif filename.endswith(_MEASURED):
            needs = device_here()
        elif filename.endswith(_LIBRARIES) and knobs.build.impl is None:
            # Compiled extensions depend on these; another build function may add anything.
            host = sys.version, platform.machine(), platform.system(), platform.libc_ver()
            needs = repr(host)
        if needs is None or _is_unnamed():
            return None
        return _files.key(
            triton=_version, kernel=self.key, file=filename, needs=needs, variables=_variables()
        )


def _is_unnamed() -> bool:
    """Return whether files, plugins or globals outside of the key may change a kernel."""
    compilation = knobs.compilation
    return bool(
        compilation.override
        or compilation.allow_non_constexpr_globals
        or compilation.always_compile
        or knobs.runtime.add_stages_inspection_hook
        or any(map(os.environ.get, _PLUGINS))
    )


def _variables() -> str:
    """Return the variables that may change code; Triton's key lacks some of them."""
    names = sorted(name for name in os.environ if name.startswith(_FIRST))
    return repr([(name, os.environ[name]) for name in names if name not in _HARMLESS])


def _portable(files: dict[str, bytes]) -> dict[str, bytes]:
    """Remove the paths of a kernel's source, unless sources are shared."""
    engine = running_engine()
    if engine is None or engine.settings.share_sources:
        return files
    from s3cache.artifact import hidden_places

    places = {*filter(os.path.isabs, sys.path), os.getcwd(), sys.prefix, sys.base_prefix}
    prefixes = sorted(places - {"/", "/usr", "/usr/local"}, key=len, reverse=True)
    kept = (name for name in files if not name.endswith(_STAGES))
    return {name: hidden_places(files[name], *prefixes) for name in kept}


def _is_called_by_inductor() -> bool:
    """Return whether Inductor called Triton. Its kernels are in the entries of their graphs."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("triton."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch._inductor.")


def _is_name(name: str) -> bool:
    """Return whether ``name`` is a plain file name, and not one of the manager's own."""
    return os.path.basename(name) == name and not name.startswith((".", "__grp__"))
