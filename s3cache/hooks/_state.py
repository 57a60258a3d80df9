"""What the hooks share: replaced functions, calls of torch into its cache, the compile, its keys.

torch calls its cache at two levels (:data:`LEVELS`): with whole graphs (AOT) and with FX graphs.
:class:`CompileEvents` announces these calls to features; see :mod:`s3cache.seam`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias, TypeVar, cast

from s3cache.cache import CandidateLookup, Hit, Retry
from s3cache.errors import ConfigError, Reason
from s3cache.frame import Frame
from s3cache.graph import (
    ORIGINAL_ATTR,
    BypassReason,
    Key,
    bypass_reasons,
    context_hashes,
    described_passes,
    extra_cacheable_functions,
    forget_kernels,
    fx_bypass_reasons,
    is_custom_function,
    key_of,
    record_kernel,
    take_baseline,
    unpicklable_options,
)
from s3cache.hooks._again import compile_module
from s3cache.seam import Notice, Question, Span
from s3cache.stats import EntryKind
from s3cache.store import Buffer
from s3cache.torch_api import Internal, internals
from s3cache.torch_api.protocols import Function
from s3cache.util.importing import when_imported
from s3cache.util.snapshot import CALLS

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import AOTResult, CompiledGraph, DynamoObject, KeyPickler

#: The result of a compile at a level.
Result: TypeAlias = "AOTResult | CompiledGraph"
#: A candidate of torch's lookup: result, its pickle, whether it is from the local tier.
Candidate: TypeAlias = tuple[Result, bytes, bool]

F = TypeVar("F", bound=Function[object])
_Method = TypeVar("_Method", bound=Function[object])

# -- replaced functions of torch

_MARK = "s3cache_around"


def around(*functions: Internal[F]) -> Callable[[_Method], _Method]:
    """Mark a method as a hook: :meth:`Patches.install` replaces these functions with it."""

    def mark(method: _Method) -> _Method:
        vars(method)[_MARK] = functions
        return method

    return mark


class Patches(contextlib.ExitStack):
    """Stack of replaced functions. :meth:`close` restores them, last first."""

    def install(self, hooks: object) -> None:
        """Install every hook of an object, see :func:`around`."""
        for name in dir(type(hooks)):
            for function in getattr(getattr(type(hooks), name), _MARK, ()):
                self.wrap(function, getattr(hooks, name))

    def wrap(self, internal: Internal[F], around: Function[object]) -> None:
        """Replace a function with ``around(original, *args, **kwargs)``.

        ``original`` is the plain function. A static or class method stays one.
        """
        owner, name = internal.owner()
        present = inspect.getattr_static(owner, name)
        wrapped = isinstance(present, (staticmethod, classmethod))
        original: F = present.__func__ if wrapped else present

        def replacement(*args: object, **kwargs: object) -> object:
            return around(original, *args, **kwargs)

        internals.hide(replacement)
        # Keys describe the original function, which may be the user's.
        vars(replacement)[ORIGINAL_ATTR] = original
        is_inherited = name not in vars(owner)
        setattr(owner, name, type(present)(replacement) if wrapped else replacement)
        if is_inherited:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, present)

    def set_variable(self, variable: str, value: str) -> None:
        """Set an environment variable."""
        before = os.environ.get(variable)
        os.environ[variable] = value
        if before is None:
            self.callback(os.environ.pop, variable, None)
        else:
            self.callback(os.environ.__setitem__, variable, before)


# -- calls of torch into its cache


class Level(NamedTuple):
    """A level of torch's caches, with the internals of torch that both levels have."""

    name: EntryKind
    label: str  # in logs
    result: Internal[type[AOTResult]] | Internal[type[CompiledGraph]]
    candidates: Internal[Function[Iterator[Candidate]]]
    write: Internal[Function[None]]
    asks_remote: Internal[Function[bool]]
    remote_cache: Internal[Function[object]]
    uses_torchs_remote: Internal[Function[bool]]  # according to torch's own options


