"""Stable bytes of the values that a key depends on, and the digest of them that is a part of it.

The bytes come from torch's own pickler for keys, which asks a Python function about each object in
a value. Most are of three kinds, of which a training step has hundreds: inputs, sources of inputs,
and graphs. Those are put into words here without asking again for each of their parts; the words
hold all that torch's own reduction does.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from s3cache.graph._homes import home_of
from s3cache.graph._identity import UnidentifiedError, code_digest
from s3cache.graph._passes import context_hash, table_text
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph, GraphModule, Node

    from s3cache.torch_api.protocols import DeviceMesh, KeyPickler

__all__ = ["Component", "StableBytes", "autograd_words", "bounded", "plain_text", "shown_parts"]

_VALUE_CHARACTERS = 200
_TEXT_CHARACTERS = 16 << 10
_REMEMBERED_TEXTS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Component:
    """One named part of a key.

    Attributes:
        digest: 32 hexadecimal digits.
        value: what it is, for people; shortened, and not part of the key.
        parts: what it consists of, by name, where the value does not say it; neither.
    """

    digest: str
    value: str
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_text(cls, text: str) -> Component:
        """A component whose value is its whole content."""
        is_short = len(text) <= _VALUE_CHARACTERS
        parts = None if is_short else bounded((("", text),), _TEXT_CHARACTERS)
        return cls.of_bytes(text.encode(), text, parts)

    @classmethod
    def of_bytes(cls, data: bytes, value: str, parts: Mapping[str, str] | None = None) -> Component:
        """A component with content that nobody wants to read."""
        if len(value) > _VALUE_CHARACTERS:
            value = value[:_VALUE_CHARACTERS] + "…"
        return cls(hashlib.sha256(data).hexdigest()[:32], value, parts or {})


class StableBytes:
    """Bytes that depend on what a value is, and not on which of its parts are one object.

    torch's pickler writes a shared object once for each time it is met (``fast``). Some values
    switch that off; here it holds for each value anew.
    """

    def __init__(
        self,
        pickler: KeyPickler,
        vouched: Callable[[object], str | None] = lambda _: None,
        *,
        traced: bool = False,
    ) -> None:
        self.vouched = vouched
        self._pickler = pickler
        self._words = _Words(internals.inherited_reducer(pickler), vouched, traced)
        pickler.reducer_override = self._words.reduce

    @property
    def codes(self) -> list[str]:
        """The code of each graph in the last value, the outermost first."""
        return self._words.codes

    @property
    def told(self) -> Mapping[int, str]:
        """What each tensor in the last value is, by its id; good while that value lives."""
        return self._words.told

    def __call__(self, value: object) -> bytes:
        """Raises what torch's pickler raises for a value that has none."""
        self._words.codes, self._words.told = [], {}
        self._pickler.clear_memo()
        self._pickler.fast = True
        if type(value) is list:  # the inputs: to be asked about each costs as much as its words
            value = [self._words.told_beforehand(each) for each in value]
        return self._pickler.dumps(value)


_TENSOR = "a tensor"


