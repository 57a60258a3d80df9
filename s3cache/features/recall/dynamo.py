"""Convert Dynamo's frames to plain data and back: sources, guards and bytecode.

This is recall's only adapter to torch. If a release lacks a name that it needs, recall is off, and
a warning says so.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from s3cache.features.recall import names
from s3cache.graph import value_at
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.features.recall import RecallReason

#: A place where Dynamo found an object: a variable, an attribute of the object at a source, ...
Source: TypeAlias = Any
#: Dynamo's result for a frame, during the trace.
OutputGraph: TypeAlias = Any
#: Plain data.
Plain: TypeAlias = Any

#: Prefixes of global names that Dynamo installs.
COMPILED, RESUME, IMPORT, BUILTINS = "__compiled_fn", "__resume_at", "__import_", "__builtins_dict"
#: The name under which recall installs the dictionary of built-in functions.
OWN_BUILTINS: Final = "__s3cache_builtins"

# Guards that can be checked before a trace, by the functions that make them. The second set is
# checked by its arguments; the third is about the process.
_BY_CONTENT = frozenset(
    """
    TYPE_MATCH BOOL_MATCH NONE_MATCH NOT_NONE_MATCH ID_MATCH EQUALS_MATCH CONSTANT_MATCH
    CONSTANT_SUBCLASS_MATCH FUNCTION_MATCH CLASS_MATCH MODULE_MATCH CLOSURE_MATCH
    BUILTIN_MATCH SEQUENCE_LENGTH MAPPING_KEYS_CHECK DICT_KEYS_MATCH
    EMPTY_NN_MODULE_HOOKS_DICT TENSOR_MATCH DISPATCH_KEY_SET_MATCH
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
_BY_ARGUMENT: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "HASATTR": hasattr,
    "NOT_PRESENT_IN_GENERIC_DICT": lambda value, name: name in getattr(value, "__dict__", ()),
    "DICT_CONTAINS": lambda value, key: dict.__contains__(value, key),
    "DICT_NOT_CONTAINS": lambda value, key: dict.__contains__(value, key),
    "SET_CONTAINS": lambda value, key: key in value,
    "SET_NOT_CONTAINS": lambda value, key: key in value,
}
_OF_PROCESS = frozenset(
    """
    GRAD_MODE DETERMINISTIC_ALGORITHMS FSDP_TRAINING_STATE GLOBAL_STATE
    TORCH_FUNCTION_STATE DEFAULT_DEVICE SHAPE_ENV DUAL_LEVEL FUNCTORCH_STACK_MATCH
    AUTOGRAD_SAVED_TENSORS_HOOKS
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
_DUPLICATE = "DUPLICATE_INPUT"
#: Guards for equality that include elements.
WHOLE: Final = frozenset({"EQUALS_MATCH", "CONSTANT_MATCH", "CONSTANT_SUBCLASS_MATCH"})
_CODE_KINDS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    types.CodeType,
    enum.Enum,
    type,
    type(None),
    bool,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


# Matches the name of a parameter or a buffer in its module.
_STATE = re.compile(r"\._(parameters|buffers)\['[^']*'\]$")


class NotPlainError(Exception):
    """A part of a frame cannot be expressed as plain data; ``code`` is its kind."""

    def __init__(self, code: RecallReason, message: str) -> None:
        super().__init__(message)
        self.code = code


# -- sources


# Matches names with an address, such as ``___module_math_140248_c0``.
_BY_ADDRESS = re.compile(r"^_.*\d{6,}_c\d")


def is_imported(module: types.ModuleType) -> bool:
    """Return whether a module is the one that is imported under its name."""
    return sys.modules.get(module.__name__) is module


def name_of_module(module: types.ModuleType) -> str:
    """Return the global name that recall uses for a module."""
    return f"__s3cache_module_{module.__name__.replace('.', '_')}"


class SourceWriter:
    """Writes sources as rows of plain data, kind and fields; a row may refer to earlier rows."""

    def __init__(self, names_: Mapping[str, object]) -> None:
        self.rows: list[Plain] = []
        self.modules: dict[str, str] = {}  # names of modules by our global names for them
        self._names = names_
        self._numbers: dict[Source, int] = {}

    def number(self, source: Source) -> int:
        """Return the number of the row of a source; add a row if it is new.

        Raises:
            NotPlainError: the source cannot be expressed as plain data.
        """
        known = self._numbers.get(source)
        if known is not None:
            return known
        kind = type(source)
        if kind.__module__ != internals.SOURCES or not dataclasses.is_dataclass(kind):
            raise NotPlainError("source", f"reads by a {kind.__qualname__}")
        names_ = _fields_of(cast("Any", kind))
        values = [self._value(getattr(source, name)) for name in names_]
        if kind.__name__ == "GlobalSource" and str(source.global_name).startswith(BUILTINS):
            values[names_.index("global_name")] = OWN_BUILTINS
        if kind.__name__ == "GlobalSource" and _BY_ADDRESS.search(source.global_name):
            module = self._names.get(source.global_name)
            if not isinstance(module, types.ModuleType) or not is_imported(module):
                raise NotPlainError("global", f"reads {source.global_name}")
            values[names_.index("global_name")] = name = name_of_module(module)
            self.modules[name] = module.__name__
        self.rows.append([kind.__name__, *values])
        self._numbers[source] = len(self.rows) - 1
        return len(self.rows) - 1

    def _value(self, value: object) -> Plain:
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if isinstance(value, enum.Enum) and type(value).__module__ == internals.SOURCES:
            return ["enum", type(value).__name__, value.name]
        if type(value) in (tuple, list):
            return [
                type(value).__name__,
                [self._value(each) for each in cast("list[object]", value)],
            ]
        if isinstance(value, type) and value_at(value.__module__, value.__qualname__) is value:
            return ["class", value.__module__, value.__qualname__]
        if isinstance(value, names.source_class.get()):
            return ["source", self.number(value)]
        raise NotPlainError("source", f"reads by a {type(value).__qualname__}")

    argument = _value


class Places:
    """Reads the objects at the sources in rows, for the variables of a frame, each once."""

    def __init__(
        self, rows: Sequence[Plain], variables: Mapping[str, object], names_: dict[str, object]
    ) -> None:
        self._rows, self._module = rows, names.sources.get()
        self._sources: list[Source] = [None] * len(rows)
        self._values: list[Any] = [_UNREAD] * len(rows)
        self._variables, self._names = variables, names_
        self._scope = Scope(variables, names_)
        self.holds = self._scope.holds

    def of(self, variables: Mapping[str, object]) -> Places:
        """Return the same places for another call."""
        return Places(self._rows, variables, self._names)

    def at(self, number: int) -> Any:
        """Return the object at a source; raise any error of reading it."""
        found = self._values[number]
        if found is _UNREAD:
            kind, *values = self._rows[number]
            read = _READERS.get(kind)
            found = _UNREAD if read is None else read(self, values)
            if found is _UNREAD:  # not a usual kind
                found = self._scope.value(self.source(number))
            self._values[number] = found
        return found

    def source(self, number: int) -> Source:
        """Return the source itself."""
        found = self._sources[number]
        if found is None:
            name, *values = self._rows[number]
            kind = getattr(self._module, name)
            if not (isinstance(kind, type) and issubclass(kind, names.source_class.get())):
                raise ValueError(f"{name} is not a source")
            made: Any = kind
            given = zip(_fields_of(made), map(self.argument, values), strict=True)
            found = self._sources[number] = made(**dict(given))
        return found

    def argument(self, value: Plain) -> object:
        """Return the argument of a source or guard from its plain data."""
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind == "source":
            return self.source(rest[0])
        if kind == "class":
            return value_at(*rest)
        if kind == "enum":
            return getattr(self._module, rest[0])[rest[1]]
        items = [self.argument(each) for each in rest[0]]
        return tuple(items) if kind == "tuple" else items

    # Fast paths for the usual kinds: evaluating text is slow. The first field is the base.

    def _attribute(self, values: list[Plain]) -> Any:
        return getattr(self.at(values[0][1]), values[1])

    def _item(self, values: list[Plain]) -> Any:
        return _UNREAD if isinstance(values[1], list) else self.at(values[0][1])[values[1]]

    def _base(self, values: list[Plain]) -> Any:
        return self.at(values[0][1])

    def _global(self, values: list[Plain]) -> Any:
        return self._names[values[0]]

    def _local(self, values: list[Plain]) -> Any:
        return self._variables[values[0]]


_UNREAD: Final = object()
_READERS: Final[Mapping[str, Callable[[Places, list[Plain]], Any]]] = {
    "LocalSource": Places._local,
    "GlobalSource": Places._global,
    "AttrSource": Places._attribute,
    "UnspecializedParamBufferSource": Places._attribute,
    "DictGetItemSource": Places._item,
    "UnspecializedNNModuleSource": Places._base,
    "UnspecializedBuiltinNNModuleSource": Places._base,
    "FSDPNNModuleSource": Places._base,
}


@functools.cache
def _fields_of(kind: type) -> list[str]:
    return [each.name for each in dataclasses.fields(kind) if each.init]


def is_module(value: object) -> bool:
    """Return whether a value is an ``nn.Module``."""
    import torch

    return isinstance(value, torch.nn.Module)


def plain(source: Source) -> Source:
    """Return a source without marks for the kind of module."""
    while type(source).__name__.endswith("NNModuleSource"):
        source = source.base
    return source


def is_state_of_module(source: Source) -> bool:
    """Return whether a source is a parameter or a buffer of an ``nn.Module``."""
    return _STATE.search(source.name) is not None


class Scope:
    """Reads the objects at the sources of a frame, each once."""

    def __init__(self, variables: Mapping[str, object], names_: dict[str, object]) -> None:
        self._variables, self._names = variables, names_
        # The names that Dynamo's builder of guards uses.
        self._outer = {"L": variables, "G": names_}
        self._closure = names.closure_vars.get()()
        self._known: dict[Source, object] = {}

    def value(self, source: Source) -> Any:
        """Return the object at a source; raise any error of reading it."""
        known = self._known
        if source in known:
            return known[source]
        kind = type(source).__name__
        found: Any
        # Fast paths for the usual kinds: evaluating text is slow.
        if kind == "LocalSource":
            found = self._variables[source.local_name]
        elif kind == "GlobalSource":
            name = source.global_name
            # Every attempt to trace a frame has another name for it.
            found = builtins_of(self._names) if name.startswith(BUILTINS) else self._names[name]
        elif kind == "AttrSource" or kind == "UnspecializedParamBufferSource":
            found = getattr(self.value(source.base), source.member)
        elif kind in ("UnspecializedNNModuleSource", "UnspecializedBuiltinNNModuleSource"):
            found = self.value(source.base)
        else:
            base = getattr(source, "base", None)
            if base is not None:
                self.value(base)
            found = source.get_value(self._outer, self._closure, known)
        known[source] = found
        return found

    def holds(self, expression: str) -> bool:
        """Return whether a guard on sizes, a Python expression, holds."""
        functions = {**internals.guard_functions.get(), **self._closure}
        return bool(eval(expression, {**functions, **self._outer}))  # noqa: S307 - of a verified entry


def dispatch_keys(tensor: Any) -> int:
    """Return the dispatch keys of a tensor."""
    return int(names.dispatch_keys.get()(tensor).raw_repr())


# -- guards


def guard_rows(graph: OutputGraph, writer: SourceWriter, scope: Scope) -> list[Plain]:
    """Return the guards of a frame as plain data: kind, source, arguments, guarded value.

    Raises:
        NotPlainError: one of them cannot be checked before a trace.
    """
    return [_guard_row(each, writer, scope) for each in sorted(graph.guards)]


def _guard_row(guard: Any, writer: SourceWriter, scope: Scope) -> Plain:
    made: Any = guard.create_fn
    args: Sequence[object] = ()
    kwargs: dict[str, object] = {}
    if isinstance(made, functools.partial):
        args, kwargs, made = made.args, dict(made.keywords), made.func
    kind = made.__name__
    if kind == "TENSOR_MATCH":
        args, kwargs = (), {}  # the only argument is the tensor at the source
    number = writer.number(guard.originating_source)
    given = (
        [writer.argument(each) for each in args],
        {name: writer.argument(each) for name, each in kwargs.items()},
    )
    found: object = None
    if kind in _BY_ARGUMENT:
        found = check_guard(kind, scope.value(guard.originating_source), [*args, *kwargs.values()])
    elif kind == _DUPLICATE:
        found = scope.value(guard.originating_source) is scope.value([*args, *kwargs.values()][0])
    elif kind == "ID_MATCH" and not isinstance(scope.value(guard.originating_source), _CODE_KINDS):
        value = scope.value(guard.originating_source)
        raise NotPlainError("guard", f"is guarded by the identity of a {type(value).__qualname__}")
    elif kind not in _BY_CONTENT and kind not in _OF_PROCESS:
        raise NotPlainError("guard", f"is guarded by {kind}")
    return [kind, number, *given, found]


def is_about_process(kind: str) -> bool:
    """Return whether a guard is about the process as a whole, not an object."""
    return kind in _OF_PROCESS


def check_guard(kind: str, value: object, args: Sequence[object]) -> bool:
    """Return the result of a guard that is checked by its argument."""
    if kind == _DUPLICATE:
        return value is args[0]
    return _BY_ARGUMENT[kind](value, args[0])


def ignores_hooks() -> bool:
    """Return whether torch does not guard the absence of hooks on modules; the default."""
    return names.skips_module_hooks.get()


def is_by_argument(kind: str) -> bool:
    return kind in _BY_ARGUMENT or kind == _DUPLICATE


def symbolic(graph: OutputGraph) -> set[str]:
    """Return names of sources of numbers and sizes that are symbols in a traced graph."""
    return {str(source) for source in graph.shape_env.source_to_var}


def may_exclude_sizes() -> bool:
    """Return whether guards may exclude sizes of earlier calls; by default, they do not."""
    # Not every release has the option.
    return bool(getattr(names.dynamo_options.get(), "automatic_dynamic_exclusion_guard", False))


def varies_by_history(graph: OutputGraph, reads: Iterable[tuple[Source, object]]) -> bool:
    """Return whether sizes vary that changed in earlier calls, and that the user has not marked.

    Numbers may vary: the walk looks at them.
    """
    shapes = graph.shape_env
    changed = {
        symbol
        for symbol, _ in getattr(shapes, "exclusion_constraints", ())
        if any(".size()[" in str(source) for source in shapes.var_to_sources.get(symbol, ()))
    }
    marked = {
        f"{source.name}.size()[{dim}]"
        for source, value in reads
        if is_tensor(value)
        for dim in getattr(value, names.DYNAMIC_DIMS, ())
    }
    known = {var for source, var in shapes.source_to_var.items() if str(source) in marked}
    return not changed <= known


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor."""
    import torch

    return isinstance(value, torch.Tensor)


def sizes_of(graph: OutputGraph) -> dict[Source, tuple[list[int | None], list[int | None]]]:
    """Return sizes and strides of inputs; a symbol is None."""
    concrete = names.concrete_size.get()
    return {
        source: ([concrete(d) for d in sizes["size"]], [concrete(d) for d in sizes["stride"]])
        for source, sizes in graph.input_source_to_sizes_strides.items()
    }


# -- the guard tree


@dataclasses.dataclass(frozen=True)
class Tree:
    """The input for building torch's guards of a frame."""

    guards: Sequence[tuple[str, Source, Sequence[object], Mapping[str, object]]]
    key_order: Sequence[Source]
    sizes: Mapping[Source, tuple[Sequence[int | None], Sequence[int | None]]]
    expressions: Sequence[str]

    def build(
        self,
        code: types.CodeType,
        variables: Mapping[str, object],
        names_: dict[str, object],
        state: object,
    ) -> Any:
        """Build torch's own guards for the current values."""
        builder, guard = names.guard_builder.get(), names.guard_class.get()
        made = [
            guard(source, functools.partial(getattr(builder, kind), *args, **kwargs))
            if args or kwargs
            else guard(source, getattr(builder, kind))
            for kind, source, args, kwargs in self.guards
        ]
        expressions = names.shape_guards.get()([*self.expressions])
        graph = names.guards_state.get()(
            local_scope=dict(variables),
            global_scope=names_,
            torch_function_mode_stack=[],
            guard_on_key_order=set(self.key_order),
            input_source_to_sizes_strides={
                source: {"size": tuple(sizes), "stride": tuple(strides)}
                for source, (sizes, strides) in self.sizes.items()
            },
            dual_level=-1,
            functorch_layers=[],
            current_device=names.current_device.get(),
            global_state_guard=state,
            _guards=names.guard_set.get()(names.ordered_set.get()(made)),
            _aotautograd_guards=[],
            skip_guards_check=True,
            name_of_builtins_dict_key_in_fglobals=OWN_BUILTINS,
        )
        parts = names.shape_code.get()(expressions, expressions, None, True, [])
        # Outside of a compile there is no context with the id of the compile.
        with _compile_context():
            return names.check_manager.get()(code, graph, shape_code_parts=parts)


@contextlib.contextmanager
def _compile_context() -> Any:
    context, before = names.compile_context_class.get(), names.initial_state.get()
    with names.compile_context.get()(context(context.current_compile_id())):
        try:
            setattr(*names.initial_state.owner(), before or names.state_guard.get()())
            yield
        finally:
            setattr(*names.initial_state.owner(), before)


class LateGuards:
    """Guards that are built at their first check.

    ``first`` is called until it returns torch's own guards, which are used from then on. While it
    returns None, the guards fail.
    """

    def __init__(
        self, first: Callable[[dict[str, object]], Any], names_: dict[str, object]
    ) -> None:
        self.manager = names.guard_manager.get()()
        self._first: Callable[[dict[str, object]], Any] | None = first
        self._real: Any = None
        self.manager.root.add_lambda_guard(self._check, ["recalled by s3cache"], None)
        self.manager.verbose_code_parts = []
        self.manager.args, self.manager.closure_vars = [], names.closure_vars.get()()
        self.manager.global_scope = {"G": names_}

    def _check(self, variables: dict[str, object]) -> bool:
        if self._real is None:
            assert self._first is not None
            maker = self._first(variables)
            if maker is None:
                return False
            built = maker.guard_manager
            self._real, self._first = built.root, None
            # torch drops the code when an object is freed that it knows by its address. It finds
            # the code through these guards, in which it clears freed objects.
            maker.guard_manager = self.manager
            # torch uses these attributes to explain why a guard failed.
            for name in (
                "closure_vars",
                "args",
                "code_parts",
                "verbose_code_parts",
                "id_matched_objs",
            ):
                setattr(self.manager, name, getattr(built, name))
            self.manager.global_scope = built.global_scope
            self.manager.no_tensor_aliasing_sources = built.no_tensor_aliasing_sources
            self.kept = self.manager.root
            self.manager.root = built.root
        return bool(self._real.check(variables))


# -- frames


def guarded(code: types.CodeType, guards: Any, compile_id: object) -> Any:
    """Return the result that Dynamo returns for a compiled frame."""
    label = f"Torch-Compiled Region: {compile_id}"
    return names.wrap_guarded_code.get()(names.guarded_code.get()(code, guards, compile_id, label))


def guarded_code(result: Any) -> types.CodeType | None:
    """Return the compiled code of a frame; None if it was not compiled."""
    found = getattr(result, "guarded_code", None)
    return None if found is None else found.code


def install(
    code: types.CodeType,
    original: types.CodeType,
    scope: dict[str, object],
    values: Mapping[str, object],
) -> None:
    """Register generated code with Dynamo as its own, and install its global names."""
    names.original_codes.get()[code] = original
    names.output_codes.get().add(code)
    clean = names.cleanup_hook.get()
    names.cleanups.get()[code] = [clean(scope, name, value) for name, value in values.items()]


def constant_row(value: object) -> list[Any] | None:
    """Return a constant of torch in bytecode as plain data; None for any other."""
    import torch

    if type(value) is torch.Size:
        return ["Size", *value] if all(type(each) is int for each in value) else None
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return ["name", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    return None


def constant_of(row: Any) -> object:
    """Return the constant of a row of :func:`constant_row`."""
    import torch

    kind, *rest = row
    if kind == "Size":
        return torch.Size(rest)
    return torch.device(*rest) if kind == "device" else getattr(torch, rest[0])


# -- graphs that DDP splits into parts


def split_rows(split: Any) -> list[Plain] | None:
    """Return the sequence of calls of DDP's parts of a graph; None if it has no parts.

    A row is a call of a part with its arguments and whether it returns one value, or an item of a
    value; the last row is the output. Values are numbered: inputs first, then results of rows.

    Raises:
        NotPlainError: the graph has other operations.
    """
    import torch

    if not isinstance(split, torch.fx.GraphModule):
        return None
    numbers: dict[Any, int] = {}

    def written(value: Any) -> Plain:
        if isinstance(value, torch.fx.Node):
            return ["value", numbers[value]]
        if isinstance(value, (tuple, list)):
            return [type(value).__name__, [written(each) for each in value]]
        if value is None or type(value) in (bool, int, float, str):
            return ["constant", value]
        raise NotPlainError("graphs", f"passes a {type(value).__qualname__} to a part of DDP")

    rows: list[Plain] = []
    for node in split.graph.nodes:
        if node.op == "call_module" and not node.kwargs:
            single = bool(split.get_submodule(node.target).unwrap_singleton_tuple)
            rows.append(["part", written(list(node.args)), single])
        elif node.op == "call_function" and node.target is operator.getitem:
            rows.append(["item", *map(written, node.args)])
        elif node.op == "output":
            rows.append(["output", written(node.args[0])])
        elif node.op != "placeholder":
            raise NotPlainError("graphs", f"has parts of DDP with {node.op}")
        if node.op != "output":
            numbers[node] = len(numbers)
    return rows


def joined(rows: Sequence[Plain], parts: Iterable[Callable[..., Any]]) -> Callable[..., object]:
    """Return a function that calls DDP's parts as described by rows of :func:`split_rows`."""
    functions = iter([*parts])
    steps = [(row, next(functions) if row[0] == "part" else None) for row in rows]

    def read(value: Plain, values: list[Any]) -> Any:
        kind, content = value
        if kind == "value":
            return values[content]
        if kind == "constant":
            return content
        items = [read(each, values) for each in content]
        return tuple(items) if kind == "tuple" else items

    def run(*inputs: object) -> object:
        values: list[Any] = [*inputs]
        for (kind, *rest), part in steps:
            if kind == "output":
                return read(rest[0], values)
            if part is None:
                values.append(read(rest[0], values)[read(rest[1], values)])
                continue
            found = part(*read(rest[0], values))
            values.append(found[0] if rest[1] and isinstance(found, (tuple, list)) else found)
        return None

    return run


def builtins_of(scope: dict[str, object]) -> dict[str, object]:
    """Return the dictionary of built-in functions, as Dynamo looks it up."""
    found = scope["__builtins__"]
    return vars(found) if isinstance(found, types.ModuleType) else cast("dict[str, object]", found)


def state_of_process() -> tuple[Any, str] | None:
    """Return the state of torch that guards check, also as text; None if it is unusual.

    It is unusual under :func:`is_under_modes`, a stance, compiled autograd, a hook on bytecode, a
    profiler or a debugger: then no frame is recalled.
    """
    unusual = (
        is_under_modes()
        or names.stance.get().stance != "default"
        or names.in_compiled_autograd.get()
        or names.bytecode_hooks.get()
        or names.profiler_enabled.get()()
        or sys.gettrace() is not None
        or sys.getprofile() is not None
    )
    if unusual:
        return None
    state = names.state_guard.get()()
    return state, f"{state.__getstate__()} {names.error_on_graph_break.get()()}"


def is_under_modes() -> bool:
    """Return whether a mode for functions or dispatch, a transform, or a saving hook is active."""
    return bool(
        names.function_modes.get()() > 0
        # Inside a compile, Dynamo has disabled the modes, so none is current.
        or names.in_dispatch_mode.get()()
        or names.dispatch_modes.get()() > 0
        or names.functorch_layer.get()() is not None
        or names.dual_level.get() >= 0
        or names.saving_hooks.get()(True) is not None
    )


def state_text(state: Any) -> str:
    """Return the given, or else the current, state of torch that guards check, as text."""
    return str((state or names.state_guard.get()()).__getstate__())


def ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; code may depend on both."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def accelerators() -> str:
    """Return the properties of this machine's accelerators that traced code may read."""
    import torch

    found: list[object] = []
    cuda: Any = torch.cuda
    if torch.version.cuda or torch.version.hip:
        found.append(cuda.is_available())
        if cuda.is_initialized():
            found += [cuda.device_count(), cuda.current_device(), cuda.get_device_properties()]
    return str(found)


def asks_for_guards(hooks: Any) -> bool:
    """Return whether a program has hooks on guards and frames."""
    return any(value is not None for value in vars(hooks).values())


def note_sizes(code: types.CodeType, closure: object, values: Iterable[tuple[str, object]]) -> None:
    """Record sizes and numbers of inputs in Dynamo by name, as if it had traced them."""
    seen = _seen(code, closure)
    for name, value in () if seen is None else values:
        if (entry := _size_entry(name, value)) is not None:
            seen[name] |= entry


def _seen(code: types.CodeType, closure: object) -> Any:
    """Return the sizes that Dynamo has seen in a frame, by name; None if it does not use them."""
    if not names.automatic_dynamic.get():
        return None
    return names.code_state.get()()[names.code_id.get().make(code, closure)].automatic_dynamic


def _size_entry(name: str, value: object) -> Any:
    """Return what Dynamo would record of an input; None if nothing."""
    import torch

    if isinstance(value, torch.Tensor):
        # While ranks compare sizes, Dynamo returns the entry without merging it into others.
        table = types.SimpleNamespace(automatic_dynamic={})
        state = types.SimpleNamespace(all_states=None, local_state=table)
        trace = types.SimpleNamespace(distributed_state=state)
        return names.record_automatic_dynamic.get()(trace, name, value)
    if type(value) in (int, float):
        return names.size_entry.get().make_scalar(value)
    return None


def lets_vary(
    code: types.CodeType,
    closure: object,
    name: str,
    value: object,
    fixed: tuple[Sequence[int | None], Sequence[int | None]] | None,
) -> bool:
    """Return whether Dynamo would let vary what a candidate has ``fixed``, after earlier calls.

    ``fixed`` has the sizes and strides of a tensor; None stands for a symbol, as for a number.
    """
    seen, entry = _seen(code, closure), _size_entry(name, value)
    if seen is None or entry is None or name not in seen:
        return False
    merged = copy.copy(seen[name])
    merged |= entry
    if type(value) in (int, float):
        return fixed is not None and merged.scalar is names.auto_dynamic.get()
    static = getattr(value, names.STATIC_DIMS, ())
    sizes, strides = fixed or ((), ())
    return any(
        number not in (None, 0, 1) and dim not in static and is_dynamic(dim)
        for numbers, is_dynamic in (
            (sizes, merged.is_size_dynamic),
            (strides, merged.is_stride_dynamic),
        )
        for dim, number in enumerate(numbers)
    )


def compiler_of(backend: object) -> Plain | None:
    """Return the mode and options of an Inductor backend; None for other backends."""
    found: Any = backend
    for _ in range(8):
        inner = getattr(found, names.ORIGINAL_BACKEND, None)
        if inner is None:
            break
        found = inner
    ddp: Any = getattr(found, "__self__", None)
    if type(ddp).__name__ == "DDPOptimizer":
        inner = compiler_of(ddp.backend_compile_fn)
        return inner and ["ddp", ddp.bucket_bytes_cap, ddp.first_bucket_cap, inner]
    if type(found) is names.inductor_wrapper.get():
        return [
            "inductor",
            sorted((name, repr(each)) for name, each in found.config.items()),
            repr(found.dynamic),
        ]
    return None


def options_of_dynamo() -> str | None:
    """Return the options of Dynamo as text; None if one of them has none."""
    own = internals.options_text(names.dynamo_options.get())
    # Names and values of inputs with sizes that may change.
    common = names.common_options.get()()
    sizes = {name: each for name, each in common.items() if name.startswith(_OF_SIZES)}
    return None if own is None else f"{own}\n{sorted(sizes.items())}"


def options_of_compiler(backend: object) -> Mapping[str, object]:
    """Return the options of ``torch.compile``, or those of its mode."""
    found: Any = backend
    while (inner := getattr(found, names.ORIGINAL_BACKEND, None)) is not None:
        found = inner
    ddp: Any = getattr(found, "__self__", None)
    if type(ddp).__name__ == "DDPOptimizer":
        return options_of_compiler(ddp.backend_compile_fn)
    return dict(getattr(found, "config", None) or {})


_OF_SIZES: Final = ("dynamic_", "unbacked_")
_numbers = itertools.count()


def unique_name(kind: str) -> str:
    """Return an unused global name."""
    return f"__s3cache_{kind}_{next(_numbers)}"


def disabled(function: Callable[..., object]) -> Callable[..., object]:
    """Hide a function from Dynamo."""
    return internals.disable_dynamo.get()(function, reason="do not trace Dynamo-compiled graph")
