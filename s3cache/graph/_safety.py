"""May a graph be cached? All reasons why not, each with the node it comes from and a way out.

A graph is safe if its key determines what it compiles to. The conditions are torch's own
(``torch/_functorch/_aot_autograd/autograd_cache.py``: ``check_cacheable``, ``check_node_safe``;
``torch/_inductor/codecache.py``: ``CacheabilityValidator``), which stop at the first that fails,
and some that torch does not have:

* the graphs inside of a graph (checkpointed regions, branches, custom autograd functions) are
  checked like the outermost one;
* a function of a C extension is no more known than one in Python (pytorch #194658);
* a module that Dynamo was told not to look into (``allow_in_graph``) is not known at all.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from s3cache.graph._identity import UnidentifiedError
from s3cache.graph._passes import context_hash, custom_passes, why_unidentified
from s3cache.graph._stable import autograd_words
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from s3cache.torch_api.protocols import Function

__all__ = [
    "Code",
    "Unsafe",
    "also_safe",
    "graph_modules",
    "is_custom_function",
    "unsafe_half",
    "unsafe_parts",
    "unsafe_process",
    "way_out",
]

Code: TypeAlias = Literal[
    "caches-off",  # the process
    "fx-graph-cache-off",
    "freezing",
    "fakify-first-call",
    "constant-folding",
    "bisecting",
    "custom-pass",
    "custom-callable",
    "config",
    "function",  # the graph
    "method",
    "module",
    "higher-order-op",
    "node-kind",
    "checkpoint-context",
    "custom-operator",
    "override",
    "generator",
    "subclass",
    "frozen-parameters",
    "backward-state",  # its inputs
    "input",
    "component",
    "entry",  # what it was compiled to
    "unrecorded",
    "kernel",
    "torch",  # a reason that only torch knows
    "error",  # none at all
]


# Reasons that hold for what a graph is traced into as well: for the second level.
_IN_ANY_FORM: frozenset[Code] = frozenset(
    {
        "caches-off",
        "fx-graph-cache-off",
        "constant-folding",
        "bisecting",
        "custom-pass",
        "config",
        "generator",
        "higher-order-op",
        "input",
        "error",
    }
)


@dataclass(frozen=True, slots=True)
class Unsafe:
    """One reason why a graph cannot be cached.

    Attributes:
        code: the kind of reason, stable over releases.
        message: what is wrong.
        fix: what a user can do about it.
        node: name of the graph's node, or ``""`` for the graph as a whole.
        target: what the node calls, qualified.
        module: the (sub)graph the node is in, ``""`` for the outermost.
        line: of the program, where a report knows it.
    """

    code: Code
    message: str
    fix: str = ""
    node: str = ""
    target: str = ""
    module: str = ""
    line: str = ""

    @property
    def in_any_form(self) -> bool:
        """Whether halves of the graph cannot be cached by themselves either, as far as is known."""
        return self.code in _IN_ANY_FORM

    def __str__(self) -> str:
        where = self.line or f"{self.module}.{self.node}".strip(".")
        return f"{where}: {self.message}" if where else self.message

    def as_dict(self) -> dict[str, str]:
        """All attributes, as plain data."""
        return asdict(self)


def graph_modules(gm: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """``gm`` and all graph modules inside of it, with their names; its own is ``""``."""
    from torch.fx import GraphModule

    for name, module in gm.named_modules():
        if isinstance(module, GraphModule):
            yield name, module


def unsafe_parts(
    gm: GraphModule, registered: Callable[[object], bool], inputs: Iterable[object] = ()
) -> list[Unsafe]:
    """Every reason why the graph module ``gm`` cannot be cached; empty if it can.

    Args:
        registered: whether the user vouched for a function
            (:func:`s3cache.register_cacheable`).
        inputs: what the graph is called with.
    """
    return [
        *_process(),
        *_passes(registered),
        *_graphs(gm, registered),
        *_inputs(inputs),
    ]


def unsafe_process() -> list[Unsafe]:
    """Why nothing at all is cached as a whole in this process, as it is set up now."""
    return [*_process()]


def unsafe_half(gm: GraphModule, registered: Callable[[object], bool]) -> list[Unsafe]:
    """Every reason why ``gm``, which AOTAutograd has traced, cannot be cached by itself.

    torch's own check of it comes first. What was traced names operators and no more, so what code
    they came from does not matter here; nor do values of frozen parameters, which an entry takes
    from the program that it is a hit for.
    """
    judge = _Judge(registered)
    nodes = (judge.graph(module, name) for name, module in graph_modules(gm))
    passes = (each for each in _passes(registered) if each.in_any_form)
    return [*passes, *itertools.chain.from_iterable(nodes)]


# -- the process


def _process() -> Iterator[Unsafe]:
    import torch

    inductor = internals.inductor_config.get()
    if not any(internals.tiers_asked("aot")):
        yield Unsafe(
            "caches-off",
            "torch's caches are switched off",
            "import torch._functorch.config; torch.compiler.config.force_disable_caches = False; "
            "torch._functorch.config.enable_autograd_cache = True",
        )
    if not (inductor.fx_graph_cache or internals.should_use_remote_fx_cache.get()()):
        yield Unsafe(
            "fx-graph-cache-off",
            "torch's FX graph cache is switched off",
            "import torch._inductor.config; torch._inductor.config.fx_graph_cache = True",
        )
    if inductor.freezing and not torch.is_grad_enabled():  # else nothing is frozen
        yield Unsafe(
            "freezing",
            "freezing compiles the values of parameters into the code",
            "import torch._inductor.config; torch._inductor.config.freezing = False",
        )
    if internals.runtime_constant_folding.get():
        yield Unsafe(
            "constant-folding",
            "constants are folded when the code is loaded",
            "import torch._inductor.config; "
            "torch._inductor.config.aot_inductor.use_runtime_constant_folding = False",
        )
    if internals.bisection_enabled.get():
        yield Unsafe("bisecting", "the compiler bisector is at work", "let it finish")


def _passes(registered: Callable[[object], bool]) -> Iterator[Unsafe]:
    """Yield a reason for each of users' passes that has no identity."""
    for option, value in custom_passes():
        for pass_ in value if isinstance(value, (list, tuple)) else [value]:
            why = why_unidentified(option, pass_, _versions(registered))
            if why is not None:
                yield Unsafe(
                    option.code,
                    f"{option.name} is {_qualified(pass_)}, which {why}",
                    _fix(option.fix, pass_),
                    target=_qualified(pass_),
                )


