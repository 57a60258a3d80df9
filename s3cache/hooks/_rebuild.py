"""Check whether an entry fits, load its code, and watch its first call.

While torch compiles, it learns more about a program than its key says. It makes Dynamo guard some
of these facts: that two inputs are one tensor, or overlap in one storage. It writes absolute
offsets in storages into the code, and lowers a backward under the current settings. A hit skips all
of this. So we store the facts as :class:`Conditions` on torch's own result, wherever that is saved:
in our entry, in torch's directory, in the artifacts of ``torch.compiler.save_cache_artifacts``.

A hit loads kernels without compiling them, and runs the Python code in the entry. torch alone would
run the file with the same name. Inductor names a shared library after its source and the compiler's
command line, which contains the paths of this installation. Here the name of a kernel depends on
its content: source, extra flags, device and kind of binding. Everything else that changes machine
code (ISA, ABI, Python version, torch) is in the key of the entry.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import inspect
import json
import linecache
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, TypeAlias, TypedDict, cast

from s3cache.artifact import (
    CONDITIONS,
    check_image,
    hidden_places,
    hidden_source,
    without_places,
)
from s3cache.errors import ConfigError, CorruptError
from s3cache.graph import Code, settings_digest, storage_offsets
from s3cache.hooks._again import interpreted_backward, lower_backward
from s3cache.hooks._portable import portable, restore_kernel, unloaded
from s3cache.hooks._state import CompileState, around
from s3cache.store import Buffer, check_files, own_directory
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from types import CodeType

    from torch import Tensor

    from s3cache.cache import Engine
    from s3cache.frame import Frame
    from s3cache.torch_api.protocols import (
        AOTResult,
        CachingAutotuner,
        CompiledGraph,
        CppLibraries,
        PythonModules,
        TritonBundle,
    )

logger = logger_of("lookups")

_SYMBOL = re.compile(r"\w+")
_LOCAL = re.compile(r"L\['(\w+)'\]")  # a variable of the function that is compiled
# torch's name for the input size with this number, in the guards of its entries.
_NUMBERED = re.compile(r"L\['t(\d+)'\]")
#: The attribute of torch's results with the limits of their code, and their field in an entry.
LIMITS, LIMITS_FIELD = "s3cache_place", "place"


class Conditions(TypedDict):
    """Plain data, pickled with torch's entry.

    ``guards`` are AOTAutograd's guards: the kind, and the indices of the inputs. ``sizes`` are
    conditions on sizes that torch's entry leaves out, because some sizes are not inputs (such
    as that of a storage): expressions, with their symbols and sources. ``places`` are the offsets
    of inputs in their storages; nil if the code does not depend on them. ``lowered`` is a digest of
    the settings under which the backward was lowered, if that was at its first call and not with
    the forward. ``of_threads`` says whether they include the number of threads.
    """

    guards: list[tuple[str, list[int], list[int]]]
    sizes: list[tuple[str, dict[str, str]]]
    places: str | None
    lowered: str | None
    of_threads: bool


class NotSharableError(Exception):
    """A compiled graph cannot be saved: an entry cannot express it, or not its conditions."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code


# -- conditions


def conditions_of(entry: object) -> Conditions | None:
    """Return the conditions of the code in ``entry``; ``None`` if it has none."""
    noted: object = getattr(entry, CONDITIONS, None)
    if noted is not None and (
        not isinstance(noted, Mapping) or set(noted) != set(Conditions.__annotations__)
    ):
        raise CorruptError("entry", "has conditions of an unknown kind")
    return cast("Conditions | None", noted)


def described(
    conditions: Conditions | None, limits: Mapping[str, object] = MappingProxyType({})
) -> str | None:
    """Describe what a hit requires beyond torch's own guards; ``None`` if nothing."""
    relied: dict[str, object] = {}
    if conditions is not None:
        relied |= {name: conditions[name] for name in ("guards", "sizes", "places")}
    relied |= limits
    return json.dumps(relied) if any(relied.values()) else None


