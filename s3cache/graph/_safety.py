"""Check whether a graph can be cached; find all reasons against it, with nodes and fixes.

A graph is safe if its key determines its compiled code. The conditions are torch's own
(``torch/_functorch/_aot_autograd/autograd_cache.py``: ``check_cacheable``, ``check_node_safe``;
``torch/_inductor/codecache.py``: ``CacheabilityValidator``), which stop at the first failure, and
some more:

* graphs inside a graph (checkpointed regions, branches, custom autograd functions) are checked like
  the outermost graph;
* a function of a C extension is as unknown as one in Python (pytorch #194658);
* a module that Dynamo does not look into (``allow_in_graph``) is unknown.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

from s3cache.graph import _describe as describe
from s3cache.graph._describe import (
    RegisteredVersion,
    UnidentifiedError,
    graph_modules,
    identity,
    qualified_name,
)
from s3cache.graph._overrides import overrides
from s3cache.graph._results import OUTSIDE, BypassReason, Code, suggested_fix
from s3cache.graph._user_code import context_hash, custom_operators, subclasses
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from s3cache.torch_api.protocols import Config, CustomPass, Function


def bypass_reasons(
    gm: GraphModule, inputs: Sequence[object], registered_version: RegisteredVersion
) -> list[BypassReason]:
    """Return all reasons in the nodes or the process why a whole graph has no key.

    Further reasons are found when the key is computed.
    """
    reasons = [*process_bypass_reasons(), *pass_reasons(registered_version)]
    if internals.has_frozen_params.get()(gm):
        message = "the graph contains the values of frozen parameters"
        reasons.append(BypassReason("frozen-parameters", message))
    reasons += node_reasons(gm, registered_version)
    for name, module in graph_modules(gm):
        context_fn = (module.meta or {}).get(internals.CHECKPOINT_CONTEXT)
        try:
            if context_fn is not None:
                context_hash(context_fn, registered_version)
        except UnidentifiedError as exc:
            message = f"a selective-checkpoint context_fn has no cache_hash, and {exc}"
            fix = (
                "give context_fn (or the functools.partial) an attribute cache_hash that "
                "changes with what it does"
            )
            target = qualified_name(context_fn)
            code: Code = "checkpoint-context"
            reasons.append(BypassReason(code, message, fix, target=target, module=name))
    reasons += _input_reasons(inputs)
    if reasons:
        with contextlib.suppress(Exception):
            for finding in (
                custom_operators(gm, registered_version),
                subclasses(gm, inputs, registered_version),
                overrides(registered_version),
            ):
                reasons += finding if isinstance(finding, list) else []
    return reasons


def fx_bypass_reasons(gm: GraphModule, registered_version: RegisteredVersion) -> list[BypassReason]:
    """Return all reasons why ``gm``, an FX graph traced by AOTAutograd, cannot be cached by itself.

    torch's own check runs before. A traced graph only has operators, so the code behind them does
    not matter here. Nor do values of frozen parameters: on a hit they come from the program.
    """
    reasons = [reason for reason in pass_reasons(registered_version) if reason.blocks_fx_level]
    return [*reasons, *node_reasons(gm, registered_version)]


# -- the process


def process_bypass_reasons() -> Iterator[BypassReason]:
    """Yield the reasons in the current settings why this process caches no whole graph."""
    import torch

    inductor = "import torch._inductor.config; torch._inductor.config"
    if not any(internals.tiers_asked("aot")):
        fix = (
            "import torch._functorch.config; torch.compiler.config.force_disable_caches = False; "
            "torch._functorch.config.enable_autograd_cache = True"
        )
        yield BypassReason("caches-off", "torch's caches are switched off", fix)
    if not internals.asks_fx_cache():
        fix = f"{inductor}.fx_graph_cache = True"
        yield BypassReason("fx-graph-cache-off", "torch's FX graph cache is switched off", fix)
    if internals.inductor_config.get().freezing and not torch.is_grad_enabled():
        message = "freezing compiles the values of parameters into the code"
        yield BypassReason("freezing", message, f"{inductor}.freezing = False")
    if internals.runtime_constant_folding.get():
        fix = f"{inductor}.aot_inductor.use_runtime_constant_folding = False"
        yield BypassReason("constant-folding", "constants are folded when the code is loaded", fix)
    if internals.bisection_enabled.get():
        yield BypassReason("bisecting", "the compiler bisector is running", "let it finish")


# -- the graph

# Of a node: the code of the reason, the message, the fix, and the name of its target.
_Found: TypeAlias = "tuple[Code, str, str, str] | None"


def node_reasons(gm: GraphModule, registered_version: RegisteredVersion) -> Iterator[BypassReason]:
    """Yield the reasons in the nodes of ``gm``, and of all graphs inside it.

    Each function and module is reported once, at its first node.
    """
    seen: set[object] = set()

    def is_known(target: object) -> bool:
        if target in seen:
            return True
        seen.add(target)
        return registered_version(target) is not None

    for name, module in graph_modules(gm):
        for node in module.graph.nodes:
            finding: _Found = None
            if node.op == "call_function":
                is_hashed = node.meta.get(internals.WRAPPED) and node.meta.get(
                    internals.WRAPPED_HASH
                )
                finding = None if is_hashed or is_known(node.target) else _function(node.target)
            elif node.op == "call_method":
                finding = _method(node)
            elif node.op == "call_module":
                kind = type(module.get_submodule(str(node.target)))
                finding = None if is_known(kind) else _module(kind)
            elif node.op not in ("placeholder", "get_attr", "output"):
                message = f"nodes of kind {node.op!r} are not known"
                finding = "node-kind", message, "report it", str(node.target)
            if finding is not None:
                code, message, fix, target = finding
                yield BypassReason(code, message, fix, node.name, target, name)


def _function(target: Function[object] | str) -> _Found:
    if _is_safe_function(target):
        return None
    if internals.kind_of_operator(target) == "higher-order":
        return "higher-order-op", f"{target} says that it cannot be cached", OUTSIDE, str(target)
    name = qualified_name(target)
    message = f"calls {name}, which is not known to depend on its inputs alone"
    return "function", message, suggested_fix(target, "if it does"), name


def _module(kind: type) -> _Found:
    from torch.fx import GraphModule

    if issubclass(kind, GraphModule) or kind.__module__.startswith("torch."):
        return None
    name = qualified_name(kind)
    message = f"calls a {name} as a whole, and its code has no identity"
    return "module", message, suggested_fix(kind, "or let Dynamo trace it"), name


def _method(node: Node) -> _Found:
    subject = node.args[0] if node.args else None
    meta = getattr(subject, "meta", ())
    if "example_value" not in meta and "val" not in meta:
        message = (
            f"calls {node.target}() on the result of {subject}, which may not be a tensor: torch "
            "does not describe the numbers of tolist() in a graph"
        )
        fix = "read each number by itself, as in x[0].item(), or outside of the compiled region"
        return "method", message, fix, str(node.target)
    if not isinstance(node.target, str) and type(node.target).__name__ != "method_descriptor":
        message = f"calls {node.target!r}, which is not a method of tensors"
        return "method", message, OUTSIDE, str(node.target)
    return None


# Modules with C functions of Python or torch: versions in the key cover them.
_KNOWN_MODULES = ("torch", "builtins", "math", "cmath", "_operator", "_functools", "itertools")


# Functions that torch's check refuses, but that depend only on their arguments, which are in the
# graph, and on parts of the key: torch's version, and default dtypes of autocast.
_ALSO_SAFE = (
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    # Sets options that are in the key, by its arguments; the names of options are a constant.
    "torch.nn.attention._sdpa_kernel",
    "torch.nn.attention._backend_from_string",
    # Makes the context of a custom autograd function during its trace; has no arguments.
    "torch.autograd.function.FunctionCtx",
    # Dynamo puts these around forward-mode differentiation.
    *(f"torch._functorch.predispatch._{verb}_dual_level" for verb in ("enter", "exit")),
    *(f"torch._functorch.predispatch._jvp_{verb}_nesting" for verb in ("decrement", "increment")),
)


def extra_cacheable_functions(gm: GraphModule) -> dict[str, str]:
    """Return names of safe functions in ``gm`` that torch's own check refuses."""
    targets = {node.target for node in describe.call_nodes(gm)}
    return {internals.name_of(target): "" for target in targets if _is_also_safe(target)}


