"""Pickle the values that a key depends on into bytes that are equal in every process.

torch's own pickler for keys makes the bytes, and asks a Python function about each object in a
value. Most are of three kinds, of which a training step has hundreds: inputs, sources of inputs,
and graphs. Those become texts here, without asking again for each of what they consist of; the
texts hold all that torch's own reduction does.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, cast

from s3cache.graph._identity import UnidentifiedError, code_digest, origin_of
from s3cache.graph._passes import context_hash, table_text
from s3cache.graph._results import RegisteredVersion
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph, GraphModule, Node

    from s3cache.torch_api.protocols import DeviceMesh, Function, KeyPickler


class CanonicalPickler:
    """Make bytes that depend on what a value is, and not on which of its items are one object.

    torch's pickler writes a shared object once for each time it is met (``fast``). Some values
    switch that off; here it holds for each value.

    Attributes:
        codes: the code of each graph in the last value, the outermost first.
        tensor_texts: the text of each tensor in the last value, by its id; good while it lives.
    """

    def __init__(
        self,
        pickler: KeyPickler,
        registered_version: RegisteredVersion = lambda _: None,
        *,
        traced: bool = False,
    ) -> None:
        from torch.fx import GraphModule

        self.registered_version = registered_version
        self.codes: list[str] = []
        self.tensor_texts: dict[int, str] = {}
        self._traced = traced
        self._inherited = internals.inherited_reducer(pickler)
        self._identity_reducer = internals.same.get()
        self._metadata_of = internals.tensor_metadata.get()
        self._source, self._fake = internals.source.get(), internals.fake_tensor.get()
        self._graph = GraphModule
        self._mesh, self._script = internals.device_mesh.get(), internals.script_object.get()
        self._state = internals.backward_state.get()
        self._table = internals.given_decompositions.find()
        self._sources: dict[int, tuple[object, str | None]] = {}
        self._pickler = pickler
        pickler.reducer_override = self._reduce

    def __call__(self, value: object) -> bytes:
        """Return the bytes of ``value``; raise what torch's pickler raises where it has none."""
        self.codes, self.tensor_texts = [], {}
        self._pickler.clear_memo()
        self._pickler.fast = True
        if type(value) is list:  # the inputs: to be asked about each costs as much as its text
            value = [
                ("a tensor", self._tensor_text(item)) if type(item) is self._fake else item
                for item in value
            ]
        return self._pickler.dumps(value)

    def _reduce(self, value: object) -> object:
        """Return what ``reducer_override`` of a pickler does: most values are torch's to reduce."""
        reduced: object = None
        if type(value) is self._fake:
            reduced = self._tensor_text(value)
        elif isinstance(value, self._source):
            reduced = self._source_text(value)
        elif isinstance(value, self._graph):
            reduced = self._graph_parts(value)
        elif type(value) is self._script:  # what a graph that takes an object gets while traced
            real = getattr(value, internals.REAL_OBJECT)
            reduced = _mesh_text(real) if isinstance(real, self._mesh) else None
        elif isinstance(value, self._mesh):
            reduced = _mesh_text(value)
        elif type(value) is self._state:  # what it will carry is not there yet
            reduced = "BackwardState"
        elif type(value) is self._table:
            reduced = f"decompositions {table_text(value.table, self.registered_version)}"
        elif "_hash" in getattr(value, "__dict__", ()):
            reduced = _without_hash(value)
        return self._inherited(value) if reduced is None else (self._identity_reducer, (reduced,))

    def _tensor_text(self, value: Tensor) -> str:
        text = self.tensor_texts[id(value)] = _metadata_text(self._metadata_of(value))
        return text

    def _source_text(self, source: object) -> str | None:
        """Return the source as an expression, or ``None`` if it holds what has none.

        Sources of the parameters of one module share the sources they begin with.
        """
        known = self._sources.get(id(source))
        if known is None:
            kind = type(source)
            names = _init_fields(cast("Hashable", kind))
            fields = [self._field_text(getattr(source, name)) for name in names]
            text = None
            if None not in fields:
                text = f"{kind.__module__}.{kind.__qualname__}({','.join(map(str, fields))})"
            known = source, text  # an id is only good while its object lives
            self._sources[id(source)] = known
        return known[1]

    def _field_text(self, value: object) -> str | None:
        if type(value) in (str, int, bool, type(None)):
            return repr(value)
        if isinstance(value, self._source):
            return self._source_text(value)
        return f"{type(value).__qualname__}.{value.name}" if isinstance(value, enum.Enum) else None

    def _graph_parts(self, gm: GraphModule) -> tuple[object, str, object] | None:
        """Return what torch's reducer does, without compiling the generated code to read it."""
        line_of = internals.line_for_global()
        if line_of is None:
            return None
        generated = internals.GENERATED.names
        attributes = {name: value for name, value in vars(gm).items() if name not in generated}
        context_fn = gm.meta.get(internals.CHECKPOINT_CONTEXT) if gm.meta else None
        if context_fn is not None:  # seldom something to pickle
            hashed = context_hash(context_fn, self.registered_version)
            attributes["meta"] = {**gm.meta, internals.CHECKPOINT_CONTEXT: hashed}
        text, imports = graph_as_text(gm.graph), None
        if text is None:
            code = gm.graph.python_code(root_module="self")
            described = {
                name: autograd_function_text(value) for name, value in code.globals.items()
            }
            imports = sorted(
                described[name] or line_of(name, value) + self._class_version(value)
                for name, value in code.globals.items()
            )
            text = _without_aot_names(gm, code.src) if any(described.values()) else code.src
        self.codes.append(text)
        return attributes, text, imports

    def _class_version(self, value: object) -> str:
        """Return the version of a user's class of which the graph holds an object.

        Rules of operators ask such objects, as they are traced.

        Raises:
            UnidentifiedError: it has none, and the key does not have what was traced.
        """
        if not isinstance(value, type) or not internals.is_opaque_type(value):
            return ""
        version = self.registered_version(value)
        if version is not None:
            return f" version {version}"
        if not self._traced and origin_of(value).kind != "torch":
            name = f"{value.__module__}.{value.__qualname__}"
            raise UnidentifiedError(
                f"an object of {name}, which has code that takes part in tracing", value
            )
        return ""