def misfits(
    conditions: Conditions, inputs: Sequence[object], sources: Sequence[object]
) -> Iterator[str]:
    """Yield the reasons why the code may not be called with ``inputs``, those of a lookup."""
    context = internals.current_tracing_context.get()()
    places = conditions["places"]
    if places is not None and places != (here := storage_offsets(inputs)):
        # Formatted as 2@8/48: the input, its first element, the bytes of the storage.
        yield f"offsets of inputs in storages are {places} in the entry, {here} here"
    for expression, named in conditions["sizes"]:
        text = _SYMBOL.sub(lambda match: as_written(named.get(match[0], match[0])), expression)  # noqa: B023
        if (
            context is None
            or not internals.are_named(context, named)
            or not internals.value_of_symbol(context, expression)
        ):
            yield f"guard `{text}` does not hold"
    for kind, some, others in conditions["guards"]:
        if context is not None and internals.guard_holds(
            context, kind, [inputs[i] for i in some], [inputs[i] for i in others]
        ):
            continue
        texts = []
        for i in (*some, *others):
            name = internals.name_of_source(sources[i]) if i < len(sources) else None
            texts.append(f"input {i}" + (f" ({as_written(name)})" if name else ""))
        yield f"{', '.join(texts)} share memory in another way in the entry"


def failing_guards(expression: str, inputs: Sequence[object]) -> list[str]:
    """Return which of torch's guards on sizes, joined by ``and``, do not hold for ``inputs``."""
    import torch

    # The guards number the sizes in this order.
    nodes = [value.node for value in inputs if isinstance(value, torch.SymInt)]
    nodes = [node for node in nodes if node.hint is not None]
    sources = [node.shape_env.var_to_sources.get(node.expr) or [None] for node in nodes]
    names = [
        as_written(internals.name_of_source(source) or f"size {i}")
        for i, (source, *_) in enumerate(sources)
    ]
    values = [int(node.hint) for node in nodes]  # a hint adds no guard
    failures = []
    for guard in expression.split(" and "):
        if not (nodes and nodes[0].shape_env.evaluate_guards_expression(guard, values)):
            numbers = sorted({int(number) for number in _NUMBERED.findall(guard)})
            text = _NUMBERED.sub(lambda match: names[int(match[1])], guard)
            here = ", ".join(f"{names[number]} is {values[number]}" for number in numbers)
            failures.append(f"guard `{text}` does not hold: {here}")
    return failures


def as_written(source: str) -> str:
    """Return ``L['x'].size()[0]`` as the user would write it: ``x.size()[0]``."""
    return _LOCAL.sub(r"\1", source)


def add_guards(conditions: Conditions, sources: Sequence[object]) -> None:
    """Add the guards that Dynamo had when the entry was compiled, on inputs from ``sources``."""
    if not conditions["guards"] and not conditions["sizes"]:
        return
    context = internals.current_tracing_context.get()()
    if context is None:
        raise CorruptError("entry", "has guards, which cannot be checked here")
    try:
        guards = [
            internals.guard_on(kind, [sources[i] for i in some], [sources[i] for i in others])
            for kind, some, others in conditions["guards"]
        ]
        for expression, _ in conditions["sizes"]:
            internals.guard_on_sizes(context, expression)
    except (IndexError, TypeError, NameError, ValueError, AssertionError) as exc:
        raise CorruptError("entry", f"has guards that fit no input ({exc})") from exc
    context.guards_context.aotautograd_guards.extend(guards)


# -- backwards that are lowered late
#
# torch lowers most backwards at their first call, under the settings at that moment: a program
# with strict settings at ``.backward()`` gets a strict backward, even if they were not strict at
# the forward. A key is computed at the forward. So an entry stores a digest of the settings of its
# backward. A hit compares it at the first call of its own backward. If it differs, the backward is
# lowered again at once, from the graph that torch keeps in the entry.


def settings_of_backward(
    options: Mapping[str, object],
    registered_version: Callable[[object], str | None],
    *,
    of_threads: bool,
) -> str | None:
    """Return a digest of the settings under which torch would lower a backward now.

    ``options`` are those of the program for the compile of its forward.
    """
    inductor = internals.inductor_config.get()
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor.patch(**options))
        if inductor.cpp_wrapper:
            stack.enter_context(inductor.patch(**internals.cpp_wrapper_options.get()()))
        return settings_digest(of_threads=of_threads, registered_version=registered_version)


