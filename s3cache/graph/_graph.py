"""Components of a key, and of those a graph and its inputs, as far as torch leaves them out.

A graph has most of those components only if there is something to say.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, cast

from s3cache.graph._identity import code_digest
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage, device
    from torch.fx import Graph, GraphModule, Node
    from torch.fx.node import Argument

# Digests do not cover what is shown to people, so it may be shortened. An entry stores all of it.
_VALUE_CHARACTERS = 200
_TEXT_CHARACTERS = 16 << 10
_PART_CHARACTERS = 1 << 10
_ALL_CHARACTERS = 128 << 10
_PARTS = 1024


def bounded(parts: Iterable[tuple[str, str]], characters: int = _PART_CHARACTERS) -> dict[str, str]:
    """Return the first of ``parts``, each cut to ``characters``, and no more than fits an entry."""
    kept: dict[str, str] = {}
    left = _ALL_CHARACTERS
    for name, part in parts:
        if len(kept) == _PARTS or left <= 0:
            break
        kept[name] = part if len(part) <= characters else part[:characters] + "…"
        left -= len(part)
    return kept


@dataclass(frozen=True, slots=True)
class Component:
    """One named component of a key.

    Attributes:
        digest: 32 hexadecimal digits.
        value: what it is, for people; shortened, and not part of the key.
        parts: what it consists of, by name, where the value does not say it; neither.
    """

    digest: str
    value: str
    parts: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_text(cls, text: str) -> Component:
        """Return a component with ``text`` as its content and value."""
        is_short = len(text) <= _VALUE_CHARACTERS
        parts = None if is_short else bounded((("", text),), _TEXT_CHARACTERS)
        return cls.of_bytes(text.encode(), text, parts)

    @classmethod
    def of_bytes(cls, data: bytes, value: str, parts: Mapping[str, str] | None = None) -> Component:
        """Return a component with ``data`` as its content, shown as ``value`` and ``parts``."""
        if len(value) > _VALUE_CHARACTERS:
            value = value[:_VALUE_CHARACTERS] + "…"
        return cls(hashlib.sha256(data).hexdigest()[:32], value, parts or {})


def graph_modules(gm: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """Yield ``gm`` and all graph modules inside of it, with their names; its own is ``""``."""
    from torch.fx import GraphModule

    for name, module in gm.named_modules():
        if isinstance(module, GraphModule):
            yield name, module


def call_nodes(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of ``gm``, and of all graphs inside of it, that call a function."""
    for _, module in graph_modules(gm):
        yield from (node for node in module.graph.nodes if node.op == "call_function")


# -- inputs


def sharing(inputs: Sequence[object]) -> str:
    """Return which inputs are in one storage, and where in it.

    Code for inputs that overlap reads one after it has written the other; torch's key is the same
    for inputs that do not.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor, storage in _stored(inputs):
        groups.setdefault(storage._cdata, []).append(f"{name}@{tensor.storage_offset()}")
    return "; ".join(" ".join(group) for group in groups.values() if len(group) > 1)


def placement(inputs: Sequence[object], *, has_places: bool) -> list[str]:
    """Return how inputs lie in memory, and which autograd reached already."""
    places = storage_offsets(inputs) if has_places else ""
    return [sharing(inputs), non_leaf_inputs(inputs), places]


def storage_offsets(inputs: Sequence[object]) -> str:
    """Return where each input begins in its storage, and how large that is."""
    return " ".join(
        f"{name}@{tensor.storage_offset()}/{storage.nbytes()}"
        for name, tensor, storage in _stored(inputs)
    )


# In names of as_strided and its variants, and of what takes or changes a whole storage.
_NAMES_STORAGE = re.compile(r"as_strided|storage|^_?resize|^set_(\.|$)")


def reads_storage_offsets(gm: GraphModule) -> bool:
    """Return whether code made of ``gm`` depends on where inputs begin in their storages.

    All other operators that a graph is traced into get sizes and strides, and a pointer to the
    first element. Of those that name a place in a storage, Inductor takes the difference to where
    the input began when it was compiled; Dynamo has no guard for that.
    """
    return any(
        node.op in ("call_function", "call_method")
        and _NAMES_STORAGE.search(str(getattr(node.target, "__name__", node.target)))
        for _, module in graph_modules(gm)
        for node in module.graph.nodes
    )


def _stored(inputs: Iterable[object]) -> Iterator[tuple[str, Tensor, UntypedStorage]]:
    """Yield the tensors that lie in a storage, with their names, and the storage.

    A wrapper subclass lies in none; those that it wraps do. Sparse tensors do not.
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


