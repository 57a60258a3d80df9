"""Describe graphs and their inputs: what torch leaves out of its keys, and torch's own details."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import pickle
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from operator import attrgetter, methodcaller
from types import FunctionType
from typing import TYPE_CHECKING, cast

from s3cache.graph import _describe as describe
from s3cache.graph._describe import (
    Component,
    Describer,
    RegisteredVersion,
    UnidentifiedError,
    graph_modules,
    qualified_name,
    without_index,
)
from s3cache.graph._origin import origin_of, value_at
from s3cache.graph._user_code import context_hash, table_text
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage, device
    from torch.fx import Graph, GraphModule, Node
    from torch.fx.node import Argument

    from s3cache.torch_api.protocols import DecompositionTable, DeviceMesh, Function, KeyPickler


# -- inputs


def sharing(inputs: Sequence[object]) -> str:
    """Return which inputs share a storage, with their offsets.

    Code for overlapping inputs may read one after it has written the other; torch's key is the same
    for inputs that do not overlap.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor, storage in _stored(inputs):
        groups.setdefault(storage._cdata, []).append(f"{name}@{tensor.storage_offset()}")
    return "; ".join(" ".join(group) for group in groups.values() if len(group) > 1)


def placement(inputs: Sequence[object], *, has_places: bool) -> list[str]:
    """Return the layout of inputs in memory, and which inputs are not leaves of autograd."""
    places = storage_offsets(inputs) if has_places else ""
    return [sharing(inputs), non_leaf_inputs(inputs), places]


def storage_offsets(inputs: Sequence[object]) -> str:
    """Return the offset of each input in its storage, and the size of the storage."""
    return " ".join(
        f"{name}@{tensor.storage_offset()}/{storage.nbytes()}"
        for name, tensor, storage in _stored(inputs)
    )


def non_leaf_inputs(inputs: Sequence[object]) -> str:
    """Return the inputs that are not leaves of autograd: their mutations are in the graph."""
    from torch import Tensor

    tensors = ((index, value) for index, value in enumerate(inputs) if isinstance(value, Tensor))
    return " ".join(str(n) for n, value in tensors if value.requires_grad and not value.is_leaf)


# Matches as_strided and its variants, and operators that take or change a whole storage.
_NAMES_STORAGE = re.compile(r"as_strided|storage|^_?resize|^set_(\.|$)")


def reads_storage_offsets(gm: GraphModule) -> bool:
    """Return whether code for ``gm`` depends on the offsets of inputs in their storages.

    Most operators in a traced graph get sizes, strides and a pointer to the first element. Some
    have an absolute offset in a storage; Inductor subtracts the offset that the input had when it
    was compiled, and Dynamo has no guard for that.
    """
    return any(
        node.op in ("call_function", "call_method")
        and _NAMES_STORAGE.search(str(getattr(node.target, "__name__", node.target)))
        for _, module in graph_modules(gm)
        for node in module.graph.nodes
    )


def _stored(inputs: Iterable[object]) -> Iterator[tuple[str, Tensor, UntypedStorage]]:
    """Yield the tensors that have a storage, with their names and the storage.

    A wrapper subclass has none; the tensors that it wraps have. Sparse tensors have none.
    """
    from torch import Tensor

    is_wrapper = internals.is_wrapper_subclass.get()
    left = [(str(index), value) for index, value in enumerate(inputs)]
    while left:
        name, value = left.pop(0)
        if not isinstance(value, Tensor):
            continue
        if is_wrapper(value):
            inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
            left[:0] = [(f"{name}.{attribute}", getattr(value, attribute)) for attribute in inner]
            continue
        try:
            storage = value.untyped_storage()
        except (NotImplementedError, RuntimeError):
            continue
        yield name, value, storage


# -- annotations of nodes, and tensors in the graph itself


def node_annotations(gm: GraphModule, describer: Describer) -> Component | None:
    """Return annotations of nodes by ``torch.fx.traceback.annotate``; torch's pickler drops them.

    Raises:
        Exception: an annotation has no text.
    """
    texts = {
        f"{name}.{index}": describer.of(node.meta["custom"])
        for name, module in graph_modules(gm)
        for index, node in enumerate(module.graph.nodes)
        if node.meta.get("custom")
    }
    if not texts:
        return None
    parts = ((node.lstrip("."), text) for node, text in texts.items())
    return Component.of(repr(texts), " ".join(texts), parts)