AOT = Level(
    "aot",
    "",
    internals.aot_result,
    internals.iterate_over_candidates,
    internals.write_to_local_cache,
    internals.should_use_remote_cache,
    internals.remote_cache,
    internals.uses_remote_cache,
)
FX = Level(
    "fx",
    ", second level",
    internals.compiled_graph,
    internals.fx_candidates,
    internals.fx_write_to_local_cache,
    internals.should_use_remote_fx_here,
    internals.fx_remote_cache,
    internals.should_use_remote_fx_cache,
)
LEVELS = (AOT, FX)


def compile_ns(result: Result) -> tuple[int, int]:
    """Return how long the forward and the backward took to compile."""
    if isinstance(result, internals.compiled_graph.get()):
        return int(result._time_taken_ns or 0), 0
    whole = cast("AOTResult", result)
    return int(whole.forward_time_taken_ns), int(whole.backward_time_taken_ns)


def graphs_of(result: object) -> list[CompiledGraph]:
    """Return the graphs in a result of torch that Inductor compiled: itself, or both directions."""
    if isinstance(result, internals.compiled_graph.get()):
        return [result]
    whole = cast("AOTResult", result)
    return [side.result for side in (whole.compiled_fw, whole.compiled_bw) if side is not None]


@dataclass(eq=False)
class CacheCall:
    """One call of torch into its cache, from start to end.

    torch swallows errors of its cache. The first is kept here, for strict mode to raise it later.
    """

    inputs: Sequence[object] = ()  # of the graph, once its key is computed
    key: str | None = None  # of the graph, if it has one
    reasons: tuple[BypassReason, ...] = ()  # why the graph has no key
    # Whether torch computes its own key now, because the graph has none of ours; and that key.
    alone: bool = False
    torch_key: str | None = None
    error: Exception | None = None
    kernels: Mapping[str, Buffer] | None = None  # of the entry that is being rebuilt, if any
    modules: dict[str, str] = field(default_factory=dict)  # its Python code, by torch's paths
    code_of: Callable[[str], CodeType | None] = lambda _: None  # its code, compiled

    @property
    def codes(self) -> str:
        """The codes of the reasons, without duplicates."""
        return " ".join(dict.fromkeys(reason.code for reason in self.reasons))

    def record_error(self, error: Exception) -> None:
        self.error = self.error or error

    def raise_error(self, *, strict: bool) -> None:
        if strict and self.error is not None:
            raise self.error


class FxKeying(CacheCall):
    """One call of Inductor for the key of an FX graph."""


@dataclass(eq=False, kw_only=True)
class Lookup(CacheCall):
    """One lookup of torch."""

    level: Level
    sources: Sequence[object] = ()  # Dynamo's sources of the inputs
    bound: int = 0  # how many of the inputs the graph itself holds: they are first
    number: int = -1  # AOTAutograd's number of the graph
    entries: CandidateLookup | None = None  # under its key, once torch asks for them
    hit: Hit | None = None  # the entry that torch checks or rebuilds now, if it is ours
    result: object = None  # unpickled from the hit
    # Whether settings are as at the compile of the forward, if this is known without their digest.
    as_before: Callable[[], bool] | None = None
    about: dict[str, object] = field(default_factory=dict)  # shown in torch's traces
    saved_s: float = 0.0  # seconds of compiling that the accepted entry has saved
    notes: dict[str, object] = field(default_factory=dict)  # of features, for the record
    refused: str = ""  # why ``on_miss="error"`` refuses the hit
    # For each entry that was not used, a function that returns the reasons.
    rejected: list[Callable[[], Iterable[str]]] = field(default_factory=list)
    first: object = None  # the callable that torch has made of the hit, until its first call
    holder: DynamoObject | None = None  # torch's object that calls it
    donates: bool = False  # whether the backward may write into inputs that are not needed then

    def withdraw(self) -> None:
        """Forget the current entry: torch no longer checks or rebuilds it."""
        self.hit, self.result, self.kernels = None, None, None

    def reject(self, error: Exception) -> None:
        """Set the current entry aside because it cannot be used."""
        assert self.entries is not None
        assert self.hit is not None
        self.record_error(error)
        self.rejected.append(lambda: [f"cannot be used: {error}"])
        self.entries.reject(self.hit, error)
        self.withdraw()

    def reject_unread(self, why: str | None) -> None:
        """Leave an entry to others: its code cannot be used here."""
        self.rejected.append(lambda: [why or "nothing here knows where its code can run"])

    def hit_of(self, result: object) -> Hit | None:
        """Return the entry that ``result`` was unpickled from, if it is ours."""
        return self.hit if self.result is result else None