def attach_backward(
    entry: AOTResult,
    conditions: Conditions,
    state: CompileState,
    registered_version: Callable[[object], str | None],
    as_before: Callable[[], bool] | None = None,
) -> None:
    """Make the callable of ``entry`` compare the settings at its first backward."""
    compiled, metadata = entry.compiled_bw, entry.runtime_metadata
    if compiled is None or conditions["lowered"] is None:
        return
    options, compiler = dict(state.options), state.backward_compiler  # of the forward's compile
    # Inputs with memory that the code reuses. torch does not reuse it if the graph is kept for
    # another backward; it decides that before the first call.
    donated = metadata.bw_donated_idxs
    if donated:
        metadata.bw_donated_idxs = []

    settings = partial(
        settings_of_backward, options, registered_version, of_threads=conditions["of_threads"]
    )

    def choose(lowered: Function[object], args: Sequence[object]) -> Function[object]:
        kept = bool(donated) and internals.keeps_graph.get()()
        if not kept:
            metadata.bw_donated_idxs = donated
        try:
            is_same = as_before is not None and as_before()
            if not kept and (is_same or settings() == conditions["lowered"]):
                return lowered
            logger.info("a backward of a hit is lowered again, under the current settings")
            return lower_backward(entry, compiler, args)
        except Exception:  # the user's program goes on
            logger.warning(
                "a backward of a hit cannot be lowered again; it runs uncompiled", exc_info=True
            )
            return interpreted_backward(entry)

    load = compiled.post_compile

    def post_compile(*args: object, **kwargs: object) -> object:
        lowered = load(*args, **kwargs)
        chosen: Function[object] | None = None

        def backward(inputs: list[object]) -> object:
            nonlocal chosen
            if chosen is None:
                chosen = choose(lowered, inputs)
            return chosen(inputs)

        return internals.disable_dynamo.get()(
            internals.boxed(backward), reason="do not trace generated backwards pass"
        )

    compiled.post_compile = post_compile


# -- kernels and generated code