def non_leaf_inputs(inputs: Sequence[object]) -> str:
    """Return the inputs that autograd reached already: what mutates them is in the graph."""
    from torch import Tensor

    return " ".join(
        str(index)
        for index, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf
    )


def size_bounds() -> str:
    """Return bounds that the user set for sizes, e.g. by ``mark_dynamic(..., max=8)``.

    Guards are not in a key: those of an entry become guards of the program that it is a hit for.
    Where the user set bounds, guards that are narrower would be an error there.
    """
    context = internals.current_tracing_context.get()()
    shape_env = getattr(None if context is None else context.fake_mode, "shape_env", None)
    found = set()
    for tracked in getattr(shape_env, "tracked_fakes", None) or ():
        # A number has no symbolic context, and few sizes have a constraint.
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        sizes = tracked.fake.shape if constraints else ()
        for size, constraint in zip(sizes, constraints, strict=True):
            bounds = getattr(constraint, "vr", None)
            if bounds is not None:
                found.add(f"{size} in [{bounds.lower}, {bounds.upper}]")
    return " ".join(sorted(found))


# -- what nodes carry, and tensors that the graph holds itself


def node_annotations(gm: GraphModule, canonical: Callable[[object], bytes]) -> Component | None:
    """Return what ``torch.fx.traceback.annotate`` left on nodes; torch's pickler drops it.

    Raises:
        Exception: what torch's pickler raises for an annotation that it cannot pickle.
    """
    found = {
        f"{name}.{index}": node.meta["custom"]
        for name, module in graph_modules(gm)
        for index, node in enumerate(module.graph.nodes)
        if node.meta.get("custom")
    }
    if not found:
        return None
    data = b"".join(node.encode() + canonical(value) for node, value in found.items())
    parts = bounded((node.lstrip("."), _annotation_text(value)) for node, value in found.items())
    return Component.of_bytes(data, " ".join(found), parts)


def _annotation_text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_annotation_text(item)}" for name, item in value.items())
    return repr(value) if isinstance(value, (str, int, float, bool)) else type(value).__qualname__


def constants(gm: GraphModule) -> str:
    """Return values of tensors that are no parameters: of those, code may hold the values."""
    import torch

    frozen, inlined = internals.is_frozen_param.get(), internals.can_inline_constant.get()
    return "; ".join(
        f"{name}.{attribute} {_digest_of_values(value)}"
        for name, module in graph_modules(gm)
        for attribute, value in sorted(vars(module).items())
        # Frozen parameters that are not in the code are those of the program that hits.
        if isinstance(value, torch.Tensor) and not (frozen(value) and not inlined(value))
    )


def _digest_of_values(value: Tensor) -> str:
    import torch

    with internals.without_modes.get()(), torch.no_grad():
        if type(value) is not torch.Tensor or value.is_sparse or value.is_quantized:
            return repr(value)
        data = value.cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(bytes(data.tolist())).hexdigest()


# -- values of a traced graph
#
# A fake implementation that answers with other sizes or strides changes no line of the graph that
# is traced, but it does change the code that is made of that graph. So does a view in place of a
# copy.

# Where in the program a node comes from, and numbers that count graphs of the process, name things
# in the code, and decide nothing after the graph was partitioned. torch repeats ``val`` in
# ``tensor_meta``, and annotations ("custom") are a component.
_NO_VALUES = frozenset(
    [
        "ac_graph_id",
        "autograd_backward",
        "custom",
        "desc",
        "from_node",
        "fwd_nn_module_stack",
        "fwd_source_fn_stack",
        "nn_module_stack",
        "original_aten",
        "output_stack_traces",
        "seq_nr",
        "source_fn_stack",
        "stack_trace",
        "tensor_meta",
        "torch_fn",
    ]
)
_CONSTANTS = frozenset({"device", "dtype", "layout", "memory_format"})
_FLAGS = (
    ("grad", attrgetter("requires_grad")),
    ("conj", methodcaller("is_conj")),
    ("neg", methodcaller("is_neg")),
)
_MAX_DEPTH = 6