def constants(gm: GraphModule) -> str:
    """Return digests of tensors that are not parameters: code may contain their values."""
    import torch

    frozen, inlined = internals.is_frozen_param.get(), internals.can_inline_constant.get()
    return "; ".join(
        f"{name}.{attribute} {_digest_of_values(value)}"
        for name, module in graph_modules(gm)
        for attribute, value in sorted(vars(module).items())
        # Frozen parameters that are not inlined in the code come from the program that hits.
        if isinstance(value, torch.Tensor) and not (frozen(value) and not inlined(value))
    )


def _digest_of_values(value: Tensor) -> str:
    import torch

    with internals.without_modes.get()(), torch.no_grad():
        if internals.is_wrapper_subclass.get()(value):
            names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = [(name, getattr(value, name)) for name in names]
            tensors = [each for each in inner if isinstance(each[1], torch.Tensor)]
            return " ".join(f"{name}:{_digest_of_values(each)}" for name, each in tensors)
        if type(value) is not torch.Tensor or value.is_sparse or value.is_quantized:
            return repr(value)
        data = value.cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(bytes(data.tolist())).hexdigest()


# -- values of a traced graph
#
# A fake implementation that returns other sizes or strides does not change the traced graph, but
# the code generated from it. The same is true of a view in place of a copy.

