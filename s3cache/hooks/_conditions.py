"""Conditions of compiled code beyond its key: stored with the entry, checked on a hit.

While torch compiles, it learns more about a program than its key says. It makes Dynamo guard some
of these facts: that two inputs are one tensor, or overlap in one storage. It writes absolute
offsets in storages into the code, and lowers a backward under the current settings. A hit skips all
of this. So we store the facts as plain data on torch's own result. They are saved wherever torch
saves it: in our entry, in torch's directory, in the artifacts of
``torch.compiler.save_cache_artifacts``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypedDict, cast

from s3cache.artifact import CONDITIONS
from s3cache.errors import CorruptError
from s3cache.graph import Code, settings_digest, storage_offsets
from s3cache.hooks._recompile import new_trace
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Tracer
    from torch.fx.node import Argument, Target
    from torch.nn import Module

    from s3cache.hooks._keys import CompileState
    from s3cache.torch_api.protocols import (
        AOTResult,
        BackwardModule,
        CompiledGraph,
        Function,
    )

logger = logger_of("lookups")

_SYMBOL = re.compile(r"\w+")
_LOCAL = re.compile(r"L\['(\w+)'\]")  # a variable of the function that is compiled


class Conditions(TypedDict):
    """Plain data, pickled with torch's entry.

    ``guards`` are AOTAutograd's guards: the kind, and the indices of the inputs. ``sizes`` are
    conditions on sizes that torch's entry leaves out, because some sizes are not inputs (such
    as that of a storage): expressions, with their symbols and sources. ``places`` are the offsets
    of inputs in their storages; nil if the code does not depend on them. ``lowered`` is a digest of
    the settings under which the backward was lowered, if that was at its first call and not with
    the forward. ``of_threads`` says whether they include the number of threads.
    """

    guards: list[tuple[str, list[int], list[int]]]
    sizes: list[tuple[str, dict[str, str]]]
    places: str | None
    lowered: str | None
    of_threads: bool


#: The attribute of torch's results with the limits of their code, and their field in an entry.
LIMITS, LIMITS_FIELD = "s3cache_place", "place"


class NotSharableError(Exception):
    """A compiled graph cannot be saved: an entry cannot express it, or not its conditions."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code


# -- on a hit


def conditions_of(entry: object) -> Conditions | None:
    """Return the conditions of the code in ``entry``; ``None`` if it has none."""
    noted: object = getattr(entry, CONDITIONS, None)
    if noted is None:
        return None
    if not isinstance(noted, Mapping) or set(noted) != set(Conditions.__annotations__):
        raise CorruptError("entry", "has conditions of an unknown kind")
    return cast("Conditions", noted)


def graphs_of(result: object) -> list[CompiledGraph]:
    """Return the graphs in a result of torch that Inductor compiled: itself, or both directions."""
    if isinstance(result, internals.compiled_graph.get()):
        return [result]
    whole = cast("AOTResult", result)
    return [each.result for each in (whole.compiled_fw, whole.compiled_bw) if each is not None]


def described(
    conditions: Conditions | None, limits: Mapping[str, object] = MappingProxyType({})
) -> str | None:
    """Describe what a hit requires beyond torch's own guards; ``None`` if nothing."""
    relied: dict[str, object] = {}
    if conditions is not None:
        relied |= {name: conditions[name] for name in ("guards", "sizes", "places")}
    relied |= limits
    return json.dumps(relied) if any(relied.values()) else None


def misfits(
    conditions: Conditions, inputs: Sequence[object], sources: Sequence[object]
) -> Iterator[str]:
    """Yield the reasons why the code may not be called with ``inputs``, those of a lookup."""
    context = internals.current_tracing_context.get()()
    places = conditions["places"]
    if places is not None and places != (here := storage_offsets(inputs)):
        # Formatted as 2@8/48: the input, its first element, the bytes of the storage.
        yield f"offsets of inputs in storages are {places} in the entry, {here} here"
    for expression, named in conditions["sizes"]:
        text = _SYMBOL.sub(lambda match: as_written(named.get(match[0], match[0])), expression)  # noqa: B023
        if (
            context is None
            or not internals.are_named(context, named)
            or not internals.value_of_symbol(context, expression)
        ):
            yield f"guard `{text}` does not hold"
    for kind, some, others in conditions["guards"]:
        if context is not None and internals.guard_holds(
            context, kind, [inputs[i] for i in some], [inputs[i] for i in others]
        ):
            continue
        names = ", ".join(_input_name(i, sources) for i in (*some, *others))
        yield f"{names} share memory in another way in the entry"


