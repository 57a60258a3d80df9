"""Recall: reuse Dynamo's result for a frame from another process, without tracing it again.

The key of a frame is computed before it is traced: its code, the compiler, options, the machine.
Under the key are candidates. A candidate lists everything that Dynamo read, with the values; one
walk over the live objects compares them. If all are equal, the graph is looked up by its key and
the bytecode is installed. torch's own guards are built when they are first evaluated, at the next
call.

In mode ``check`` Dynamo traces anyway, and both results are compared.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import platform
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from s3cache.entries import LabelledKey, labelled_key
from s3cache.features.recall import KEYS, RecallOptions, RecallReason, dynamo, names
from s3cache.features.recall.agreement import Agreement, buried_condition
from s3cache.features.recall.candidate import FIELDS, KIND, Candidate, renamed, unpacked
from s3cache.features.recall.comparison import FrameComparison
from s3cache.features.recall.content import ContentDescriber
from s3cache.features.recall.graphs import joined, rebuilt, split_rows, without_graph
from s3cache.features.recall.guards import LateGuards
from s3cache.features.recall.questions import (
    ASKING,
    RAISED,
    SHARDING,
    Question,
    is_of_distributed,
    of_identity,
)
from s3cache.features.recall.recording import PythonFrame, Recording
from s3cache.features.recall.sets import making
from s3cache.features.recall.sources import RefusedError
from s3cache.graph import (
    code_fingerprint,
    instruction_sets,
    origin_of_file,
    settings_digest,
    settings_text,
)
from s3cache.hooks import Lookup, Patches, Session, around
from s3cache.records import Event, Record
from s3cache.stats import Reason
from s3cache.torch_api import Internal, installed_version, internals
from s3cache.torch_api.protocols import DynamoObject, Function
from s3cache.util import __version__
from s3cache.util.garbage import no_collections
from s3cache.util.importing import when_imported
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from s3cache.frame import Frame as EntryFrame

logger = logger_of("recall")

_numbers = itertools.count()  # in global names
_MAX_CANDIDATES = 64  # beyond them, nothing is saved under a key
_Candidates: TypeAlias = "tuple[list[tuple[Candidate, EntryFrame, str]], set[str]]"
# Components of a graph's key for foreign code: the frame does not describe its behaviour.
_SUBCLASSES = "graph.subclasses"
_OF_OTHERS = {
    *("graph.operators", "graph.functions", _SUBCLASSES, "graph.versions"),
    *("graph.constants", "compile.compilers"),
}


@dataclass(eq=False)
class _Call:
    """One frame that Dynamo is about to compile, with its key."""

    frame: PythonFrame
    key: LabelledKey
    state: DynamoObject
    compile_id: DynamoObject
    settings: str
    compiler: DynamoObject
    program: bytes  # the digest of the facts of this program
    began: float = field(default_factory=time.time)
    replaces: list[EntryFrame] = field(default_factory=list)  # with ``recache``
    # Candidates that fit, with their entries; conditions under which results have differed.
    fits: list[tuple[FrameComparison, EntryFrame]] = field(default_factory=list)
    buried: set[str] = field(default_factory=set)
    is_full: bool = False  # there are too many candidates to save another one
    missed: bool = False  # whether a candidate was used, and its graph has no entry


class _OfThread(threading.local):
    recording: Recording | None = None  # of the innermost trace


def _forget_handlers() -> None:
    """Make Dynamo bind its methods for functions of Python again, so that it reaches the hooks."""
    if names.handlers.place.partition(":")[0] in sys.modules:
        names.handlers.get().clear()


def _refuse_call(
    code: RecallReason, why: str, recording: Recording, *_: object, **__: object
) -> None:
    recording.refused = recording.refused or RefusedError(code, why)


def _refuse_comptime(recording: Recording, _: object, __: object, args: Any, *___: object) -> None:
    """Refuse code of the program that runs in the trace; torch's own only makes a size static."""
    code = args[0].get_code()
    if "force_static" not in code.co_names or origin_of_file(code.co_filename).kind != "torch":
        _refuse_call("code", "runs code of comptime", recording)


