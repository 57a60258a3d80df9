"""The FX level: Inductor's cache of FX graphs, the second level, for what the first cannot serve.

AOTAutograd traces one graph of Dynamo's into a forward and a backward, and Inductor compiles each.
An entry of the first level holds both and is all that a warm start needs. Where there is none,
torch asks here for each FX graph: of graphs that cannot be cached as a whole, of forwards whose
backward was never compiled, of graphs that other programs hand to Inductor. On a machine that has
the entry of the whole graph torch does not ask.

What is saved here while a whole graph is being compiled is provisional: the entry of the whole
graph, once there is one, supersedes it, and no compile is shared twice.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, TypeAlias

from s3cache._logs import logger_of
from s3cache.artifact import Artifact
from s3cache.errors import CorruptError
from s3cache.graph import Code
from s3cache.hooks._keys import FxKeying
from s3cache.hooks._level import Level, Lookup, Save
from s3cache.hooks._patching import Patches
from s3cache.stats import Reason
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CompiledGraph, Function

__all__ = ["FxGraphs"]

bypasses = logger_of("bypasses")

Made: TypeAlias = tuple[object, object]
Found: TypeAlias = tuple["CompiledGraph | None", dict[str, object]]


class FxGraphs(Level["CompiledGraph"]):
    """Puts a cache before torch's own directory of FX graphs."""

    name = "fx"
    label = ", second level"

    def install(self, patches: Patches) -> None:
        """Replace what keys a graph, looks it up, makes a callable of it, and saves it."""
        self._install(
            patches,
            candidates=internals.fx_candidates,
            write=internals.fx_write_to_local_cache,
            asks_remote=internals.should_use_remote_fx_here,
            remote_cache=internals.fx_remote_cache,
            uses_torchs_remote=internals.should_use_remote_fx_cache,
        )
        patches.replace(internals.fx_prepare_key, self._key_maker)
        patches.replace(internals.fx_lookup, self._looker)
        patches.replace(internals.fx_rebuild, self._rebuilder)
        patches.replace(internals.fx_save, self._saver)

    # -- what the level says of itself

    def _type(self) -> type[CompiledGraph]:
        return internals.compiled_graph.get()

    def _graphs(self, result: CompiledGraph) -> list[object]:
        return [result]

    def _compile_ns(self, result: CompiledGraph) -> tuple[int, int]:
        return int(result._time_taken_ns or 0), 0

    def _guards(self, result: CompiledGraph) -> str | None:
        return result.guards_expr

    def _is_provisional(self) -> bool:
        return self._compiles.is_compiling_entry()

    # -- keys

    def _key_maker(self, original: Function[Made]) -> Function[Made]:
        def prepare_key(*args: object, **kwargs: object) -> Made:
            with self._state.entered(FxKeying()) as call, self._keys.described_passes():
                made = original(*args, **kwargs)
            if made[0] is None or call.reasons:
                self._bypassed(call)
            if made[0] is None and self._compiles.force_bundling():
                return None, None  # torch would leave out what an entry of the whole graph needs
            return made

        return prepare_key

    def _bypassed(self, call: FxKeying) -> None:
        if call.reasons:
            self._log.bypassed("fx", call.reasons, None)
        codes: list[Code] = [reason.code for reason in call.reasons] or ["torch"]
        with self._log.shown("s3cache.lookup") as event:
            event.update(level="fx", outcome="bypass", reason=" ".join(dict.fromkeys(codes)))
        self._engine.count_bypass(codes, "fx")
        self._raise_if_strict(call)
        if call.error is not None:
            self._warn(bypasses, "a graph has no key at the second level", call.error)
        else:
            why = "; ".join(map(str, call.reasons)) or "torch does not cache it"
            bypasses.info("a graph is not cached at the second level: %s", why)

    # -- lookups

    def _looker(self, original: Function[Found]) -> Function[Found]:
        signature = inspect.signature(original)

        def lookup_graph(*args: object, **kwargs: object) -> Found:
            given = signature.bind(*args, **kwargs).arguments
            lookup = Lookup("fx")
            lookup.key, lookup.inputs = given["key"], given.get("example_inputs", ())
            if not self._keys.is_shared(lookup.key):
                return original(*args, **kwargs)
            with (
                self._state.entered(lookup),
                self._log.shown("s3cache.lookup") as event,
            ):
                try:
                    if internals.ranks_must_agree():  # they have agreed to compile the whole graph
                        lookup.entries = self._engine.judged(str(lookup.key), "fx")
                        lookup.entries.overrule(Reason.RANKS)
                        return None, {}
                    graph, info = original(*args, **kwargs)
                    hit = self._hit_of(graph, lookup)
                    if graph is not None and hit is not None:
                        self._accept(lookup, hit, graph)
                except Exception as exc:
                    if lookup.candidate is None:
                        raise
                    lookup.reject(exc)
                    graph, info = None, {}
                finally:
                    self._ended(lookup, event, of_whole=self._compiles.is_compiling_entry())
                self._raise_if_strict(lookup)
                return graph, info

        return lookup_graph

    def _rebuilder(self, original: Function[Found]) -> Function[Found]:
        def cache_hit_post_compile(
            graph: CompiledGraph, cache_info: dict[str, object], *args: object, **kwargs: object
        ) -> Found:
            hit = self._hit_of(graph, self._current(Lookup))
            if hit is None:
                return original(graph, cache_info, *args, **kwargs)
            with self._kernels.only(Artifact.kernels_of(hit.entry)):
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
            is_shared, in_directory = self._keys.is_shared(key), bool(given.arguments["local"])
            saving = Save("fx", key, graph, is_shared=is_shared, in_directory=in_directory)
            context: contextlib.AbstractContextManager[object] | None = contextlib.nullcontext()
            if is_shared:
                given.arguments["local"] = True  # that write comes here, for the remote alone too
                graph._fx_graph_cache_debug_lines = []  # the header of the entry has them
                context = self._made_portable(saving)
            if context is not None:
                with self._state.entered(saving), context:
                    original(*given.args, **given.kwargs)
            self._raise_if_strict(saving)

        return save_graph

    def _refused(self, code: Code, error: Exception) -> None:
        self._engine.count_bypass([code], "fx")
        bypasses.info("a compiled graph is not shared at the second level: %s", error)
