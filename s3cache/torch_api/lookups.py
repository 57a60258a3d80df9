"""torch as each lookup reads it: options, registries, keys, entries, the current graph."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import itertools
import operator as operators
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from types import (
    CodeType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from s3cache.torch_api import Internal, names

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import (
        AOTConfig,
        Config,
        Function,
        KeyDetails,
        KeyPickler,
        Operator,
        Reducer,
        TracingContext,
    )


# -- options


class Asked(NamedTuple):
    """Which tiers torch's options allow a level of the cache to use."""

    local: bool
    remote: bool


def tiers_asked(level: str) -> Asked:
    """Return the tiers that torch's options allow for ``level``, ``aot`` or ``fx``.

    An option for the remote cache that is not set follows the one for the local cache.
    """
    functorch, inductor = names.functorch_config.get(), names.inductor_config.get()
    local, remote = (
        (functorch.enable_autograd_cache, functorch.enable_remote_autograd_cache)
        if level == "aot"
        else (inductor.fx_graph_cache, inductor.fx_graph_remote_cache)
    )
    if names.force_disable_caches.get():
        local = remote = False
    return Asked(local, local if remote is None else remote)


def read_quietly(owner: object, name: str, *default: object) -> object:
    """Return the result of ``getattr``, without torch's deprecation warnings.

    Only deprecated options and attributes from a module's ``__getattr__`` warn. Read others
    directly: changing the filters makes Python repeat warnings that it shows once.
    """
    members = vars(owner) if isinstance(owner, ModuleType) else {}
    option = (members.get("_config") or {}).get(name)
    warns = option is None or getattr(option, "deprecated", False)
    if not isinstance(owner, ModuleType) or name in members or not warns:
        return getattr(owner, name, *default)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(owner, name, *default)


def options_text(config: Config) -> str | None:
    """Return the options of a config module that affect compiled code, as text.

    None if one of them has no text that is equal in other processes, such as a pass.
    """
    values: dict[str, object] = config.get_config_copy()
    ignored = tuple(cast("list[str]", values.get("_cache_config_ignore_prefix", [])))
    # Directories do not affect compiled code.
    unused = {"base_dir", "debug_dir_root", *itertools.chain(*names.CACHING_OPTIONS)}
    texts = {
        name: _plain_text(value)
        for name, value in sorted(values.items())
        if name not in unused and not name.startswith((*ignored, "_save_config", "_cache_config"))
    }
    return None if None in texts.values() else "\n".join(f"{n}={t}" for n, t in texts.items())


def _plain_text(value: object) -> str | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if not isinstance(value, (dict, list, tuple, set, frozenset)):
        return None
    items: Iterable[object] = value
    if isinstance(value, dict):
        items = itertools.chain(*value.items())
    texts = [_plain_text(item) for item in items]
    if None in texts:
        return None
    if isinstance(value, (set, frozenset)):
        texts.sort(key=str)
    return f"{type(value).__name__} {texts}"


# -- torch's own code


@functools.cache
def torch_directory() -> str:
    """Return the directory of torch, with a separator at the end. Imports torch."""
    import torch

    return os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


@functools.cache
def built_in() -> str:
    """Return the directory in which torch's own C++ was built; ``""`` if it is not known."""
    defined = names.DEFINED_AT.search(names.dispatch_dump.get()("aten::relu"))
    root, found, _ = (defined[1] if defined else "").partition("build/aten/")
    return root if found else ""


def is_kept_from_dynamo(function: object, inner: object) -> bool:
    """Return whether ``function`` only hides ``inner`` from Dynamo.

    torch wraps ``torch.manual_seed`` in this way when Dynamo is imported.
    """
    if not isinstance(function, FunctionType):
        return False
    codes = names.disable_from_compile.get().__code__.co_consts
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__ in codes and any(content is inner for content in cells)


def name_of(function: object) -> str:
    """Return the name of a function or custom operator in torch's check."""
    function = getattr(function, "_opoverload", function)  # of torch.library.custom_op
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '<none>')}"


def name_in_code(function: object) -> str | None:
    """Return the name of a function or class of torch or Python in generated code, or None."""
    import torch

    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return None
    for module in (builtins, operators):
        if getattr(module, name, None) is function:
            return f"{module.__name__}.{name}"
    is_method = isinstance(function, (MethodDescriptorType, WrapperDescriptorType))
    if is_method and getattr(torch.Tensor, name, None) is function:
        return f"torch.Tensor.{name}"
    return names.qualified_name.get()(function) if names.is_from_torch.get()(function) else None


# -- namespaces and tables

