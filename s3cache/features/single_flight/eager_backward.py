"""Lower backwards eagerly, with their forwards: other ranks can then wait for the whole graph.

torch lowers most backwards at their first call. Until then the whole graph has no entry, and ranks
must not wait for one: user code runs in between, and may need an answer from a waiting rank. So the
rank that has claimed a graph lowers the backward before it goes on. The other ranks wait and load
the entry: they trace and partition nothing.

The program must not notice. torch still asks for the backward at its first call, under the settings
at that moment. It gets the eager result if it would produce the same one now.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from s3cache.errors import UnsupportedTorchError
from s3cache.features.single_flight import names
from s3cache.hooks import FX_INFO, Compile, around, settings_of_backward
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import AutogradArguments, Function
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.hooks import Session

logger = logger_of("ranks")


@dataclass(eq=False)
class EagerBackward:
    """Lowers backwards of graphs that other ranks wait for."""

    _session: Session
    _is_claimed: Callable[[str | None], bool]

    def __post_init__(self) -> None:
        there = inspect.signature(names.make_autograd_function.get()).parameters
        if lacking := " ".join(name for name in names.ARGUMENTS if name not in there):
            raise UnsupportedTorchError(f"torch does not pass {lacking} to a backward")

    @around(names.make_autograd_function)
    def _make_autograd_function(
        self, original: Function[object], *args: object, **kwargs: object
    ) -> object:
        call = inspect.signature(original).bind(*args, **kwargs)
        compile_ = self._session.compiles.current()
        is_awaited = compile_ is not None and self._is_claimed(compile_.key)
        # torch has already lowered a backward with sizes as inputs.
        if compile_ is not None and is_awaited and call.arguments["compiled_bw_func"] is None:
            self._lower(compile_, call.arguments)
        return original(*call.args, **call.kwargs)

    def _lower(self, compile_: Compile, args: AutogradArguments) -> None:
        """Lower a backward, save the entry, and give torch a function that returns it later."""
        import torch

        lower, save, late = (
            args[name] for name in ("bw_compiler", "try_save_cache_entry", "lazy_backward_info")
        )
        config, metadata, session = args["aot_config"], args["fw_metadata"], self._session
        options, version_of = session.state.options, session.keys.version_of
        donated = metadata.bw_donated_idxs
        try:
            # As at a first call: the entry then has a digest of the settings.
            with (
                torch.no_grad(),
                names.no_autocast.get()(),
                names.while_lowering.get()(config, "backward"),
                session.state.changed(depth=0),
            ):
                eager = lower(internals.copy_graph(late.bw_module), late.placeholder_list)
        except Exception as exc:  # noqa: BLE001 - torch raises it if the backward is ever called
            logger.info("a backward cannot be lowered with its forward: %s", exc)
            return
        save(eager, late.bw_module, metadata, config)
        info = getattr(eager, FX_INFO, None)
        if info is None or info["lowered"] is None:
            return  # without notes we cannot compare: torch lowers it again

        def lower_late(module: GraphModule, values: list[object]) -> object:
            # The code reuses memory of inputs, unless the graph is kept for another backward.
            is_same = (metadata.bw_donated_idxs or []) == (donated or []) and info[
                "lowered"
            ] == settings_of_backward(options, version_of, of_threads=compile_.of_threads)
            return eager if is_same else lower(module, values)

        internals.hide(lower_late)
        args.update(bw_compiler=lower_late, try_save_cache_entry=None)