class _Words:
    """Reducers for what there is most of; everything else is torch's to reduce."""

    def __init__(
        self,
        inherited: Callable[[object], object],
        vouched: Callable[[object], str | None],
        traced: bool,
    ) -> None:
        from torch.fx import GraphModule

        self._inherited = inherited
        self._vouched, self._traced = vouched, traced
        self._same = internals.same.get()
        self._metadata_of = internals.tensor_metadata.get()
        self._source, self._fake = internals.source.get(), internals.fake_tensor.get()
        self._graph = GraphModule
        self._mesh, self._script = internals.device_mesh.get(), internals.script_object.get()
        self._state = internals.backward_state.get()
        self._table = internals.given_decompositions.find()
        self._sources: dict[int, tuple[object, str | None]] = {}
        self.codes: list[str] = []
        self.told: dict[int, str] = {}

    def told_beforehand(self, value: object) -> object:
        """A tensor's words, as nothing else has them; any other value itself."""
        return (_TENSOR, self._tensor_text(value)) if type(value) is self._fake else value

    def _tensor_text(self, value: Tensor) -> str:
        words = self.told[id(value)] = _metadata_text(self._metadata_of(value))
        return words

    def reduce(self, value: object) -> object:
        """What ``reducer_override`` of a pickler returns."""
        words: object = None
        if type(value) is self._fake:
            words = self._tensor_text(value)
        elif isinstance(value, self._source):
            words = self._source_text(value)
        elif isinstance(value, self._graph):
            words = _graph_parts(value, self._vouched, self._traced)
            if words is not None:
                self.codes.append(words[1])
        elif type(value) is self._script:  # what a graph that takes an object gets while traced
            real = getattr(value, internals.REAL_OBJECT)
            words = _mesh_words(real) if isinstance(real, self._mesh) else None
        elif isinstance(value, self._mesh):
            words = _mesh_words(value)
        elif type(value) is self._state:  # what it will carry is not there yet
            words = "BackwardState"
        elif type(value) is self._table:
            table = value.table
            words = f"decompositions {table_text(table, self._vouched)}"
        elif "_hash" in getattr(value, "__dict__", ()):
            words = _without_hash(value)
        return self._inherited(value) if words is None else (self._same, (words,))

    def _source_text(self, source: object) -> str | None:
        """The source as an expression, or ``None`` if it holds what has none.

        Sources of the parameters of one module share the sources they begin with.
        """
        known = self._sources.get(id(source))
        if known is None:
            kind = type(source)
            words = [self._word(getattr(source, name)) for name in _init_fields(kind)]
            text = None
            if None not in words:
                text = f"{kind.__module__}.{kind.__qualname__}({','.join(map(str, words))})"
            known = source, text  # an id is only good while its object lives
            self._sources[id(source)] = known
        return known[1]

    def _word(self, value: object) -> str | None:
        if type(value) in (str, int, bool, type(None)):
            return repr(value)
        if isinstance(value, self._source):
            return self._source_text(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        return None


def _graph_parts(
    gm: GraphModule, vouched: Callable[[object], str | None], traced: bool
) -> tuple[object, str, object] | None:
    """As torch's reducer, but the generated code is not compiled to be read."""
    line_of = internals.line_for_global()
    if line_of is None:
        return None
    generated = internals.GENERATED.names
    parts = {name: value for name, value in vars(gm).items() if name not in generated}
    context_fn = gm.meta.get(internals.CHECKPOINT_CONTEXT) if gm.meta else None
    if context_fn is not None:  # seldom something to pickle
        words = context_hash(context_fn, vouched)
        parts["meta"] = {**gm.meta, internals.CHECKPOINT_CONTEXT: words}
    plain = plain_text(gm.graph)
    if plain is not None:
        return parts, plain, None
    code = gm.graph.python_code(root_module="self")
    described = {name: autograd_words(value) for name, value in code.globals.items()}
    imports = sorted(
        described[name] or line_of(name, value) + _class_text(value, vouched, traced)
        for name, value in code.globals.items()
    )
    source = code.src if not any(described.values()) else _without_aot_names(gm, code.src)
    return parts, source, imports


def _class_text(value: object, registered: Callable[[object], str | None], traced: bool) -> str:
    """Return the version of a class of the user's of which the graph holds an object.

    Rules of operators ask such objects, as they are traced.

    Raises:
        UnidentifiedError: it has none, and the key does not have what was traced.
    """
    if not isinstance(value, type) or not internals.is_opaque_type(value):
        return ""
    version = registered(value)
    if version is not None:
        return f" version {version}"
    if not traced and home_of(value).kind != "torch":
        name = f"{value.__module__}.{value.__qualname__}"
        raise UnidentifiedError(f"an object of {name}, whose code takes part in tracing", value)
    return ""


def _without_hash(value: object) -> object:
    """An object of torch that keeps its ``hash()``, less that: it differs between processes.

    Specifications of DTensors do, once somebody has asked for it.
    """
    if type(value).__module__.partition(".")[0] != "torch":
        return None
    make, arguments, state = (*value.__reduce_ex__(2), None)[:3]
    if not isinstance(state, dict):
        return None
    return make, arguments, {name: part for name, part in state.items() if name != "_hash"}


def _mesh_words(mesh: DeviceMesh, depth: int = 0) -> str:
    """All that a mesh of devices is: its layout, this rank's place in it, the names of its groups.

    Beside those it keeps its ``hash()``, which differs between processes. Meshes that it is a part
    of, and that are made of it, refer to it in turn.

    Raises:
        ValueError: it holds what is told apart by its address.
    """
    import torch

    words = []
    for name, value in sorted(mesh.__getstate__().items()):
        if name == "_hash":
            continue
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        elif isinstance(value, type(mesh)):
            value = None if depth else _mesh_words(value, depth + 1)
        elif isinstance(value, dict):
            value = {
                key: None
                if depth
                else _mesh_words(part, depth + 1)
                if isinstance(part, type(mesh))
                else part
                for key, part in value.items()
            }
        words.append(f"{name}={value!r}")
    text = f"DeviceMesh({' '.join(words)})"
    if " at 0x" in text:
        raise ValueError(f"a device mesh holds what no other process has: {text}")
    return text


_fields_of: dict[type, tuple[str, ...]] = {}


def _init_fields(kind: type) -> tuple[str, ...]:
    names = _fields_of.get(kind)
    if names is None:
        assert dataclasses.is_dataclass(kind)
        names = tuple(field.name for field in dataclasses.fields(kind) if field.init)
        _fields_of[kind] = names
    return names


# Layers have the same parameters over and over.
_texts: dict[object, str] = {}
_getters: dict[type, Callable[[object], object]] = {}


def _metadata_text(metadata: object) -> str:
    kind = type(metadata)
    getter = _getters.get(kind)
    if getter is None:
        assert dataclasses.is_dataclass(kind)
        getter = attrgetter(*(field.name for field in dataclasses.fields(kind)))
        _getters[kind] = getter
    values = getter(metadata)
    try:
        text = _texts.get(values)
    except TypeError:  # symbolic sizes have no hash; in words they are the names of symbols
        return repr(metadata)
    if text is None:
        if len(_texts) >= _REMEMBERED_TEXTS:
            _texts.clear()
        text = _texts[values] = repr(metadata)
    return text


# -- graphs of plain nodes
#
# Nearly all nodes call something of torch's on other nodes and on constants. Their text says all
# that ``Graph.python_code`` would, in a tenth of its time. A graph with anything else in it is left
# to torch, whose code names what it calls, imports it, and knows many kinds of arguments.


def plain_text(graph: Graph) -> str | None:
    """A line for each node; ``None`` if one of them is not plain.

    Two plain graphs have one text if and only if torch generates the same code for both.
    """
    if not internals.has_plain_codegen(graph):
        return None
    constants, containers = internals.plain_arguments()
    words: dict[int, str | None] = {}  # the same few functions are called over and over

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
            if id(target) not in words:
                words[id(target)] = internals.name_in_code(target)
            target = words[id(target)]
        annotation = _annotation(node)
        if target is None or annotation is None or internals.WRAPPED in node.meta:
            return None
        if not are_plain(node.args) or not are_plain(node.kwargs.values()):
            return None
        if node.name in _ROOTS:  # as which the line could be read
            return None
        lines.append(f"{node.name}{annotation} = {_line(node, target)}")
    return "\n".join(lines)


_ROOTS = frozenset(("torch", "builtins", "operator", "_operator", "self"))


def _line(node: Node, target: str) -> str:
    """As code, for people who compare two: what is called, or whence it comes, on what."""
    args = [repr(each) for each in node.args]
    args += [f"{name}={each!r}" for name, each in node.kwargs.items()]
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
# it goes: one for each kind of node of torch's autograd, and one for each compiled graph whose
# backward pass is part of this one. No import finds them, and torch's key refuses them.

# Nodes that it copies from the backward pass of the first, second … compiled graph.
_COPIED = re.compile(r"\baot\d+_\w+")

_DESCRIBED = frozenset({"torch", internals.PROLOGUE_CALLS, internals.PROLOGUE_TANGENTS})


def autograd_words(target: object) -> str | None:
    """Which such function ``target`` is, if it is one and all that it does can be told."""
    if isinstance(target, internals.autograd_node.get()):
        # All that a node of torch's own has saved is in its arguments. C++ of others may do more.
        return None if target.is_custom_function else f"autograd node {target.__name__}"
    if isinstance(target, FunctionType) and target.__qualname__ == internals.PROLOGUE:
        return _prologue_words(target)
    return None


def _prologue_words(target: FunctionType) -> str | None:
    """Code that AOTAutograd generates to check, and lay out, what a backward pass is given."""
    cells = dict(zip(target.__code__.co_freevars, target.__closure__ or (), strict=True))
    cell = cells.get(internals.PROLOGUE_CELL)
    prologue = None if cell is None else cell.cell_contents
    if not isinstance(prologue, FunctionType) or prologue.__closure__:
        return None
    used = {name for name in _names(prologue.__code__) if name in prologue.__globals__}
    tangents = prologue.__globals__.get(internals.PROLOGUE_TANGENTS, ())
    plain = internals.plain_tensor_meta.get()
    if used - _DESCRIBED - {*internals.PROLOGUE_MESSAGES} or any(
        type(tangent) is not plain for tangent in tangents
    ):
        return None  # of a tensor subclass, or of a torch that we have not seen
    return f"backward prologue {code_digest(prologue.__code__)} of {list(tangents)!r}"


def _without_aot_names(gm: GraphModule, source: str) -> str:
    """``source``, generated from ``gm``, with numbers for the names of nodes copied into it.

    The backward pass of a hit was written out and read again, which gives its nodes other names.
    """
    names = (node.name for node in gm.graph.nodes if _COPIED.fullmatch(node.name))
    numbers = {name: f"aot#{number}" for number, name in enumerate(names)}
    return _COPIED.sub(lambda found: numbers.get(found[0], found[0]), source)


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


# -- what components consist of, so that a difference can be named
#
# For people, and in no digest: two components may differ where these words are equal. Texts are
# shortened, and few enough that an entry grows by little.

_COUNT = 1024
_CHARACTERS = 1 << 10
_ALL_CHARACTERS = 128 << 10
# What counts graphs of a process is in no key.
_OF_THE_PROCESS = frozenset({"aot_id", "precompile_backend_id"})
_SCALAR_PARTS = (type(None), bool, int, float, complex, str)


def shown_parts(value: object, stable: StableBytes) -> Mapping[str, str]:
    """The parts of a value whose bytes ``stable`` has just made, by name.

    Of a graph that is its code, of a list each item by number, of options and objects each by name.
    """
    if stable.codes:
        return bounded((("code", "\n".join(stable.codes)),), _ALL_CHARACTERS)
    return bounded((name, _part_text(part, stable)) for name, part in _named(value))


def bounded(parts: Iterable[tuple[str, str]], characters: int = _CHARACTERS) -> dict[str, str]:
    """``parts``, the first of them, each shortened."""
    found: dict[str, str] = {}
    left = _ALL_CHARACTERS
    for name, text in parts:
        if len(found) == _COUNT or left <= 0:
            break
        found[name] = text if len(text) <= characters else text[:characters] + "…"
        left -= len(text)
    return found


def _named(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            part = getattr(value, each.name, None)
            if not callable(part) and each.name not in _OF_THE_PROCESS:
                yield each.name, part


def _part_text(value: object, stable: StableBytes, depth: int = 0) -> str:
    if type(value) in _SCALAR_PARTS:
        return repr(value)
    told = stable.told.get(id(value))
    if told is not None:
        return told
    if isinstance(value, internals.source.get()):
        name = getattr(value, "name", "")
        return str(name() if callable(name) else name)
    if isinstance(value, (list, tuple)) and depth < 3:
        return f"[{', '.join(_part_text(each, stable, depth + 1) for each in value[:_COUNT])}]"
    return _plain_part(value)


def _plain_part(value: object) -> str:
    """Nothing that differs from process to process, as addresses do."""
    import torch

    if isinstance(value, (torch.dtype, torch.device, torch.Size, torch.SymInt, torch.layout)):
        return str(value)
    held = getattr(value, "value", None)  # a box of torch's
    if type(held) in (bool, int):
        return repr(held)
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(value, '__module__', '')}.{name}"
    return type(value).__qualname__
