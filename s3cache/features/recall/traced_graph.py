"""Keep the graph that Dynamo traced, and compile it again in a process that does not trace.

A graph without a key at the first level, or without an entry under it, is found at the second
level: AOTAutograd has to trace it first. So a candidate has the graph itself, as plain data, with a
digest of the metadata of each value in it.

Third-party code that takes part in tracing (fake implementations of custom operators, functions in
``allow_in_graph``, tensor subclasses) is not compared. It runs again, on fakes of the inputs of
this call: if each value has the metadata that Dynamo saw, Dynamo would trace this graph again. Then
torch compiles it as after a trace, with the usual keys.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from s3cache.features.recall import dynamo, names
from s3cache.features.recall.content import OWN_KINDS, metadata_text, tensor_guarded
from s3cache.features.recall.sources import Plain, RefusedError, Source
from s3cache.graph import NATIVE, PLAIN_KINDS, origin_of_file, traced_operators
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from s3cache.torch_api.protocols import DynamoObject, Function

# Where Dynamo notes the value of a node; and what it notes of a graph.
_VALUE: Final = "example_value"
_OF_GRAPH: Final = {"dynamo_flat_name_to_original_fqn", "dynamo_compile_id", "backend_id"}
# Others may refer to tables of the process by number.
_HIGHER_ORDER: Final = frozenset(
    f"torch.ops.higher_order.{name}" for name in ("cond", "tag_activation_checkpoint")
)
_ROOTS: Final = ("torch", "operator", "builtins", "math")
_MAX_NUMBER: Final = 1 << 63  # of plain data


class _Row(NamedTuple):
    """A node as plain data.

    Attributes:
        inner: the nodes of the graph that it reads, if it reads one.
        static: Dynamo's mark of an input with a fixed address.
        has_value: whether Dynamo has noted its value.
    """

    op: str
    name: str
    target: Plain
    args: Plain
    kwargs: Plain
    type: str | None
    inner: list[Plain] | None
    static: str | None
    has_value: bool


@dataclass(eq=False)
class TracedGraph:
    """A graph from Dynamo.

    Attributes:
        nodes: as plain data; see :class:`_Row`.
        objects: functions that are not torch's, to which nodes refer by number.
        values: of the nodes that have one, in order.
        operators: the schemas of custom operators.
    """

    nodes: list[Plain] = field(default_factory=list)
    objects: list[object] = field(default_factory=list)
    values: list[object] = field(default_factory=list)
    operators: str = ""

    @classmethod
    def of(cls, gm: GraphModule) -> TracedGraph:
        """Return the graph in ``gm``, before torch changes it.

        Raises:
            RefusedError: it cannot be saved.
        """
        graph = cls(operators=traced_operators(gm, _unregistered))
        graph.nodes = graph._rows(gm)
        return graph

    def saved(
        self, inputs: Sequence[Any], place_of: Callable[[object], int], at: Callable[[int], object]
    ) -> list[Plain]:
        """Return the row for a candidate; see :class:`Compilation`.

        Raises:
            RefusedError: another process cannot tell whether Dynamo would trace this graph.
        """
        row = [self.nodes, [*map(place_of, self.objects)]]
        digest = _digest([self.operators, *_texts(self.values)])
        if not Compilation([*row, digest], inputs, at).is_as_traced():
            raise RefusedError("graphs", "has a value in it that fakes do not have")
        return [*row, digest]

    def _rows(self, gm: GraphModule) -> list[Plain]:
        if more := gm.meta.keys() - _OF_GRAPH:
            raise RefusedError("graphs", f"has a graph with {min(more)}")
        return [[*self._row(node, gm)] for node in gm.graph.nodes]

    def _row(self, node: Node, gm: GraphModule) -> _Row:
        from torch.fx import GraphModule

        inner = None
        if node.op == "get_attr":
            module = getattr(gm, str(node.target), None)
            if not isinstance(module, GraphModule):
                raise RefusedError("graphs", f"has a constant {type(module).__qualname__}")
            inner = self._rows(module)
        if node.op == "call_module" or node.meta.get("custom"):
            raise RefusedError("graphs", f"has a graph with {node.op} {node.name}")
        if has_value := _VALUE in node.meta:
            self.values.append(node.meta[_VALUE])
        return _Row(
            node.op,
            node.name,
            node.target if isinstance(node.target, str) else self._plain(node.target),
            self._plain(node.args),
            self._plain(node.kwargs),
            None if node.type is None else internals.name_in_code(node.type),
            inner,
            (node.meta.get("tensor_dict") or {}).get(names.STATIC_INPUT),
            has_value,
        )

    def _plain(self, value: Any) -> Plain:
        """Return an argument or a function as plain data; a list begins with its kind."""
        from torch.fx import Node

        if type(value) in (type(None), bool, float, str) or _is_small(value):
            return value
        if isinstance(value, Node):
            return ["node", value.name]
        if (row := dynamo.constant_row(value)) is not None:
            return ["constant", row]
        base = _base_of(value)
        if base in (list, tuple):
            return [base.__name__, [*map(self._plain, value)]]
        if base is dict and all(type(key) is str for key in value):
            return ["dict", [[key, self._plain(item)] for key, item in value.items()]]
        if type(value) is slice:
            return ["slice", [*map(self._plain, (value.start, value.stop, value.step))]]
        if value is ...:
            return ["ellipsis"]
        if not callable(value):
            raise RefusedError("graphs", f"has a {type(value).__qualname__} in its graph")
        name = internals.name_in_code(value)
        if name is not None and _function_at(name) is value:
            is_higher = internals.kind_of_operator(value) == "higher-order"
            if (is_higher and name not in _HIGHER_ORDER) or name.startswith("torch._dynamo"):
                raise RefusedError("graphs", f"calls {name}")
            return ["name", name]
        self.objects.append(value)
        return ["object", len(self.objects) - 1]


def _base_of(value: object) -> type:
    """Return the class of a value; of torch's own lists and dictionaries, that of Python."""
    kind = type(value)
    is_of_graphs = kind.__module__ == "torch.fx.immutable_collections"
    return kind.__base__ or kind if is_of_graphs else kind


