"""The seams at Inductor's cache of FX graphs: the second level, for what the first cannot serve.

AOTAutograd traces one graph of Dynamo's into a forward and a backward, and Inductor compiles each.
An entry of the first level holds both and is all that a warm start needs. Where there is none,
torch asks here for each half: of graphs that cannot be cached as a whole, of forwards whose
backward was never compiled, of graphs that other programs hand to Inductor. On a machine that has
the entry of the whole graph nobody comes by here.

What is saved here while a whole graph is being compiled is provisional: the entry of the whole
graph, once there is one, supersedes it, and no compile is shared twice.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from s3cache._logs import logger_of
from s3cache._pages import pointer
from s3cache._problems import code_of
from s3cache.artifact import Artifact, UnreadableError, check_readable, unpickled
from s3cache.cache import Engine, Hit, JudgedLookup, Saved
from s3cache.errors import CorruptError
from s3cache.graph import Code
from s3cache.hooks._bundling import Bundling
from s3cache.hooks._kernels import Kernels, UnsharableKernelError
from s3cache.hooks._keys import CacheCall, CacheCalls, FxKeying, KeySeam
from s3cache.hooks._lookups import asks_remote, of_torch_if_asked
from s3cache.hooks._patching import Patches
from s3cache.hooks._records import Recording, in_words
from s3cache.hooks._rejected import failing_guards
from s3cache.hooks._saves import maker, told
from s3cache.hooks._sources import without_sources
from s3cache.hooks._triton import portable
from s3cache.stats import Reason
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CompiledGraph, Function

__all__ = ["FxGraphSeam"]

lookups, saves, bypasses = logger_of("lookups"), logger_of("saves"), logger_of("bypasses")

Made: TypeAlias = tuple[object, object]
Found: TypeAlias = tuple["CompiledGraph | None", dict[str, object]]
Candidate: TypeAlias = tuple[object, bytes, bool]


class Lookup(CacheCall):
    """One call of ``_lookup_graph``.

    Attributes:
        judged: the entries under its key, once torch asks for them.
        candidate: the one that torch judges or rebuilds now, and where it came from.
        saved_s: of a hit, what making it took where it was made.
        rejected: of entries under its key, what says why they do not fit.
    """

    def __init__(self, key: str, inputs: Sequence[object]) -> None:
        super().__init__()
        self.key = key
        self.inputs = inputs
        self.judged: JudgedLookup | None = None
        self.candidate: tuple[object, Hit] | None = None
        self.saved_s = 0.0
        self.rejected: list[Callable[[], list[str]]] = []

    def reject(self, error: Exception) -> None:
        """The candidate cannot be used: have it set aside."""
        assert self.judged is not None
        assert self.candidate is not None
        self.met(error)
        self.rejected.append(lambda: [f"cannot be used: {error}"])
        self.judged.reject(self.candidate[1], error)
        self.candidate = None


class Save(CacheCall):
    """One call of ``_save_graph``, with what is to be saved.

    Attributes:
        in_directory: whether torch keeps in its directory what cannot be shared.
    """

    def __init__(self, graph: CompiledGraph, *, in_directory: bool) -> None:
        super().__init__()
        self.graph = graph
        self.in_directory = in_directory


class FxGraphSeam:
    """Puts a cache before torch's own directory of FX graphs."""

    def __init__(
        self,
        engine: Engine,
        calls: CacheCalls,
        keys: KeySeam,
        kernels: Kernels,
        bundling: Bundling,
        recording: Recording,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._keys = keys
        self._kernels = kernels
        self._bundling = bundling
        self._recording = recording
        self._warned = False

    def install(self, patches: Patches) -> None:
        """Replace what keys a graph, looks it up, makes a callable of it, and saves it."""
        patches.replace(internals.fx_prepare_key, self._key_maker)
        patches.replace(internals.fx_lookup, self._looker)
        patches.replace(
            internals.should_use_remote_fx_here, partial(asks_remote, self._engine, "fx")
        )
        patches.replace(
            internals.fx_remote_cache,
            partial(of_torch_if_asked, internals.should_use_remote_fx_cache),
        )
        patches.replace(internals.fx_candidates, self._candidates)
        patches.replace(internals.fx_rebuild, self._rebuilder)
        patches.replace(internals.fx_save, self._saver)
        patches.replace(internals.fx_write_to_local_cache, self._writer)

    # -- keys

    def _key_maker(self, original: Function[Made]) -> Function[Made]:
        def prepare_key(*args: object, **kwargs: object) -> Made:
            with self._calls.entered(FxKeying()) as call, self._keys.described_passes():
                made = original(*args, **kwargs)
            if made[0] is None:
                # torch would leave out what an entry of the whole graph needs.
                self._bypassed(call)
                return (None, None) if self._bundling.bundle_here() else made
            if call.reasons:
                self._bypassed(call)
            return made

        return prepare_key

    def _bypassed(self, call: FxKeying) -> None:
        if call.reasons:
            self._recording.bypassed("fx", call.reasons, None)
        codes: list[Code] = [reason.code for reason in call.reasons] or ["torch"]
        with self._recording.events.shown("s3cache.lookup") as event:
            event.update(level="fx", outcome="bypass", reason=" ".join(dict.fromkeys(codes)))
        self._engine.count_bypass(codes, "fx")
        if call.error is not None:
            if self._engine.settings.strict:
                raise call.error
            self._warn(bypasses, "a graph has no key at the second level", call.error)
        else:
            why = "; ".join(map(str, call.reasons)) or "torch does not cache it"
            bypasses.info("a graph is not cached at the second level: %s", why)

    # -- lookups

    def _looker(self, original: Function[Found]) -> Function[Found]:
        signature = inspect.signature(original)

        def lookup_graph(*args: object, **kwargs: object) -> Found:
            given = signature.bind(*args, **kwargs).arguments
            key = given["key"]
            if not self._keys.is_shared(key):
                return original(*args, **kwargs)
            if internals.ranks_must_agree():  # they have agreed on the whole graph: to compile it
                with self._engine.judged(str(key), "fx") as judged:
                    judged.overrule(Reason.RANKS)
                with self._recording.events.shown("s3cache.lookup") as event:
                    self._ended(str(key), judged, event)
                return None, {}
            with (
                self._calls.entered(Lookup(key, given.get("example_inputs", ()))) as lookup,
                self._recording.events.shown("s3cache.lookup") as event,
            ):
                try:
                    graph, info = original(*args, **kwargs)
                    self._accept(lookup, graph)
                except Exception as exc:
                    if lookup.candidate is None:
                        raise
                    lookup.reject(exc)
                    graph, info = None, {}
                finally:
                    if lookup.judged is not None:
                        self._ended(str(key), lookup.judged, event, lookup.saved_s, lookup.rejected)
                if lookup.error is not None and self._engine.settings.strict:
                    raise lookup.error
                return graph, info

        return lookup_graph

    def _ended(
        self,
        key: str,
        judged: JudgedLookup,
        event: dict[str, object],
        saved_s: float = 0.0,
        rejected: Sequence[Callable[[], list[str]]] = (),
    ) -> None:
        outcome = judged.close()
        event.update(in_words(outcome), key=key, level="fx")
        self._recording.ended(
            "fx",
            key,
            outcome,
            saved_s=saved_s,
            of_whole=self._bundling.is_under_way(),
            rejected=rejected,
        )

    def _accept(self, lookup: Lookup, graph: CompiledGraph | None) -> None:
        if graph is None or lookup.candidate is None or lookup.judged is None:
            return
        found, hit = lookup.candidate
        if found is not graph:
            return
        lookup.judged.accept(hit)
        lookup.saved_s = saved_s = (graph._time_taken_ns or 0) / 1e9
        self._engine.count_time_saved(saved_s)
        lookups.info(
            "hit %s (%s, second level), %.1f s of compiling saved",
            lookup.key,
            hit.tier,
            saved_s,
        )

    def _current(self) -> Lookup | None:
        current = self._calls.current
        return current if isinstance(current, Lookup) else None

    def _candidates(self, original: Function[Iterator[Candidate]]) -> Function[Iterator[Candidate]]:
        def iterate_over_candidates(
            cls: type, *args: object, **kwargs: object
        ) -> Iterator[Candidate]:
            lookup = self._current()
            if lookup is not None:
                yield from self._entries(lookup)
                lookup.candidate = None
            if self._engine.uses_trusted_only:
                return  # torch's own are signed by nobody
            yield from original(cls, *args, **kwargs)

        return iterate_over_candidates

    def _entries(self, lookup: Lookup) -> Iterator[Candidate]:
        try:
            asked = internals.tiers_asked("fx")
            lookup.judged = self._engine.judged(str(lookup.key), "fx", **asked._asdict())
            for hit in lookup.judged:
                lookup.candidate = None, hit
                try:
                    content = bytes(Artifact.entry_of(hit.entry, "fx"))
                    graph = unpickled(content)
                    if not isinstance(graph, internals.compiled_graph.get()):
                        raise CorruptError("entry", f"holds a {type(graph).__name__}")
                except Exception as exc:  # noqa: BLE001 - whatever unpickling meets
                    lookup.reject(exc)
                    continue
                lookup.candidate = graph, hit
                yield graph, content, hit.tier == "local"
                if lookup.candidate is not None:  # torch asks for another one
                    guards = str(getattr(graph, "guards_expr", None) or "")
                    lookup.rejected.append(partial(failing_guards, guards, lookup.inputs))
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            lookup.met(exc)
            self._warn(lookups, "a lookup failed, which is a miss", exc)

    def _rebuilder(self, original: Function[Found]) -> Function[Found]:
        def cache_hit_post_compile(
            graph: CompiledGraph, cache_info: dict[str, object], *args: object, **kwargs: object
        ) -> Found:
            lookup = self._current()
            candidate = None if lookup is None else lookup.candidate
            if candidate is None or candidate[0] is not graph:
                return original(graph, cache_info, *args, **kwargs)
            with self._kernels.only(Artifact.kernels_of(candidate[1].entry)):
                made, info = original(graph, cache_info, *args, **kwargs)
            if made is None:
                raise CorruptError("entry", "cannot be made into a callable here")
            return made, info

        return cache_hit_post_compile

    # -- saves

    def _saver(self, original: Function[None]) -> Function[None]:
        signature = inspect.signature(original)

        def save_graph(key: str, graph: CompiledGraph, *args: object, **kwargs: object) -> None:
            given = signature.bind(key, graph, *args, **kwargs)
            in_directory = bool(given.arguments["local"])
            shared = self._keys.is_shared(key)
            if shared:
                given.arguments["local"] = True  # that write comes here, for the remote alone too
                graph._fx_graph_cache_debug_lines = []  # the header of the entry has them
            shares = self._engine.settings.share_sources
            saved = Save(graph, in_directory=in_directory)
            with self._calls.entered(saved) as saving, contextlib.ExitStack() as stack:
                try:
                    if shared and internals.with_triton_kernels([graph]):
                        stack.enter_context(portable([graph], share_sources=shares))
                    if shared and not shares:
                        stack.enter_context(without_sources(graph))
                except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
                    saving.met(exc)
                    self._warn(saves, "a compiled graph is not shared", exc)
                else:
                    original(*given.args, **given.kwargs)
                if saving.error is not None and self._engine.settings.strict:
                    raise saving.error

        return save_graph

    def _writer(self, original: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
        def write_to_local_cache(key: str, content: bytes) -> None:
            saving = self._calls.current
            # Not in a save, this is torch.compiler.load_cache_artifacts.
            if isinstance(saving, Save) and (
                (self._keys.is_shared(key) and self._share(key, saving, content))
                or not saving.in_directory
            ):
                return
            original(key, content)

        return write_to_local_cache

    def _share(self, key: str, saving: Save, content: bytes) -> bool:
        graph = saving.graph
        try:
            check_readable(content)
            with self._recording.events.shown("s3cache.save") as event:
                kernels = self._kernels.images_of([graph])
                artifact = Artifact(
                    kind="fx",
                    entry=content,
                    kernels=kernels,
                    guards=graph.guards_expr,
                    forward_ns=int(graph._time_taken_ns or 0),
                    components=told(self._keys.components(key)),
                    parts=self._keys.known(key).parts,
                    made_by=maker([graph], compiled=bool(kernels)),
                )
                provisional = self._bundling.is_under_way()
                frame = artifact.encode(key)
                saved = self._engine.save(
                    key,
                    frame,
                    level="fx",
                    provisional=provisional,
                    remote=internals.tiers_asked("fx").remote,
                )
                event.update(key=key, level="fx", bytes=len(frame), saved=isinstance(saved, Saved))
            if isinstance(saved, Saved):
                saves.debug("saved %s (%d bytes, second level)", key, len(frame))
            return isinstance(saved, Saved)
        except (UnreadableError, UnsharableKernelError) as exc:
            code: Code = "entry" if isinstance(exc, UnreadableError) else "kernel"
            self._engine.count_bypass([code], "fx")
            bypasses.info("a compiled graph is not shared at the second level: %s", exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            saving.met(exc)
            self._warn(saves, "a compiled graph is not shared", exc)
        return False

    def _warn(self, logger: logging.Logger, what: str, error: Exception) -> None:
        if not self._warned and not self._engine.settings.strict:
            self._warned = True
            logger.warning("%s %s", what, pointer(code_of(error)), exc_info=error)