#: Names that are not used during a compile; programs often replace them.
NOT_COMPILED = frozenset(
    """
    __deepcopy__ __dir__ __format__ __reduce_ex__ __repr__ __setstate__ __slotnames__ __str__
    backward compile initial_seed load manual_seed save seed set_printoptions share_memory_ typename
    """.split()  # noqa: SIM905 - one word a line would be longer
)


def is_shadowed(module: str, kind: str, name: str) -> bool:
    """Return whether torch would find another ``name`` if a module or its class did not have it."""
    if kind:
        bases = getattr(sys.modules[module], kind).__mro__[1:]
        return any(name in vars(base) for base in bases)
    return hasattr(builtins, name) or (
        module == "torch._VF" and hasattr(names.variable_functions.get(), name)
    )


# -- operators


def is_operator(value: object) -> bool:
    """Return whether ``value`` is an operator, an overload of one, or of higher order."""
    return kind_of_operator(value) in ("higher-order", "overload", "packet")


def kind_of_operator(value: object) -> str:
    """Return ``namespace``, ``packet``, ``overload`` or ``higher-order``; ``""`` for other values.

    A namespace, such as ``torch.ops.aten``, has operators by name; a packet has the overloads of an
    operator.
    """
    return _kind_of_operator(cast("Hashable", type(value)))


# Without ``isinstance``: one class is abstract and asks all of its subclasses, 3 ms in all.
@functools.cache
def _kind_of_operator(kind: Hashable) -> str:
    kinds = {
        "higher-order": names.higher_order_operator,
        "overload": names.operator,
        "packet": names.operator_packet,
        "namespace": names.operator_namespace,
    }
    bases = cast("type", kind).__mro__
    return next((name for name, each in kinds.items() if each.get() in bases), "")


def full_name(value: object) -> str:
    """Return the dispatcher's name of a namespace, packet or operator."""
    found: Any = value
    kind = kind_of_operator(value)
    name = found.name if kind != "packet" else found._qualified_op_name
    return str(name if kind in ("namespace", "packet") else name())


def full_name_there(home: Mapping[str, object], name: str) -> str:
    """Return the full name of ``name`` in the object with the ``__dict__`` ``home``."""
    packet, space = home.get("_qualified_op_name"), home.get("name")
    if isinstance(packet, str):
        return packet if name == "default" else f"{packet}.{name}"
    return f"{space}::{name}" if isinstance(space, str) else name


def is_place_of_operator(home: Mapping[str, object], name: str) -> bool:
    """Return whether ``name`` in ``home`` is a place for an operator or an overload."""
    if "_qualified_op_name" in home:
        overloads = home.get("_overload_names", ())
        return ("" if name == "default" else name) in cast("Collection[str]", overloads)
    if "name" not in home or name in vars(names.operator_namespace.get()("s3cache")):
        return False
    text = names.dispatch_dump.get()(full_name_there(home, name))
    return names.DEFINED_AT.search(text) is not None


def tables_of(value: Operator) -> list[dict[object, object]]:
    """Return its tables of Python rules: by key, by class of tensors or modes, by transform."""
    return [value.py_kernels, value.python_key_table, value.functorch_table]


def inside_of_ordered_set(value: Collection[object]) -> dict[object, None]:
    """Return the dictionary inside an ordered set: its keys are the items."""
    return cast("dict[object, None]", value._dict)  # type: ignore[attr-defined]


def is_dtype(value: object) -> bool:
    import torch

    return isinstance(value, torch.dtype)


def registered_kernel(
    library: Any, op_name: object, fn: object, dispatch_key: object = "", **_: object
) -> tuple[str, object]:
    """Return the operator with key, and the function, of a call of ``register_kernel``."""
    whole = op_name if isinstance(op_name, str) else cast("Operator", op_name).name()
    name = whole.rpartition("::")[2]
    return f"{library.ns}/{name}/{dispatch_key or library.dispatch_key}", fn


# -- patterns and backends


def pattern_passes() -> list[tuple[str, Any]]:
    """Return the objects that hold registered patterns, by place, in imported modules."""
    if names.PATTERN_MATCHER not in sys.modules:
        return []
    return _pattern_passes(len(vars(names.pass_package.get())))


@functools.lru_cache(maxsize=1)
def _pattern_passes(_imported: int) -> list[tuple[str, Any]]:
    passes: dict[int, tuple[str, Any]] = {}
    kind, package = names.pattern_pass.get(), vars(names.pass_package.get())
    for name, module in sorted((n, m) for n, m in package.items() if type(m) is ModuleType):
        for attribute, value in list(vars(module).items()):
            place = f"{name}.{attribute}"
            if isinstance(value, kind):
                passes.setdefault(id(value), (place, value))
            elif isinstance(value, (dict, list, tuple)) and value:
                items = value if isinstance(value, dict) else dict(enumerate(value[:9]))
                if isinstance(next(iter(items.values())), kind):
                    for key, item in items.items():
                        passes.setdefault(id(item), (f"{place}[{key}]", item))
    return list(passes.values())