# Kinds of kernels in async_compile that an entry can contain: C++ as images, Triton as torch's own
# bundles. Other kinds (Halide, CUTLASS, ...) need files that only a compiler creates.
_PORTABLE = {"cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "wait"}

# Messages of compiled code contain the names of source files.
_SOURCES = b".cpp", b".h", b".hpp"


#: The marks around the source of a kernel of Triton in generated C++ (``cpp_wrapper``), which
#: compiles it at the first launch of the kernel.
COMPILES_LATER = 'R"TRITON(', ')TRITON"'


class UnusableKernelError(Exception):
    """Code of an entry is missing or does not load here."""


class Kernels:
    """The native kernels of this process, from entries or compiled here."""

    def __init__(
        self,
        state: CompileState,
        *,
        share_sources: bool = False,
        on_triton: Callable[[CompiledGraph], object] = lambda _: None,
    ) -> None:
        self._on_triton = on_triton  # called before a graph with kernels of Triton is loaded
        self._share_sources = share_sources
        self._state = state
        self._loaded: dict[tuple[str, str], object] = {}  # from entries, by id and digest
        self._images: dict[str, Buffer | str] = {}  # image or path of every kernel loaded
        self._modules: dict[str, set[str]] = {}  # kernels that a generated module loads
        # Unloaded copies of kernels from second-level entries, by the kernel that torch loads.
        self._unloaded: weakref.WeakKeyDictionary[CachingAutotuner, CachingAutotuner] = (
            weakref.WeakKeyDictionary()
        )
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
        return image if self._share_sources else hidden_places(bare, made_in)

    @contextlib.contextmanager
    def hidden(self, *results: object) -> Iterator[None]:
        """Remove traces of this machine from entries and compiled graphs while the block runs.

        These are places of source code, unless ``share_sources`` is set, and the paths in Triton
        kernels. Attributes that the block sets are kept. torch alone can use such kernels too, but
        then does not remember the fastest configuration.
        """
        changed: list[tuple[dict[str, object], str, object, object]] = []
        try:
            for result in results:
                fields = vars(result)
                for name, value in [*fields.items()]:
                    hidden = value
                    if name == internals.TRITON_BUNDLE:
                        hidden = self.portable(cast("TritonBundle | None", value))
                    elif not self._share_sources:
                        hidden = hidden_source(name, value)
                    if hidden is not value:
                        fields[name] = hidden
                        changed.append((fields, name, value, hidden))
            yield
        finally:
            for fields, name, value, hidden in changed:
                if fields.get(name) is hidden:
                    fields[name] = value

    def portable(self, bundle: TritonBundle | None) -> TritonBundle | None:
        """Return a bundle that any machine can use."""
        if not bundle or not bundle.kernel_artifacts:
            return bundle
        here = () if self._share_sources else (*installed_in(), internals.cache_dir.get()())
        return portable(bundle, self._unloaded, here)

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
        call = self._state.rebuilding
        if key not in self._modules or (call is not None and path in call.modules):
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
        call = self._state.rebuilding
        if call is None or path not in call.modules:
            return original(key, path, *args, **kwargs)
        source = call.modules[path]
        # For tracebacks: the file does not exist, or has other contents.
        linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
        module = ModuleType(f"{original.__module__}.{key}")
        vars(module).update(__file__=path, key=key)
        source, more = internals.strip_imports(source)
        vars(module).update(more)
        code = call.code_of(source) or compile(source, path, "exec", dont_inherit=True)
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
        code, optimized, device, flags = (
            bound.arguments[name] for name in internals.KERNEL_ARGUMENTS
        )
        parts = cls.__name__, code, optimized or "", device, tuple(flags)
        name = hashlib.sha256(repr(parts).encode()).hexdigest()[:40]
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
        if identity not in self._loaded:
            try:
                check_image(image)
                with opened(image, name) as path:
                    self._loaded[identity] = cls._load_library(path, name)
            except Exception as exc:
                raise UnusableKernelError(f"kernel {name} does not load: {exc}") from exc
            self._images[name] = image
        return self._loaded[identity]

    @around(internals.emit_triton_bundle)
    def _read_and_emit(
        self, original: Function[object], bundle: TritonBundle, *args: object, **kwargs: object
    ) -> object:
        for kernel in () if self._state.rebuilding is None else bundle.kernel_artifacts:
            try:  # the directory is this user's alone, and so are the files of the kernel in it
                directory = own_directory(internals.triton_directory.get()(kernel.device))
                with contextlib.suppress(FileNotFoundError):  # no files of this kernel yet
                    held = directory.enter(kernel.kernel_hash)
                    fix = "remove it, or give TRITON_CACHE_DIR another directory"
                    check_files(held.fd, held.path, held.names(), fix)
            except ConfigError as exc:
                raise PermissionError(
                    errno.EACCES,
                    f"kernels of Triton are not loaded from where others may write: {exc}",
                ) from exc
        for static in bundle.static_autotuners:
            if self._state.fx_options is not None:  # a whole graph's entry may need it unloaded
                self._unloaded[static.kernel] = unloaded(static.kernel)
            restore_kernel(static.kernel)
        return original(bundle, *args, **kwargs)

    @around(internals.collect_triton_bundle)
    def _collect(
        self, original: Function[object], bundler: object, *args: object, **kwargs: object
    ) -> object:
        """Keep every kernel that one of the autotuners launches.

        torch drops the kernels of autotuners that had only one configuration.
        """
        launched: set[str] | None = getattr(bundler, internals.LAUNCHED, None)
        if launched:
            launched.update(
                internals.triton_file_name.get()(result.kernel.hash)
                for static in getattr(bundler, internals.AUTOTUNERS) or ()
                for result in static.kernel.compile_results
            )
        return original(bundler, *args, **kwargs)


@functools.cache
def installed_in() -> tuple[str, ...]:
    """Return directories of torch, Triton and Python, which compiled code may name."""
    specs = filter(None, map(find_spec, ("torch", "triton")))
    places = {str(Path(spec.origin).parent.parent) for spec in specs if spec.origin}
    places |= {sys.prefix, sys.base_prefix}
    return tuple(sorted(places - {"/", "/usr", "/usr/local"}, key=len, reverse=True))


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


@contextlib.contextmanager
def opened(image: Buffer, name: str) -> Iterator[str]:
    """Yield a path ending in ``.so`` under which ``image`` can be loaded while the block runs.

    The bytes live in memory: they cannot be exchanged between being verified and being loaded, and
    a ``noexec`` temporary directory, which only gets a link to them, does not matter.
    """
    with contextlib.ExitStack() as undo:
        try:
            directory = tempfile.mkdtemp(prefix="s3cache-")
        except OSError:
            directory = tempfile.mkdtemp(prefix="s3cache-", dir=os.path.expanduser("~"))
        undo.callback(os.rmdir, directory)
        # From here on its path does not matter, which other users may be able to change.
        fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EACCES, "another user has replaced it", directory)
        file = undo.enter_context(open(os.memfd_create(name[:64], os.MFD_CLOEXEC), "wb"))
        file.write(image)
        file.flush()
        # The loader treats two libraries with one path as the same.
        link = f"{os.path.basename(directory)}.so"
        os.symlink(f"/proc/self/fd/{file.fileno()}", link, dir_fd=fd)
        undo.callback(os.unlink, link, dir_fd=fd)
        yield f"/proc/self/fd/{fd}/{link}"


# -- the first call

# How many bytes of inputs that a graph writes to are copied at the first call of an entry.
_MAX_COPIED = 64 << 20

#: The result of a call or its error, and the code of the next calls; None to try it again.
Outcome: TypeAlias = "tuple[object, Exception | None, Function[object] | None]"