def _fix(otherwise: str, pass_: object) -> str:
    """Return the line that registers a function, or what to do with anything else."""
    if not isinstance(pass_, types.FunctionType):
        return otherwise
    return way_out(pass_, f"with a new version after each change to it; or {otherwise}")


def _versions(registered: Callable[[object], bool]) -> Callable[[object], str | None]:
    """Return versions that tell what is registered from what is not."""
    return lambda function: "" if registered(function) else None


# -- the graph


def _graphs(gm: GraphModule, registered: Callable[[object], bool]) -> Iterator[Unsafe]:
    if internals.has_frozen_params.get()(gm):
        yield Unsafe("frozen-parameters", "the graph holds the values of frozen parameters")
    judge = _Judge(registered)
    for name, module in graph_modules(gm):
        yield from judge.graph(module, name)
        context_fn = (module.meta or {}).get(internals.CHECKPOINT_CONTEXT)
        if context_fn is None:
            continue
        try:
            context_hash(context_fn, _versions(registered))
        except UnidentifiedError as exc:
            yield Unsafe(
                "checkpoint-context",
                f"a selective-checkpoint context_fn has no cache_hash, and {exc}",
                "give context_fn (or the functools.partial) an attribute cache_hash that "
                "changes with what it does",
                target=_qualified(context_fn),
                module=name,
            )


