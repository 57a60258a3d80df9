"""The FX level: Inductor's cache of FX graphs, for what the first level cannot serve.

AOTAutograd traces one graph of Dynamo's into a forward and a backward, and Inductor compiles each.
An entry of the first level holds both. Where there is none, torch asks here for each FX graph: of
graphs that cannot be cached as a whole, of forwards without a compiled backward, of graphs
that other programs hand to Inductor.

What is saved here while a whole graph is being compiled is provisional: the entry of the whole
graph supersedes it, and no compile is shared twice.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from s3cache.graph import Code
from s3cache.hooks._keys import FxKeying
from s3cache.hooks._level import Level, Lookup, Save
from s3cache.hooks._state import Patches
from s3cache.stats import Reason
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CompiledGraph, Function

bypasses = logger_of("bypasses")

Made: TypeAlias = tuple[object, object]
Found: TypeAlias = tuple["CompiledGraph | None", dict[str, object]]


class FxGraphs(Level["CompiledGraph"]):
    """Puts a cache before torch's own directory of FX graphs."""

    name = "fx"
    label = ", second level"

    def install(self, patches: Patches) -> None:
        """Replace what computes the key of a graph, looks it up, and saves it."""
        self._install(
            patches,
            candidates=internals.fx_candidates,
            write=internals.fx_write_to_local_cache,
            asks_remote=internals.should_use_remote_fx_here,
            remote_cache=internals.fx_remote_cache,
            uses_torchs_remote=internals.should_use_remote_fx_cache,
        )
        patches.wrap(internals.fx_prepare_key, self._prepare_key)
        patches.wrap(internals.fx_lookup, self._lookup_graph)
        patches.wrap(internals.fx_save, self._save_graph)

    def _type(self) -> type[CompiledGraph]:
        return internals.compiled_graph.get()

    def _graphs(self, result: CompiledGraph) -> list[object]:
        return [result]

    def _compile_ns(self, result: CompiledGraph) -> tuple[int, int]:
        return int(result._time_taken_ns or 0), 0

    def _is_provisional(self) -> bool:
        return self._compiles.is_compiling_entry()

    def _refused(self, code: Code, error: Exception) -> None:
        self._engine.count_bypass([code], "fx")
        bypasses.info("a compiled graph is not shared at the second level: %s", error)

    def _prepare_key(self, original: Function[Made], *args: object, **kwargs: object) -> Made:
        with self._state.entered(FxKeying()) as call, self._keys.described_passes():
            made = original(*args, **kwargs)
        if made[0] is None or call.reasons:
            self._bypassed(call)
        if made[0] is None and self._compiles.force_bundling():
            return None, None  # torch would leave out what an entry of the whole graph needs
        return made

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

    def _lookup_graph(self, original: Function[Found], *args: object, **kwargs: object) -> Found:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        lookup = Lookup(level="fx")
        lookup.key, lookup.inputs = given["key"], given.get("example_inputs", ())
        if not self._keys.is_shared(lookup.key):
            return original(*args, **kwargs)
        with self._looking_up(lookup) as event:
            try:
                if internals.ranks_must_agree():  # they have agreed to compile the whole graph
                    lookup.entries = self._engine.candidates(str(lookup.key), "fx")
                    lookup.entries.force_miss(Reason.RANKS)
                    return None, {}
                graph, info = original(*args, **kwargs)
                if graph is not None and (hit := lookup.hit_of(graph)) is not None:
                    self._accept(lookup, hit, graph)
            except Exception as exc:
                if lookup.hit is None:
                    raise
                lookup.reject(exc)
                graph, info = None, {}
            finally:
                self._ended(lookup, event, of_whole=self._compiles.is_compiling_entry())
            self._raise_if_strict(lookup)
            return graph, info

    def _save_graph(
        self,
        original: Function[None],
        key: str,
        graph: CompiledGraph,
        *args: object,
        **kwargs: object,
    ) -> None:
        given = inspect.signature(original).bind(key, graph, *args, **kwargs)
        is_shared, in_directory = self._keys.is_shared(key), bool(given.arguments["local"])
        saving = Save(
            level="fx", key=key, result=graph, is_shared=is_shared, in_directory=in_directory
        )
        if is_shared:
            given.arguments["local"] = True  # that write comes here, for the remote alone too
            graph._fx_graph_cache_debug_lines = []  # the header of the entry has them
        self._run(saving, partial(original, *given.args, **given.kwargs))