# The origin of a node in the program, and counters of graphs in the process, only affect names in
# the code once the graph is partitioned. torch repeats ``val`` in ``tensor_meta``, and annotations
# ("custom") are a separate component.
_NO_VALUES = frozenset(
    """
    ac_graph_id autograd_backward custom desc from_node fwd_nn_module_stack fwd_source_fn_stack
    nn_module_stack original_aten output_stack_traces seq_nr source_fn_stack stack_trace
    tensor_meta torch_fn
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
_FLAGS = (
    ("grad", attrgetter("requires_grad")),
    ("conj", methodcaller("is_conj")),
    ("neg", methodcaller("is_neg")),
)


def traced_values(gm: GraphModule, device: device | None = None) -> Component:
    """Return a component of the metadata of all values in ``gm``, and of their shared storages.

    It has the values in each node's ``meta`` (``val`` and others) and its plain marks, but not the
    origin of the node in the program. The index of ``device`` is left out.
    """
    values = _ValueDescriber(device)
    lines = []
    for name, module in graph_modules(gm):
        for node in module.graph.nodes:
            texts = ((n, values.of(node.meta[n])) for n in sorted(node.meta) if n not in _NO_VALUES)
            line = " ".join(f"{n}={text}" for n, text in texts if text)
            lines.append((f"{name}.{node.name}".lstrip("."), line))
    content = "\n".join(f"{name}: {text}" for name, text in lines)
    return Component.of(content, f"{len(lines)} values", lines)


class _ValueDescriber(Describer):
    """Describes values of a graph; storages are numbered in order of appearance."""

    max_depth = 6

    def __init__(self, device: device | None) -> None:
        from torch import SymBool, SymFloat, SymInt, Tensor

        super().__init__(device)
        self._tensor, self._symbolic = Tensor, (SymInt, SymFloat, SymBool)
        self._storages: dict[int, tuple[int, int | SymInt]] = {}

    def special(self, value: object) -> str | None:
        if isinstance(value, self._tensor):
            return self.once(value, self._tensor_text)
        return str(value) if isinstance(value, self._symbolic) else None

    def code(self, value: object) -> str:
        return ""

    def other(self, value: object) -> str:
        for base in (dict, list, tuple):  # torch has its own kinds
            if isinstance(value, base):
                return self.of(base(value))
        return ""

    def refuse(self, message: str, value: object) -> str:
        return ""

    def _tensor_text(self, value: Tensor) -> str:
        device = without_index(value.device, self.device)
        words = [f"{value.dtype} {device} {value.layout}", f"[{','.join(map(str, value.shape))}]"]
        words += [name for name, is_set in _FLAGS if is_set(value)]
        try:
            strides, offset = value.stride(), value.storage_offset()
            storage = value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
            flatten = getattr(value, "__tensor_flatten__", None)
            inner = flatten()[0] if flatten is not None else ()
            return " ".join([*words, *(f"{n}={self.of(getattr(value, n))}" for n in inner)])
        number, base = self._storages.setdefault(storage, (len(self._storages), offset))
        words += [f"({','.join(map(str, strides))})", f"@{number}+{offset - base}"]
        return " ".join(words)


# -- graphs of plain nodes
#
# Nearly all nodes call functions of torch on other nodes and on constants. Their text is equivalent
# to ``Graph.python_code``, in a tenth of the time. For a graph with other nodes we use torch's
# code, which supports many kinds of functions and arguments.

_ROOTS = frozenset(("torch", "builtins", "operator", "_operator", "self"))


def graph_as_text(graph: Graph, device: device | None = None) -> str | None:
    """Return a line for each node; ``None`` if one of them is not plain.

    The index of ``device`` is left out. Apart from that, two plain graphs have equal texts if and
    only if torch generates the same code for both.
    """
    from torch.fx.node import map_aggregate

    if not internals.has_plain_codegen(graph):
        return None
    constants, containers = internals.plain_arguments()
    names: dict[int, str | None] = {}  # by function: a graph calls few different ones

    def are_plain(values: Iterable[object]) -> bool:
        for value in values:
            kind = type(value)
            if kind in constants:
                continue
            if kind is slice:
                value = (value.start, value.stop, value.step)  # type: ignore[attr-defined]
            elif kind not in containers:
                return False
            elif isinstance(value, dict):
                value = (*value, *value.values())
            if not are_plain(value):  # type: ignore[arg-type]
                return False
        return True

    def bare(value: Argument) -> Argument:
        return without_index(value, device) if type(value) is type(device) else value  # type: ignore[arg-type]

    lines = []
    for node in graph.nodes:
        target = node.target
        if type(target) is not str:
            if id(target) not in names:
                names[id(target)] = internals.name_in_code(target)
            target = names[id(target)]
        annotation = _annotation(node)
        if target is None or annotation is None or internals.WRAPPED in node.meta:
            return None
        if not are_plain(node.args) or not are_plain(node.kwargs.values()):
            return None
        if node.name in _ROOTS:  # the line would be ambiguous
            return None
        arguments, keywords = node.args, node.kwargs
        if device is not None:
            arguments, keywords = map_aggregate(arguments, bare), map_aggregate(keywords, bare)
        args = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in keywords.items())]
        lines.append(f"{node.name}{annotation} = {_call_text(node, target, args)}")
    return "\n".join(lines)


def _call_text(node: Node, target: str, args: Sequence[str]) -> str:
    """Return a node as code, for people who compare two graphs."""
    if node.op == "call_method":
        return f"{args[0]}.{target}({', '.join(args[1:])})"
    if node.op == "get_attr":
        return f"self.{target}"
    start = {"call_function": "", "call_module": "self."}.get(node.op, f"{node.op} ")
    return f"{start}{target}({', '.join(args)})"


def _annotation(node: Node) -> str | None:
    if node.type is None:
        return ""
    name = internals.name_in_code(node.type) if isinstance(node.type, type) else None
    return None if name is None else f": {name}"


_LITERAL = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""


def code_on(source: str, device: device, other: device) -> str:
    """Replace ``device`` with ``other`` in code that torch generated from a graph.

    Strings that the program passes to operators stay unchanged.
    """
    pattern = f"{_LITERAL}|{re.escape(repr(device))}"
    return re.sub(pattern, lambda found: found[0] if found[0][0] in "'\"" else repr(other), source)


# Nodes copied from the backward of the first, second … compiled graph.
_COPIED = re.compile(r"\baot\d+_\w+")


def without_aot_names(gm: GraphModule, source: str) -> str:
    """Replace names of copied nodes with numbers in ``source``, which was generated from ``gm``.

    The backward of a hit was serialized and read again, which changes the names of its nodes.
    """
    copied = (node.name for node in gm.graph.nodes if _COPIED.fullmatch(node.name))
    numbers = {name: f"aot#{number}" for number, name in enumerate(copied)}
    return _COPIED.sub(lambda found: numbers.get(found[0], found[0]), source)


# -- torch's details of a graph


class DetailsDescriber(Describer):
    """Describes torch's details by content: tensors by their metadata, graphs by their code.

    Attributes:
        codes: of the graphs in the last value, outermost first.
        last_of_user: the class of the last object that is the user's.
        is_for_options: whether functions need an identity; others are named in a graph.
    """

    max_depth = 150

    def __init__(
        self,
        pickler: KeyPickler,
        registered_version: RegisteredVersion = lambda _: None,
        *,
        traced: bool = False,
        device: device | None = None,
    ) -> None:
        from torch import Tensor, strided
        from torch.fx import GraphModule

        super().__init__(device)
        self.codes: list[str] = []
        self.last_of_user: type | None = None
        self.is_for_options, self._meshes = False, 0
        self._registered_version, self._traced = registered_version, traced
        self._inherited = internals.inherited_reducer(pickler)
        self._reducers = pickler.dispatch_table
        self._metadata_of = internals.tensor_metadata.get()
        self._is_wrapper = internals.is_wrapper_subclass.get()
        self._source, self._fake = internals.source.get(), internals.fake_tensor.get()
        self._graph, self._tensor, self._strided = GraphModule, Tensor, strided
        self._mesh, self._script = internals.device_mesh.get(), internals.script_object.get()
        self._state = internals.backward_state.get()
        self._table = internals.given_decompositions.find()

    def special(self, value: object) -> str | None:
        kind = type(value)
        if kind is self._fake:
            return self.once(cast("Tensor", value), self._tensor_text)
        if kind is list and describe.PLAIN_KINDS.issuperset(map(type, cast("list[object]", value))):
            return repr(value)
        if isinstance(value, self._source):  # parameters of a module share their base sources
            return self.once(value, self._source_text)
        if isinstance(value, self._tensor) and self._is_wrapper(value):
            return self._subclass_text(value)
        if isinstance(value, self._graph):
            return self._graph_text(value)
        if kind is self._script:  # stands for an object that a graph takes as input
            value = getattr(value, internals.REAL_OBJECT)
        if isinstance(value, self._mesh):
            return self._mesh_text(value)
        if kind is self._state:  # it has no content yet
            return "BackwardState"
        if kind is self._table:
            table = cast("DecompositionTable", value).table
            return f"decompositions {table_text(table, self._registered_version)}"
        return None

    def code(self, value: object) -> str:
        reduced = self._inherited(value)
        if reduced is not NotImplemented:
            return self._reduced_text(value, reduced)
        if isinstance(value, (type, FunctionType)):
            text = qualified_name(value)
            if value_at(value.__module__, value.__qualname__) is not value:
                text = repr(pickle.dumps(value))  # raises the reason why it cannot be imported
            is_function = isinstance(value, FunctionType) and self.is_for_options
            return (
                f"{text} {describe.identity(value, self._registered_version)}"
                if is_function
                else text
            )
        return self.other(value)

    def other(self, value: object) -> str:
        kind = type(value)
        reduced = self._inherited(value)
        if reduced is NotImplemented:
            reduce = self._reducers.get(kind)
            reduced = (
                value.__reduce_ex__(pickle.DEFAULT_PROTOCOL) if reduce is None else reduce(value)
            )
        if origin_of(kind).kind in ("library", "user"):
            self.last_of_user = kind
        return self._reduced_text(value, reduced)

    def _reduced_text(self, value: object, reduced: object) -> str:
        if not isinstance(reduced, tuple):
            return repr(pickle.dumps(value))
        parts = [[*part] if isinstance(part, Iterator) else part for part in reduced]
        is_of_torch = type(value).__module__.partition(".")[0] == "torch"
        if is_of_torch and len(parts) > 2 and isinstance(parts[2], dict):
            # The hash of DTensor's objects differs by process.
            parts[2] = {name: item for name, item in parts[2].items() if name != "_hash"}
        return self.all(type(value).__qualname__, parts)

    def for_people(self, value: object, depth: int = 0) -> str:
        """Return the text of a part of a value, which need not be complete."""
        if isinstance(value, self._source):
            return internals.name_of_source(value) or ""
        if isinstance(value, (list, tuple)) and depth < 3:
            return f"[{', '.join(self.for_people(item, depth + 1) for item in value[:1024])}]"
        try:
            return self.of(value)
        except Exception:  # noqa: BLE001 - it is not in the key
            return type(value).__qualname__

    def _tensor_text(self, value: Tensor) -> str:
        metadata = self._metadata_of(value)
        if self.device is not None:
            device = without_index(metadata.device, self.device)
            metadata = dataclasses.replace(metadata, device=device)
        kind = cast("Hashable", type(metadata))
        try:
            values = tuple(getattr(metadata, name) for name in _names_of_fields(kind))
            return _text_of_fields(kind, values)
        except TypeError:  # symbolic sizes have no hash; their text has symbols
            return repr(metadata)

    def _subclass_text(self, value: Tensor) -> str:
        """Describe a wrapper subclass by its own metadata, its context, and all that it wraps.

        torch's key leaves the inner tensors to the class, and DTensor's has only the outer sizes:
        processes with shards of different sizes would share code.
        """
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        if any(map(internals.is_numbered_length, value.shape)):
            raise UnidentifiedError("is a jagged tensor outside of the inputs", value)
        strides = value.stride() if value.layout is self._strided else ()
        fields = value.dtype, value.layout, value.requires_grad, value.shape, strides, value.device
        inner = [(name, getattr(value, name)) for name in names]
        return self.all(
            qualified_name(type(value)), [*map(str, fields[:3]), *fields[3:], context, inner]
        )

    def _mesh_text(self, mesh: DeviceMesh) -> str:
        """Describe a device mesh: its layout, our place in it, the names of its groups."""
        if self._meshes == 2:  # parts of a mesh refer back to it
            return "DeviceMesh"
        state = {
            name: item.tolist() if isinstance(item, self._tensor) else item
            for name, item in mesh.__getstate__().items()
            if name != "_hash"  # differs by process
        }
        self._meshes += 1
        try:
            return self.all("DeviceMesh", [state])
        finally:
            self._meshes -= 1

    def _source_text(self, source: object) -> str | None:
        """Return the source as an expression, or ``None`` if a part has none."""
        kind = cast("Hashable", type(source))
        fields = [self._field_text(getattr(source, name)) for name in _names_of_fields(kind)]
        is_complete = None not in fields
        return f"{qualified_name(kind)}({','.join(map(str, fields))})" if is_complete else None

    def _field_text(self, value: object) -> str | None:
        if type(value) in (str, int, bool, type(None)):
            return repr(value)
        if isinstance(value, self._source):
            return self.once(value, self._source_text)
        return f"{type(value).__qualname__}.{value.name}" if isinstance(value, enum.Enum) else None

    def _graph_text(self, gm: GraphModule) -> str | None:
        """Return the result of torch's reducer, without compiling the generated code."""
        metadata = internals.enrich_profiler_metadata.get()
        line_of = None if metadata else internals.format_global.find()
        if line_of is None:
            return None
        generated = internals.GENERATED.names
        attributes = {name: value for name, value in vars(gm).items() if name not in generated}
        context_fn = gm.meta.get(internals.CHECKPOINT_CONTEXT) if gm.meta else None
        if context_fn is not None:  # seldom something to pickle
            hashed = context_hash(context_fn, self._registered_version)
            attributes["meta"] = {**gm.meta, internals.CHECKPOINT_CONTEXT: hashed}
        text, imports = graph_as_text(gm.graph, self.device), None
        if text is None:
            code = gm.graph.python_code(root_module="self")
            described = {
                name: describe.autograd_function_text(value) for name, value in code.globals.items()
            }
            imports = sorted(
                described[name] or line_of(name, value) + self._class_version(value)
                for name, value in code.globals.items()
            )
            text = without_aot_names(gm, code.src) if any(described.values()) else code.src
            if self.device is not None:
                text = code_on(text, self.device, without_index(self.device, self.device))
        self.codes.append(text)
        return self.all("graph", [attributes, text, imports])

    def _class_version(self, value: object) -> str:
        """Return the registered version of a user's class with an object in the graph."""
        if not isinstance(value, type) or not internals.is_opaque_type.get()(value):
            return ""
        version = self._registered_version(value)
        if version is not None:
            return f" version {version}"
        if not self._traced and origin_of(value).kind != "torch":
            what = f"an object of {qualified_name(value)}"
            raise UnidentifiedError(f"{what}, which has code that takes part in tracing", value)
        return ""


@functools.cache
def _names_of_fields(kind: Hashable) -> tuple[str, ...]:
    assert dataclasses.is_dataclass(kind)
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


@functools.lru_cache(maxsize=4096)  # many layers have equal parameters
def _text_of_fields(kind: Hashable, values: tuple[object, ...]) -> str:
    return repr(cast("Function[object]", kind)(*values))
