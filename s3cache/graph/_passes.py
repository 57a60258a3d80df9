"""Users' code by which graphs are compiled: passes over them, compilers, decompositions.

torch puts into its key what such code says of itself (``uuid()``, ``cache_hash``), and bypasses
graphs for which it says nothing. Here its :func:`identity` stands for it, if it has one. Code that
runs before a graph is lowered takes part in tracing: it is refused at the first level, and needs no
identity at the second.

A backend of the user's hands compilers and decompositions to Inductor or to AOTAutograd as
arguments, in place of torch's own; no graph names them, and torch's keys have none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from s3cache.graph._identity import UnidentifiedError, identity
from s3cache.graph._origin import ABSENT, foreign_parts, text_of
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import Config, CustomPass

__all__ = [
    "compilers_text",
    "context_hash",
    "context_hashes",
    "custom_passes",
    "described_passes",
    "table_text",
    "why_unidentified",
]


@dataclass(frozen=True)
class _Option:
    """An option of torch that takes a user's code.

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
    def fix(self) -> str:
        """Return what a user can do about code without an identity."""
        if self.kind is None:
            return "use a later torch"
        base = f"{self.kind.__module__}.{self.kind.__name__}"
        return f"derive it from {base} and give it a uuid()"


def custom_passes() -> Iterator[tuple[_Option, object]]:
    """The options that are set to users' code, and what to: one piece of code, or several."""
    inductor, functorch = internals.inductor_config.get(), internals.functorch_config.get()
    graphs, nodes = internals.custom_graph_pass.get(), internals.custom_scheduler_pass.find()
    options = [
        _Option(inductor, "post_grad_custom_pre_pass", graphs),
        _Option(inductor, "post_grad_custom_post_pass", graphs),
        _Option(inductor, "joint_custom_pre_pass", graphs, "custom-callable"),
        _Option(inductor, "joint_custom_post_pass", graphs, "custom-callable"),
        _Option(inductor, "_pre_fusion_custom_pass", nodes),
        _Option(inductor, "_post_fusion_custom_pass", nodes),
        _Option(inductor, "_fuse_ddp_communication_passes", graphs),
        _Option(
            inductor, "custom_partitioner_fn", internals.custom_partitioner.get(), "custom-callable"
        ),
        # torch leaves this one out of its key, and does not refuse it either.
        _Option(functorch, "joint_custom_pass", graphs, "custom-callable"),
        *(
            _Option(functorch, f"activation_memory_budget_{name}", kind, "custom-callable")
            for name, kind in (
                ("solver", internals.custom_solver.get()),
                ("runtime_estimator", internals.custom_estimator.get()),
            )
        ),
    ]
    if internals.pre_grad_pass_timing.find() == "late":  # others have run on this graph already
        options.append(_Option(inductor, "pre_grad_custom_pass", graphs, "custom-callable"))
    for option in options:
        value = getattr(option.config, option.name)
        if isinstance(value, (list, tuple)):  # some take names beside functions
            value = [each for each in value if not isinstance(each, str)]
        if value and not isinstance(value, str):
            yield option, value


def why_unidentified(
    option: _Option, pass_: object, registered: Callable[[object], str | None]
) -> str | None:
    """Return why nothing says which code ``pass_`` is; ``None`` if something does."""
    if option.kind is None:
        return "has no uuid()"
    if isinstance(pass_, option.kind):
        return None if pass_.uuid() else "has an empty uuid()"
    try:
        identity(pass_, registered)
    except UnidentifiedError as exc:
        return f"has no uuid(), and {exc}"
    return None


