"""Third-party code that takes part in tracing or compiling a graph.

A graph only has the name of an operator. Its fake implementation, its backward formula, its rules
for vmap and autocast, and its decomposition are called while the graph is traced. Dynamo treats a
tensor subclass as one tensor; AOTAutograd unwraps it, and runs its ``__torch_dispatch__``. A user's
backend passes compilers and decompositions to Inductor as arguments. Graphs and torch's keys
contain none of these.

The functions here return the component of the key for such code, or a reason for each piece of it
without a registered version: then the graph is shared at the second level only, where the traced
graph is in the key.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import _s3cache_process
from s3cache.graph import _origin as origins
from s3cache.graph._describe import (
    RegisteredVersion,
    UnidentifiedError,
    autograd_function_text,
    call_nodes,
    graph_modules,
    identity,
    qualified_name,
)
from s3cache.graph._origin import is_third_party_rule, is_torch_operator, origin_of
from s3cache.graph._results import BypassReason, Code, Finding, fix_or, suggested_fix
from s3cache.torch_api import internals
from s3cache.util.snapshot import ABSENT, CALLS, content_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import Operator


def registered_versions(gm: GraphModule, registered_version: RegisteredVersion) -> str:
    """Return the registered versions of the functions and operators that ``gm`` calls."""
    called = [*(type(module) for module in gm.modules()), *(n.target for n in call_nodes(gm))]
    versions = {
        f"{internals.name_of(target)}={version}"
        for target in called
        if (version := registered_version(target)) is not None
    }
    return " ".join(sorted(versions))


# -- custom operators

# Dispatch keys of kernels that run with the graph. Kernels under other keys are called while the
# graph is traced.
_AT_RUN_TIME = re.compile(
    r"debug|((Sparse|SparseCsr|Nested\w*?|Quantized)?"
    r"(CPU|CUDA|HIP|XPU|MPS|MTIA|HPU|PrivateUse1))(\[alias\])?"
)
_FIX = (
    "import s3cache, torch; s3cache.register_cacheable({}, version='1')  "
    "# if its rules depend on their inputs alone"
)


def custom_operators(gm: GraphModule, registered_version: RegisteredVersion) -> Finding:
    """Return the same as :func:`traced_operators`, or a reason for each operator with a rule."""
    reasons: list[BypassReason] = []
    for operator, node in _operators_in(gm).items():
        rule = next(_rules(operator), None) if registered_version(operator) is None else None
        if rule is not None:
            message = f"calls {operator}, and {rule} is code that takes part in tracing"
            reasons.append(_operator_reason("custom-operator", message, operator, node))
    return reasons or traced_operators(gm, registered_version)


def traced_operators(gm: GraphModule, registered_version: RegisteredVersion) -> str:
    """Return the schema and tags of each custom operator, which Inductor reads, and its version."""
    texts = (
        f"{each._schema} {sorted(map(str, each.tags))} {registered_version(each) or ''}"
        for each in _operators_in(gm)
    )
    return "; ".join(sorted(texts))


def refaked_operators(gm: GraphModule, registered_version: RegisteredVersion) -> Finding:
    """Return the identities of fake implementations that get other inputs than in the trace.

    Inductor calls a fake implementation again while it generates code. The inputs have the layout
    of the trace, unless a tag of the operator or an option of torch lets Inductor choose it.
    """
    texts: list[str] = []
    reasons: list[BypassReason] = []
    for operator, node in _operators_in(gm).items():
        if registered_version(operator) is not None or not internals.has_flexible_layout(operator):
            continue
        definition = internals.custom_operators.get().get(operator.name())
        fake = _fake_of(operator) if definition is None else definition._abstract_fn
        try:
            if fake is None and definition is None:
                raise UnidentifiedError("is not in Python")
            texts.append(f"{operator}: {identity(fake, registered_version)}")
        except UnidentifiedError as exc:
            message = f"Inductor lays out inputs of {operator}, and its fake implementation {exc}"
            reasons.append(_operator_reason("generator", message, operator, node))
    return reasons or "; ".join(sorted(texts))


def _operator_reason(code: Code, message: str, operator: Operator, node: str) -> BypassReason:
    name = str(operator)
    fix = _FIX.format(".".join(("torch", "ops", *name.split(".")[:2])))
    return BypassReason(code, message, fix, node, name)


def _operators_in(gm: GraphModule) -> dict[Operator, str]:
    """Return the operators that torch does not define, with a node that calls them."""
    packet = internals.operator_packet.get()
    callers: dict[Operator, str] = {}
    targets: dict[Operator, str] = {node.target: node.name for node in call_nodes(gm)}
    for target, name in targets.items():
        is_packet = isinstance(target, packet)
        overloads = (
            [getattr(target, each) for each in target.overloads()] if is_packet else [target]
        )
        callers.update((each, name) for each in overloads if origins.is_third_party_operator(each))
    return callers


def _fake_of(operator: Operator) -> object:
    """Return the fake implementation that torch keeps outside of a definition in Python."""
    entry = internals.fake_registry.get().get(operator.name())
    return getattr(entry and entry.fake_impl.kernel, "func", None)


def _rules(operator: Operator) -> Iterator[str]:
    """Yield third-party functions that are called while ``operator`` is traced."""
    name = operator.name()
    definition = internals.custom_operators.get().get(name)
    rules: dict[str, object] = {"its fake implementation": _fake_of(operator)}
    if definition is not None:
        rules = {
            "its fake implementation": definition._abstract_fn,
            "its backward formula": definition._backward_fn or definition._setup_context_fn,
            "its vmap rule": definition._vmap_fn,
            "its autocast rule": internals.autocast_dtypes(definition),
            "its rule for a tensor subclass": definition._torch_dispatch_fns,
        }
    yield from (what for what, rule in rules.items() if rule)
    entry = internals.fake_registry.get().get(name)
    if entry is not None and entry.torch_dispatch_rules._data:
        yield "its rule for a tensor subclass"
    if operator in internals.decompositions.get():
        yield "its decomposition"
    for key in operator.py_kernels:
        yield f"its kernel for {key}"
    for key, path in internals.REGISTERED_AT.findall(internals.dispatch_dump.get()(name)):
        # For a definition in Python, torch registers kernels that call the functions above.
        is_torchs = definition is not None and path.startswith(internals.torch_directory())
        if not is_torchs and not _AT_RUN_TIME.fullmatch(key):
            yield f"its kernel for {key}"


# -- kernels for torch's operators
#
# The dispatcher's kernels cannot be read. It only lists the dispatch keys of an operator that have
# a kernel, and the file that registered it. We know a kernel if it was registered while a cache was
# enabled.

_NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".mm")
_DEPTH_OF_FORMULAS = 4


class _Recorded:
    """Kernels that were registered while a cache was enabled, and the results about them."""

    def __init__(self, *, is_complete: bool) -> None:
        self.is_complete = is_complete  # since `import torch`: no earlier kernel was replaced
        self.kernels: dict[str, object] = {}  # by operator and key, in torch's notation
        self.count = 0
        self.paths: dict[str, str] = {}  # of others' files, by kernel that was not recorded
        self.last: tuple[object, dict[str, object]] | None = None


_recorded = _Recorded(is_complete=True)


def record_kernel(where: str, function: object) -> None:
    """Record that ``function`` is registered for an operator and key, in torch's notation."""
    _recorded.kernels[where] = function
    _recorded.count += 1