class Limits(NamedTuple):
    """Where code can run, beyond what its key says.

    Attributes:
        where: plain data in the entry for the feature that understands it; ``None``: wherever its
            key is looked up.
        relied: what every process that uses the code must have; empty if any process can use it.
    """

    where: Mapping[str, object] | None = None
    relied: Mapping[str, object] = MappingProxyType({})


@dataclass(eq=False, kw_only=True)
class Save(CacheCall):
    """One call of torch's ``save``."""

    level: Level
    key: str
    result: Result
    is_shared: bool  # whether we save it; otherwise torch does, unchanged
    in_directory: bool = True  # whether torch's directory gets results that cannot be shared
    limits: Limits = Limits()
    is_delayed: bool = False  # whether the upload waits: a better entry will soon replace it


class CompileEvents:
    """The events of one session, as torch compiles.

    Attributes:
        looking_up: torch looks a whole graph up, and a hit depends on other processes.
        barred: why no entry may be used, not even torch's own, where a hit depends on other
            processes. Asked before the entries of an FX graph are searched, and before and after
            torch makes a callable of a whole graph.
        missed: no entry fits; a process may wait for another one, and search again.
        is_awaited: whether the entry must be uploaded at once.
        rebuilding: torch is about to load a graph with kernels of Triton.
        fits: why code with limits cannot be used here as it is; empty if it can.
        load: a function that unpickles code with limits, or returns why it cannot be used here.
        hit: torch has made a callable of an entry.
        limit: where code can run that was made for a device (or none), or in a job.
        saving: torch is about to pickle a result.
        describe: more for the header of an entry.
        saved: an entry was saved, or not; a whole graph is, once Dynamo has accepted its frame.
        looked_up: a whole graph that Dynamo has traced was looked up, or has no key.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.looking_up: Span[[Lookup, GraphModule, Sequence[object]]] = Span(strict=strict)
        self.barred: Question[[Lookup], Reason] = Question(strict=strict)
        self.missed: Question[[Lookup], Retry] = Question(strict=strict)
        self.is_awaited: Question[[Save], bool] = Question(strict=strict)
        self.rebuilding: Notice[[CompiledGraph]] = Notice(strict=strict)
        self.fits: Question[[object], str] = Question(strict=strict)
        self.load: Question[[object, bytes], Callable[[], object]] = Question(strict=strict)
        self.hit: Notice[[Lookup, Hit, Result]] = Notice(strict=strict)
        self.limit: Question[[Save, str], Limits] = Question(strict=strict)
        self.saving: Notice[[Save]] = Notice(strict=strict)
        self.describe: Question[[Save], Mapping[str, object]] = Question(strict=strict)
        self.saved: Notice[[Save, Frame, bool]] = Notice(strict=strict)
        self.looked_up: Notice[[Lookup]] = Notice(strict=strict)


# -- the current compile

# Arguments that make AOTAutograd compile a graph with something other than Inductor.
_COMPILERS = ("bw_compiler", "decompositions", "fw_compiler", "inference_compiler", "partition_fn")
_Call = TypeVar("_Call", bound=CacheCall)


@dataclass(eq=False)
class FrameCompile:
    """The compile of a Python frame by Dynamo, with what is done once Dynamo has accepted it.

    Dynamo compares its guards with the user's bounds of sizes after the backend has compiled the
    graph of the frame. The graph of a frame that ends in an error is not saved. (DDPOptimizer
    splits a frame into several graphs. Other processes wait for each of them, so each is saved when
    the next one is looked up.)
    """

    saves: list[Callable[[], object]] = field(default_factory=list)
    # Functions to call once the graphs are saved, or dropped.
    ends: list[Callable[[], object]] = field(default_factory=list)

    def save(self) -> None:
        try:
            while self.saves:
                self.saves.pop(0)()
        finally:
            self.end()

    def end(self) -> None:
        while self.ends:
            self.ends.pop(0)()


@dataclass(eq=False)
class CompileState(threading.local):
    """State of the current compile on this thread. Hooks set and reset its fields."""

    # The Python frame that Dynamo compiles; None outside of Dynamo.
    frame: FrameCompile | None = None
    # The options that ``torch.compile(options=...)`` gave to Inductor.
    options: Mapping[str, object] = field(default_factory=dict)
    depth: int = 0  # of nested calls of AOTAutograd
    backward_compiler: Function[Function[object]] | None = None  # of the innermost one
    # The program's own compilers for the graph, by name of the argument.
    user_compilers: Mapping[str, object] = field(default_factory=dict)
    # The innermost call of torch into its cache. Calls may be nested.
    current: CacheCall | None = None
    # Compiles the graph of the innermost call of AOTAutograd again, for real inputs.
    again: Callable[[Sequence[object]], Function[object]] | None = None
    # The code that calls the graph, if Dynamo does not trace it now.
    caller: CodeType | None = None
    # The lookup that gave the current FX graph, if it was a hit of ours.
    fx_hit: CacheCall | None = None
    # Restores an option that was set for the current FX graph.
    fx_options: contextlib.ExitStack | None = None
    # Lets a function be called once the current compile has ended; None outside of a compile.
    at_end: Callable[[Callable[[], object]], object] | None = None
    # Entered while torch compiles, to notice calls.
    observed: Callable[[], contextlib.AbstractContextManager[object]] = CALLS.compiling
    # Kernels of the modules that are being loaded, outermost module first.
    loading: list[set[str]] = field(default_factory=list)

    @property
    def rebuilding(self) -> CacheCall | None:
        """The current call if it rebuilds an entry of ours."""
        return self.current if self.current and self.current.kernels is not None else None

    @contextlib.contextmanager
    def changed(self, **values: object) -> Iterator[None]:
        """Set attributes of this thread while the block runs."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    @contextlib.contextmanager
    def entered(self, call: _Call) -> Iterator[_Call]:
        """Make ``call`` the current one while the block runs."""
        with self.changed(current=call):
            yield call

    def compile_frame(self, original: Function[object], *args: object, **kwargs: object) -> object:
        """Compile a frame with Dynamo, then save its graphs; see :class:`FrameCompile`."""
        frame = FrameCompile()
        try:
            with self.changed(frame=frame):
                result = original(*args, **kwargs)
            frame.save()
            return result
        finally:
            frame.end()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Let the block be a compile; it ends after the block, or once its frame is accepted."""
        with contextlib.ExitStack() as ends, self.changed(at_end=ends.callback):
            yield
            if self.frame is not None:
                self.frame.ends.append(ends.pop_all().close)

    @around(internals.compile_fx)
    def _compile_fx(self, original: Function[object], *args: object, **kwargs: object) -> object:
        asked = cast("Mapping[str, object] | None", kwargs.get("config_patches"))
        with self.changed(options={**self.options, **(asked or {})}):
            return original(*args, **kwargs)

    # A user's backend may call AOTAutograd with its own compilers or decompositions, which are not
    # visible in the graph.
    @around(internals.aot_module)
    def _aot_module(self, original: Function[object], *args: object, **kwargs: object) -> object:
        inner = internals.inner_compiler(kwargs.get("fw_compiler"))
        if inner is None:
            compilers = {name: kwargs.get(name) for name in _COMPILERS}
        else:
            compilers = {"inner_compile": inner, "decompositions": kwargs.get("decompositions")}
        again = partial(compile_module, original, dict(self.options), args, kwargs)
        of_call = {
            "depth": self.depth + 1,
            "backward_compiler": kwargs.get("bw_compiler"),
            "user_compilers": compilers,
            "again": again if len(args) > 1 else None,
        }
        with self.changed(**of_call), self.ending(), self.observed():
            return original(*args, **kwargs)


# -- keys
#
# A lookup of torch begins here: ``autograd_cache_key`` checks a graph and digests it. Inductor does
# the same with each FX graph. We replace checks and digest with those of :mod:`s3cache.graph`.

# A key is needed from the lookup that misses to the save. For a backward that is compiled late,
# many other graphs may come between.
_MAX_KEYS = 1024
# Details of components take more memory, and entries do not need them.
_MAX_WITH_DETAILS = 64


@dataclass
class Registry:
    """Registered functions of the user: their output depends only on inputs and version."""

    versions: dict[str, str] = field(default_factory=dict)

    def add(self, function: Function[object], version: str) -> None:
        """Register ``function``; a new ``version`` makes old entries miss."""
        name = internals.name_of(function)
        if not name or "<" in name:
            raise ConfigError(
                f"function {function!r}",
                "has no name that other processes can import",
                "define it at the top level of a module",
            )
        if not version:
            raise ConfigError(f"function {name}", "has no version", "give one, e.g. version='1'")
        self.versions[name] = version

    def version_of(self, function: object) -> str | None:
        """Return the registered version, or None. An operator includes its overloads."""
        if not self.versions:
            return None
        packet = getattr(function, "overloadpacket", function)
        version = self.versions.get(internals.name_of(function))
        return version or self.versions.get(internals.name_of(packet))


class KeyHook:
    """Computes keys, or the reasons why a graph has none; remembers keys until the save."""

    def __init__(self, registry: Registry, calls: CompileState) -> None:
        self._registry = registry
        self.version_of = registry.version_of
        self._calls = calls
        self._keys: dict[str, Key] = {}  # the latest last
        self._directory: str | None = None  # of torch's cache

    def install(self, patches: Patches) -> None:
        patches.install(self)
        self._directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    def is_shared(self, key: str | None) -> bool:
        """Return whether entries under ``key`` are shared.

        They are not if torch or another library made the key up, nor inside ``fresh_cache()``,
        which requests a new compile. We detect it by Triton's directory inside Inductor's: a
        program that only moves its cache rarely does that.
        """
        if key not in self._keys:
            return False
        directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        if directory is None or directory == self._directory:
            return True
        return os.environ.get("TRITON_CACHE_DIR") != os.path.join(directory, "triton")

    def know(self, key: str) -> None:
        """Share entries under ``key``, which another process computed."""
        self._keys.setdefault(key, Key({}))

    def described_passes(self) -> contextlib.AbstractContextManager[None]:
        """Let torch call the users' passes for a description while the block runs."""
        traced = isinstance(self._calls.current, FxKeying)
        return described_passes(self.version_of, traced=traced)

    def known(self, key: str) -> Key:
        """Return the components of a key, as far as they are remembered."""
        return self._keys.get(key, Key({}))

    @around(internals.autograd_cache_key)
    def _autograd_cache_key(
        self,
        original: Function[tuple[str, list[str]]],
        mod: Module,
        inputs: Sequence[object],
        *args: object,
        **kwargs: object,
    ) -> tuple[str, list[str]]:
        """Record the key in the current call, or the reasons why the graph has none.

        Without a key of ours, torch computes its own: the graph then stays in torch's caches.
        """
        ask = partial(original, mod, inputs, *args, **kwargs)
        with self._calls.entered(self._calls.current or CacheCall()) as call:
            call.inputs, call.alone = inputs, False
            try:
                skip_init = internals.skip_backend_init()
                with self.described_passes(), skip_init, contextlib.ExitStack() as stack:
                    if internals.makes_keys_up.get():  # it would hide why a graph has no key
                        functorch = internals.functorch_config.get()
                        stack.enter_context(functorch.patch(bypass_autograd_cache_key=False))
                    key, lines = ask()
                call.key, call.reasons = key, ()
                return key, lines
            except Exception as exc:  # noqa: BLE001 - torch may cache it nevertheless
                reason = BypassReason("error", repr(exc))
                if isinstance(exc, internals.bypass_error.get()):
                    reason = BypassReason("torch", str(exc))
                call.key = None
                call.reasons = call.reasons or tuple(unpicklable_options()) or (reason,)
                call.record_error(exc)
            call.alone = True
            key, lines = ask()
            call.torch_key = key
            return key, lines

    @property
    def _is_alone(self) -> bool:
        return self._calls.current is not None and self._calls.current.alone

    @around(internals.check_cacheable)
    def _check_cacheable(self, original: Callable[[GraphModule], None], gm: GraphModule) -> None:
        import torch

        if self._is_alone:
            original(gm)
            return
        inputs = () if self._calls.current is None else self._calls.current.inputs
        if reasons := bypass_reasons(gm, inputs, self.version_of):
            self._refuse(reasons)
        more = {**self._registry.versions, **extra_cacheable_functions(gm)}
        # torch refuses graphs with a first call on fake tensors; our entries support them.
        with contextlib.ExitStack() as options, internals.hide_fake_first_call():
            inductor = internals.inductor_config.get()
            # It also refuses every graph under this option, but freezes only without gradients.
            if inductor.freezing and torch.is_grad_enabled():
                options.enter_context(inductor.patch(freezing=False))
            if more:
                more |= inductor.unsafe_marked_cacheable_functions
                options.enter_context(inductor.patch(unsafe_marked_cacheable_functions=more))
            original(gm)

    @around(internals.operator_cacheable)
    def _operator_cacheable(self, original: Callable[[object], bool], operator: object) -> bool:
        # Our keys cover a custom autograd function completely. torch has an option to accept them,
        # but it would be in the key of every graph.
        return (is_custom_function(operator) and not self._is_alone) or original(operator)

    @around(internals.init_backends)
    def _init_backends(self, original: Function[None]) -> None:
        if not internals.skips_backend_init():
            original()

    @around(internals.context_hashes)
    def _context_hashes(self, original: Function[list[object]], gm: GraphModule) -> list[object]:
        return original(gm) if self._is_alone else context_hashes(gm, self.version_of)

    @around(internals.get_hash)
    def _get_hash(self, original: Function[str], pickler: KeyPickler, value: object) -> str:
        if self._is_alone or not isinstance(value, internals.key_details.get()):
            return original(pickler, value)
        compilers = self._calls.user_compilers
        key = key_of(value, pickler, self.version_of, compilers=compilers)
        if not isinstance(key, Key):
            self._refuse(key)
        self._remember((internals.AUTOGRAD_PREFIX.find() or "a") + key.digest, key)
        return key.digest

    @around(internals.fx_check_cacheable)
    def _fx_check_cacheable(
        self, original: Function[None], gm: GraphModule, *args: object, **kwargs: object
    ) -> None:
        """Record in the current call why a graph has no key; torch may still compute its own."""
        call = self._calls.current
        if not isinstance(call, FxKeying):
            original(gm, *args, **kwargs)
            return
        if args:  # since torch 2.13, the inputs; a forward only passes hooks on to its backward
            inputs, hook = cast("Sequence[object]", args[0]), internals.backward_state.get()
            args = [value for value in inputs if not isinstance(value, hook)], *args[1:]
        original(gm, *args, **kwargs)
        try:
            call.reasons = tuple(fx_bypass_reasons(gm, self.version_of))
        except Exception as exc:  # noqa: BLE001 - torch's own key is as good as ever
            call.reasons = (BypassReason("error", repr(exc)),)
            call.record_error(exc)

    @around(internals.fx_key())
    def _fx_get_key(self, original: Function[str], pickler: KeyPickler, value: object) -> str:
        call = self._calls.current
        details = internals.fx_key_details.get()
        if type(value) is not details or not isinstance(call, FxKeying) or call.reasons:
            return original(pickler, value)
        try:
            key = key_of(value, pickler, self.version_of, traced=True)
        except Exception as exc:  # noqa: BLE001 - torch's own key is as good as ever
            key = [BypassReason("error", repr(exc))]
            call.record_error(exc)
        if not isinstance(key, Key):
            call.reasons = tuple(key)
            return original(pickler, value)
        name = internals.FX_PREFIX + key.digest
        self._remember(name, key)
        return name if internals.fx_get_key.expected else key.digest

    def debug_lines(
        self, original: Function[list[str]], pickler: KeyPickler, value: object
    ) -> list[str]:
        """Make torch log the components of our keys (*hash details*)."""
        call = self._calls.current
        key = None if call is None else self._keys.get(call.key or "")
        # The details of a whole graph have a subclass.
        if key is None or not isinstance(value, internals.fx_key_details.get()):
            return original(pickler, value)
        return [f"[{part.digest}] {name}: {part.value}" for name, part in key.components.items()]

    def _refuse(self, reasons: Sequence[BypassReason]) -> NoReturn:
        if self._calls.current is not None:
            self._calls.current.reasons = tuple(reasons)
        raise internals.bypass_error.get()("; ".join(map(str, reasons)))

    def _remember(self, name: str, key: Key) -> None:
        if self._calls.current is not None:
            self._calls.current.key = name
        self._keys.pop(name, None)
        self._keys[name] = key
        names = [*self._keys]
        if len(names) > _MAX_WITH_DETAILS:
            old = names[-1 - _MAX_WITH_DETAILS]
            self._keys[old] = self._keys[old].without_parts()
        if len(names) > _MAX_KEYS:
            del self._keys[names[0]]