class _Judge:
    """Judges nodes, each thing that they call once: its first node tells of it."""

    def __init__(self, registered: Callable[[object], bool]) -> None:
        self._registered = registered
        self._known: dict[object, bool] = {}
        self._refused: set[object] = set()

    def graph(self, gm: GraphModule, module: str) -> Iterator[Unsafe]:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                yield from self._function(node, module)
            elif node.op == "call_method":
                yield from _method(node, module)
            elif node.op == "call_module":
                yield from self._module(node, gm, module)
            elif node.op not in ("placeholder", "get_attr", "output"):
                yield Unsafe(
                    "node-kind",
                    f"nodes of kind {node.op!r} are not known",
                    "report it",
                    node.name,
                    str(node.target),
                    module,
                )

    def _function(self, node: Node, module: str) -> Iterator[Unsafe]:
        target = node.target
        if node.meta.get(internals.WRAPPED) and node.meta.get(internals.WRAPPED_HASH):
            return
        safe = self._known.get(target)
        if safe is None:
            safe = self._registered(target) or _is_safe_function(target)
            self._known[target] = safe
        if safe or target in self._refused:
            return
        self._refused.add(target)
        if internals.is_higher_order(target):
            yield Unsafe(
                "higher-order-op",
                f"{target} says that it cannot be cached",
                "call it outside of the compiled region",
                node.name,
                str(target),
                module,
            )
            return
        yield Unsafe(
            "function",
            f"calls {_qualified(target)}, which is not known to depend on its inputs alone",
            way_out(target, "if it does"),
            node.name,
            _qualified(target),
            module,
        )

    def _module(self, node: Node, gm: GraphModule, module: str) -> Iterator[Unsafe]:
        import torch

        called = gm.get_submodule(str(node.target))
        kind = type(called)
        if isinstance(called, torch.fx.GraphModule) or kind.__module__.startswith("torch."):
            return
        if not self._registered(kind) and kind not in self._refused:
            self._refused.add(kind)
            yield Unsafe(
                "module",
                f"calls a {_qualified(kind)} as a whole, and nothing tells what its code is",
                way_out(kind, "or let Dynamo trace it"),
                node.name,
                _qualified(kind),
                module,
            )


# Modules whose C functions come with Python or torch, so that versions in the key cover them.
_KNOWN_MODULES = ("torch", "builtins", "math", "cmath", "_operator", "_functools", "itertools")


# Functions that torch's check leaves out. All that they do is in their arguments, which are in the
# graph, and in the key: torch's version, and default dtypes of autocast.
_ALSO_SAFE = (
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    # Sets what the key has, by its arguments; the names of the settings are a constant of torch's.
    "torch.nn.attention._sdpa_kernel",
    "torch.nn.attention._backend_from_string",
    # Makes the context of a custom autograd function while that is traced, and takes nothing.
    "torch.autograd.function.FunctionCtx",
    # Dynamo puts these around what is differentiated forward.
    "torch._functorch.predispatch._enter_dual_level",
    "torch._functorch.predispatch._exit_dual_level",
    "torch._functorch.predispatch._jvp_decrement_nesting",
    "torch._functorch.predispatch._jvp_increment_nesting",
)


def also_safe(gm: GraphModule) -> dict[str, str]:
    """Names of functions in ``gm`` that torch's own check must be told to accept."""
    targets = {
        node.target
        for _, module in graph_modules(gm)
        for node in module.graph.nodes
        if node.op == "call_function"
    }
    return {internals.name_of(target): "" for target in targets if _is_also_safe(target)}


def is_custom_function(target: object) -> bool:
    """Whether ``target`` is the operator that stands for a custom ``autograd.Function``.

    It has no code of its own: Dynamo has traced ``forward`` and ``backward`` into graphs inside of
    the graph, and passes on what the context was told, in words: which outputs have no derivative,
    which inputs are written to, what is saved. AOTAutograd runs those graphs, and sees no more of
    the user's class. All of it is in the key with the graph, and checked with it.
    """
    return target is internals.custom_function.get()


