"""Backwards that are lowered with their forwards, so that one entry has both at once.

torch lowers most backwards when they are first called. Until then there is no entry of the whole
graph, and no rank may wait for one: code of the program runs in between, which may need an answer
of that very rank. So the rank that has claimed a graph lowers the backward before it goes on. The
others wait, and load the entry: they trace and partition nothing.

The program must not notice. torch still asks for the backward at its first call, under the settings
of that moment. It gets what was lowered early if it would make the same now.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from s3cache.errors import UnsupportedTorchError
from s3cache.hooks._compiles import FX_INFO, Compile, Compiles
from s3cache.hooks._conditions import settings_of_backward
from s3cache.hooks._keys import CompileState, around
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import AutogradArguments, Function
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

logger = logger_of("ranks")


@dataclass(eq=False)
class Early:
    """Lowers backwards of graphs that other ranks wait for."""

    _state: CompileState
    _compiles: Compiles
    _version_of: Callable[[object], str | None]

    def __post_init__(self) -> None:
        there = inspect.signature(internals.make_autograd_function.get()).parameters
        if lacking := " ".join(name for name in internals.LOWERING if name not in there):
            raise UnsupportedTorchError(f"torch makes a backward of other things than {lacking}")

    @around(internals.make_autograd_function)
    def _make_autograd_function(
        self, original: Function[object], *args: object, **kwargs: object
    ) -> object:
        given = inspect.signature(original).bind(*args, **kwargs)
        compile_ = self._compiles.led()
        # torch has lowered it already where its sizes are inputs.
        if compile_ is not None and given.arguments["compiled_bw_func"] is None:
            self._lower(compile_, given.arguments)
        return original(*given.args, **given.kwargs)

    def _lower(self, compile_: Compile, given: AutogradArguments) -> None:
        """Lower a backward, save the entry, and give torch what returns it when asked."""
        lower, save, late = (
            given[name] for name in ("bw_compiler", "try_save_cache_entry", "lazy_backward_info")
        )
        config, metadata, options = given["aot_config"], given["fw_metadata"], self._state.options
        donated = metadata.bw_donated_idxs
        try:
            # As at its first call: its entry says under which settings it was lowered.
            with internals.lowering_backward(config), self._state.changed(depth=0):
                early = lower(internals.copied(late.bw_module), late.placeholder_list)
        except Exception as exc:  # noqa: BLE001 - torch raises it if the backward is ever called
            logger.info("a backward cannot be lowered with its forward: %s", exc)
            return
        save(early, late.bw_module, metadata, config)
        info = getattr(early, FX_INFO, None)
        if info is None or info["lowered"] is None:
            return  # there is nothing to compare: it is lowered again

        def lower_late(module: GraphModule, values: list[object]) -> object:
            # Memory that the code reuses, but for a graph that is kept for another backward.
            is_same = (metadata.bw_donated_idxs or []) == (donated or []) and info[
                "lowered"
            ] == settings_of_backward(options, self._version_of, of_threads=compile_.of_threads)
            return early if is_same else lower(module, values)

        given.update(bw_compiler=lower_late, try_save_cache_entry=None)