# torch's name for the input size with this number, in the guards of its entries.
_NUMBERED = re.compile(r"L\['t(\d+)'\]")


def failing_guards(expression: str, inputs: Sequence[object]) -> list[str]:
    """Return which of torch's guards on sizes, joined by ``and``, do not hold for ``inputs``."""
    sizes = internals.sizes_among(inputs)
    names = [
        as_written(internals.name_of_size(size) or f"size {i}") for i, size in enumerate(sizes)
    ]
    values = [int(size.node.hint) for size in sizes]  # a hint adds no guard
    failures = []
    for guard in expression.split(" and "):
        if not internals.holds_of_sizes(guard, sizes, values):
            numbers = sorted({int(number) for number in _NUMBERED.findall(guard)})
            text = _NUMBERED.sub(lambda match: names[int(match[1])], guard)
            here = ", ".join(f"{names[number]} is {values[number]}" for number in numbers)
            failures.append(f"guard `{text}` does not hold: {here}")
    return failures


def as_written(source: str) -> str:
    """Return ``L['x'].size()[0]`` as the user would write it: ``x.size()[0]``."""
    return _LOCAL.sub(r"\1", source)


def _input_name(number: int, sources: Sequence[object]) -> str:
    name = internals.name_of_source(sources[number]) if number < len(sources) else None
    return f"input {number}" + (f" ({as_written(name)})" if name else "")


def add_guards(conditions: Conditions, sources: Sequence[object]) -> None:
    """Add the guards that Dynamo had when the entry was compiled, on inputs from ``sources``."""
    if not conditions["guards"] and not conditions["sizes"]:
        return
    context = internals.current_tracing_context.get()()
    if context is None:
        raise CorruptError("entry", "has guards, which cannot be checked here")
    try:
        guards = [
            internals.guard_on(kind, [sources[i] for i in some], [sources[i] for i in others])
            for kind, some, others in conditions["guards"]
        ]
        for expression, _ in conditions["sizes"]:
            internals.guard_on_sizes(context, expression)
    except (IndexError, TypeError, NameError, ValueError, AssertionError) as exc:
        raise CorruptError("entry", f"has guards that fit no input ({exc})") from exc
    context.guards_context.aotautograd_guards.extend(guards)


# -- backwards: those that are lowered late, and those that compiled autograd needs
#
# torch lowers most backwards at their first call, under the settings at that moment: a program
# with strict settings at ``.backward()`` gets a strict backward, even if they were not strict at
# the forward. A key is computed at the forward. So an entry stores a digest of the settings of its
# backward. A hit compares it at the first call of its own backward. If it differs, the backward is
# lowered again at once, from the graph that torch keeps in the entry.


def deserialize_backward(original: Function[object], module: BackwardModule) -> object:
    """Rebuild the graph of a backward from its text, with a tracer that sees every operator.

    Compiled autograd needs the graph of a hit. torch's own tracing of the text sees an operator
    only if one of its direct arguments is a proxy. So it fails on ``expand(x, [6, s0])``. It also
    runs operators without arguments from the graph at once: a backward that draws random numbers
    would use the same numbers in every step.
    """
    if module.args[0].get("_tracer_cls") is not None:
        return original(module)  # not from AOTAutograd: torch's tracer handles it
    return _traced(module)


def settings_of_backward(
    options: Mapping[str, object],
    registered_version: Callable[[object], str | None],
    *,
    of_threads: bool,
) -> str | None:
    """Return a digest of the settings under which torch would lower a backward now.

    ``options`` are those of the program for the compile of its forward.
    """
    inductor = internals.inductor_config.get()
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor.patch(**options))
        if inductor.cpp_wrapper:
            stack.enter_context(inductor.patch(**internals.cpp_wrapper_options.get()()))
        return settings_digest(of_threads=of_threads, registered_version=registered_version)


