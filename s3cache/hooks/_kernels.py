"""The seam at Inductor's C++ code cache: kernels that come with an entry are loaded, not compiled.

Inductor names a shared library after its source and the compiler's command line, which holds the
paths of this installation. Here a kernel is named after what it *is*: source, extra flags, device,
kind of binding. What else would change the machine code (ISA, ABI, Python version, torch) is in the
key of the entry that carries it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from s3cache.artifact import open_image
from s3cache.hooks._patching import Patches
from s3cache.store import Buffer

__all__ = ["Kernels", "MissingKernelError"]


class MissingKernelError(Exception):
    """A graph's native kernel was not seen being loaded, so an entry would be incomplete."""


class Kernels:
    """Native kernels of this process: those that arrived, and those that were compiled here."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._offered: dict[str, Buffer] = {}
        self._loaded: dict[str, Any] = {}  # libraries that arrived with an entry
        # Every kernel met so far: its source, and its image or the path of it.
        self._seen: dict[str, tuple[str, Buffer | str]] = {}

    def install(self, patches: Patches) -> None:
        """Route ``CppCodeCache.load_async`` through here."""
        from torch._inductor.codecache import CppCodeCache

        original = CppCodeCache.__dict__["load_async"].__func__
        signature = inspect.signature(original)

        def load_async(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(cls, *args, **kwargs)
            bound.apply_defaults()
            name, source = _kernel_id(cls, bound.arguments), bound.arguments["main_code"]
            library = self._load_offered(cls, name, source)
            if library is not None:
                return lambda: library
            return self._remembering(name, source, original(cls, *args, **kwargs))

        patches.set(CppCodeCache, "load_async", classmethod(load_async))

    def offer(self, images: Mapping[str, Buffer]) -> None:
        """Have these at hand for the code that is about to be loaded."""
        with self._mutex:
            self._offered.update(images)

    def withdraw(self, names: Iterable[str]) -> None:
        """Let go of images that were offered; what was loaded stays loaded."""
        with self._mutex:
            for name in names:
                self._offered.pop(name, None)

    def needed_by(self, sources: Iterable[str]) -> dict[str, Buffer]:
        """Images of the kernels that generated Python modules load, by id.

        Raises:
            MissingKernelError: one of them was never loaded in this process.
            OSError: a library that was loaded is gone from the disk.
        """
        found: dict[str, Buffer] = {}
        for source in sources:
            for kernel in _kernel_sources(source):
                names = [name for name, (code, _) in self._seen.items() if code.startswith(kernel)]
                if not names:
                    raise MissingKernelError(kernel[:200])
                found.update((name, self._image(name)) for name in names if name not in found)
        return found

    def _image(self, name: str) -> Buffer:
        image = self._seen[name][1]
        if isinstance(image, str):
            with open(image, "rb") as file:
                return file.read()
        return image

    def _load_offered(self, cls: Any, name: str, source: str) -> Any:
        with self._mutex:
            library = self._loaded.get(name)
            image = self._offered.get(name)
        if library is None and image is not None:
            with open_image(image, name) as path:
                library = cls._load_library(path, name)
            with self._mutex:
                library = self._loaded.setdefault(name, library)
                self._seen[name] = source, image
        return library

    def _remembering(self, name: str, source: str, load: Callable[[], Any]) -> Callable[[], Any]:
        def loaded() -> Any:
            library = load()
            path = getattr(library, "__file__", None) or getattr(library, "_name", None)
            if path:
                self._seen[name] = source, path
            return library

        return loaded


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


def _kernel_sources(module_source: str) -> list[str]:
    """C++ sources in the ``async_compile.cpp*(...)`` calls of a generated module."""
    found: list[str] = []
    for node in ast.walk(ast.parse(module_source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("cpp", "cpp_pybinding")
        ):
            found += [
                each.value
                for each in node.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
    return found