def is_custom_function(target: object) -> bool:
    """Return whether ``target`` is the operator for a custom ``autograd.Function``.

    It has no code of its own: Dynamo has traced ``forward`` and ``backward`` into inner graphs,
    which are checked and in the key, like the values that the context was given.
    """
    return target is internals.custom_function.get()


def _is_also_safe(target: object) -> bool:
    return (
        describe.autograd_function_text(target) is not None  # the text is in the key
        or is_custom_function(target)
        or internals.name_of(target) in _ALSO_SAFE
    )


def _is_safe_function(target: Function[object] | str) -> bool:
    from torch.fx import Graph

    if isinstance(target, types.BuiltinFunctionType):
        module = str(getattr(target, "__module__", None) or type(target.__self__).__module__)
        return module.partition(".")[0] in _KNOWN_MODULES
    if _is_also_safe(target):
        return True
    try:  # torch's own check of a node: its rules are long, and change
        node = Graph().create_node("call_function", cast("Function[object]", target))
        internals.check_node_safe.get()(node)
    except (internals.bypass_error.get(), AttributeError, AssertionError):
        return False
    return True


def _input_reasons(inputs: Iterable[object]) -> Iterator[BypassReason]:
    from torch import Tensor

    backward_state = internals.backward_state.get()
    for index, value in enumerate(inputs):
        if isinstance(value, backward_state):
            message = "carries hooks over to the backward pass (compiled autograd)"
            fix = "register hooks outside of the compiled region"
            yield BypassReason("backward-state", message, fix, f"input {index}")
        elif isinstance(value, Tensor) and value.is_mkldnn:
            message, fix = "is a tensor in mkldnn's own layout", "convert it with to_dense()"
            yield BypassReason("input", message, fix, f"input {index}")


