"""Load the kernels and the generated code of entries, and save them without traces of this machine.

A hit loads kernels without compiling them, and runs the Python code in the entry. torch alone would
run the file with the same name.

Inductor names a shared library after its source and the compiler's command line, which contains the
paths of this installation. Here the name of a kernel depends on its content: source, extra flags,
device and kind of binding. Everything else that changes machine code (ISA, ABI, Python version,
torch) is in the key of the entry. A graph needs the kernels that its generated Python module loads.

An entry contains a Triton kernel without files, directories and bound methods; the machine that
reads the entry adds its own. torch writes Triton kernels to files, unless files of that name exist,
and loads them by name. So other users must not be able to write there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import functools
import hashlib
import inspect
import json
import linecache
import os
import re
import stat
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from s3cache.artifact import check_image, hidden_places, hidden_source, without_places
from s3cache.errors import ConfigError, CorruptError
from s3cache.hooks._conditions import NotSharableError
from s3cache.hooks._keys import CompileState, around
from s3cache.store import Buffer, own_directory
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.directories import is_writable_by_others, private_directory

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import (
        CachingAutotuner,
        CompiledGraph,
        CppLibraries,
        PythonModules,
        TritonBundle,
        TritonFile,
    )

# Kinds of kernels in async_compile that an entry can contain: C++ as images, Triton as torch's own
# bundles. Other kinds (Halide, CUTLASS, ...) need files that only a compiler creates.
_PORTABLE = {"cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "wait"}


# Messages of compiled code contain the names of source files.
_SOURCES = b".cpp", b".h", b".hpp"


#: The marks around the source of a kernel of Triton in generated C++ (``cpp_wrapper``), which
#: compiles it at the first launch of the kernel.
COMPILES_LATER = 'R"TRITON(', ')TRITON"'


class UnusableKernelError(Exception):
    """Raised when code of an entry is missing or does not load here."""


class Kernels:
    """The native kernels of this process, from entries or compiled here."""

    def __init__(
        self,
        state: CompileState,
        *,
        share_sources: bool = False,
        on_triton: Callable[[CompiledGraph], object] = lambda _: None,
    ) -> None:
        self.share_sources = share_sources
        self._on_triton = on_triton  # called before a graph with kernels of Triton is loaded
        self._state = state
        self._loaded: dict[tuple[str, str], object] = {}  # from entries, by id and digest
        self._images: dict[str, Buffer | str] = {}  # image or path of every kernel loaded
        self._modules: dict[str, set[str]] = {}  # kernels that a generated module loads
        self._loaded_as: weakref.WeakValueDictionary[str, ModuleType] = (
            weakref.WeakValueDictionary()
        )

    def module_of(self, graph: CompiledGraph) -> ModuleType | None:
        """Return the module of a graph's code, if it was loaded."""
        return self._loaded_as.get(graph.cache_key)

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
        made_in, bare = internals.cache_dir.get()(), without_places(image, *installed_in())
        if files := files_named_in(bare, made_in):
            raise _unsharable(f"it reads a file of this machine ({files[0]})")
        return image if self.share_sources else hidden_places(bare, made_in)

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
            # It was loaded before s3cache was enabled, or from a file.
            cls.modules_no_attr.pop(path, None)
        needed: set[str] = set()
        self._state.loading.append(needed)
        try:
            module = original(cls, key, path, *args, **kwargs)
        finally:
            self._state.loading.pop()
        self._loaded_as[key] = cast("ModuleType", module)
        self._modules.setdefault(key, needed)
        return module

    def _source_of(self, path: str) -> str | None:
        """Return the code for a file in the entry that is being loaded, if it has any."""
        call = self._state.rebuilding
        return None if call is None else call.modules.get(path)

    @around(internals.rebuild_module)
    def _after_deserialization(
        self, original: Function[str], graph: CompiledGraph, *args: object, **kwargs: object
    ) -> str:
        call = self._state.rebuilding
        if has_triton(graph):
            self._on_triton(graph)
        if call is None:
            return original(graph, *args, **kwargs)
        path = internals.path_of_module.get()(graph.cache_key, "py")[2]
        call.modules[path] = graph.source_code
        try:
            return original(graph, *args, **kwargs)
        except OSError as exc:
            # torch would treat it as a miss without a message.
            raise UnusableKernelError(f"its code does not load: {exc}") from exc

    @around(internals.run_module)
    def _reload_python_module(
        self, original: Function[ModuleType], key: str, path: str, *args: object, **kwargs: object
    ) -> ModuleType:
        source = self._source_of(path)
        if source is None:
            return original(key, path, *args, **kwargs)
        # For tracebacks: the file does not exist, or has other contents.
        linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
        module = ModuleType(f"{original.__module__}.{key}")
        vars(module).update(__file__=path, key=key)
        source, more = internals.strip_imports(source)
        vars(module).update(more)
        call = self._state.rebuilding
        code = None if call is None else call.code_of(source)
        if code is None:
            code = compile(source, path, "exec", dont_inherit=True)
        exec(internals.with_filename(code, path), vars(module))  # noqa: S102 - verified
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
        if call is not None:
            library = self._load(cls, name, call.kernels or {})
            return lambda: library
        load = original(cls, *args, **kwargs)

        def loaded() -> object:
            library = load()
            # A Python extension, or a library opened by ctypes.
            path = getattr(library, "__file__", None) or getattr(library, "_name", None)
            if path:
                self._images[name] = path
            return library

        return loaded

    def _load(self, cls: type[CppLibraries], name: str, kernels: Mapping[str, Buffer]) -> object:
        if name not in kernels:
            raise UnusableKernelError(f"kernel {name} is not in the entry")
        image = kernels[name]
        # Two entries may have different images of the same source.
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
            if (
                self._state.fx_options is not None
            ):  # an entry of the whole graph may need it unloaded
                _as_found[static.kernel] = _not_loaded(static.kernel)
            restore_kernel(static.kernel)
        return original(bundle, *args, **kwargs)

    @around(internals.collect_triton_bundle)
    def _collect(
        self, original: Function[object], bundler: object, *args: object, **kwargs: object
    ) -> object:
        internals.keep_launched_kernels(bundler)
        return original(bundler, *args, **kwargs)


