"""Components of a key: the class, and those of a graph and its inputs that torch leaves out.

Most of these components are absent if they are empty.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, methodcaller
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from s3cache.graph._describe import Describer, without_index
from s3cache.graph._results import Component, bounded
from s3cache.torch_api import internals
from s3cache.util.snapshot import code_digest

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage, device
    from torch.fx import Graph, GraphModule, Node
    from torch.fx.node import Argument


def graph_modules(gm: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """Yield ``gm`` and all graph modules inside it, with their names; that of ``gm`` is ``""``."""
    from torch.fx import GraphModule

    for name, module in gm.named_modules():
        if isinstance(module, GraphModule):
            yield name, module


def call_nodes(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of ``gm``, and of all graphs inside it, that call a function."""
    for _, module in graph_modules(gm):
        yield from (node for node in module.graph.nodes if node.op == "call_function")


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
    parts = bounded((node.lstrip("."), text) for node, text in texts.items())
    return Component.of_bytes(repr(texts).encode(errors="surrogatepass"), " ".join(texts), parts)


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
    lines = [
        (f"{name}.{node.name}".lstrip("."), values.of_node(node))
        for name, module in graph_modules(gm)
        for node in module.graph.nodes
    ]
    data = "\n".join(f"{name}: {text}" for name, text in lines).encode()
    return Component.of_bytes(data, f"{len(lines)} values", bounded(lines))


class _ValueDescriber(Describer):
    """Describes values of a graph; storages are numbered in order of appearance."""

    max_depth = 6

    def __init__(self, device: device | None) -> None:
        from torch import SymBool, SymFloat, SymInt, Tensor

        super().__init__(device)
        self._tensor, self._symbolic = Tensor, (SymInt, SymFloat, SymBool)
        self._texts: dict[int, tuple[object, str]] = {}
        self._storages: dict[int, tuple[int, int | SymInt]] = {}

    def of_node(self, node: Node) -> str:
        meta = node.meta
        return " ".join(
            f"{name}={text}"
            for name in sorted(meta)
            if name not in _NO_VALUES and (text := self.of(meta[name]))
        )

    def special(self, value: object) -> str | None:
        if isinstance(value, self._tensor):
            known = self._texts.get(id(value))
            if known is None:
                # Keep the tensor, so that no other one gets its id.
                known = self._texts[id(value)] = value, self._tensor_text(value)
            return known[1]
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
    """Replace ``device`` with ``other`` in code that torch generated from a graph.

    Strings that the program passes to operators stay unchanged.
    """
    pattern = f"{_LITERAL}|{re.escape(repr(device))}"
    return re.sub(pattern, lambda found: found[0] if found[0][0] in "'\"" else repr(other), source)


# -- functions in graphs of compiled autograd
#
# Compiled autograd traces a whole backward pass. It puts functions into the graph that it creates
# meanwhile: one for each kind of torch's autograd nodes, and one for each compiled graph with a
# backward in this one. They cannot be imported, and torch's key refuses them.

# Nodes copied from the backward of the first, second … compiled graph.
_COPIED = re.compile(r"\baot\d+_\w+")
_KNOWN_GLOBALS = {"torch", internals.PROLOGUE_CALLS, internals.PROLOGUE_TANGENTS}


def autograd_function_text(target: object) -> str | None:
    """Return a text that describes such a function completely, or None."""
    if isinstance(target, internals.autograd_node.get()):
        # The state of torch's own nodes is in the arguments. C++ nodes of others may have more.
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
        return None  # of a tensor subclass, or of an unknown torch
    return f"backward prologue {code_digest(prologue.__code__)} of {list(tangents)!r}"


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def without_aot_names(gm: GraphModule, source: str) -> str:
    """Replace names of copied nodes with numbers in ``source``, which was generated from ``gm``.

    The backward of a hit was serialized and read again, which changes the names of its nodes.
    """
    copied = (node.name for node in gm.graph.nodes if _COPIED.fullmatch(node.name))
    numbers = {name: f"aot#{number}" for number, name in enumerate(copied)}
    return _COPIED.sub(lambda found: numbers.get(found[0], found[0]), source)