@functools.cache
def _init_fields(kind: Hashable) -> tuple[str, ...]:
    assert dataclasses.is_dataclass(kind)
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


@functools.cache
def _field_getter(kind: Hashable) -> Callable[[object], tuple[object, ...]]:
    assert dataclasses.is_dataclass(kind)
    return attrgetter(*(field.name for field in dataclasses.fields(kind)))


def _metadata_text(metadata: object) -> str:
    kind = cast("Hashable", type(metadata))
    try:
        return _text_of_fields(kind, _field_getter(kind)(metadata))
    except TypeError:  # symbolic sizes have no hash; their text names symbols
        return repr(metadata)


@functools.lru_cache(maxsize=4096)  # layers have the same parameters over and over
def _text_of_fields(kind: Hashable, values: tuple[object, ...]) -> str:
    return repr(cast("Function[object]", kind)(*values))


def _without_hash(value: object) -> object:
    """Return what to pickle of an object of torch less its ``hash()``, which differs by process.

    Specifications of DTensors keep theirs once it was asked for.
    """
    if type(value).__module__.partition(".")[0] != "torch":
        return None
    make, arguments, state = (*value.__reduce_ex__(2), None)[:3]
    if not isinstance(state, dict):
        return None
    return make, arguments, {name: item for name, item in state.items() if name != "_hash"}


def _mesh_text(mesh: DeviceMesh, depth: int = 0) -> str:
    """Return all that a mesh of devices is: its layout, this rank's place in it, its groups' names.

    It also keeps its ``hash()``, which differs between processes. The meshes that it belongs to,
    and those that it is made of, refer to it in turn.

    Raises:
        ValueError: it holds something that only its address identifies.
    """
    import torch

    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, type(mesh)):
            return None if depth else _mesh_text(value, depth + 1)
        if isinstance(value, dict):
            return {key: None if depth else plain(item) for key, item in value.items()}
        return value

    state = sorted(mesh.__getstate__().items())
    fields = " ".join(f"{name}={plain(value)!r}" for name, value in state if name != "_hash")
    text = f"DeviceMesh({fields})"
    if " at 0x" in text:
        raise ValueError(f"a device mesh holds what no other process has: {text}")
    return text


# -- graphs of plain nodes
#
# Nearly all nodes call something of torch's on other nodes and on constants. Their text says all
# that ``Graph.python_code`` would, in a tenth of its time. A graph with anything else in it is left
# to torch: its code names what it calls, imports it, and knows many kinds of arguments.

_ROOTS = frozenset(("torch", "builtins", "operator", "_operator", "self"))


def graph_as_text(graph: Graph) -> str | None:
    """Return a line for each node; ``None`` if one of them is not plain.

    Two plain graphs have one text if and only if torch generates the same code for both.
    """
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
        lines.append(f"{node.name}{annotation} = {_call_text(node, target)}")
    return "\n".join(lines)


def _call_text(node: Node, target: str) -> str:
    """Return what a node does as code, for people who compare two graphs."""
    args = [repr(value) for value in node.args]
    args += [f"{name}={value!r}" for name, value in node.kwargs.items()]
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


def _without_aot_names(gm: GraphModule, source: str) -> str:
    """Return ``source``, generated from ``gm``, with numbers for the names of copied nodes.

    The backward pass of a hit was written out and read again, which gives its nodes other names.
    """
    copied = (node.name for node in gm.graph.nodes if _COPIED.fullmatch(node.name))
    numbers = {name: f"aot#{number}" for number, name in enumerate(copied)}
    return _COPIED.sub(lambda found: numbers.get(found[0], found[0]), source)