# -- passes over graphs
#
# torch puts the ``uuid()`` of users' passes into its key, and bypasses if a pass has none. We use
# their identity instead, if they have one. Passes that run before a graph is lowered take part in
# tracing: at the second level they need no identity.


class _Option(NamedTuple):
    """An option of torch for user code."""

    config: Config
    name: str
    kind: type[CustomPass] | None  # the base class of code with a uuid()
    code: Literal["custom-pass", "custom-callable"] = "custom-pass"  # generates code, or traces

    @property
    def passes(self) -> list[object]:
        value = getattr(self.config, self.name)
        return [*value] if isinstance(value, (list, tuple)) else [value]


def _options() -> Iterator[_Option]:
    """Yield the options that are set to user code."""
    inductor, functorch = internals.inductor_config.get(), internals.functorch_config.get()
    graphs, nodes = internals.custom_graph_pass.get(), internals.custom_scheduler_pass.find()
    partitioner, estimator = internals.custom_partitioner.get(), internals.custom_estimator.get()
    budget = "activation_memory_budget"
    options = [
        _Option(inductor, "post_grad_custom_pre_pass", graphs),
        _Option(inductor, "post_grad_custom_post_pass", graphs),
        _Option(inductor, "joint_custom_pre_pass", graphs, "custom-callable"),
        _Option(inductor, "joint_custom_post_pass", graphs, "custom-callable"),
        _Option(inductor, "_pre_fusion_custom_pass", nodes),
        _Option(inductor, "_post_fusion_custom_pass", nodes),
        _Option(inductor, "_fuse_ddp_communication_passes", graphs),
        _Option(inductor, "custom_partitioner_fn", partitioner, "custom-callable"),
        # torch neither puts this option into its key nor refuses it.
        _Option(functorch, "joint_custom_pass", graphs, "custom-callable"),
        _Option(functorch, f"{budget}_solver", internals.custom_solver.get(), "custom-callable"),
        _Option(functorch, f"{budget}_runtime_estimator", estimator, "custom-callable"),
    ]
    if internals.pre_grad_pass_timing.find() == "late":  # otherwise they have run on this graph
        options.append(_Option(inductor, "pre_grad_custom_pass", graphs, "custom-callable"))
    return (option for option in options if any(map(_is_of_user, option.passes)))


def _is_of_user(pass_: object) -> bool:
    return bool(pass_) and not isinstance(pass_, str)  # torch's own passes have names


def pass_reasons(registered_version: RegisteredVersion) -> Iterator[BypassReason]:
    """Yield a reason for each user pass without an identity."""
    for option in _options():
        for pass_ in filter(_is_of_user, option.passes):
            try:
                if option.kind is None:
                    raise UnidentifiedError("has no uuid()")
                if not isinstance(pass_, option.kind):
                    identity(pass_, registered_version)
                elif not pass_.uuid():
                    raise UnidentifiedError("has an empty uuid()")
            except UnidentifiedError as exc:
                why = f"has no uuid(), and {exc}" if exc.about is not None else str(exc)
                fix = "use a later torch"
                if option.kind is not None:
                    base = f"{option.kind.__module__}.{option.kind.__name__}"
                    fix = f"derive it from {base} and give it a uuid()"
                if isinstance(pass_, types.FunctionType):
                    condition = f"with a new version after each change to it; or {fix}"
                    fix = suggested_fix(pass_, condition)
                name = qualified_name(pass_)
                message = f"{option.name} is {name}, which {why}"
                yield BypassReason(option.code, message, fix, target=name)


@contextlib.contextmanager
def described_passes(
    registered_version: RegisteredVersion = lambda _: None, *, traced: bool = False
) -> Iterator[None]:
    """Give user passes a ``uuid()`` for torch while the block runs.

    If a key covers the ``traced`` graph, passes that took part in tracing need no identity.
    """
    with contextlib.ExitStack() as stack:
        for option in _options():
            if option.kind is None:
                continue
            value = getattr(option.config, option.name)
            is_done = traced and option.code == "custom-callable"
            passes = [
                _with_uuid(option.kind, pass_, registered_version, is_done=is_done)
                for pass_ in option.passes
            ]
            given = type(value)(passes) if isinstance(value, (list, tuple)) else passes[0]
            stack.enter_context(option.config.patch(**{option.name: given}))
        yield


def _with_uuid(
    kind: type[CustomPass], pass_: object, registered_version: RegisteredVersion, *, is_done: bool
) -> object:
    if isinstance(pass_, (kind, str)):
        return pass_
    try:
        name = identity(pass_, registered_version)
    except UnidentifiedError:
        if not is_done:
            return pass_
        name = "traced"

    def call(_: object, *args: object, **kwargs: object) -> object:
        return cast("Function[object]", pass_)(*args, **kwargs)

    members = {"__call__": call, "uuid": lambda _: name}
    members["__reduce__"] = lambda _: (str, (name,))  # torch's key pickles it with other options
    return type(kind.__name__, (kind,), members)()