def forget_kernels() -> None:
    """Forget the records: from now on, replaced kernels are not recorded."""
    global _recorded
    _recorded = _Recorded(is_complete=False)
    CALLS.end()


def replaced_kernels() -> dict[str, object]:
    """Return Python kernels that others registered for torch's own operators.

    By operator and key, in torch's notation: the function if it was recorded, or else the file that
    registered it.
    """
    present = internals.python_kernels.get()
    new = present - _s3cache_process.kernels if _recorded.is_complete else set(present)
    seen = present & _recorded.kernels.keys()
    state = _recorded.count, seen, new
    if _recorded.last is None or _recorded.last[0] != state:
        paths = _recorded.paths
        _recorded.paths = {
            where: paths[where] if where in paths else _path_of_others(where) for where in new
        }
        kernels: dict[str, object] = {}
        for where in sorted(seen | new):
            function = _recorded.kernels.get(where)
            if function is None or not is_third_party_rule(function, _formulas_in(function)):
                function = _recorded.paths.get(where)
            if function and is_torch_operator(_operator_and_key(where)[0]):
                kernels[where] = function
        _recorded.last = state, kernels
    return _recorded.last[1]


def _operator_and_key(where: str) -> tuple[str, str]:
    name, _, key = where.rpartition("/")
    return name.replace("/", "::", 1), key


def _formulas_in(value: object, depth: int = 0) -> Iterator[object]:
    """Yield the functions of a backward formula: torch keeps them in an object in a class."""
    if depth > _DEPTH_OF_FORMULAS or internals.is_operator(value):
        return
    if isinstance(value, types.FunctionType):
        inner = [content_of(cell) for cell in value.__closure__ or ()]
    elif isinstance(value, type):
        inner = [part.__func__ for part in vars(value).values() if isinstance(part, staticmethod)]
    else:
        kinds = types.FunctionType, types.MethodType, partial
        inner = [v for v in getattr(value, "__dict__", {}).values() if isinstance(v, kinds)]
        yield from inner
    for part in inner:
        yield from _formulas_in(part, depth + 1)


