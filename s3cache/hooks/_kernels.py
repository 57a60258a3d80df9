"""The seam at Inductor's C++ code caches: kernels that come with an entry are loaded, not compiled.

Inductor names a shared library after its source and the compiler's command line, which holds the
paths of this installation. Here a kernel is named after what it *is*: source, extra flags, device,
kind of binding. What else would change the machine code (ISA, ABI, Python version, torch) is in the
key of the entry that carries it.

Which kernels a graph needs is seen, not guessed: those that its generated Python module asks for
while it is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from s3cache.artifact import check_image, open_image
from s3cache.errors import CorruptError
from s3cache.hooks._patching import Patches
from s3cache.store import Buffer

__all__ = ["Kernels", "UnsharableKernelError", "UnusableKernelError"]

# What generated code may load through async_compile and an entry can carry: C++ as images, Triton
# as torch's own bundles. The others (Halide, CUTLASS, ...) leave files that only a compiler makes.
_PORTABLE = {"cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "wait"}


class UnsharableKernelError(Exception):
    """A graph loads native code that an entry cannot carry."""


class UnusableKernelError(Exception):
    """A kernel of an entry does not load here, or is not in it."""


class Kernels:
    """Native kernels of this process: those that arrived, and those that were compiled here."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._arrived: dict[str, Any] = {}  # libraries loaded from an entry
        self._images: dict[str, Buffer | str] = {}  # of every kernel loaded; or the path of it
        self._modules: dict[str, set[str]] = {}  # kernels that a generated module asked for

    def install(self, patches: Patches) -> None:
        """Route the loading of kernels, and of the modules that ask for them, through here."""
        from torch._inductor.codecache import CppCodeCache, PyCodeCache

        patches.set(CppCodeCache, "load_async", self._kernel_loader(CppCodeCache))
        patches.set(PyCodeCache, "load_by_key_path", self._module_loader(PyCodeCache))

    @contextlib.contextmanager
    def only(self, images: Mapping[str, Buffer]) -> Iterator[None]:
        """While the block runs, this thread loads kernels from ``images`` and compiles none."""
        before, self._thread.offered = self._thread.offered, images
        try:
            yield
        finally:
            self._thread.offered = before

    def needed_by(self, modules: Iterable[tuple[str, str]]) -> dict[str, Buffer]:
        """Images of the kernels that generated modules load, by id.

        Args:
            modules: each one's name in torch's cache of modules, and its source.

        Raises:
            UnsharableKernelError: there is one that an entry cannot carry.
            OSError: a library that was loaded is gone from the disk.
        """
        found: dict[str, Buffer] = {}
        for module, source in modules:
            kinds = set(re.findall(r"\basync_compile\.(\w+)\(", source)) - _PORTABLE
            if kinds:
                raise UnsharableKernelError(f"it has kernels of kind {', '.join(sorted(kinds))}")
            if module not in self._modules:
                raise UnsharableKernelError("its kernels were loaded before s3cache was enabled")
            for name in self._modules[module]:
                if name not in self._images:
                    raise UnsharableKernelError("one of its kernels was never loaded")
                found[name] = self._image(name)
        return found

    def _image(self, name: str) -> Buffer:
        image = self._images[name]
        if isinstance(image, str):
            with open(image, "rb") as file:
                image = file.read()
        try:
            check_image(image)
        except CorruptError as exc:
            raise UnsharableKernelError(str(exc)) from exc
        return image

    def _kernel_loader(self, cache: Any) -> Any:
        original = cache.__dict__["load_async"].__func__
        signature = inspect.signature(original)

        def load_async(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(cls, *args, **kwargs)
            bound.apply_defaults()
            name = _kernel_id(cls, bound.arguments)
            for needed in self._thread.loading:
                needed.add(name)
            if self._thread.offered is not None:
                library = self._load(cls, name, self._thread.offered)
                return lambda: library
            return self._remembering(name, original(cls, *args, **kwargs))

        return classmethod(load_async)

    def _module_loader(self, cache: Any) -> Any:
        original = cache.__dict__["load_by_key_path"].__func__

        def load_by_key_path(cls: Any, key: str, path: str, *args: Any, **kwargs: Any) -> Any:
            if key not in self._modules:
                # Loaded before we were here: once more, to see what it asks for.
                cls.modules_no_attr.pop(path, None)
            needed: set[str] = set()
            self._thread.loading.append(needed)
            try:
                module = original(cls, key, path, *args, **kwargs)
            finally:
                self._thread.loading.pop()
            self._modules.setdefault(key, needed)
            return module

        return classmethod(load_by_key_path)

    def _load(self, cls: Any, name: str, offered: Mapping[str, Buffer]) -> Any:
        library = self._arrived.get(name)
        if library is not None:
            return library
        if name not in offered:
            raise UnusableKernelError(f"kernel {name} is not in the entry")
        image = offered[name]
        try:
            check_image(image)
            with open_image(image, name) as path:
                library = cls._load_library(path, name)
        except Exception as exc:
            raise UnusableKernelError(f"kernel {name} does not load: {exc}") from exc
        self._images[name] = image
        return self._arrived.setdefault(name, library)

    def _remembering(self, name: str, load: Callable[[], Any]) -> Callable[[], Any]:
        def loaded() -> Any:
            library = load()
            path = getattr(library, "__file__", None) or getattr(library, "_name", None)
            if path:
                self._images[name] = path
            return library

        return loaded


class _Thread(threading.local):
    """What this thread is about."""

    def __init__(self) -> None:
        self.offered: Mapping[str, Buffer] | None = None  # of the entry that is being rebuilt
        self.loading: list[set[str]] = []  # kernels of each module being loaded, the outer first


def _kernel_id(cls: type, arguments: Mapping[str, Any]) -> str:
    parts = (
        cls.__name__,
        arguments["main_code"],
        arguments["optimized_code"] or "",
        arguments["device_type"],
        repr(tuple(arguments["extra_flags"])),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()[:40]