@contextlib.contextmanager
def described_passes(
    vouched: Callable[[object], str | None] = lambda _: None,
    *,
    traced: bool = False,
) -> Iterator[None]:
    """While the block runs, users' passes have a ``uuid()``, for torch to ask for.

    Args:
        vouched: the version that the user registered a function with.
        traced: whether a key is asked for that has what was traced. Passes that had their part in
            that need no identity any more.
    """
    with contextlib.ExitStack() as stack:
        for option, value in custom_passes():
            if option.kind is None:
                continue
            given = getattr(option.config, option.name)
            described: object
            if isinstance(given, (list, tuple)):
                described = type(given)(_described(option, each, vouched, traced) for each in given)
            else:
                described = _described(option, value, vouched, traced)
            stack.enter_context(option.config.patch(**{option.name: described}))
        yield


def _described(
    option: _Option, pass_: object, registered: Callable[[object], str | None], traced: bool
) -> object:
    kind = option.kind
    assert kind is not None
    if isinstance(pass_, (kind, str)):
        return pass_
    try:
        return _standing_in(kind, pass_, identity(pass_, registered))
    except UnidentifiedError:
        is_done = traced and option.code == "custom-callable"
        return _standing_in(kind, pass_, "traced") if is_done else pass_


def _standing_in(kind: type[CustomPass], pass_: object, name: str) -> object:
    """An object of class ``kind`` that is ``pass_`` to its callers, and says ``name`` of itself."""

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


def context_hash(context_fn: object, registered: Callable[[object], str | None]) -> object:
    """Return what stands for a ``context_fn`` in a key: its ``cache_hash``, or its identity.

    Raises:
        UnidentifiedError: it has neither.
    """
    own = getattr(context_fn, "cache_hash", None)
    return identity(context_fn, registered) if own is None else own


def context_hashes(gm: GraphModule, *, vouched: Callable[[object], str | None]) -> list[object]:
    """Those of all checkpointed regions of a graph, in its order; see :func:`context_hash`."""
    return [
        context_hash(context_fn, vouched)
        for module in gm.modules()
        if (context_fn := (getattr(module, "meta", None) or {}).get(internals.CHECKPOINT_CONTEXT))
        is not None
    ]


# -- compilers, and what they decompose by


def compilers_text(given: Mapping[str, object], registered: Callable[[object], str | None]) -> str:
    """Return what of ``given`` is not as Inductor has it, in words; ``""`` if all of it is.

    Args:
        given: what compiles, by the name of the argument; a dict is a table of decompositions.
        registered: the version that the user registered a function with.

    Raises:
        UnidentifiedError: one of them is not torch's, and is not registered: it takes part in
            tracing, or compiles what was traced.
    """
    by_inductor = "inner_compile" in given
    words = [] if by_inductor else ["not by Inductor"]
    for name, value in sorted(given.items()):
        try:
            if name == "decompositions":
                table = cast("Mapping[object, object]", value or {})
                text = table_text(table, registered)
            elif by_inductor and not foreign_parts(value):
                text = ""
            else:
                text = _torchs_own(value, registered)
        except UnidentifiedError as exc:
            raise UnidentifiedError(f"{name}, which {exc}", exc.about) from exc
        if text:
            words.append(f"{name}={text}")
    return " ".join(words)


def _torchs_own(value: object, registered: Callable[[object], str | None]) -> str:
    for part in foreign_parts(value):
        if not isinstance(part, partial) and registered(part) is None:
            raise UnidentifiedError("is not torch's", part)
    return text_of(value, registered)


def table_text(
    table: Mapping[object, object], registered: Callable[[object], str | None] = lambda _: None
) -> str:
    """Return how a table of decompositions differs from Inductor's; ``""`` if it does not.

    Raises:
        UnidentifiedError: a decomposition in it is not torch's, and is not registered.
    """
    usual = internals.usual_decompositions()
    if table is usual:
        return ""
    changed = [
        (str(name), value)
        for name in usual.keys() | table.keys()
        if (value := table.get(name, ABSENT)) is not usual.get(name, ABSENT)
    ]
    changed.sort(key=lambda each: each[0])
    return " ".join(f"{name}={_torchs_own(value, registered)}" for name, value in changed)