def attach_backward(
    entry: AOTResult,
    conditions: Conditions,
    state: CompileState,
    registered_version: Callable[[object], str | None],
    as_before: Callable[[], bool] | None = None,
) -> None:
    """Make the callable of ``entry`` compare the settings at its first backward."""
    compiled, metadata = entry.compiled_bw, entry.runtime_metadata
    if compiled is None or conditions["lowered"] is None:
        return
    module = entry.serialized_bw_module
    options, compiler = dict(state.options), state.backward_compiler  # of the forward's compile
    # Inputs with memory that the code reuses. torch does not reuse it if the graph is kept for
    # another backward; it decides that before the first call.
    donated = metadata.bw_donated_idxs
    if donated:
        metadata.bw_donated_idxs = []

    def settings() -> str | None:
        return settings_of_backward(
            options, registered_version, of_threads=conditions["of_threads"]
        )

    def choose(lowered: Function[object], args: Sequence[object]) -> Function[object]:
        kept = bool(donated) and internals.keeps_graph.get()()
        if not kept:
            metadata.bw_donated_idxs = donated
        try:
            is_same = as_before is not None and as_before()
            if not kept and (is_same or settings() == conditions["lowered"]):
                return lowered
            logger.info("a backward of a hit is lowered again, under the current settings")
            assert compiler is not None
            with new_trace(metadata) as fake:
                return compiler(_as_serialized(module), [fake(value) for value in args])
        except Exception:  # the user's program goes on
            logger.warning(
                "a backward of a hit cannot be lowered again; it runs uncompiled", exc_info=True
            )
            return internals.interpreted(_as_serialized(module))

    load = compiled.post_compile

    def post_compile(*args: object, **kwargs: object) -> object:
        lowered = load(*args, **kwargs)
        chosen: Function[object] | None = None

        def backward(inputs: list[object]) -> object:
            nonlocal chosen
            if chosen is None:
                chosen = choose(lowered, inputs)
            return chosen(inputs)

        return internals.disable_dynamo.get()(
            internals.boxed(backward), reason="do not trace generated backwards pass"
        )

    compiled.post_compile = post_compile


def lower_backward_again(
    entry: AOTResult, compiler: Function[Function[object]] | None, values: Sequence[object]
) -> Function[object]:
    """Lower the backward of ``entry`` for real values; without a compiler, interpret it."""
    module = entry.serialized_bw_module
    if compiler is None:
        return internals.interpreted(_as_serialized(module))
    with new_trace(entry.runtime_metadata) as fake:
        return compiler(_as_serialized(module), [fake(value) for value in values])


def _as_serialized(module: BackwardModule) -> GraphModule:
    found = _traced(module)
    found.graph._tracer_cls = cast("type | None", module.args[0].get("_tracer_cls"))
    return found


def _traced(module: BackwardModule) -> GraphModule:
    body, *rest = module.args
    # In a copy: the program may ask for it more than once.
    traced: GraphModule = module.fn({**body, "_tracer_cls": _every_operator()}, *rest)
    return traced


@functools.cache
def _every_operator() -> type[Tracer]:
    from torch.fx import Tracer
    from torch.overrides import TorchFunctionMode

    class Recording(TorchFunctionMode):
        def __init__(self, tracer: Tracer) -> None:
            super().__init__()
            self._tracer = tracer

        def __torch_function__(
            self,
            func: object,
            types: object,
            args: tuple[Argument, ...] = (),
            kwargs: Mapping[str, Argument] | None = None,
        ) -> object:
            if isinstance(func, internals.operator.get()):
                return self._tracer.create_proxy(
                    "call_function", cast("Target", func), args, {**(kwargs or {})}
                )
            return cast("Function[object]", func)(*args, **(kwargs or {}))

    class EveryOperator(Tracer):
        def trace(
            self, root: Module | Function[object], concrete_args: dict[str, object] | None = None
        ) -> Graph:
            with Recording(self):
                return super().trace(root, concrete_args)

    return EveryOperator