def third_party_fakes() -> Iterator[tuple[str, object]]:
    """Yield functions of others that are called instead of torch's during tracing.

    Each comes with the operator and its purpose.
    """
    rules: list[tuple[str, str, object]] = []
    for name, kept in list(internals.fake_registry.get().items()):
        rules.append((name, "on fake tensors", getattr(kept.fake_impl.kernel, "func", None)))
        by_class = kept.torch_dispatch_rules._data.values()
        rules += [(name, "on a class of tensors", rule) for rule in by_class]
    for name, of in list(internals.custom_operators.get().items()):
        functions = of._abstract_fn, of._backward_fn, of._setup_context_fn, of._vmap_fn
        functions += tuple(of._torch_dispatch_fns.values())
        rules += [(name, "on tracing", function) for function in functions]
    for name, purpose, function in rules:
        if function is not None and is_third_party_rule(function) and is_torch_operator(name):
            yield f"{name} {purpose}", function


def _path_of_others(where: str) -> str:
    """Return the file that registers a kernel in Python, or "" if torch does."""
    name, key = _operator_and_key(where)
    for here, path in internals.REGISTERED_AT.findall(internals.dispatch_dump.get()(name)):
        if here.partition("[")[0] != key or path.endswith(_NATIVE):
            continue
        is_torchs = path.startswith(internals.torch_directory())
        if not is_torchs or (name.startswith("aten::") and origins.registers_for_others(path)):
            return str(path)
    return ""


# -- functions


def functions(gm: GraphModule, registered_version: RegisteredVersion) -> Finding:
    """Return the identities of functions with a name that torch's check accepts, but not torch's.

    einops' functions are on torch's list, and count as torch's own. A function with
    ``functools.wraps`` around one of torch's has its name, and does not.
    """
    texts: list[str] = []
    reasons: list[BypassReason] = []
    callers = {
        node.target: node for node in call_nodes(gm) if not node.meta.get(internals.WRAPPED_HASH)
    }
    for function, caller in callers.items():
        if (
            not isinstance(function, types.FunctionType)
            or origins.origin_of_file(function.__code__.co_filename).kind == "torch"
            or registered_version(function) is not None
            or autograd_function_text(function) is not None
        ):
            continue
        name = internals.name_of(function)
        try:
            texts.append(f"{name}: {identity(function, registered_version)}")
        except UnidentifiedError as exc:
            message = f"calls a function with the name {name}, which {exc}"
            fix = suggested_fix(function)
            reasons.append(BypassReason("function", message, fix, caller.name, name))
    return reasons or " ".join(sorted(texts))


# -- tensor subclasses


def subclasses(
    gm: GraphModule, inputs: Iterable[object], registered_version: RegisteredVersion
) -> Finding:
    """Return the names of the tensor subclasses in a graph, and their versions.

    Rules that torch itself temporarily adds to their tables (``loss_parallel()``) are included.
    """
    texts: list[str] = []
    reasons: list[BypassReason] = []
    for kind, (where, carried) in _subclasses_in(gm, inputs).items():
        name, version = f"{kind.__module__}.{kind.__qualname__}", registered_version(kind)
        if version is not None:
            texts.append(f"{name}: version {version}")
            continue
        codes = ["its class"] if origin_of(kind).kind != "torch" else []
        versions = []
        for value in carried.values():
            version = registered_version(value)
            version = registered_version(type(value)) if version is None else version
            if version is None:
                codes.append(f"{qualified_name(value)}, which it carries,")
            versions.append(f"version {version}")
        codes += [f"a rule for {operator}" for operator in operators_with_others_rules(kind)]
        if codes:
            message = f"works on a {name}, and {codes[0]} takes part in tracing"
            reasons.append(BypassReason("subclass", message, suggested_fix(kind), where, name))
            continue
        texts.append(subclass_text(kind, versions))
    return reasons or " ".join(sorted(texts))


def subclass_text(kind: type, versions: Iterable[str] = ()) -> str:
    """Return the name of a class of tensors with its handlers of operators, and ``versions``."""
    handlers = internals.sharding_handlers(kind)
    words = sorted(f"{operator} {qualified_name(handler)}" for operator, handler in handlers)
    return f"{kind.__module__}.{kind.__qualname__}: {' '.join([*words, *sorted(versions)])}"


def operators_with_others_rules(kind: type) -> list[str]:
    """Return the operators on distributed tensors of a class for which third parties have rules."""
    return [
        str(operator)
        for operator, rule in internals.sharding_rules(kind)
        if is_third_party_rule(rule, (getattr(rule, "func", None),))
    ]


