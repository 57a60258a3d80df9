"""Hooks at Inductor's code caches: what comes with an entry is run, and nothing else is.

Kernels are loaded, not compiled, and the Python code that calls them is run as the entry has it:
torch would run the file that lies under its name.

Inductor names a shared library after its source and the compiler's command line, which holds the
paths of this installation. Here a kernel is named after what it *is*: source, extra flags, device,
kind of binding. What else would change the machine code (ISA, ABI, Python version, torch) is in the
key of the entry that carries it.

Which kernels a graph needs is seen, not guessed: those that its generated Python module asks for
while it is loaded.

torch writes the Triton kernels of an entry to files, unless there are some under their names, and
loads those by name, at once or when they are first run. So no other user may be able to write
there: what is loaded are then the bytes that were verified, or what this user's torch compiled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import linecache
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from s3cache.artifact import check_image, without_places
from s3cache.errors import ConfigError, CorruptError
from s3cache.hooks._patching import Patches
from s3cache.hooks._portable import installed_in, restore_kernel
from s3cache.hooks._state import CompileState
from s3cache.store import Buffer, Directory, check_way, is_writable_by_others, make_parents
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CompiledGraph, CppLibraries, PythonModules, TritonBundle

__all__ = [
    "Kernels",
    "UnsharableKernelError",
    "UnusableKernelError",
    "check_triton_directory",
    "opened",
]

LoadLibrary: TypeAlias = Function[Callable[[], object]]
LoadModule: TypeAlias = Function[object]
Emit: TypeAlias = Function[object]

# What generated code may load through async_compile and an entry can carry: C++ as images, Triton
# as torch's own bundles. The others (Halide, CUTLASS, ...) leave files that only a compiler makes.
_PORTABLE = {"cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "wait"}


class UnsharableKernelError(Exception):
    """A graph loads native code that an entry cannot carry."""


class UnusableKernelError(Exception):
    """Code of an entry does not load here, or is not in it."""


class Kernels:
    """Native kernels of this process: those that arrived, and those that were compiled here."""

    def __init__(self, state: CompileState, *, share_sources: bool = False) -> None:
        self._share_sources = share_sources
        self._state = state
        self._arrived: dict[tuple[str, str], object] = {}  # from entries; by id and digest
        self._images: dict[str, Buffer | str] = {}  # of every kernel loaded; or the path of it
        self._modules: dict[str, set[str]] = {}  # kernels that a generated module asked for

    def install(self, patches: Patches) -> None:
        """Route the loading of kernels, and of the modules that ask for them, through here."""
        patches.replace(internals.load_library, self._library_loader)
        patches.replace(internals.load_module, self._module_loader)
        patches.replace(internals.rebuild_module, self._module_rebuilder)
        patches.replace(internals.run_module, self._module_runner)
        patches.replace(internals.emit_triton_bundle, self._emitter)
        patches.replace(internals.collect_triton_bundle, _collector)

    def only(self, images: Mapping[str, Buffer]) -> contextlib.AbstractContextManager[None]:
        """While the block runs, this thread loads kernels from ``images`` and compiles none.

        The Python code of graphs that are rebuilt is theirs, and not that of any file.
        """
        return self._state.changed(offered=images, sources={})

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
            if key not in self._modules or path in self._state.sources:
                # Loaded before we were here: once more, to see what it asks for. Or from a file.
                cls.modules_no_attr.pop(path, None)
            needed: set[str] = set()
            self._state.loading.append(needed)
            try:
                module = original(cls, key, path, *args, **kwargs)
            finally:
                self._state.loading.pop()
            self._modules.setdefault(key, needed)
            return module

        return load_by_key_path

    def _module_rebuilder(self, original: Function[str]) -> Function[str]:
        def after_deserialization(graph: CompiledGraph, *args: object, **kwargs: object) -> str:
            if self._state.offered is not None:
                path = internals.path_of_module.get()(graph.cache_key, "py")[2]
                self._state.sources[path] = graph.source_code
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
            source = self._state.sources.get(path)
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

    def _emitter(self, original: Emit) -> Emit:
        def read_and_emit(bundle: TritonBundle, *args: object, **kwargs: object) -> object:
            if self._state.offered is not None:  # an entry of ours is being rebuilt
                for kernel in bundle.kernel_artifacts:
                    base = internals.triton_directory.get()(kernel.device)
                    check_triton_directory(base, kernel.kernel_hash)
            for static in bundle.static_autotuners:
                restore_kernel(static.kernel)
            return original(bundle, *args, **kwargs)

        return read_and_emit

    def _library_loader(self, original: LoadLibrary) -> LoadLibrary:
        signature = inspect.signature(original)

        def load_async(
            cls: type[CppLibraries], *args: object, **kwargs: object
        ) -> Callable[[], object]:
            bound = signature.bind(cls, *args, **kwargs)
            bound.apply_defaults()
            name = _kernel_id(cls, bound)
            for needed in self._state.loading:
                needed.add(name)
            if self._state.offered is not None:
                library = self._load(cls, name, self._state.offered)
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


def _kernel_id(cls: type[CppLibraries], call: inspect.BoundArguments) -> str:
    main_code, optimized_code, device_type, extra_flags = (
        call.arguments[name] for name in internals.KERNEL_ARGUMENTS
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

    The bytes live in memory (``memfd_create``): they cannot be exchanged between being verified
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


# -- kernels of Triton


def _collector(original: Function[object]) -> Function[object]:
    def collect(bundler: object, *args: object, **kwargs: object) -> object:
        internals.keep_launched_kernels(bundler)
        return original(bundler, *args, **kwargs)

    return collect


def check_triton_directory(base: str, kernel: str) -> None:
    """Make ``base`` for this user alone, unless it is there; look at what there is of a kernel.

    Raises:
        PermissionError: others may write in it, or what is there is not this user's alone. That
            says nothing of the entry.
    """
    try:
        make_parents(os.path.abspath(base))
        check_way(base)  # before it is opened: from then on the name leads there
        directory = Directory.at(base, make=True)
        # Where no other user gets in, it does not matter what the umask left open within.
        is_private = not os.fstat(directory.fd).st_mode & 0o077
        with contextlib.suppress(FileNotFoundError):  # there is nothing for it yet
            _check_files(directory, kernel, is_private=is_private)
    except ConfigError as exc:
        raise PermissionError(
            errno.EACCES, f"kernels of Triton are not loaded from where others may write: {exc}"
        ) from exc


def _check_files(base: Directory, kernel: str, *, is_private: bool) -> None:
    place = f"{base.path}/{kernel}"
    status = os.stat(kernel, dir_fd=base.fd, follow_symlinks=False)
    _check_ours(status, stat.S_ISDIR, is_private, place)
    fd = os.open(kernel, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=base.fd)
    try:
        for name in os.listdir(fd):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            _check_ours(status, stat.S_ISREG, is_private, f"{place}/{name}")
    finally:
        os.close(fd)


def _check_ours(
    status: os.stat_result, is_kind: Callable[[int], bool], is_private: bool, place: str
) -> None:
    is_ours = is_kind(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or (not is_private and is_writable_by_others(status)):
        raise ConfigError(
            place,
            "is not this user's alone",
            "remove it, or give TRITON_CACHE_DIR another directory",
        )