def _is_small(value: object) -> bool:
    return type(value) is int and -_MAX_NUMBER <= value < _MAX_NUMBER


def _function_at(name: str) -> object:
    """Return the function of torch or Python with a name in generated code; None if none has."""
    root, *rest = name.split(".")
    value: object = importlib.import_module(root) if root in _ROOTS else None
    for each in rest:
        value = getattr(value, each, None)
    # A program may replace functions of torch.
    is_function = isinstance(value, (*NATIVE, type)) or internals.is_operator(value)
    if isinstance(value, FunctionType):
        is_function = origin_of_file(value.__code__.co_filename).kind in OWN_KINDS
    return value if is_function and internals.name_in_code(value) == name else None


# -- graphs from plain data


class _Rebuilt:
    """A graph from plain data, with its inner graphs and the nodes that have a value."""

    def __init__(self, nodes: Sequence[Plain], objects: Sequence[object]) -> None:
        self._objects = objects
        self._inner: list[GraphModule] = []
        self.valued: list[Node] = []
        self.gm = self._module(nodes)

    def _module(self, nodes: Sequence[Plain]) -> GraphModule:
        from torch.fx import Graph, GraphModule

        graph = Graph()
        attributes: dict[str, Any] = {}
        by_name: dict[str, Node] = {}
        for row in (_Row(*each) for each in nodes):
            target = self._value(row.target, by_name)
            if row.inner is not None:
                attributes[row.target] = self._module(row.inner)
                self._inner.append(attributes[row.target])
            args, kwargs = (self._value(each, by_name) for each in (row.args, row.kwargs))
            type_: Any = None if row.type is None else _function_at(row.type)
            node = graph.create_node(row.op, target, args, kwargs, row.name, type_)
            if node.name != row.name:
                raise ValueError(f"{row.name} is used twice")
            by_name[row.name] = node
            if row.op == "placeholder":
                marks = {names.STATIC_INPUT: row.static} if row.static else {}
                node.meta["tensor_dict"] = marks
            if row.has_value:
                self.valued.append(node)
        return GraphModule(attributes, graph)

    def _value(self, plain: Plain, nodes: dict[str, Node]) -> Any:
        if not isinstance(plain, list):
            return plain
        kind, *rest = plain
        if kind == "node":
            return nodes[rest[0]]
        if kind == "constant":
            return dynamo.constant_of(rest[0])
        if kind == "dict":
            return {key: self._value(item, nodes) for key, item in rest[0]}
        if kind == "ellipsis":
            return ...
        if kind == "name":
            if (function := _function_at(rest[0])) is None:
                raise LookupError(rest[0])
            return function
        if kind == "object":
            return self._objects[rest[0]]
        items = [self._value(each, nodes) for each in rest[0]]
        if kind == "slice":
            return slice(*items)
        return tuple(items) if kind == "tuple" else items

    def propagate(self, inputs: Sequence[object]) -> list[object]:
        """Run the graph on fakes of its inputs; return the values of all nodes that have one.

        Raises:
            RefusedError: an operator does not run a graph inside the graph.
        """
        from torch.fx import Interpreter

        has_value = {*self.valued}

        class Propagate(Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                if target is names.checkpointed.get():  # it would run the nodes of the graph itself
                    return args[0](*args[1:])
                return super().call_function(target, args, kwargs)

            def run_node(self, n: Node) -> Any:
                result = super().run_node(n)
                if n in has_value:
                    n.meta[_VALUE] = result
                return result

        for gm in self._inner:
            vars(gm)["forward"] = Propagate(gm).run
        try:
            Propagate(self.gm).run(*inputs)
        finally:
            for gm in self._inner:
                del vars(gm)["forward"]
        if not all(_VALUE in node.meta for node in self.valued):
            raise RefusedError("graphs", "has a graph inside it that does not run on fakes")
        return [node.meta[_VALUE] for node in self.valued]


def _texts(values: Sequence[object]) -> list[str]:
    """Return texts of the metadata of values, and which tensors are the same object.

    Raises:
        RefusedError: a value has no text.
    """
    import torch

    first: dict[int, int] = {}
    return [
        f"{first.setdefault(id(value), number)} {_text(value)}"
        if isinstance(value, torch.Tensor)
        else _text(value)
        for number, value in enumerate(values)
    ]


def _text(value: Any) -> str:
    import torch

    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, torch.Tensor):
        if any(type(each) is not int for each in value.shape):
            raise RefusedError("graphs", "has sizes that vary")
        is_parameter = isinstance(value, torch.nn.Parameter)
        text = f"{name} {is_parameter} {tensor_guarded(value)} {value.layout} {value.is_leaf} "
        text += str([*value.shape])
        if internals.is_wrapper_subclass.get()(value):
            inner, _ = cast("Any", value).__tensor_flatten__()
            parts = [_text(getattr(value, each)) for each in inner]
            return f"{text} {inner} {parts} {metadata_text(value)}"
        is_strided = value.layout is torch.strided
        return f"{text} {value.stride()} {value.storage_offset()}" if is_strided else text
    if isinstance(value, (list, tuple)):
        return f"{name} {[*map(_text, value)]}"
    if kind is dict:
        return f"{name} {[[key, _text(item)] for key, item in value.items()]}"
    if kind in PLAIN_KINDS or dynamo.constant_row(value) is not None:
        return f"{name} {value!r}"
    raise RefusedError("graphs", f"has a {name} in its graph")