def _is_also_safe(target: object) -> bool:
    if autograd_words(target) is not None:  # the words are in the key
        return True
    if is_custom_function(target):
        return True
    return internals.name_of(target) in _ALSO_SAFE


def _is_safe_function(target: Function[object] | str) -> bool:
    if isinstance(target, types.BuiltinFunctionType):
        home = str(getattr(target, "__module__", None) or type(target.__self__).__module__)
        return home.partition(".")[0] in _KNOWN_MODULES
    return _is_also_safe(target) or _is_known_to_torch(target)


def _is_known_to_torch(target: object) -> bool:
    """torch's own judgement, one function at a time: its rules are long, and change."""
    from torch.fx import Graph

    try:
        internals.check_node_safe.get()(
            Graph().create_node("call_function", cast("Function[object]", target))
        )
    except (internals.bypass_error.get(), AttributeError, AssertionError):
        return False
    return True


def _method(node: Node, module: str) -> Iterator[Unsafe]:
    subject = node.args[0] if node.args else None
    meta = getattr(subject, "meta", ())
    if "example_value" not in meta and "val" not in meta:
        message = f"calls method {node.target!r} of something that is no tensor"
    elif not isinstance(node.target, str) and type(node.target).__name__ != "method_descriptor":
        message = f"calls {node.target!r}, which is no method of tensors"
    else:
        return
    fix = "call it outside of the compiled region"
    yield Unsafe("method", message, fix, node.name, str(node.target), module)


# -- its inputs


def _inputs(inputs: Iterable[object]) -> Iterator[Unsafe]:
    from torch import Tensor

    backward_state = internals.backward_state.get()
    for index, value in enumerate(inputs):
        if isinstance(value, backward_state):
            yield Unsafe(
                "backward-state",
                "carries hooks over to the backward pass (compiled autograd)",
                "register hooks outside of the compiled region",
                node=f"input {index}",
            )
        elif isinstance(value, Tensor) and value.is_mkldnn:
            yield Unsafe(
                "input",
                "is a tensor in mkldnn's own layout",
                "convert it with to_dense()",
                node=f"input {index}",
            )


def way_out(target: object, condition: str = "if it depends on its inputs alone") -> str:
    """The lines of Python by which a user vouches for ``target``, to be pasted."""
    module = str(getattr(target, "__module__", None) or "")
    name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", ""))
    if module.startswith(internals.COMPILED_AUTOGRAD):
        return (
            "go backward outside of compiled autograd there: torch makes this function as it "
            "captures the backward pass, and nothing can vouch for it"
        )
    if module.startswith("torch.") and "<locals>" in name:
        return (
            "call a custom operator or plain functions there instead: torch makes this one anew "
            "for each call of what allow_in_graph or nonstrict_trace keeps from it"
        )
    if not module or not name:  # an object
        return way_out(type(target), condition)
    found = _found(module, name)
    wraps = hasattr(target, "__wrapped__") and found is not target
    if wraps and isinstance(target, types.FunctionType):
        # functools.wraps gave it the names of what it stands in front of.
        module, name = str(target.__globals__.get("__name__")), target.__code__.co_name
        found = _found(module, name)
    if module == "__main__":  # no other module can import it from there
        imported, where = "import s3cache", ""
    else:
        imported, where = f"import s3cache, {module}", f"{module}."
    plain = name.rpartition(".")[2]
    plain = plain if plain.isidentifier() else "your_function"
    at = name if found is target else plain
    register = f"{imported}; s3cache.register_cacheable({where}{at}, version='1')  # {condition}"
    if found is target:
        return register
    return f"define {plain} at the top of {module}, then: {register}"


def _found(module: str, name: str) -> object:
    """Return what a module that is imported has by a qualified name, if anything."""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _qualified(target: object) -> str:
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:  # an object: its type says more than an address would
        target = type(target)
        name = target.__qualname__
    return f"{getattr(target, '__module__', None)}.{name}"
