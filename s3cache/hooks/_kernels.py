"""Hooks at Inductor's code caches: what comes with an entry is run, and nothing else is.

Kernels are loaded, not compiled, and the Python code that calls them is run as the entry has it:
torch would run the file that lies under its name.

Inductor names a shared library after its source and the compiler's command line, which holds the
paths of this installation. Here a kernel is named after its content: source, extra flags, device,
kind of binding. What else would change the machine code (ISA, ABI, Python version, torch) is in the
key of the entry that carries it.

A graph needs the kernels that its generated Python module asks for while it is loaded.

torch writes the Triton kernels of an entry to files, unless there are some under their names, and
loads those by name. So no other user may be able to write there (``_portable``).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from s3cache.artifact import check_image, without_places
from s3cache.errors import CorruptError
from s3cache.hooks._conditions import NotSharableError
from s3cache.hooks._portable import check_triton_directory, installed_in, restore_kernel
from s3cache.hooks._state import CompileState, around
from s3cache.store import Buffer
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CompiledGraph, CppLibraries, PythonModules, TritonBundle

# What generated code may load through async_compile and an entry can carry: C++ as images, Triton
# as torch's own bundles. The others (Halide, CUTLASS, ...) leave files that only a compiler makes.
_PORTABLE = {"cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "wait"}


class UnusableKernelError(Exception):
    """Code of an entry does not load here, or is not in it."""


class Kernels:
    """Native kernels of this process: those of entries, and those that were compiled here."""

    def __init__(self, state: CompileState, *, share_sources: bool = False) -> None:
        self._share_sources = share_sources
        self._state = state
        self._loaded: dict[tuple[str, str], object] = {}  # from entries, by id and digest
        self._images: dict[str, Buffer | str] = {}  # image or path of every kernel loaded
        self._modules: dict[str, set[str]] = {}  # kernels that a generated module asked for

    def images_of(self, graphs: Iterable[object]) -> dict[str, Buffer]:
        """Return images of the kernels that the code of compiled graphs loads, by id."""
        images: dict[str, Buffer] = {}
        for graph in graphs:
            if not isinstance(graph, internals.compiled_graph.get()):
                raise _unsharable(f"it is a {type(graph).__name__}, not one compiled graph")
            kinds = set(re.findall(r"\basync_compile\.(\w+)\(", graph.source_code)) - _PORTABLE
            if kinds:
                raise _unsharable(f"it has kernels of kind {', '.join(sorted(kinds))}")
            called = set(re.findall(r"\bextern_kernels\.(\w+)", graph.source_code))
            if called and (lacking := called - internals.extern_kernels()):
                raise _unsharable(
                    f"it calls extern_kernels.{', '.join(sorted(lacking))}, which is only there"
                    " where the graph was lowered"
                )
            needed = self._modules.get(graph.cache_key)
            if needed is None:
                raise _unsharable("its kernels were loaded before s3cache was enabled")
            images.update((name, self._image(name)) for name in needed)
        return images

    def _image(self, name: str) -> Buffer:
        image = self._images.get(name)
        if isinstance(image, str):
            with open(image, "rb") as file:
                image = file.read()
        if image is None:
            raise _unsharable("one of its kernels was never loaded")
        try:
            check_image(image)
        except CorruptError as exc:
            raise _unsharable(str(exc)) from exc
        if self._share_sources:
            return image
        return without_places(image, *installed_in())

    @around(internals.load_module)
    def _load_by_key_path(
        self,
        original: Function[object],
        cls: type[PythonModules],
        key: str,
        path: str,
        *args: object,
        **kwargs: object,
    ) -> object:
        if key not in self._modules or self._source_of(path) is not None:
            # Loaded before we were here, or from a file: load it again.
            cls.modules_no_attr.pop(path, None)
        needed: set[str] = set()
        self._state.loading.append(needed)
        try:
            module = original(cls, key, path, *args, **kwargs)
        finally:
            self._state.loading.pop()
        self._modules.setdefault(key, needed)
        return module

    def _source_of(self, path: str) -> str | None:
        """Return the code that the entry which is rebuilt has in place of a file."""
        call = self._state.rebuilding
        return None if call is None else call.modules.get(path)

    @around(internals.rebuild_module)
    def _after_deserialization(
        self, original: Function[str], graph: CompiledGraph, *args: object, **kwargs: object
    ) -> str:
        call = self._state.rebuilding
        if call is None:
            return original(graph, *args, **kwargs)
        path = internals.path_of_module.get()(graph.cache_key, "py")[2]
        call.modules[path] = graph.source_code
        try:
            return original(graph, *args, **kwargs)
        except OSError as exc:
            # torch would go on as if there were no entry, and not say why.
            raise UnusableKernelError(f"its code does not load: {exc}") from exc

    @around(internals.run_module)
    def _reload_python_module(
        self, original: Function[ModuleType], key: str, path: str, *args: object, **kwargs: object
    ) -> ModuleType:
        source = self._source_of(path)
        if source is None:
            return original(key, path, *args, **kwargs)
        # For tracebacks: there is no such file, or another one.
        linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
        module = ModuleType(f"{original.__module__}.{key}")
        vars(module).update(__file__=path, key=key)
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - verified
        if kwargs.get("set_sys_modules", args[0] if args else True):
            sys.modules[module.__name__] = module
        return module

    @around(internals.load_library)
    def _load_async(
        self,
        original: Function[Callable[[], object]],
        cls: type[CppLibraries],
        *args: object,
        **kwargs: object,
    ) -> Callable[[], object]:
        bound = inspect.signature(original).bind(cls, *args, **kwargs)
        bound.apply_defaults()
        name = _kernel_id(cls, bound)
        for needed in self._state.loading:
            needed.add(name)
        call = self._state.rebuilding
        if call is not None and call.kernels is not None:
            library = self._load(cls, name, call.kernels)
            return lambda: library
        load = original(cls, *args, **kwargs)

        def loaded() -> object:
            library = load()
            # Of a Python extension, or of a library opened by ctypes.
            path = getattr(library, "__file__", None) or getattr(library, "_name", None)
            if path:
                self._images[name] = path
            return library

        return loaded

    def _load(self, cls: type[CppLibraries], name: str, kernels: Mapping[str, Buffer]) -> object:
        if name not in kernels:
            raise UnusableKernelError(f"kernel {name} is not in the entry")
        image = kernels[name]
        # Two entries may have two images of one source.
        identity = name, hashlib.sha256(image).hexdigest()
        library = self._loaded.get(identity)
        if library is not None:
            return library
        try:
            check_image(image)
            with opened(image, name) as path:
                library = cls._load_library(path, name)
        except Exception as exc:
            raise UnusableKernelError(f"kernel {name} does not load: {exc}") from exc
        self._images[name] = image
        return self._loaded.setdefault(identity, library)

    @around(internals.emit_triton_bundle)
    def _read_and_emit(
        self, original: Function[object], bundle: TritonBundle, *args: object, **kwargs: object
    ) -> object:
        if self._state.rebuilding is not None:
            for kernel in bundle.kernel_artifacts:
                base = internals.triton_directory.get()(kernel.device)
                check_triton_directory(base, kernel.kernel_hash)
        for static in bundle.static_autotuners:
            restore_kernel(static.kernel)
        return original(bundle, *args, **kwargs)

    @around(internals.collect_triton_bundle)
    def _collect(
        self, original: Function[object], bundler: object, *args: object, **kwargs: object
    ) -> object:
        internals.keep_launched_kernels(bundler)
        return original(bundler, *args, **kwargs)


def _unsharable(why: str) -> NotSharableError:
    return NotSharableError("kernel", why)


def _kernel_id(cls: type[CppLibraries], call: inspect.BoundArguments) -> str:
    main_code, optimized_code, device_type, extra_flags = (
        call.arguments[name] for name in internals.KERNEL_ARGUMENTS
    )
    flags = repr(tuple(extra_flags))
    digest = hashlib.sha256()
    for part in (cls.__name__, main_code, optimized_code or "", device_type, flags):
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()[:40]


@contextlib.contextmanager
def opened(image: Buffer, name: str) -> Iterator[str]:
    """Yield a path ending in ``.so`` under which ``image`` can be loaded while the block runs.

    The bytes live in memory (``memfd_create``): they cannot be exchanged between being verified
    and being loaded, and a ``noexec`` temporary directory, which only gets a link to them, does
    not matter. Where the system has no such files, a private temporary one is used. The directory
    is reached by its descriptor, as others may rename it. Nothing is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="s3cache-") as directory, _held(directory) as held:
        inside = f"/proc/self/fd/{held}" if os.path.isdir("/proc/self/fd") else directory
        # The loader takes two libraries with one path for the same one.
        file_name = f"{os.path.basename(directory)}.so"
        path = os.path.join(inside, file_name)
        try:
            fd = os.memfd_create(name[:64], os.MFD_CLOEXEC)
        except (AttributeError, OSError):
            fd = os.open(file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700, dir_fd=held)
            with os.fdopen(fd, "wb") as file:
                file.write(image)
            yield path
            return
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(image)
            os.symlink(f"/proc/self/fd/{fd}", file_name, dir_fd=held)
            yield path
        finally:
            os.close(fd)


@contextlib.contextmanager
def _held(directory: str) -> Iterator[int]:
    """Yield a descriptor of a directory that was just made for this user alone."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(held)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{directory} was exchanged: it is not this user's alone")
        yield held
    finally:
        os.close(held)
