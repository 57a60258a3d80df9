"""Dynamo's guards of a frame: as plain data, checked before a trace, and built again."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from s3cache.features.recall import names
from s3cache.features.recall.candidate import Candidate
from s3cache.features.recall.content import is_whole, metadata_text
from s3cache.features.recall.sources import OWN_BUILTINS, Plain, RefusedError, Sources
from s3cache.graph import PLAIN_KINDS

#: Builds torch's own guards for the variables of a call; returns None if they fail.
Builder: TypeAlias = Callable[[dict[str, object]], Any]

# Guards that can be checked before a trace, by the functions that make them. The second set is
# checked by its first argument, if it has one; the third is about the process.
_BY_CONTENT = frozenset(
    """
    TYPE_MATCH BOOL_MATCH NONE_MATCH NOT_NONE_MATCH ID_MATCH EQUALS_MATCH CONSTANT_MATCH
    CONSTANT_SUBCLASS_MATCH FUNCTION_MATCH CLASS_MATCH MODULE_MATCH CLOSURE_MATCH
    BUILTIN_MATCH SEQUENCE_LENGTH MAPPING_KEYS_CHECK DICT_KEYS_MATCH
    EMPTY_NN_MODULE_HOOKS_DICT TENSOR_MATCH DISPATCH_KEY_SET_MATCH DTENSOR_SPEC_MATCH
    FAKE_SCRIPT_TYPE_MATCH OPAQUE_OBJ_GUARD_FN_MATCH
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
BY_ARGUMENT: Final[Mapping[str, Callable[[Any, Any], object]]] = {
    "HASATTR": hasattr,
    "NOT_PRESENT_IN_GENERIC_DICT": lambda value, name: name in getattr(value, "__dict__", ()),
    "DICT_CONTAINS": lambda value, key: dict.__contains__(value, key),
    "DICT_NOT_CONTAINS": lambda value, key: dict.__contains__(value, key),
    "SET_CONTAINS": lambda value, key: key in value,
    "SET_NOT_CONTAINS": lambda value, key: key in value,
    "DUPLICATE_INPUT": lambda value, other: value is other,
    "TENSOR_SUBCLASS_METADATA_MATCH": lambda value, _: metadata_text(value),
}
OF_PROCESS = frozenset(
    """
    GRAD_MODE DETERMINISTIC_ALGORITHMS FSDP_TRAINING_STATE GLOBAL_STATE
    TORCH_FUNCTION_STATE DEFAULT_DEVICE SHAPE_ENV DUAL_LEVEL FUNCTORCH_STACK_MATCH
    AUTOGRAD_SAVED_TENSORS_HOOKS
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
#: Guards for equality that include elements.
WHOLE: Final = frozenset({"EQUALS_MATCH", "CONSTANT_MATCH", "CONSTANT_SUBCLASS_MATCH"})
_CODE_KINDS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    types.CodeType,
    enum.Enum,
    type,
    type(None),
    bool,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_EXPLAINS = """closure_vars args code_parts verbose_code_parts id_matched_objs global_scope
no_tensor_aliasing_sources"""


def guard_row(guard: Any, sources: Sources) -> Plain:
    """Return a guard as a row of a candidate; raise RefusedError if a trace must come first."""
    create: Any = guard.create_fn
    args: Sequence[object] = ()
    kwargs: Mapping[str, object] = {}
    if isinstance(create, functools.partial):
        create, args, kwargs = create.func, create.args, create.keywords
    kind = create.__name__
    if kind in ("TENSOR_MATCH", "NOT_NONE_MATCH"):
        args, kwargs = (), {}  # the only argument is the tensor at the source
    number = sources.number(guard.originating_source)
    plain = [*map(sources.plain, args)], {k: sources.plain(each) for k, each in kwargs.items()}
    value: object = None
    if kind in BY_ARGUMENT:
        value = check_guard(sources, kind, number, *plain)
    elif kind == "ID_MATCH" and not _has_content(it := sources.at(number)):
        raise RefusedError("guard", f"is guarded by the identity of a {type(it).__qualname__}")
    elif kind not in _BY_CONTENT and kind not in OF_PROCESS:
        raise RefusedError("guard", f"is guarded by {kind}")
    return [kind, number, *plain, value]


def is_of_optimizer(guard: Any) -> bool:
    """Return whether a guard says that an optimizer lives, as the guard on its identity does."""
    name = str(getattr(guard.originating_source, "global_name", ""))
    return guard.create_fn_name() == "WEAKREF_ALIVE" and name.startswith("__optimizer_")


def _has_content(value: object) -> bool:
    """Return whether Dynamo reads no more of an object than its text, or what has a source."""
    import torch

    return (
        isinstance(value, (*_CODE_KINDS, torch.optim.Optimizer))
        or type(value) in PLAIN_KINDS
        or is_whole(value)
        # Only its address matters, to a graph that uses it.
        or getattr(value, names.STATIC_INPUT, None) == "guarded"
    )


def check_guard(
    sources: Sources, kind: str, number: int, args: Sequence[Plain], kwargs: Mapping[str, Plain]
) -> object:
    """Return the result of a guard of ``BY_ARGUMENT``."""
    argument: Any = next(iter([*args, *kwargs.values()]), None)
    is_source = kind == "DUPLICATE_INPUT"
    other = sources.at(argument[1]) if is_source else sources.argument(argument)
    return BY_ARGUMENT[kind](sources.at(number), other)


def build_guards(
    candidate: Candidate,
    sources: Sources,
    code: types.CodeType,
    variables: Mapping[str, object],
    names_: dict[str, object],
    state: object,
) -> Any:
    """Build torch's own guards for the current values."""
    builder, guard, source_of = names.guard_builder.get(), names.guard_class.get(), sources.source

    def make(kind: str, number: int, args: list[Plain], kwargs: dict[str, Plain], _: object) -> Any:
        function = getattr(builder, kind)
        if args or kwargs:
            named = {name: sources.argument(each) for name, each in kwargs.items()}
            function = functools.partial(function, *map(sources.argument, args), **named)
        return guard(source_of(number), function)

    guards = names.ordered_set.get()([make(*row) for row in candidate.guards])
    expressions = names.shape_guards.get()([*candidate.expressions])
    graph = names.guards_state.get()(
        local_scope=dict(variables),
        global_scope=names_,
        torch_function_mode_stack=[],
        guard_on_key_order={*map(source_of, candidate.key_order)},
        input_source_to_sizes_strides={
            source_of(number): {"size": tuple(sizes), "stride": tuple(strides)}
            for number, sizes, strides in candidate.sizes
        },
        dual_level=-1,
        functorch_layers=[],
        current_device=names.current_device.get(),
        global_state_guard=state,
        _guards=names.guard_set.get()(guards),
        _aotautograd_guards=[],
        skip_guards_check=True,
        name_of_builtins_dict_key_in_fglobals=OWN_BUILTINS,
    )
    parts = names.shape_code.get()(expressions, expressions, None, True, [])
    # Outside a compile, no context has the id of a compile.
    context, before = names.compile_context_class.get(), names.initial_state.get()
    with names.compile_context.get()(context(context.current_compile_id())):
        try:
            setattr(*names.initial_state.owner(), before or names.state_guard.get()())
            return names.check_manager.get()(code, graph, shape_code_parts=parts)
        finally:
            setattr(*names.initial_state.owner(), before)


class LateGuards:
    """Guards that are built at their first check.

    ``first`` is called until it returns torch's own guards, which are used from then on. While it
    returns None, the guards fail.
    """

    def __init__(self, first: Builder, names_: dict[str, object]) -> None:
        self.manager = names.guard_manager.get()()
        self._first: Builder | None = first
        self._real: Any = None
        self.manager.root.add_lambda_guard(self._check, ["recalled by s3cache"], None)
        self.manager.verbose_code_parts = []
        self.manager.args, self.manager.closure_vars = [], names.closure_vars.get()()
        self.manager.global_scope = {"G": names_}

    def _check(self, variables: dict[str, object]) -> bool:
        if self._real is None:
            assert self._first is not None
            maker = self._first(variables)
            if maker is None:
                return False
            built = maker.guard_manager
            self._real, self._first = built.root, None
            # torch drops the code when an object is freed that it knows by its address. It finds
            # the code through these guards, in which it clears freed objects.
            maker.guard_manager = self.manager
            # torch uses these attributes to explain why a guard failed.
            for name in _EXPLAINS.split():
                setattr(self.manager, name, getattr(built, name))
            self.kept = self.manager.root
            self.manager.root = built.root
        return bool(self._real.check(variables))