def has_triton(graph: CompiledGraph) -> bool:
    """Return whether a compiled graph has kernels of Triton."""
    bundle: TritonBundle | None = getattr(graph, internals.TRITON_BUNDLE, None)
    if bundle is not None and bundle.kernel_artifacts:
        return True
    return COMPILES_LATER[0] in getattr(graph, "source_code", "")


def _unsharable(why: str) -> NotSharableError:
    return NotSharableError("kernel", why)


def files_named_in(image: Buffer, directory: str) -> list[str]:
    """Return the files below ``directory`` that an image names, other than sources.

    With ``cpp_wrapper``, compiled code may load GPU kernels by path. It never reads sources.
    """
    names = re.findall(re.escape(directory.encode()) + rb"/[^\0]+", image)
    return [name.decode(errors="replace") for name in names if not name.endswith(_SOURCES)]


def _kernel_id(cls: type[CppLibraries], call: inspect.BoundArguments) -> str:
    main_code, optimized_code, device_type, extra_flags = (
        call.arguments[name] for name in internals.KERNEL_ARGUMENTS
    )
    parts = cls.__name__, main_code, optimized_code or "", device_type, tuple(extra_flags)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


@contextlib.contextmanager
def opened(image: Buffer, name: str) -> Iterator[str]:
    """Yield a path ending in ``.so`` under which ``image`` can be loaded while the block runs.

    The bytes live in memory: they cannot be exchanged between being verified and being loaded, and
    a ``noexec`` temporary directory, which only gets a link to them, does not matter. Nothing is
    left behind.
    """
    directory, forget = private_directory()
    try:
        with open(os.memfd_create(name[:64], os.MFD_CLOEXEC), "wb") as file:
            file.write(image)
            file.flush()
            # The loader treats two libraries with one path as the same.
            path = f"{directory}/{os.path.basename(directory)}.so"
            os.symlink(f"/proc/self/fd/{file.fileno()}", path)
            yield path
    finally:
        forget()


# -- entries without traces of this machine


@contextlib.contextmanager
def portable(*results: object, share_sources: bool = False) -> Iterator[None]:
    """Remove traces of this machine from entries and compiled graphs while the block runs.

    These are places of source code, unless ``share_sources`` is set, and the paths in Triton
    kernels. Attributes that the block sets are kept. torch alone can use such kernels too, but then
    does not remember the fastest configuration.
    """
    changed: list[tuple[dict[str, object], str, object, object]] = []
    try:
        for result in results:
            fields = vars(result)
            for name, value in [*fields.items()]:
                hidden = value
                if name == internals.TRITON_BUNDLE:
                    hidden = portable_bundle(
                        cast("TritonBundle | None", value), share_sources=share_sources
                    )
                elif not share_sources:
                    hidden = hidden_source(name, value)
                if hidden is not value:
                    fields[name] = hidden
                    changed.append((fields, name, value, hidden))
        yield
    finally:
        for fields, name, value, hidden in changed:
            if fields.get(name) is hidden:
                fields[name] = value


@functools.cache
def installed_in() -> tuple[str, ...]:
    """Return directories of torch, Triton and Python, which compiled code may name."""
    specs = filter(None, map(find_spec, ("torch", "triton")))
    found = {str(Path(spec.origin).parent.parent) for spec in specs if spec.origin}
    found |= {sys.prefix, sys.base_prefix}
    return tuple(sorted(found - {"/", "/usr", "/usr/local"}, key=len, reverse=True))


