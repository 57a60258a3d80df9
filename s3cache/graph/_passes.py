"""Users' code by which graphs are compiled: passes over them, compilers, decompositions.

torch puts into its key what such code says of itself (``uuid()``, ``cache_hash``), and bypasses
graphs for which it says nothing. Here its :func:`identity` stands for it, if it has one. Code that
runs before a graph is lowered takes part in tracing: it is refused at the first level, and needs no
identity at the second.

A user's backend hands compilers and decompositions to Inductor or to AOTAutograd as arguments, in
place of torch's own; no graph names them, and torch's keys have none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from s3cache.graph._identity import UnidentifiedError, identity
from s3cache.graph._origin import foreign_parts
from s3cache.graph._results import (
    BypassReason,
    Finding,
    RegisteredVersion,
    qualified_name,
    suggested_fix,
)
from s3cache.torch_api import internals
from s3cache.util.snapshot import ABSENT

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import Config, CustomPass


class _Option(NamedTuple):
    """An option of torch that takes users' code.

    Attributes:
        config: the module it is in.
        name: its name there.
        kind: the class of torch from which code that has a ``uuid()`` is derived, if there is one.
        code: of the reason not to cache: ``custom-pass`` for code that generates code, and
            ``custom-callable`` for code that takes part in tracing or partitioning.
    """

    config: Config
    name: str
    kind: type[CustomPass] | None
    code: Literal["custom-pass", "custom-callable"] = "custom-pass"

    @property
    def passes(self) -> list[object]:
        """The user's code that it is set to; names of torch's own passes are left out."""
        value = getattr(self.config, self.name)
        given = value if isinstance(value, (list, tuple)) else [value]
        return [each for each in given if each and not isinstance(each, str)]


def _options() -> Iterator[_Option]:
    """Yield the options that are set to users' code."""
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
        # torch leaves this one out of its key, and does not refuse it either.
        _Option(functorch, "joint_custom_pass", graphs, "custom-callable"),
        _Option(functorch, f"{budget}_solver", internals.custom_solver.get(), "custom-callable"),
        _Option(functorch, f"{budget}_runtime_estimator", estimator, "custom-callable"),
    ]
    if internals.pre_grad_pass_timing.find() == "late":  # others have run on this graph already
        options.append(_Option(inductor, "pre_grad_custom_pass", graphs, "custom-callable"))
    return (option for option in options if option.passes)


def pass_reasons(registered_version: RegisteredVersion) -> Iterator[BypassReason]:
    """Yield a reason for each of users' passes that has no identity."""
    for option in _options():
        for pass_ in option.passes:
            try:
                _pass_identity(option.kind, pass_, registered_version)
            except UnidentifiedError as exc:
                fix = "use a later torch"
                if option.kind is not None:
                    base = f"{option.kind.__module__}.{option.kind.__name__}"
                    fix = f"derive it from {base} and give it a uuid()"
                if isinstance(pass_, FunctionType):
                    condition = f"with a new version after each change to it; or {fix}"
                    fix = suggested_fix(pass_, condition)
                name = qualified_name(pass_)
                message = f"{option.name} is {name}, which {exc}"
                yield BypassReason(option.code, message, fix, target=name)


def _pass_identity(
    kind: type[CustomPass] | None, pass_: object, registered_version: RegisteredVersion
) -> str | None:
    """Return the identity of a pass that torch cannot ask for one; None if it can.

    Raises:
        UnidentifiedError: it has none.
    """
    if kind is None:
        raise UnidentifiedError("has no uuid()", pass_)
    if isinstance(pass_, kind):
        if not pass_.uuid():
            raise UnidentifiedError("has an empty uuid()", pass_)
        return None
    try:
        return identity(pass_, registered_version)
    except UnidentifiedError as exc:
        raise UnidentifiedError(f"has no uuid(), and {exc}", exc.about) from exc