def without_index(value: device, current: device | None) -> device:
    """Return ``value``, less its index if it is ``current``, of which keys have none.

    It may be another constant of torch's, which is returned as it is.
    """
    return type(value)(value.type) if current is not None and value == current else value


def traced_values(gm: GraphModule, device: device | None = None) -> Component:
    """Return a component of the metadata of every value in ``gm``, and of the storages they share.

    It has what each node's ``meta`` says of values (``val`` and others), and its plain marks, but
    not where in the program the node comes from. The index of ``device`` is left out.
    """
    values = _Values(device)
    lines = [
        (f"{name}.{node.name}".lstrip("."), values.text_of(node))
        for name, module in graph_modules(gm)
        for node in module.graph.nodes
    ]
    data = "\n".join(f"{name}: {text}" for name, text in lines).encode()
    return Component.of_bytes(data, f"{len(lines)} values", bounded(lines))


class _Values:
    """Texts of the values of one graph; storages are numbered in the order they are met in."""

    def __init__(self, device: device | None) -> None:
        from torch import SymBool, SymFloat, SymInt, Tensor

        self._device = device
        self._tensor, self._symbolic = Tensor, (SymInt, SymFloat, SymBool)
        self._texts: dict[int, tuple[object, str]] = {}
        self._storages: dict[int, tuple[int, object]] = {}

    def text_of(self, node: Node) -> str:
        meta = node.meta
        return " ".join(
            f"{name}={text}"
            for name in sorted(meta)
            if name not in _NO_VALUES and (text := self._text(meta[name], 0))
        )

    def _text(self, value: object, depth: int) -> str:
        """Return the text of a value, or ``""`` for an object that is no value of a graph."""
        if isinstance(value, self._tensor):
            known = self._texts.get(id(value))
            if known is None:
                # The tensor is kept, as another one may get the id of one that is gone.
                known = self._texts[id(value)] = value, self._tensor_text(value)
            return known[1]
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str):
            return repr(value)
        if isinstance(value, self._symbolic):
            return str(value)
        if depth < _MAX_DEPTH and isinstance(value, (dict, list, tuple, set, frozenset)):
            if isinstance(value, dict):
                pairs = value.items()
                items = [f"{self._text(k, depth + 1)}:{self._text(v, depth + 1)}" for k, v in pairs]
                return f"{{{','.join(items)}}}"
            items = [self._text(item, depth + 1) for item in value]
            return f"({','.join(sorted(items) if isinstance(value, (set, frozenset)) else items)})"
        if kind.__module__ != "torch" or kind.__name__ not in _CONSTANTS:
            return ""
        return str(without_index(cast("device", value), self._device))

    def _tensor_text(self, value: Tensor) -> str:
        device = without_index(value.device, self._device)
        words = [f"{value.dtype} {device} {value.layout}", f"[{','.join(map(str, value.shape))}]"]
        words += [name for name, is_set in _FLAGS if is_set(value)]
        try:
            strides, offset = value.stride(), value.storage_offset()
            storage = value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
            flatten = getattr(value, "__tensor_flatten__", None)
            inner = flatten()[0] if flatten is not None else ()
            return " ".join([*words, *(f"{n}={self._text(getattr(value, n), 1)}" for n in inner)])
        number, base = self._storages.setdefault(storage, (len(self._storages), offset))
        words += [f"({','.join(map(str, strides))})", f"@{number}+{offset - base}"]  # type: ignore[operator]
        return " ".join(words)


# -- graphs of plain nodes
#
# Nearly all nodes call something of torch's on other nodes and on constants. Their text says all
# that ``Graph.python_code`` would, in a tenth of its time. A graph with anything else in it is left
# to torch: its code names what it calls, imports it, and knows many kinds of arguments.

_ROOTS = frozenset(("torch", "builtins", "operator", "_operator", "self"))