# -- kernels of Triton

# Triton's intermediate code. It contains names of source files, and no process needs it
# (TRITON_STORE_BINARY_ONLY).
_STAGES = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn")
_GROUP = "__grp__"  # prefix of the file that lists the others
#: On a kernel in an entry: the digest of its configurations, under which torch remembers the best.
_CONFIGS = "s3cache_configs"
# Unloaded copies of kernels from second-level entries, by the kernel that torch loads.
_as_found: weakref.WeakKeyDictionary[CachingAutotuner, CachingAutotuner] = (
    weakref.WeakKeyDictionary()
)


def portable_bundle(bundle: TritonBundle | None, *, share_sources: bool) -> TritonBundle | None:
    """Return a bundle that any machine can use."""
    if not bundle or not bundle.kernel_artifacts:
        return bundle
    places = () if share_sources else (*installed_in(), internals.cache_dir.get()())
    autotuners = [
        dataclasses.replace(each, kernel=_without_process(kernel))
        for each in bundle.static_autotuners
        if not internals.is_loaded(kernel := _as_found.get(each.kernel, each.kernel))
    ]
    kernels = []
    for kernel in bundle.kernel_artifacts:
        files = [each for each in kernel.artifacts if not each.filename.endswith(_STAGES)]
        names = {each.filename for each in files}
        kept = [
            dataclasses.replace(each, payload=hidden_places(_payload(each, names), *places))
            for each in files
        ]
        kernels.append(dataclasses.replace(kernel, artifacts=kept))
    return dataclasses.replace(bundle, kernel_artifacts=kernels, static_autotuners=autotuners)


def _payload(file: TritonFile, names: set[str]) -> bytes:
    if not file.filename.startswith(_GROUP):
        return bytes(file.payload)
    group = json.loads(
        file.payload
    )  # a newer Triton ignores a group if one of its files is missing
    paths = group["child_paths"].items()
    group["child_paths"] = {name: path for name, path in paths if name in names}
    return json.dumps(group).encode()


def _without_process(kernel: CachingAutotuner) -> CachingAutotuner:
    """Return a copy without the state of this process; torch refuses to pickle a loaded kernel."""
    bare, function = object.__new__(type(kernel)), object.__new__(type(kernel.fn))
    vars(function).update(vars(kernel.fn))
    vars(function)[internals.BINDERS] = None
    if internals.FILE in vars(function):
        vars(function)[internals.FILE] = ""
    vars(bare).update(vars(kernel), fn=function, filename=None, save_cache_hook=None)
    vars(bare).update({internals.LAUNCHERS: [], internals.RELOAD: None})
    cache = getattr(kernel.save_cache_hook, "__self__", None)
    if isinstance(cache, internals.autotune_cache.get()):
        vars(bare)[_CONFIGS] = cache.configs_hash
    return bare


def _not_loaded(kernel: CachingAutotuner) -> CachingAutotuner:
    """Return a copy that does not change when torch loads ``kernel``."""
    bare = _without_process(kernel)
    bare.compile_results = [*map(copy.copy, kernel.compile_results)]
    for result in bare.compile_results:
        result.kernel = copy.copy(result.kernel)
    return bare


def restore_kernel(kernel: CachingAutotuner) -> None:
    """Add the state of this process to a kernel, as if it had been compiled here."""
    if kernel.filename is not None or not kernel.kernel_hash:
        return  # torch has added it
    kernel.filename = internals.path_of_module.get()(kernel.kernel_hash, "py")[2]
    vars(kernel.fn)[internals.BINDERS] = defaultdict(kernel.fn.create_binder)
    if internals.FILE in vars(kernel.fn):
        vars(kernel.fn)[internals.FILE] = kernel.filename
    configs = kernel.__dict__.pop(_CONFIGS, None)
    if configs is not None:
        cache = internals.autotune_cache.get().create(
            kernel.inductor_meta, kernel.filename, configs
        )
        kernel.save_cache_hook = cache and cache.save


def check_triton_directory(base: str, kernel: str) -> None:
    """Make ``base`` for this user alone, unless it is there; check the files of a kernel in it."""
    try:
        directory = own_directory(base)
        with contextlib.suppress(FileNotFoundError):  # no files of this kernel yet
            held = directory.enter(kernel)
            for name in held.names():
                status = os.stat(name, dir_fd=held.fd, follow_symlinks=False)
                is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if not is_ours or is_writable_by_others(status):
                    raise ConfigError(
                        f"{held.path}/{name}",
                        "is not this user's alone",
                        "remove it, or give TRITON_CACHE_DIR another directory",
                    )
    except ConfigError as exc:
        raise PermissionError(
            errno.EACCES, f"kernels of Triton are not loaded from where others may write: {exc}"
        ) from exc