class Recall:
    """Hooks into Dynamo; see the module."""

    def __init__(self, session: Session) -> None:
        self._session, engine = session, session.engine
        self._engine, self._state, self._keys = engine, session.state, session.keys
        self._counts = engine.counts["recall"]
        self._bypasses = session.bypasses
        self._thread = _OfThread()
        self._unusable: set[str] = set()
        self._is_ready = False
        self._patches = Patches()
        self._checks = engine.settings.of(RecallOptions).recall == "check"
        self._agreement = Agreement(engine)
        self._known: dict[str, _Candidates] = {}  # by key, if there are several
        # Code that resumes after a graph break, by its function: shared by all instances.
        self._resumes: weakref.WeakKeyDictionary[types.CodeType, dict[bytes, types.CodeType]] = (
            weakref.WeakKeyDictionary()
        )

    # -- frames

    @around(internals.compile_frame)
    def _compile_frame(
        self, original: Function[object], *args: DynamoObject, **kwargs: DynamoObject
    ) -> object:
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        call: _Call | None = None
        comparison: FrameComparison | None = None
        with self._guarded("a frame is not recalled"):
            try:
                call = self._call(arguments)
            except RefusedError as exc:
                self._refuse(exc, arguments["code"])
            comparison = None if call is None else self._find(call)
            if call is not None and comparison is not None and not self._checks:
                result = self._rebuild(call, comparison)
                if result is not None:
                    self._counts.count("recalled")
                    self._record("recalled", call.frame.code, call.began)
                    return result
        if call is None:
            return original(*args, **kwargs)
        outer, recording = self._thread.recording, Recording(call.frame)
        self._thread.recording = recording
        try:
            result = original(*args, **kwargs)
        finally:
            self._thread.recording = outer
        self._counts.count("traced")
        with self._guarded("a frame is not kept for recall"):
            self._keep(call, recording, result)
        return result

    def _call(self, args: Mapping[str, DynamoObject]) -> _Call | None:
        """Return the frame with its key, or raise RefusedError; None if Dynamo must trace it."""
        if args.get("export") or args.get("package") is not None:
            return None
        if any(hook is not None for hook in vars(args["hooks"]).values()):
            raise RefusedError("filter", "has user functions that filter guards or frames")
        limit, _ = names.exceeds_recompile_limit.get()(args["cache_size"], args["compile_id"])
        if limit:
            return None
        compiler = dynamo.compiler_of(args["compiler_fn"])
        if compiler is None:
            raise RefusedError("backend", "is compiled by a backend other than Inductor")
        state = dynamo.state_of_process()
        if state is None:
            why = "is compiled under a mode, a transform, a profiler or a debugger"
            raise RefusedError("modes", why)
        # Not every release has the option.
        if getattr(names.dynamo_options.get(), "automatic_dynamic_exclusion_guard", False):
            why = "is compiled with automatic_dynamic_exclusion_guard, so that earlier calls matter"
            raise RefusedError("settings", why)
        settings = settings_text(self._keys.version_of)
        options = dynamo.options_of_dynamo()
        if settings is None or options is None:
            raise RefusedError("settings", "is compiled with options that have no text form")
        import torch

        code, scope = args["code"], args["globals"]
        package = getattr(scope.get("__spec__"), "parent", None)  # of relative imports
        frame = PythonFrame(code, scope, args["locals"], args["closure"])
        parts = {
            "s3cache": __version__,
            "fields": FIELDS,
            "torch.version": installed_version(),
            "python": platform.python_version(),
            "machine.arch": platform.machine(),
            "machine.isa": instruction_sets(),
            "cache_key_tag": names.cache_key_tag.get(),
            "settings": settings,
            "dynamo.config": options,
            "compiler": compiler,
            "state": state[1],
            "fullgraph": bool(args["one_graph"]),
            "code": code_fingerprint(code),
            "function": code.co_name,
            "cells": code.co_cellvars,
            "package": f"{scope.get('__package__')} {package}",
            "default_dtype": torch.get_default_dtype(),
            "ranks": dynamo.ranks(),
            "accelerators": dynamo.accelerators(),
            "debug": bool(os.environ.get("TORCH_COMPILE_DEBUG")),
        }
        key = labelled_key(KEYS, parts.items())
        program = self._agreement.look()
        return _Call(
            frame, key, state[0], args["compile_id"], settings, args["compiler_fn"], program
        )

    def _find(self, call: _Call) -> FrameComparison | None:
        """Return a candidate that matches the live objects and may be used, if there is one."""
        differences: list[str] = []
        recache, contents = self._engine.settings.recache, ContentDescriber()
        candidates, call.buried = self._candidates(call.key)
        call.is_full = len(candidates) >= _MAX_CANDIDATES
        for candidate, entry, tier in candidates:
            if candidate.variant in self._unusable or candidate.condition in call.buried:
                continue
            try:
                comparison = FrameComparison(candidate, call.frame, contents)
            except Exception as exc:  # noqa: BLE001 - objects that cannot be read any more
                logger.debug("a candidate for %s does not fit: %r", call.frame.code.co_name, exc)
                differences.append(f"cannot be compared: {exc}")
                continue
            if comparison.difference:
                differences.append(comparison.difference)
            elif recache:
                call.replaces.append(entry)
                differences.append("fits, and is replaced (recache)")
            else:
                call.fits.append((comparison, entry))
                objection = self._agreement.objection(candidate, call.program)
                if objection is None:
                    self._record_lookup(call, "hit", tier)
                    return comparison
                code, why = objection
                self._counts.count("held_back", code)
                differences.append(f"fits, but {why}")
            logger.debug("a frame %s is traced: %s", call.frame.code.co_name, differences[-1])
        reason = Reason.FORCED if call.replaces else Reason.GUARD if candidates else Reason.ABSENT
        self._record_lookup(call, "miss", reason, differences)
        return None

    def _candidates(self, key: LabelledKey) -> _Candidates:
        """Return the candidates under a key, those with fewer wildcards first, and what is buried.

        The layers of a model often share a key, and each has a candidate. They are kept.
        """
        if (remembered := self._known.get(key)) is not None:
            return remembered
        candidates: list[tuple[Candidate, EntryFrame, str]] = []
        buried: set[str] = set()
        lookup = self._engine.candidates(key, KIND, replaced=True)
        for hit in lookup:
            try:
                if condition := buried_condition(hit.entry):
                    buried.add(condition)
                    continue
                candidates.append((Candidate.decode(hit.entry), hit.entry, hit.tier))
                if not self._engine.settings.recache:
                    lookup.accept(hit)
            except Exception as exc:  # noqa: BLE001 - whatever it holds
                lookup.reject(hit, exc)
            if len(candidates) >= _MAX_CANDIDATES:
                break
        result = sorted(candidates, key=lambda item: item[0].wildcards), buried
        if len(candidates) > 1:
            self._known[key] = result
        return result

    def _record_lookup(
        self, call: _Call, outcome: str, reason: str, differences: Sequence[str] = ()
    ) -> None:
        """Record a lookup under the key of a frame, so that a miss can be explained."""
        now, code = time.time(), call.frame.code
        self._engine.record(
            Record(
                *("recall", outcome, call.key, str(reason), now, now - call.began),
                where=(code.co_filename, code.co_firstlineno, code.co_name),
                components=call.key.components,
                rejected=tuple(differences),
            )
        )

    def _rebuild(self, call: _Call, comparison: FrameComparison) -> object | None:
        """Return what Dynamo would have returned; None if the graph missed."""
        candidate, frame, file = comparison.candidate, call.frame, call.frame.code.co_filename
        values: dict[str, object] = {}
        unique: dict[str, str] = {}  # names of the values in the bytecode, by placeholder
        if candidate.graphs:
            self._session.install_loading()
            if not self._is_ready:
                self._patches.wrap(names.post_compile_hit, self._post_compile_hit)
                self._is_ready = True
            version = self._keys.version_of
            parts: list[Function[object]] = []
            comparison.restore_state()
            for key_of_graph, inputs, sources, bound in comparison.graphs():
                held = inputs[:bound]
                for optimizer in comparison.optimizers():  # as torch does
                    weakref.finalize(optimizer, held.clear)
                with self._state.changed(caller=frame.code):
                    part: Any = key_of_graph and rebuilt(
                        self._session, key_of_graph, inputs, sources, held, candidate.lowered,
                        lambda: settings_text(version) == call.settings,
                    )  # fmt: skip
                    if not part and (compilation := comparison.compilation()) is not None:
                        part = self._state.compile_frame(
                            compilation.run, call.compiler, sources, call.compile_id
                        )
                if not part:
                    call.missed = True
                    comparison.withdraw_state()
                    return None
                parts.append(part)
            function = parts[0] if candidate.split is None else joined(candidate.split, parts)
            name = unique[candidate.compiled] = f"__s3cache_compiled_{next(_numbers)}"
            values[name] = internals.disable_dynamo.get()(
                function, reason="do not trace Dynamo-compiled graph"
            )
        resumes = self._resumes.setdefault(frame.code, {})
        for placeholder, content, function_name, is_factory in candidate.resumes:
            if (inner := resumes.get(content)) is None:
                inner = resumes[content] = unpacked(content, file, comparison.constant_of)
            make = partial(types.FunctionType, inner, frame.names, function_name, None)
            name = unique[placeholder] = f"__s3cache_resume_{next(_numbers)}"
            values[name] = make if is_factory else make()  # a factory gets the closure
        code = renamed(unpacked(candidate.code, file, comparison.constant_of), unique)
        build = comparison.guards(call.state)

        def build_late(variables: dict[str, object]) -> object:
            if candidate.variant in self._unusable:
                return None
            try:
                with no_collections():
                    return build(variables)
            except Exception as exc:  # noqa: BLE001 - the frame is traced, as without recall
                self._unusable.add(candidate.variant)
                self._bypasses.warn_of_failure(
                    logger, "guards of a recalled frame cannot be built", exc
                )
                return None

        guards = LateGuards(build_late, frame.names)
        dynamo.note_sizes(frame.code, frame.closure, comparison.seen())
        logger.info("recalled %s", frame.code.co_name)
        return dynamo.install(
            code, frame.code, frame.names, values, guards.manager, call.compile_id
        )

    def _keep(self, call: _Call, recording: Recording, result: object) -> None:
        """Compare a trace with the candidates that fit, and save what it adds."""
        code = dynamo.guarded_code(result)
        if code is None:  # Dynamo skips it, or runs it unchanged
            self._record("traced", call.frame.code, call.began)
            return
        try:
            if recording.refused is not None:
                raise recording.refused
            keys = [self._keys.known(lookup.key or "") for lookup in recording.lookups]
            parts = [part for key in keys for part in key.components.items()]
            components = {name for name, _ in parts}
            others = _OF_OTHERS & components
            subclasses = [part for name, part in parts if name == _SUBCLASSES]
            if subclasses and all(map(is_of_distributed, subclasses)):
                others.discard(_SUBCLASSES)
                recording.asked.append(SHARDING)
            has_places = "inputs.places" in components
            candidate = recording.finish(code, has_places=has_places, by_key=not others)
        except RefusedError as exc:
            self._refuse(exc, call.frame.code, call.began)
            self._bury(call, None, f"it is refused now: {exc}")
            return
        if candidate.graphs:
            candidate.lowered = self._settings(call)
        result_now = _result_of(candidate)
        alike = next((x for x in call.fits if _result_of(x[0].candidate) == result_now), None)
        if alike is not None:
            self._counts.count("agreed")
            self._record("agreed", call.frame.code, call.began)
            candidate, traced = alike[0].candidate, candidate
            if call.missed and candidate.traced is None:
                try:
                    candidate.traced = recording.traced_graph(traced)
                except RefusedError as exc:
                    self._refuse(exc, call.frame.code)
                    return
        else:
            self._record("traced", call.frame.code, call.began)
            self._bury(call, candidate, "tracing gives another result")
        if candidate.condition in call.buried or not self._agreement.writes:
            return
        if not (self._agreement.add(candidate, call.program) or call.missed):
            return
        if call.is_full and alike is None:
            return
        self._known.pop(call.key, None)
        entry = candidate.encode(call.key)
        if alike is not None:
            self._engine.replace(alike[1], entry)
        else:
            self._engine.save(call.key, entry, kind=KIND, replaces=call.replaces)
            self._counts.count("saved")

    def _settings(self, call: _Call) -> list[str | None]:
        """Return digests of the settings under which a backward would be lowered now.

        The first is for code that does not depend on the number of threads.
        """
        inductor = internals.inductor_config.get()
        with contextlib.ExitStack() as stack:
            # The options of torch.compile, or those of its mode.
            options = getattr(dynamo.unwrapped(call.compiler)[1], "config", None) or {}
            stack.enter_context(inductor.patch(**options))
            if inductor.cpp_wrapper:
                stack.enter_context(inductor.patch(**internals.cpp_wrapper_options.get()()))
            return [
                settings_digest(of_threads=each, registered_version=self._keys.version_of)
                for each in (False, True)
            ]

    def _bury(self, call: _Call, traced: Candidate | None, why: str) -> None:
        """Let no process use the candidates of this program that fit: the trace is another."""
        for comparison, _ in call.fits:
            recorded = comparison.candidate
            if self._agreement.other_program(recorded, call.program):
                continue  # it would not have been used
            self._counts.count("disagreed")
            self._record("disagreed", call.frame.code, call.began)
            call.buried.add(recorded.condition)
            file = self._agreement.bury(call.key, recorded, traced, why)
            name = call.frame.code.co_name
            logger.warning("recall of %s would have been wrong: %s; report %s", name, why, file)

    def _refuse(
        self, error: RefusedError, code: types.CodeType, began: float | None = None
    ) -> None:
        reason, more = error.code, pointer(error.code)
        self._counts.count("refused", reason)
        self._record(f"refused: {reason}", code, began)
        logger.info("a frame is not recalled (%s): %s %s %s", reason, code.co_name, error, more)

    def _record(self, ended: str, code: types.CodeType, began: float | None) -> None:
        """Record the outcome of a frame, for reports and traces."""
        now, where = time.time(), f"{code.co_filename}:{code.co_firstlineno}"
        elapsed_s = max(now - (began or now), 0.0)
        self._engine.record(Event("recall", now, elapsed_s, f"{code.co_name} {where}", ended=ended))

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Warn of an error in the block instead of failing the compile."""
        try:
            yield
        except Exception as exc:
            if self._engine.settings.strict:
                raise
            self._bypasses.warn_of_failure(logger, what, exc)

    @around(names.compiler_config)
    def _compiler_config(self, original: Function[object], backend: DynamoObject) -> object:
        """Answer torch.compile's question to Inductor without importing Inductor."""
        if internals.COMPILER in sys.modules:
            return original(backend)
        inductor = internals.inductor_config.get()
        with inductor.patch(backend.config):
            return inductor.get_config_copy()

    def _post_compile_hit(
        self, original: Function[object], *args: DynamoObject, **kwargs: DynamoObject
    ) -> object:
        if self._state.rebuilding is None or internals.COMPILER in sys.modules:
            return original(*args, **kwargs)
        return without_graph(original)(*args, **kwargs)

    def install(self, patches: Patches) -> None:
        """Install every hook; hooks into modules that are not imported yet follow later.

        This runs in the middle of a program's imports, so it imports nothing.
        """
        self._patches = patches
        _forget_handlers()
        patches.callback(_forget_handlers)  # runs after the hooks are removed
        patches.install(self)

        noted: list[tuple[Internal[Any], Callable[..., None]]] = [
            (names.build_variable, lambda it, builder, x: it.reads.append((builder.source, x))),
            (names.call_optimizer, Recording.note_method_of_optimizer),
            (names.init_group, Recording.note_optimizer),
            (names.build_sourceless, lambda it, tx, x: it.sourceless.append(x)),
            (names.make_constant, lambda it, _, *args, **kwargs: it.note_constant(*args, **kwargs)),
            (names.make_random, partial(_refuse_call, "random", "uses an object of random.Random")),
            (names.run_comptime, _refuse_comptime),
            (names.update_automatic_dynamic, lambda it, tx, x, *_, **__: it.dynamic.append(x)),
            (names.call_inductor, lambda it, _, gm, *__, **___: it.note_graph(gm)),
        ]
        for function, note in noted:
            if function.expected:
                patches.wrap(function, partial(self._notes, note))
        for function in names.make_set:
            if function.expected:
                patches.wrap(function, self._make_set)
        for function, questions in ASKING:
            if function.expected:
                patches.wrap(function, partial(self._asks, questions))
        comparisons = names.comparisons.get()
        for name in ("is", "is not"):
            patches.callback(comparisons.__setitem__, name, comparisons[name])
            comparisons[name] = partial(self._asks, of_identity, comparisons[name])
        wrap_parts = partial(patches.wrap, names.compile_parts, self._compile_parts)
        patches.callback(when_imported(names.DDP_OPTIMIZER, wrap_parts))
        patches.callback(self._session.events.looked_up.subscribe(self._looked_up))

    def _compile_parts(
        self, original: Function[object], *args: DynamoObject, **kwargs: DynamoObject
    ) -> object:
        compiled = original(*args, **kwargs)
        if (recording := self._thread.recording) is not None:
            with recording.refusing():
                recording.split = split_rows(compiled)
        return compiled

    # -- while Dynamo traces

    def _looked_up(self, lookup: Lookup) -> None:
        if (recording := self._thread.recording) is not None:
            recording.lookups.append(lookup)

    def _notes(
        self,
        note: Callable[..., None],
        original: Function[object],
        *args: object,
        **kwargs: object,
    ) -> object:
        """Record a call of a function of Dynamo, and call it."""
        if (recording := self._thread.recording) is not None:
            note(recording, *args, **kwargs)
        return original(*args, **kwargs)

    def _make_set(
        self, original: Function[None], variable: object, items: Any, **kwargs: object
    ) -> None:
        with making():
            original(variable, items, **kwargs)
        if (recording := self._thread.recording) is not None:
            with recording.refusing():
                recording.note_set(variable, items)

    def _asks(
        self,
        questions: Callable[..., Iterable[Question]],
        original: Function[object],
        *args: object,
        **kwargs: object,
    ) -> object:
        """Call a function of Dynamo, and record what it asks the process."""
        result = RAISED
        try:
            result = original(*args, **kwargs)
            return result
        finally:
            if (recording := self._thread.recording) is not None:
                with recording.refusing():
                    recording.asked += questions(result, *args, **kwargs)

    @around(names.build_guards)
    def _build_guards(
        self,
        original: Function[object],
        manager: DynamoObject,
        *args: DynamoObject,
        **kwargs: DynamoObject,
    ) -> object:
        recording = self._thread.recording
        if recording is None or recording.candidate is None:
            return original(manager, *args, **kwargs)
        given = inspect.signature(original).bind(manager, *args, **kwargs)
        given.arguments["save_guards"] = True  # so that it keeps conditions on sizes as text
        built = original(*given.args, **given.kwargs)
        if manager.shape_code_parts is not None:
            recording.candidate.expressions = [*manager.shape_code_parts.python_code_parts.exprs]
        return built

    @around(names.check_functions)
    def _check_functions(
        self, original: Function[None], manager: object, *args: DynamoObject, **kwargs: DynamoObject
    ) -> None:
        if (recording := self._thread.recording) is not None:
            arguments = inspect.signature(original).bind(manager, *args, **kwargs).arguments
            is_filtered = arguments.get("guard_filter_fn") is not None
            with recording.refusing():
                recording.note_trace(arguments["output_graph"], filtered=is_filtered)
        original(manager, *args, **kwargs)


def install(session: Session) -> None:
    """Install recall when Dynamo is imported, before torch's compiler: it does not need it."""
    session.undo.callback(
        when_imported(
            internals.DYNAMO,
            lambda: session.install_part(names.FEATURE, Recall(session).install),
        )
    )


def _result_of(candidate: Candidate) -> object:
    """Return a digest of the result, and the guards with their sources as text, in any order."""
    guards = sorted(
        repr([kind, candidate.rows[number], args, kwargs, found])
        for kind, number, args, kwargs, found in candidate.guards
    )
    return candidate.outcome, guards