def graph_as_text(graph: Graph, device: device | None = None) -> str | None:
    """Return a line for each node; ``None`` if one of them is not plain.

    The index of ``device`` is left out. But for that, two plain graphs have one text if and only if
    torch generates the same code for both.
    """
    from torch.fx.node import map_aggregate

    if not internals.has_plain_codegen(graph):
        return None
    constants, containers = internals.plain_arguments()
    names: dict[int, str | None] = {}  # the same few functions are called over and over

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
        if node.name in _ROOTS:  # as which the line could be read
            return None
        arguments, keywords = node.args, node.kwargs
        if device is not None:
            arguments, keywords = map_aggregate(arguments, bare), map_aggregate(keywords, bare)
        args = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in keywords.items())]
        lines.append(f"{node.name}{annotation} = {_call_text(node, target, args)}")
    return "\n".join(lines)


def _call_text(node: Node, target: str, args: Sequence[str]) -> str:
    """Return what a node does as code, for people who compare two graphs."""
    if node.op == "call_function":
        return f"{target}({', '.join(args)})"
    if node.op == "call_method":
        return f"{args[0]}.{target}({', '.join(args[1:])})"
    if node.op == "call_module":
        return f"self.{target}({', '.join(args)})"
    if node.op == "get_attr":
        return f"self.{target}"
    return f"{node.op} {target}({', '.join(args)})"


def _annotation(node: Node) -> str | None:
    if node.type is None:
        return ""
    name = internals.name_in_code(node.type) if isinstance(node.type, type) else None
    return None if name is None else f": {name}"


_LITERAL = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""


def code_on(source: str, device: device, other: device) -> str:
    """Return code that torch generated from a graph, with ``other`` in the place of ``device``.

    Text that the program has given to an operator stays as it is.
    """
    pattern = f"{_LITERAL}|{re.escape(repr(device))}"
    return re.sub(pattern, lambda found: found[0] if found[0][0] in "'\"" else repr(other), source)


# -- what graphs of compiled autograd call
#
# Compiled autograd traces a whole backward pass. It puts functions into the graph that it makes as
# it goes: one for each kind of node of torch's autograd, and one for each compiled graph that has
# its backward pass in this one. No import finds them, and torch's key refuses them.

# Nodes that it copies from the backward pass of the first, second … compiled graph.
_COPIED = re.compile(r"\baot\d+_\w+")
_KNOWN_GLOBALS = {"torch", internals.PROLOGUE_CALLS, internals.PROLOGUE_TANGENTS}


def autograd_function_text(target: object) -> str | None:
    """Return which such function ``target`` is, if it is one and the text says all that it does."""
    if isinstance(target, internals.autograd_node.get()):
        # All that a node of torch's own has saved is in its arguments. C++ of others may do more.
        return None if target.is_custom_function else f"autograd node {target.__name__}"
    if isinstance(target, FunctionType) and target.__qualname__ == internals.PROLOGUE:
        return _prologue_text(target)
    return None


def _prologue_text(target: FunctionType) -> str | None:
    """Describe code that AOTAutograd generates to check the inputs of a backward pass."""
    cells: Mapping[str, object] = dict(
        zip(target.__code__.co_freevars, target.__closure__ or (), strict=True)
    )
    prologue = getattr(cells.get(internals.PROLOGUE_CELL), "cell_contents", None)
    if not isinstance(prologue, FunctionType) or prologue.__closure__:
        return None
    used = {name for name in _names_in(prologue.__code__) if name in prologue.__globals__}
    tangents = prologue.__globals__.get(internals.PROLOGUE_TANGENTS, ())
    plain = internals.plain_tensor_meta.get()
    if used - _KNOWN_GLOBALS - {*internals.PROLOGUE_MESSAGES} or any(
        type(tangent) is not plain for tangent in tangents
    ):
        return None  # of a tensor subclass, or of a torch that we have not seen
    return f"backward prologue {code_digest(prologue.__code__)} of {list(tangents)!r}"


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def without_aot_names(gm: GraphModule, source: str) -> str:
    """Return ``source``, generated from ``gm``, with numbers for the names of copied nodes.

    The backward pass of a hit was written out and read again, which gives its nodes other names.
    """
    copied = (node.name for node in gm.graph.nodes if _COPIED.fullmatch(node.name))
    numbers = {name: f"aot#{number}" for number, name in enumerate(copied)}
    return _COPIED.sub(lambda found: numbers.get(found[0], found[0]), source)