# -- compiling


class Compilation:
    """A compile of the graph of a candidate, without Dynamo.

    ``traced`` is its row in the candidate: the nodes, the places of objects, and the digest of
    values. ``at`` returns the object at a place.
    """

    def __init__(self, traced: Plain, inputs: Sequence[Any], at: Callable[[int], object]) -> None:
        nodes, objects, self._digest = traced
        self._rebuilt, self._inputs = _Rebuilt(nodes, [*map(at, objects)]), inputs
        self._context = internals.tracing_context.get()(_new_mode(internals.shape_env.get()()))

    def is_as_traced(self) -> bool:
        """Return whether the values of the graph have the metadata that Dynamo saw."""
        run = cast("Function[list[object]]", names.preserve_global_state.get()(self._propagate))
        operators = traced_operators(self._rebuilt.gm, _unregistered)
        return bool(_digest([operators, *_texts(run())]) == self._digest)

    def _propagate(self) -> list[object]:
        mode = self._context.fake_mode
        with internals.tracing.get()(self._context):
            inputs = [mode.from_tensor(value, static_shapes=True) for value in self._inputs]
            with mode, names.python_dispatcher.get()():
                return self._rebuilt.propagate(inputs)

    def run(
        self, compiler: DynamoObject, sources: Sequence[Source], compile_id: object
    ) -> Function[object] | None:
        """Compile the graph as after a trace; None if torch adds guards that Dynamo did not have.

        :meth:`is_as_traced` was called before.
        """
        gm, context = self._rebuilt.gm, self._context
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        trace: Any = SimpleNamespace(output=SimpleNamespace(tracing_context=context))
        for node, source, value in zip(inputs, sources, self._inputs, strict=True):
            setattr(node, names.INPUT_SOURCE, source)
            static = names.symbolic_context.get()(value, trace, source, static_shapes=True)
            context.tensor_to_context[value] = static
        gm.meta.update(dict.fromkeys(_OF_GRAPH))
        gm.meta["dynamo_compile_id"] = compile_id
        setattr(gm, names.BREAK_REASON, None)  # in Dynamo's order, which is in keys
        for name in names.OF_GRAPH:
            setattr(gm, name, {})
        # The graph may have changed the first fakes. Dynamo also makes others for the backend.
        context.fake_mode = _new_mode(context.fake_mode.shape_env)

        def compile_() -> Function[object]:
            with internals.tracing.get()(context):
                return cast("Function[object]", compiler(gm, [*self._inputs]))

        function = cast("Function[object]", names.preserve_global_state.get()(compile_)())
        guards = *context.guards_context.aotautograd_guards, *internals.shape_guards(context)
        return None if guards else function


def _new_mode(shapes: object) -> Any:
    functorch = internals.functorch_config.get()
    with functorch.patch(fake_tensor_allow_unsafe_data_ptr_access=False):  # as Dynamo does
        return internals.fake_mode.get()(shape_env=shapes)


def _digest(texts: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=12).digest()


def _unregistered(_: object) -> None:
    """Return no version of code, which decides on keys only."""