def passes_by_device(passes: Sequence[object]) -> dict[str, object]:
    """Return the passes of backends in a key by device, without ``None``."""
    devices = list(names.custom_backend_passes.get())
    return {device: each for device, each in zip(devices, passes, strict=True) if each is not None}


def usual_decompositions() -> Mapping[object, object]:
    """Return Inductor's default table of decompositions."""
    if names.fallback_random.get():
        return names.decompositions.get()
    return cast("Mapping[object, object]", names.decompositions_with_random.get()())


def found_late(module: str, name: str) -> Function[object] | None:
    """Return a stand-in for a function in a module that is slow to import; it imports when called.

    A compiled graph names the function that returns its decompositions, and rarely calls it. None
    for any other function, and if the module is imported.
    """
    is_late = (module, name) == (names.DECOMPOSITIONS, "select_decomp_table")
    return _select_decomp_table if is_late and module not in sys.modules else None


def _select_decomp_table() -> object:
    return names.decomposition_table.get()()


def stale_decompositions() -> tuple[Mapping[object, object], Mapping[object, object]]:
    """Return torch's table of decompositions, and what it would be now; both empty if equal.

    torch merges two tables at the first use; later additions to them are missing in the result.
    """
    if names.DECOMPOSITIONS not in sys.modules:
        return {}, {}
    memo = names.decompositions_with_random.get()
    if not memo.cache_info().currsize:
        return {}, {}
    now, fresh = memo(), {**names.decompositions.get(), **names.random_decompositions.get()}
    return ({}, {}) if now == fresh else (now, fresh)


# -- keys of whole graphs


def may_have_cpu_code(details: KeyDetails) -> bool:
    """Return whether torch may generate code for the processor; always False before torch 2.13."""
    ask = getattr(details, names.ASKS_FOR_CPU_CODE, None)
    return ask is not None and bool(ask(details.gm, details.example_inputs))


def graph_module_of(mod: Module) -> GraphModule:
    """Return the graph that torch looks up, unwrapped."""
    return cast("GraphModule", getattr(mod, "gm", mod))


def inherited_reducer(pickler: KeyPickler) -> Reducer:
    """Return the pickler's own reducer."""
    return getattr(pickler, "reducer_override", _refuse_nested)


def _refuse_nested(value: object) -> object:
    """Refuse nested tensors like later releases; a table of reducers treats them as plain."""
    import torch

    if isinstance(value, torch.Tensor) and value.is_nested:
        raise TypeError("a nested tensor has sizes that are numbered by order of creation")
    return NotImplemented


def is_numbered_length(size: object) -> bool:
    """Return whether a size is the length of a jagged dimension, numbered in this process."""
    import torch

    return isinstance(size, torch.SymInt) and size.node.nested_int() is not None


def has_plain_codegen(graph: Graph) -> bool:
    """Return whether the code of a graph is generated from its nodes alone."""
    codegen = graph._codegen
    return type(codegen) is names.codegen.get() and codegen._body_transformer is None


@functools.cache
def plain_arguments() -> tuple[frozenset[type], frozenset[type]]:
    """Return types of arguments that generated code writes as ``repr``, and of containers."""
    import torch
    from torch.fx import Node, immutable_collections

    constants = (type(None), bool, int, float, complex, str, type(...))
    of_torch = (torch.dtype, torch.device, torch.layout, torch.memory_format, Node)
    lists = (tuple, list, immutable_collections.immutable_list)
    dicts = (dict, immutable_collections.immutable_dict)
    return frozenset((*constants, *of_torch)), frozenset((*lists, *dicts))


def without_backend_id(aot_config: AOTConfig) -> AOTConfig:
    """Return the configuration without an id that is random (``caching_precompile``)."""
    if aot_config.precompile_backend_id is None:
        return aot_config
    return dataclasses.replace(aot_config, precompile_backend_id=None)


_keying = threading.local()


@contextlib.contextmanager
def skip_backend_init() -> Iterator[None]:
    """Make :func:`skips_backend_init` true in this thread while the block runs.

    Importing all of torch's backends takes longer than a key, and a hit needs none.
    """
    before, _keying.unasked = getattr(_keying, "unasked", False), True
    try:
        yield
    finally:
        _keying.unasked = before