# -- the line of the user's program that torch compiles

_NO_FILE = re.compile(r"<(?!stdin>|string>)")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def users_line() -> tuple[str, int, str] | None:
    """Return file, line and function of the first frame outside of torch that called the compiler.

    Frames of users' backends, which Dynamo calls, do not count.
    """
    compiler, torchs = _compiler_files()
    line, frame = None, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_filename
        if name.startswith(compiler):
            line = None
        elif line is None and not name.startswith(torchs) and not _NO_FILE.match(name):
            line = name, frame.f_lineno, frame.f_code.co_name
    return line


@functools.cache
def _compiler_files() -> tuple[str, tuple[str, ...]]:
    torch = internals.torch_directory()
    between = (str(module.__file__) for module in (contextlib, functools, threading))
    return os.path.join(torch, "_dynamo") + os.sep, (torch, _OURS, *between)


# -- kernels of torch's dispatcher, which cannot tell later which kernels were replaced


def watch_registrations(failed: Callable[[Exception], None]) -> Callable[[], None]:
    """Record registered kernels, and torch's own state, from the end of ``import torch`` or now.

    ``failed`` is called with the error if this is not possible: then keys cannot be trusted.
    Returns a function that restores torch and forgets the records.
    """
    patches = Patches()
    early = internals.TORCH not in sys.modules

    def record(original: Function[object], *args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        record_kernel(*internals.registered_kernel(*args, **kwargs))
        return result

    def begin() -> None:
        try:
            patches.callback(take_baseline(early=early))
            if internals.is_supported():
                patches.wrap(internals.register_kernel, record)
        except Exception as exc:  # noqa: BLE001 - the program that imports torch goes on
            failed(exc)

    patches.callback(forget_kernels)
    patches.callback(when_imported(internals.TORCH, begin))
    return patches.close
