"""May a graph be cached? All reasons why not, each with the node it comes from and a way out.

A graph is safe if its key determines what it compiles to. The conditions are torch's own
(``torch/_functorch/_aot_autograd/autograd_cache.py``: ``check_cacheable``, ``check_node_safe``);
torch stops at the first that fails, and is asked as well, so what a newer torch adds is covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["Code", "Unsafe", "unsafe_parts"]

Code: TypeAlias = Literal[
    "freezing",
    "fx-graph-cache-off",
    "fakify-first-call",
    "function",
    "method",
    "higher-order-op",
    "node-kind",
    "checkpoint-context",
    "custom-callable",
    "torch",
]


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
    """

    code: Code
    message: str
    fix: str
    node: str = ""
    target: str = ""
    module: str = ""

    def __str__(self) -> str:
        where = f"{self.module}.{self.node}".strip(".")
        return f"{where}: {self.message}" if where else self.message


def unsafe_parts(gm: Any, registered: Callable[[Any], bool]) -> list[Unsafe]:
    """Every reason why the graph module ``gm`` cannot be cached; empty if it can.

    Args:
        registered: whether the user vouched for a function
            (:func:`s3cache.register_cacheable`).
    """
    return [*_conditions(), *_nodes(gm, "", registered), *_contexts(gm), *_callables()]


def _conditions() -> Iterator[Unsafe]:
    import torch
    from torch._inductor.utils import should_use_remote_fx_graph_cache

    inductor = torch._inductor.config
    if inductor.freezing:
        yield Unsafe(
            "freezing",
            "freezing compiles the values of parameters into the code",
            "unset torch._inductor.config.freezing",
        )
    if not (inductor.fx_graph_cache or should_use_remote_fx_graph_cache()):
        yield Unsafe(
            "fx-graph-cache-off",
            "torch's FX graph cache is switched off",
            "set torch._inductor.config.fx_graph_cache = True",
        )
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fakify_first_call:
        yield Unsafe(
            "fakify-first-call",
            "the first call runs on fake tensors (fakify_first_call)",
            "DDPOptimizer sets it; set torch._dynamo.config.optimize_ddp = False",
        )


def _nodes(gm: Any, module: str, registered: Callable[[Any], bool]) -> Iterator[Unsafe]:
    for node in gm.graph.nodes:
        if node.op == "call_function":
            yield from _function(node, module, registered)
        elif node.op == "call_method":
            yield from _method(node, module)
        elif node.op not in ("placeholder", "get_attr", "call_module", "output"):
            yield Unsafe(
                "node-kind", f"nodes of kind {node.op!r} are not known", "report it", node.name
            )
    for name in ("saved_tensors_hooks_pack_0", "saved_tensors_hooks_unpack_0"):
        if hasattr(gm, name):
            yield from _nodes(getattr(gm, name), f"{module}.{name}".strip("."), registered)


def _function(node: Any, module: str, registered: Callable[[Any], bool]) -> Iterator[Unsafe]:
    import torch

    target = node.target
    if node.meta and node.meta.get("is_wrapped", False) and node.meta.get("user_cache_hash"):
        return
    if isinstance(target, torch._ops.HigherOrderOperator):
        if not target.cacheable():
            yield Unsafe(
                "higher-order-op",
                f"{target} says that it cannot be cached",
                "call it outside of the compiled region",
                node.name,
                str(target),
                module,
            )
    elif not (_is_safe_function(target) or registered(target)):
        yield Unsafe(
            "function",
            f"calls {_qualified(target)}, which torch does not know to depend on its inputs alone",
            "if it does: s3cache.register_cacheable(function, version=...)",
            node.name,
            _qualified(target),
            module,
        )


def _is_safe_function(target: Any) -> bool:
    import torch
    from torch._functorch._aot_autograd import autograd_cache
    from torch.fx import Graph

    # torch's own judgement, one node at a time: its rules are long, and change.
    probe = Graph().call_function(target)
    try:
        autograd_cache.check_node_safe(probe)
    except (autograd_cache.BypassAOTAutogradCache, AttributeError, AssertionError):
        return False
    return not isinstance(target, torch._ops.HigherOrderOperator)


def _method(node: Any, module: str) -> Iterator[Unsafe]:
    subject = node.args[0] if node.args else None
    if "example_value" not in getattr(subject, "meta", ()):
        yield Unsafe(
            "method",
            f"calls method {node.target!r} of something that is no tensor",
            "call it outside of the compiled region",
            node.name,
            str(node.target),
            module,
        )
    elif not isinstance(node.target, str) and type(node.target).__name__ != "method_descriptor":
        yield Unsafe(
            "method",
            f"calls {node.target!r}, which is no method of tensors",
            "call it outside of the compiled region",
            node.name,
            str(node.target),
            module,
        )


def _contexts(gm: Any) -> Iterator[Unsafe]:
    import torch

    for name, module in gm.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            context_fn = (module.meta or {}).get("_checkpoint_context_fn")
            if context_fn is not None and getattr(context_fn, "cache_hash", None) is None:
                yield Unsafe(
                    "checkpoint-context",
                    "a selective-checkpoint context_fn has no cache_hash",
                    "give context_fn (or the functools.partial) an attribute cache_hash that "
                    "changes with what it does",
                    target=_qualified(context_fn),
                    module=name,
                )


def _callables() -> Iterator[Unsafe]:
    import torch
    from torch._functorch._aot_autograd import autograd_cache

    probe = getattr(autograd_cache, "_get_custom_estimator_solver_uuids", None)
    if probe is None:
        return
    try:
        probe(torch._functorch.config)
    except autograd_cache.BypassAOTAutogradCache as exc:
        yield Unsafe("custom-callable", str(exc), "give it a uuid() as torch asks")


def _qualified(target: Any) -> str:
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if name else repr(target)
