"""The seam at Inductor's code caches: what comes with an entry is run, and nothing else is.

Kernels are loaded, not compiled, and the Python code that calls them is run as the entry has it:
torch would run whatever file is there under its name.

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
import linecache
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from s3cache.artifact import check_image, without_places
from s3cache.errors import CorruptError
from s3cache.hooks._patching import Patches
from s3cache.hooks._sources import installed_in
from s3cache.store import Buffer
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CompiledGraph, CppLibraries, PythonModules

__all__ = ["Kernels", "UnsharableKernelError", "UnusableKernelError", "opened"]

LoadLibrary: TypeAlias = Function[Callable[[], object]]
LoadModule: TypeAlias = Function[object]


# What generated code may load through async_compile and an entry can carry: C++ as images, Triton
# as torch's own bundles. The others (Halide, CUTLASS, ...) leave files that only a compiler makes.
_PORTABLE = {"cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "wait"}


class UnsharableKernelError(Exception):
    """A graph loads native code that an entry cannot carry."""


class UnusableKernelError(Exception):
    """Code of an entry does not load here, or is not in it."""


class Kernels:
    """Native kernels of this process: those that arrived, and those that were compiled here."""

    def __init__(self, *, share_sources: bool = False) -> None:
        self._share_sources = share_sources
        self._thread = _Thread()
        self._arrived: dict[tuple[str, str], object] = {}  # from entries; by id and digest
        self._images: dict[str, Buffer | str] = {}  # of every kernel loaded; or the path of it
        self._modules: dict[str, set[str]] = {}  # kernels that a generated module asked for

    def install(self, patches: Patches) -> None:
        """Route the loading of kernels, and of the modules that ask for them, through here."""
        patches.replace(internals.load_library, self._library_loader)
        patches.replace(internals.load_module, self._module_loader)
        patches.replace(internals.rebuild_module, self._module_rebuilder)
        patches.replace(internals.run_module, self._module_runner)

    @contextlib.contextmanager
    def only(self, images: Mapping[str, Buffer]) -> Iterator[None]:
        """While the block runs, this thread loads kernels from ``images`` and compiles none.

        The Python code of graphs that are rebuilt is theirs, and not that of any file.
        """
        before = self._thread.offered, self._thread.sources
        self._thread.offered, self._thread.sources = images, {}
        try:
            yield
        finally:
            self._thread.offered, self._thread.sources = before

    def is_offered(self) -> bool:
        """Whether this thread is in such a block."""
        return self._thread.offered is not None

    def images_of(self, graphs: Iterable[object]) -> dict[str, Buffer]:
        """Images of the kernels that the generated code of compiled graphs loads, by id.

        Raises:
            UnsharableKernelError: there is one that an entry cannot carry.
            OSError: a library that was loaded is gone from the disk.
        """
        images: dict[str, Buffer] = {}
        for graph in graphs:
            if not isinstance(graph, internals.compiled_graph.get()):
                raise UnsharableKernelError(
                    f"it is a {type(graph).__name__}, not one compiled graph"
                )
            kinds = set(re.findall(r"\basync_compile\.(\w+)\(", graph.source_code)) - _PORTABLE
            if kinds:
                raise UnsharableKernelError(f"it has kernels of kind {', '.join(sorted(kinds))}")
            called = set(re.findall(r"\bextern_kernels\.(\w+)", graph.source_code))
            if called and (lacking := called - internals.extern_kernels()):
                raise UnsharableKernelError(
                    f"it calls extern_kernels.{', '.join(sorted(lacking))}, which is only there"
                    " where the graph was lowered"
                )
            needed = self._modules.get(graph.cache_key)
            if needed is None:
                raise UnsharableKernelError("its kernels were loaded before s3cache was enabled")
            images.update((name, self._image(name)) for name in needed)
        return images

    def _image(self, name: str) -> Buffer:
        image = self._images.get(name)
        if isinstance(image, str):
            with open(image, "rb") as file:
                image = file.read()
        if image is None:
            raise UnsharableKernelError("one of its kernels was never loaded")
        try:
            check_image(image)
        except CorruptError as exc:
            raise UnsharableKernelError(str(exc)) from exc
        return image if self._share_sources else without_places(image, *installed_in())

    def _module_loader(self, original: LoadModule) -> LoadModule:
        def load_by_key_path(
            cls: type[PythonModules], key: str, path: str, *args: object, **kwargs: object
        ) -> object:
            if key not in self._modules or path in self._thread.sources:
                # Loaded before we were here: once more, to see what it asks for. Or from a file.
                cls.modules_no_attr.pop(path, None)
            needed: set[str] = set()
            self._thread.loading.append(needed)
            try:
                module = original(cls, key, path, *args, **kwargs)
            finally:
                self._thread.loading.pop()
            self._modules.setdefault(key, needed)
            return module

        return load_by_key_path

    def _module_rebuilder(self, original: Function[str]) -> Function[str]:
        def after_deserialization(graph: CompiledGraph, *args: object, **kwargs: object) -> str:
            if self._thread.offered is not None:
                path = internals.path_of_module.get()(graph.cache_key, "py")[2]
                self._thread.sources[path] = graph.source_code
                try:
                    return original(graph, *args, **kwargs)
                except OSError as exc:
                    # torch would go on as if there were no entry, and not say why.
                    raise UnusableKernelError(f"its code does not load: {exc}") from exc
            return original(graph, *args, **kwargs)

        return after_deserialization

    def _module_runner(self, original: Function[ModuleType]) -> Function[ModuleType]:
        def reload_python_module(
            key: str, path: str, *args: object, **kwargs: object
        ) -> ModuleType:
            source = self._thread.sources.get(path)
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

        return reload_python_module

    def _library_loader(self, original: LoadLibrary) -> LoadLibrary:
        signature = inspect.signature(original)

        def load_async(
            cls: type[CppLibraries], *args: object, **kwargs: object
        ) -> Callable[[], object]:
            bound = signature.bind(cls, *args, **kwargs)
            bound.apply_defaults()
            name = _kernel_id(cls, bound)
            for needed in self._thread.loading:
                needed.add(name)
            if self._thread.offered is not None:
                library = self._load(cls, name, self._thread.offered)
                return lambda: library
            return self._remembering(name, original(cls, *args, **kwargs))

        return load_async

    def _load(self, cls: type[CppLibraries], name: str, offered: Mapping[str, Buffer]) -> object:
        if name not in offered:
            raise UnusableKernelError(f"kernel {name} is not in the entry")
        image = offered[name]
        # Two entries may have two images of one source.
        arrived = name, hashlib.sha256(image).hexdigest()
        library = self._arrived.get(arrived)
        if library is not None:
            return library
        try:
            check_image(image)
            with opened(image, name) as path:
                library = cls._load_library(path, name)
        except Exception as exc:
            raise UnusableKernelError(f"kernel {name} does not load: {exc}") from exc
        self._images[name] = image
        return self._arrived.setdefault(arrived, library)

    def _remembering(self, name: str, load: Callable[[], object]) -> Callable[[], object]:
        def loaded() -> object:
            library = load()
            # Of a Python extension, or of a library opened by ctypes.
            path = getattr(library, "__file__", None) or getattr(library, "_name", None)
            if path:
                self._images[name] = path
            return library

        return loaded


class _Thread(threading.local):
    """What this thread may load, and what it is loading."""

    def __init__(self) -> None:
        self.offered: Mapping[str, Buffer] | None = None  # of the entry that is being rebuilt
        self.loading: list[set[str]] = []  # kernels of each module being loaded, the outer first
        self.sources: dict[str, str] = {}  # Python code of that entry, by the path torch gives it


def _kernel_id(cls: type[CppLibraries], call: inspect.BoundArguments) -> str:
    main_code, optimized_code, device_type, extra_flags = (
        call.arguments[name] for name in internals.KERNEL_ARGUMENTS.words
    )
    parts = (
        cls.__name__,
        main_code,
        optimized_code or "",
        device_type,
        repr(tuple(extra_flags)),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()[:40]


@contextlib.contextmanager
def opened(image: Buffer, name: str) -> Iterator[str]:
    """A path ending in ``.so`` under which ``image`` can be loaded while the block runs.

    The bytes live in memory (``memfd_create``): nobody can exchange them between being verified
    and being loaded, and a ``noexec`` temporary directory, which only gets a link to them, does
    not matter. Where the system has no such files, a private temporary one is used. The directory
    is reached by its descriptor: in a temporary directory that all may write and rename in, its
    name may soon be another one's. Nothing is left behind.

    Raises:
        OSError: neither can be made, or somebody interferes.
    """
    with tempfile.TemporaryDirectory(prefix="s3cache-") as directory, _held(directory) as held:
        inside = f"/proc/self/fd/{held}" if os.path.isdir("/proc/self/fd") else directory
        # The loader knows libraries by their paths: what has the path of another one is that one.
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
    """A descriptor of a directory that was just made for this user alone."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(held)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{directory} was exchanged: it is not this user's alone")
        yield held
    finally:
        os.close(held)