class Inputs:
    """The inputs of a first call: tells whether they have changed, and keeps none alive."""

    def __init__(self, values: Sequence[object], mutated: Sequence[int] | None) -> None:
        import torch

        tensors = {i: value for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
        fake = internals.fake_tensor.get()
        self.are_fake = any(isinstance(tensor, fake) for tensor in tensors.values())
        self._values: list[Callable[[], object]] = [
            weakref.ref(value) if isinstance(value, torch.Tensor) else partial(_same, value)
            for value in values
        ]
        self._before = {i: _state_of(tensor) for i, tensor in tensors.items()}
        written = {i: tensors[i] for i in tensors if mutated is None or i in mutated}
        size = sum(tensor.numel() * tensor.element_size() for tensor in written.values())
        self._written = set(written)
        may_copy = not self.are_fake and size <= _MAX_COPIED
        kept = {i: tensor for i, tensor in written.items() if may_copy and has_storage(tensor)}
        self._copies = {i: tensor.detach().clone() for i, tensor in kept.items()}
        self._random = torch.random.get_rng_state()
        self._of_cuda = None
        on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        if on_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._of_cuda = torch.cuda.get_rng_state()

    def alive(self) -> list[object] | None:
        """Return the inputs; None if one was freed."""
        values = [value() for value in self._values]
        return None if any(values[i] is None for i in self._before) else values

    def have_changed(self) -> bool:
        """Return whether an input was written to, as far as can be known."""
        import torch

        for i, before in self._before.items():
            value = cast("Tensor", self._values[i]())
            if i not in self._written:
                if _state_of(value) != before:
                    return True
            elif (
                i not in self._copies
                or not has_storage(value)
                or not torch.allclose(
                    value.detach(), self._copies[i], rtol=0, atol=0, equal_nan=True
                )
            ):
                return True
        return False

    def restore_random(self) -> None:
        import torch

        torch.random.set_rng_state(self._random)
        if self._of_cuda is not None:
            torch.cuda.set_rng_state(self._of_cuda)


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor can be read. FSDP takes the storage of parameters away between uses.

    A read of such a tensor ends the process.
    """
    import torch

    if internals.is_wrapper_subclass.get()(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return all(has_storage(getattr(tensor, name)) for name in names)
    if tensor.layout != torch.strided or tensor.is_nested or not tensor.numel():
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return needed <= tensor.untyped_storage().nbytes()


def _same(value: object) -> object:
    return value


def _state_of(tensor: Tensor) -> object:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.shape, tensor.dtype


@dataclass(eq=False, kw_only=True)
class FirstCall:
    """What answers the first call of an entry's code if it raises; see ``_first_calls``."""

    engine: Engine
    entry: Frame
    take_back: Callable[[str], None]  # counts the hit as a miss
    # Compiles the graph for real inputs, without a cache; None if it is not at hand.
    again: Callable[[Sequence[object]], Function[object]] | None
    mutated: Sequence[int] | None  # the inputs that the code writes to; None if it may be any
    sources: Sequence[str]
    effects: bool = False  # whether the code has effects that must not be repeated
    reusing: str = ""  # the code, if it may write into inputs that are not needed after it
    code: CodeType | None = None  # of the frame that calls it, if Dynamo compiles that
    # Returns the outcome of a call that raised.
    heal: Callable[[FirstCall, Inputs, Exception, Function[object]], Outcome]
    built: list[Frame] = field(default_factory=list)  # entries that were saved with this code

    def watched(
        self, function: Function[object], finish: Callable[[Function[object]], None]
    ) -> Callable[[list[object]], object]:
        """Return ``function`` for its first call; ``finish`` puts another in its place then."""
        chosen: Function[object] | None = None

        def first(args: list[object]) -> object:
            nonlocal chosen
            if chosen is not None:
                return chosen(args)
            inputs = Inputs(args, self.mutated)
            if inputs.are_fake:
                return function(args)
            try:
                result = function(args)
            except Exception as exc:
                hidden = internals.disable_dynamo.get()(self.heal)
                result, error, code = cast("Outcome", hidden(self, inputs, exc, function))
                if code is not None:
                    chosen = code
                    finish(code)
                if error is exc:
                    raise
                if error is not None:
                    raise error from None
                return result
            chosen = function
            finish(function)
            return result

        return internals.boxed(first)

    def has_effects(self) -> bool:
        """Return whether a repeated call would repeat more than the computation."""
        return self.effects or any(map(internals.collectives_of, self.sources))

    def set_aside(self, why: str, *, is_proven: bool) -> str:
        """Set the entry aside; return what becomes of it. Dynamo compiles the frame again."""
        for entry in self.built:
            self.engine.set_aside(entry, why, is_proven=is_proven)
        fate = self.engine.set_aside(self.entry, why, is_proven=is_proven)
        self.take_back(why)
        if self.code is not None:
            internals.reset_code.get()(self.code)
        return fate