def skips_backend_init() -> bool:
    """Return whether backends need not be registered now; custom devices must be."""
    return getattr(_keying, "unasked", False) and names.added_device.get()() == "privateuseone"


def fx_key() -> Internal[Callable[[KeyPickler, object], str]]:
    """Return the function that makes an FX key from details; until 2.12 without the prefix."""
    return names.fx_get_key if names.fx_get_key.expected else names.fx_get_hash


def asks_fx_cache() -> bool:
    """Return whether Inductor uses its cache of FX graphs, according to options."""
    local = names.inductor_config.get().fx_graph_cache
    return bool(local) or names.should_use_remote_fx_cache.get()()


# -- entries


def is_hit(result: object) -> bool:
    return (result[0] if isinstance(result, tuple) else result) is not None


def boxed(function: Callable[[list[object]], object]) -> Callable[[list[object]], object]:
    """Mark ``function`` as taking its arguments as a list, which it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def hide(function: Function[object]) -> None:
    """Make Dynamo trace neither a function, a plain one, nor what it calls.

    torch calls our hooks while a compiled program runs: it lowers most backwards then. Dynamo would
    trace them like functions of the program.
    """
    skip = names.frame_action.get().SKIP
    names.set_strategy.get()(function.__code__, names.frame_strategy.get()(skip, skip))


def code_in_dynamo() -> CodeType | None:
    """Return the code of the frame that Dynamo traces now, if any."""
    if "torch._dynamo.symbolic_convert" not in sys.modules:
        return None
    translator = getattr(names.translating.get(), names.TRANSLATOR, None)
    return cast("CodeType | None", getattr(translator, "f_code", None))


def inner_compiler(compiler: object) -> object:
    """Return the function inside ``compiler`` that lowers, if Inductor made it; else ``None``.

    Inductor makes one for each graph, around the function of its caller.
    """
    function: object = getattr(compiler, "compiler_fn", None)
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, FunctionType) or function.__code__.co_name != "fw_compiler_base":
        return None
    if not function.__code__.co_filename.startswith(torch_directory()):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cell = cells.get("inner_compile")
    return None if cell is None else cell.cell_contents


# -- sizes, and guards on them


def name_of_source(source: Any) -> str | None:
    """Return the source of an input as a Python expression; ``None`` if it is not known."""
    try:
        return str(source.name() if callable(source.name) else source.name)
    except Exception:  # noqa: BLE001 - some have no such thing, and say so in their own ways
        return None


def known_of_sizes(gm: GraphModule, inputs: Sequence[object]) -> str:
    """Return what the current compile knows of the symbols in a graph, and of related symbols.

    That is all that torch can use from now on when it reasons about sizes, in the form in which
    torch checks it: guards, ranges, equalities, divisibility, assertions, specializations. Values
    of symbols are not part of it, nor is knowledge of other variables of the program.
    """
    context = names.current_tracing_context.get()()
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    if shapes is None or not shapes.var_to_range:
        return ""
    related: set[Any] = _symbols_of_graph(gm, inputs)
    asserts = [each.expr for some in shapes.deferred_runtime_asserts.values() for each in some]
    facts = [(f"{each}", each.free_symbols) for each in shapes.get_nontrivial_guards()]
    facts += [(f"assert {each}", each.free_symbols) for each in map(shapes.simplify, asserts)]
    facts += [(f"{each} = 0", each.free_symbols) for each in map(shapes.replace, shapes.divisible)]
    for symbol, other in {**shapes.replacements, **shapes.unbacked_renamings}.items():
        facts.append((f"{symbol} = {shapes.replace(other)}", {symbol, *other.free_symbols}))
    if getattr(shapes, "specializations", None):  # the one that is compiled now is an axiom only
        facts += [
            (f"{each} is {is_so}", each.free_symbols) for each, is_so in shapes.axioms.items()
        ]
    texts: set[str] = set()
    while some := [each for each in facts if not related.isdisjoint(each[1])]:
        facts = [each for each in facts if related.isdisjoint(each[1])]
        related = related.union(*(symbols for _, symbols in some))
        texts |= {text for text, _ in some}
    for symbol in related & shapes.var_to_range.keys():
        bounds, size = shapes.var_to_range[symbol], symbol in shapes.size_like
        texts.add(f"{symbol} in [{bounds.lower}, {bounds.upper}]{' as a size' if size else ''}")
    if texts and shapes.prefer_deferred_runtime_asserts_over_guards:
        texts.add("deferred")
    return "; ".join(sorted(texts))


def _symbols_of_graph(gm: GraphModule, inputs: Sequence[object]) -> set[Any]:
    """Return the symbols in the inputs of a graph, and those that its nodes introduce."""
    import torch

    symbols: set[Any] = set()
    for value in inputs:
        for number in _numbers_of(value):
            if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                symbols |= getattr(getattr(number.node, "expr", None), "free_symbols", set())
    for module in gm.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            symbols |= (node.meta.get(names.NEW_SYMBOLS) or {}).keys()
    return symbols


def _numbers_of(value: Any) -> Iterator[object]:
    """Yield the numbers that describe an input: its layout, and that of all tensors inside."""
    import torch

    if not isinstance(value, torch.Tensor):
        yield value
        return
    yield from value.shape
    if value.layout is torch.strided:
        yield from (*value.stride(), value.storage_offset())
    if (flatten := getattr(value, "__tensor_flatten__", None)) is not None:
        for name in flatten()[0]:
            yield from _numbers_of(getattr(value, name))


@contextlib.contextmanager
def trace_event(event: str, level: str) -> Iterator[dict[str, object]]:
    """Show the block as an event in torch's own traces, with the content of the mapping.

    It appears in ``TORCH_TRACE`` and in a profiler's trace. Nested events with the same name are
    left out, and so are events that fail.
    """
    about: dict[str, object] = {"level": level}
    began_ns, end = time.time_ns(), None
    with contextlib.suppress(Exception):
        if names.trace_log.get().handlers or names.profiler_runs.get():
            log = names.event_log.get()()
            if event not in log.get_stack():
                log.log_event_start(event, began_ns, {}, False)
                end = log.log_event_end
    try:
        yield about
    finally:
        if end is not None:
            with contextlib.suppress(Exception):
                end(event, time.time_ns(), about, began_ns, False)


# -- processes of a job, and first calls on fake tensors (DDPOptimizer)


def hits_need_agreement() -> bool:
    """Return whether processes must agree on hits: they exchange data while they compile.

    False if torch's own lookups already make them agree.
    """
    return not names.sync_lookups.find() and compiles_exchange()


def compiles_exchange() -> bool:
    """Return whether processes of this job exchange data while they compile, hits or not."""
    import torch.distributed as dist

    exchanging = any(option.get() for option in names.EXCHANGING)
    return exchanging and is_in_job() and dist.get_world_size() > 1


def is_in_job() -> bool:
    """Return whether this process is one of several that have joined in a job."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def context_of_fake_call() -> TracingContext | None:
    context = names.current_tracing_context.get()()
    return context if context is not None and context.fakify_first_call else None