def _subclasses_in(
    gm: GraphModule, inputs: Iterable[object]
) -> dict[type, tuple[str, dict[int, object]]]:
    """Return the tensor classes that run their own code, or carry third-party code.

    Each comes with the place of its first tensor, and the objects that its tensors carry, by id.
    """
    values = [(f"input {index}", value) for index, value in enumerate(inputs)]
    for name, module in graph_modules(gm):
        values += [(f"{name}.{key}".strip("."), value) for key, value in vars(module).items()]
        for node in module.graph.nodes:
            result = node.meta.get("example_value")
            results = result if isinstance(result, (list, tuple)) else (result,)
            values += [(node.name, value) for value in results]
    kinds: dict[type, tuple[str, dict[int, object]]] = {}
    for where, value in values:
        for kind, carried in _kinds(value):
            kinds.setdefault(kind, (where, {}))[1].update((id(each), each) for each in carried)
    return kinds


def _kinds(value: object) -> Iterator[tuple[type, list[object]]]:
    from torch import Tensor, nn

    kind, plain = type(value), (Tensor, nn.Parameter, nn.Buffer, internals.fake_tensor.get())
    if not isinstance(value, Tensor) or kind in plain:
        return
    carried: list[object] = []
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        names, context = flatten()
        for name in names:
            yield from _kinds(getattr(value, name))
        carried = list(_carried(context))
    dispatches = getattr(kind, "__torch_dispatch__", None)
    if carried or dispatches is not Tensor.__torch_dispatch__:
        yield kind, carried


def _carried(context: object) -> Iterator[object]:
    """Yield third-party objects with code that a subclass keeps besides its tensors."""
    if isinstance(context, dict):
        context = [*context.keys(), *context.values()]
    if isinstance(context, (list, tuple, set, frozenset)):
        for item in context:
            yield from _carried(item)
        return
    is_code = isinstance(context, (types.FunctionType, types.MethodType, partial, type))
    if origin_of(context if is_code else type(context)).kind in ("library", "user"):
        yield context


# -- selective checkpointing


def context_hash(context_fn: object, registered_version: RegisteredVersion) -> object:
    """Return the ``cache_hash`` or identity of a ``context_fn``, for keys."""
    own = getattr(context_fn, "cache_hash", None)
    return identity(context_fn, registered_version) if own is None else own


def context_hashes(gm: GraphModule, registered_version: RegisteredVersion) -> list[object]:
    """Return the context hashes of all checkpointed regions of a graph, in order."""
    return [
        context_hash(context_fn, registered_version)
        for module in gm.modules()
        if (context_fn := (getattr(module, "meta", None) or {}).get(internals.CHECKPOINT_CONTEXT))
        is not None
    ]


# -- compilers and decompositions


def compilers_component(
    arguments: Mapping[str, object], registered_version: RegisteredVersion
) -> Finding:
    """Return how the compilers of a graph differ from Inductor; a reason if they are not torch's.

    ``arguments`` has the compilers by name; a dict is a table of decompositions.
    """
    by_inductor = "inner_compile" in arguments
    words = [] if by_inductor or not arguments else ["not by Inductor"]
    for name, value in sorted(arguments.items()):
        text = ""
        try:
            if name == "decompositions":
                text = table_text(cast("Mapping[object, object]", value or {}), registered_version)
            elif not by_inductor or origins.third_party_parts(value):
                text = _identity_of_torchs(value, registered_version)
        except UnidentifiedError as exc:
            fix = fix_or("pass a function that a module defines", exc.about)
            return [BypassReason("custom-callable", f"is compiled by {name}, which {exc}", fix)]
        words += [f"{name}={text}"] if text else []
    return " ".join(words)


def _identity_of_torchs(value: object, registered_version: RegisteredVersion) -> str:
    for part in origins.third_party_parts(value):
        if not isinstance(part, partial) and registered_version(part) is None:
            raise UnidentifiedError("is not torch's", part)
    return identity(value, registered_version)


def table_text(
    table: Mapping[object, object], registered_version: RegisteredVersion = lambda _: None
) -> str:
    """Return how a table of decompositions differs from Inductor's; ``""`` if it does not."""
    usual = internals.usual_decompositions()
    changed = {
        str(name): table.get(name, ABSENT)
        for name in (usual.keys() | table.keys() if table is not usual else ())
        if table.get(name, ABSENT) is not usual.get(name, ABSENT)
    }
    return " ".join(
        f"{name}={_identity_of_torchs(value, registered_version)}"
        for name, value in sorted(changed.items())
    )
