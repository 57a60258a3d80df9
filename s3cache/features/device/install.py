"""Subscribe to the events of a session."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

from s3cache.features.device import SEALING
from s3cache.features.device.names import LEFT, REMEMBERED, SEARCHED
from s3cache.hooks import FX, LIMITS, LIMITS_FIELD, Limits, Patches, graphs_of, has_triton
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.cache import Hit
    from s3cache.features.device.moving import DeviceConstraint
    from s3cache.features.device.winners import Winners
    from s3cache.frame import Frame
    from s3cache.hooks import CacheCall, Lookup, Result, Save, Session
    from s3cache.torch_api.protocols import CompiledGraph, TritonBundle

logger = logger_of("saves")

#: Set on a compiled graph if its code may contain the number of this rank.
_HOLDS_RANK = "s3cache_holds_rank"


def install(session: Session) -> None:
    """Subscribe to the events of ``session``."""
    device, events = Device(session), session.events
    session.required.append(device.install)
    events.limit.subscribe(device.limit)
    events.fits.subscribe(device.fits)
    events.load.subscribe(device.load)
    events.rebuilding.subscribe(device.rebuilding)
    events.saving.subscribe(device.saving)
    events.describe.subscribe(device.describe)
    events.saved.subscribe(device.saved)


class _OfThread(threading.local):
    """The collectives in the graph that is compiled; None outside of a job with ranks."""

    traced: Counter[str] | None = None


class Device:
    """What a session does for code on accelerators."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._of_thread = _OfThread()
        self._with_triton: weakref.WeakSet[CacheCall] = weakref.WeakSet()
        self._sees_hits = False

    def install(self, patches: Patches) -> None:
        """Observe which collectives a compile adds."""
        patches.wrap(internals.compile_fx_inner, self._compile_graph)

    @functools.cached_property
    def winners(self) -> Winners:
        """The object that seals entries, made for the first entry with a Triton kernel."""
        from s3cache.features.device.winners import Winners

        winners = Winners(self._session.engine, self._session.kernels)
        self._session.install_part(SEALING, winners.install)
        return winners

    # -- limits of code

    def _compile_graph(
        self, original: Function[CompiledGraph], gm: GraphModule, *args: object, **kwargs: object
    ) -> CompiledGraph:
        if internals.process_groups() is None:
            return original(gm, *args, **kwargs)
        from s3cache.features.device.moving import collectives_in

        outer, self._of_thread.traced = self._of_thread.traced, collectives_in(gm)
        try:
            graph = original(gm, *args, **kwargs)
            setattr(graph, _HOLDS_RANK, self._may_hold_rank(graph))
        finally:
            self._of_thread.traced = outer
        return graph

    def _may_hold_rank(self, graph: CompiledGraph) -> bool:
        traced = self._of_thread.traced
        return traced is not None and internals.collectives_of(graph.source_code) != traced

    def limit(self, saving: Save, device: str) -> Limits | None:
        """Return where the code of a result can run."""
        try:
            from s3cache.features.device.moving import rank_of_process, why_alone

            graphs = graphs_of(saving.result)
            if saving.level is FX:
                holds_rank = self._may_hold_rank(graphs[0])
            else:
                holds_rank = any(getattr(graph, _HOLDS_RANK, False) for graph in graphs)
            if not device and not holds_rank:
                return Limits()
            alone = why_alone(graphs, device) if device else None
            rank = rank_of_process() if holds_rank else None
        except Exception as exc:
            logger.debug("the limits of a result are not known: %s", exc, exc_info=True)
            return None
        relied = {"device": device if alone is not None else None, "rank": rank}
        return Limits(
            {"device": device or None, "alone": alone, "rank": rank},
            {name: value for name, value in relied.items() if value is not None},
        )

    def fits(self, limits: object) -> str:
        """Return why code cannot be used here as it is."""
        from s3cache.features.device.moving import misplaced

        try:
            return misplaced(cast("DeviceConstraint", limits), movable=False) or ""
        except Exception as exc:  # noqa: BLE001 - of another device, or damaged
            return f"its limits cannot be read: {exc}"

    def load(self, limits: object, content: bytes) -> Callable[[], object]:
        """Return a function that unpickles code for this device."""
        from s3cache.features.device.moving import unpickle_here

        return partial(unpickle_here, content, cast("DeviceConstraint", limits))

    # -- winners

    def rebuilding(self, graph: CompiledGraph) -> None:
        """Tell torch what the entry knows of winners, before torch loads the kernels."""
        bundle: TritonBundle | None = getattr(graph, internals.TRITON_BUNDLE, None)
        for static in () if bundle is None else bundle.static_autotuners:
            for name in vars(static.kernel).get(SEARCHED, ()):
                setattr(static.kernel.compile_results[0].config, name, True)
        if (call := self._session.state.rebuilding) is None:
            return
        for kernel, best in getattr(graph, REMEMBERED, {}).items():
            from s3cache.features.device.kernels import remember_winner

            remember_winner(kernel, best)
        if not self._sees_hits:  # programs without such kernels do not come here
            self._sees_hits = True
            self._session.events.hit.subscribe(self.hit)
        self._with_triton.add(call)

    def hit(self, lookup: Lookup, hit: Hit, result: Result) -> None:
        """Note the kernels of a hit that must still be measured; seal the entry after that."""
        if lookup not in self._with_triton:
            return
        graphs = graphs_of(result)
        left = self.winners.left(graphs)
        if not left:
            return
        lookup.notes["left"] = [[*each] for each in left]
        if self._session.engine.settings.on_miss == "error":
            what = "; ".join(f"{kernel}: {reason}" for kernel, reason in left)
            lookup.refused = f"a hit has kernels left to measure: {what}"
        if getattr(result, LIMITS, None) == hit.entry.header.meta.get(LIMITS_FIELD):  # not moved
            self.winners.watch(hit.entry, graphs, is_ours=False)

    def saving(self, saving: Save) -> None:
        """Add to a result which winners torch remembers."""
        for graph in filter(has_triton, graphs_of(saving.result)):
            self.winners.remember(graph)

    def describe(self, saving: Save) -> Mapping[str, object] | None:
        """Return which kernels a hit must still measure."""
        graphs = graphs_of(saving.result)
        if not any(map(has_triton, graphs)) or not (left := self.winners.left(graphs)):
            return None
        saving.is_delayed = True  # a measured one will soon replace it
        return {LEFT: [[*each] for each in left]}

    def saved(self, saving: Save, entry: Frame, is_saved: bool) -> None:
        """Seal an entry once its kernels have been measured."""
        if is_saved and entry.header.meta.get(LEFT):
            self.winners.watch(entry, graphs_of(saving.result))