def is_first_call_fake() -> bool:
    """Return whether the current graph answers its first call with fake tensors."""
    return context_of_fake_call() is not None


@contextlib.contextmanager
def hide_fake_first_call() -> Iterator[None]:
    """Hide from torch, in the block, that first calls will be on fake tensors."""
    context = context_of_fake_call()
    if context is not None:
        context.fakify_first_call = False
    try:
        yield
    finally:
        if context is not None:
            context.fakify_first_call = True


# -- rebuilding a graph without importing Inductor's lowerings
#
# Generated code imports two names from those modules, which few graphs use: we look them up at
# their first use. torch itself uses one class there, to show code to tests.

#: Lines of generated code, and their replacements.
_LINES: Final = {
    f"from {names.SELECTION} import extern_kernels\n": "extern_kernels = _s3cache_kernels\n",
    f"from {names.PLANNING} import _align as align\n": "align = _s3cache_align\n",
}

#: Kernels that are functions of torch with the same name.
SAME_NAME: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_int_mm"})


def with_filename(code: CodeType, path: str) -> CodeType:
    """Return code, and its nested code, with another file name."""
    if code.co_filename == path:
        return code
    constants = tuple(
        with_filename(each, path) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    return code.replace(co_consts=constants, co_filename=path)


class LateKernels:
    """A stand-in for ``extern_kernels``; imports Inductor for kernels that torch does not have."""

    def __getattr__(self, name: str) -> object:
        import torch

        if name in SAME_NAME and names.SELECTION not in sys.modules:
            kernel: object = getattr(torch, name)
        else:
            kernel = getattr(names.selected_kernels.get(), name)
        vars(self)[name] = kernel
        return kernel


def strip_imports(source: str) -> tuple[str, dict[str, object]]:
    """Return generated code with fewer imports, and the names that it needs instead."""

    def align(nbytes: object) -> object:  # imports Inductor's function when it is called
        return names.align.get()(nbytes)

    for line, shorter in _LINES.items():
        source = source.replace(line, shorter, 1)
    return source, {"_s3cache_kernels": LateKernels(), "_s3cache_align": align}