@contextlib.contextmanager
def described_passes(
    registered_version: RegisteredVersion = lambda _: None, *, traced: bool = False
) -> Iterator[None]:
    """Give users' passes a ``uuid()`` while the block runs, for torch to ask for.

    Args:
        traced: whether a key is made that has what was traced. Passes that took part in tracing
            need no identity then.
    """
    with contextlib.ExitStack() as stack:
        for option in _options():
            if option.kind is None:
                continue
            is_done = traced and option.code == "custom-callable"
            value = getattr(option.config, option.name)
            several = value if isinstance(value, (list, tuple)) else [value]
            described: list[object] = [
                _described(option.kind, pass_, registered_version, is_done=is_done)
                for pass_ in several
            ]
            given = type(value)(described) if several is value else described[0]
            stack.enter_context(option.config.patch(**{option.name: given}))
        yield


def _described(
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
        assert callable(pass_)
        return pass_(*args, **kwargs)

    members = {
        "__call__": call,
        "uuid": lambda _: name,
        # It is pickled with options that torch's key has as they are.
        "__reduce__": lambda _: (str, (name,)),
    }
    return type(kind.__name__, (kind,), members)()


# -- selective checkpointing


def context_hash(context_fn: object, registered_version: RegisteredVersion) -> object:
    """Return what stands for a ``context_fn`` in a key: its ``cache_hash``, or its identity.

    Raises:
        UnidentifiedError: it has neither.
    """
    own = getattr(context_fn, "cache_hash", None)
    return identity(context_fn, registered_version) if own is None else own


def context_hashes(gm: GraphModule, registered_version: RegisteredVersion) -> list[object]:
    """Return those of all checkpointed regions of a graph, in its order."""
    return [
        context_hash(context_fn, registered_version)
        for module in gm.modules()
        if (context_fn := (getattr(module, "meta", None) or {}).get(internals.CHECKPOINT_CONTEXT))
        is not None
    ]


# -- compilers and decompositions


def compilers_component(
    given: Mapping[str, object], registered_version: RegisteredVersion
) -> Finding:
    """Return how what compiles a graph differs from Inductor; a reason if it is not torch's.

    Args:
        given: what compiles, by the name of the argument; a dict is a table of decompositions.
    """
    if not given:
        return None
    by_inductor = "inner_compile" in given
    words = [] if by_inductor else ["not by Inductor"]
    for name, value in sorted(given.items()):
        try:
            if name == "decompositions":
                text = table_text(cast("Mapping[object, object]", value or {}), registered_version)
            elif by_inductor and not foreign_parts(value):
                text = ""
            else:
                text = _identity_of_torchs(value, registered_version)
        except UnidentifiedError as exc:
            fix = "give a function that a module defines"
            if hasattr(exc.about, "__qualname__"):
                fix = suggested_fix(exc.about, f"if it depends on its inputs alone; or {fix}")
            return [BypassReason("custom-callable", f"is compiled by {name}, which {exc}", fix)]
        if text:
            words.append(f"{name}={text}")
    return " ".join(words)


def _identity_of_torchs(value: object, registered_version: RegisteredVersion) -> str:
    for part in foreign_parts(value):
        if not isinstance(part, partial) and registered_version(part) is None:
            raise UnidentifiedError("is not torch's", part)
    return identity(value, registered_version)


def table_text(
    table: Mapping[object, object], registered_version: RegisteredVersion = lambda _: None
) -> str:
    """Return how a table of decompositions differs from Inductor's; ``""`` if it does not.

    Raises:
        UnidentifiedError: a decomposition in it is not torch's, and is not registered.
    """
    usual = internals.usual_decompositions()
    if table is usual:
        return ""
    changed = {
        str(name): table.get(name, ABSENT)
        for name in usual.keys() | table.keys()
        if table.get(name, ABSENT) is not usual.get(name, ABSENT)
    }
    return " ".join(
        f"{name}={_identity_of_torchs(value, registered_version)}"
        for name, value in sorted(changed.items())
    )
