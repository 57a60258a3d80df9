"""What a machine does with the cases: run each eagerly and compiled, and say how they compare."""

from __future__ import annotations

import json
import pickle
import traceback
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from s3cache import frame
from s3cache.artifact import Artifact, GraphDescription, description, to_plain
from tests.kinds.case import CASES, Case
from tests.support.descriptions import differences_from_torch
from tests.support.watch import Watch

__all__ = ["ROWS", "load_cases", "run"]

ROWS = (
    "safety",
    "outputs",
    "inputs",
    "tensors",
    "runtime",
    "paths",
    "compiled_autograd",
    "compiled_backward",
)


def load_cases() -> dict[str, Case]:
    """All cases, by name; without torch."""
    for row in ROWS:
        import_module(f"tests.kinds.{row}")
    return CASES


def run(names: list[str], remote: str | None) -> dict[str, dict[str, Any]]:
    """Run cases one after the other, each as if it were alone in the process.

    Returns:
        For each case what :class:`Watch` counts, ``error``, ``differs`` (from eager) and ``hits``
        (as torch counts them); with s3cache also ``shown`` (an entry was saved that has the case's
        kind) and ``entries`` (descriptions of what was saved).
    """
    load_cases()
    watch = Watch()
    seen: set[Path] = set()
    found = {}
    for name in names:
        case = CASES[name]
        found[name] = watch.around(partial(_compared, case))
        if remote is not None:
            new = [path for path in _files(remote) if path not in seen]
            seen.update(new)
            saved = (frame.decode(path.read_bytes()) for path in new)
            entries = [_description(each) for each in saved if each.header.kind == "aot"]
            found[name].update(shown=_shown(case, entries), entries=entries)
    return found


def _shown(case: Case, entries: list[dict[str, Any]]) -> bool:
    some = case.shows is None or any(map(case.shows, entries))
    return some and (case.together is None or case.together(entries))


def _compared(case: Case) -> dict[str, Any]:
    """What differs from eager, as if the case were alone in the process; or how it failed."""
    import torch
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiler: Any = torch.compiler.config
    try:
        with compiler.patch(cache_key_tag=case.name):  # no other case's entries
            differs, error = _compare(case), ""
    except Exception:
        differs, error = [], traceback.format_exc()
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    return {"differs": differs, "error": error, "hits": hits}


def _compare(case: Case) -> list[str]:
    import torch

    from tests.support.observe import differences, observe

    results = []
    for compile_it in (_eagerly, _compiled):
        torch.manual_seed(0)
        results.append(observe(case.program(compile_it)))
    return [each for each in differences(*results) if not each.startswith(case.differs)]


def _eagerly(function: Any, **options: Any) -> Any:
    return function


def _compiled(function: Any, *, without_dynamo: bool = False, **options: Any) -> Any:
    import torch

    return _traced(function) if without_dynamo else torch.compile(function, **options)


def _traced(function: Any) -> Any:
    """``function`` as a graph given to Inductor, as a backend is given one by Dynamo.

    Dynamo itself never returns inputs, and leaves what changes their shape to Python.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx

    def call(*inputs: Any) -> Any:
        made = isinstance(function, torch.fx.GraphModule)
        gm = function if made else torch.fx.symbolic_trace(function)
        # Neither lines of this file nor its annotations, strings here: Dynamo's have none either.
        gm.graph._co_fields = {}
        for node in gm.graph.nodes:
            node.type = None
        gm.recompile()
        _Annotating(gm).run(*(each.detach().clone() for each in inputs))
        fake_mode = torch._subclasses.FakeTensorMode(
            shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()
        )
        with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
            compiled: Any = compile_fx(gm, list(inputs))
        return compiled(*inputs)

    return call


def _Annotating(gm: Any) -> Any:  # noqa: N802 - a class that needs torch to be imported
    import torch

    class Annotating(torch.fx.Interpreter):
        """Writes an example of each node's value where Dynamo writes it."""

        def run_node(self, node: Any) -> Any:
            node.meta["example_value"] = value = super().run_node(node)
            return value

    return Annotating(gm)


def _files(remote: str) -> list[Path]:
    root = Path(remote.removeprefix("file://").partition("?")[0])
    return [path for path in root.rglob("*") if path.is_file() and "/v1" in str(path)]


def _description(entry: frame.Frame) -> dict[str, Any]:
    """What an entry says of its graph, by torch's names, and where it says what is not so."""
    whole: Any = description(entry.header)
    metadata = whole.runtime_metadata
    subclasses = {
        "inputs": metadata.subclass_inp_meta,
        "outputs": metadata.subclass_fw_graph_out_meta,
        "tangents": metadata.subclass_tangent_meta,
    }
    plain: dict[str, Any] = json.loads(json.dumps(to_plain(metadata), default=repr))
    return {
        **{field.name: None for field in fields(metadata)},
        **plain,
        "inputs": plain["input_info"],
        "outputs": plain["output_info"],
        "subclasses": {place: list(map(to_plain, metas)) for place, metas in subclasses.items()},
        "wrappers": [wrapper.type.rpartition(".")[2] for wrapper in whole.dispatch_wrappers],
        "has_backward": whole.backward is not None,
        "has_backward_module": whole.has_backward_module,
        "key": entry.header.key,
        "guards": entry.header.meta["guards"],
        "wrong": [
            *_wrong(whole, pickle.loads(bytes(Artifact.entry_of(entry, "aot")))),
            *_wrongly_made(entry.header.meta),
        ],
    }


def _wrongly_made(meta: Any) -> list[str]:
    """What an entry does not say of what made it, or says too much of it."""
    made_by, components = meta["made_by"], meta["components"]
    torch = components["torch.version"][1]
    right = {
        "times": all(time >= 0 for time in meta["times_ns"]),
        "made by": made_by["torch"] == torch and made_by["platform"] and "device" in made_by,
        "digests": all(len(digest) == 32 for digest, _ in components.values()),
    }
    return [what for what, is_right in right.items() if not is_right]


def _wrong(whole: GraphDescription, theirs: Any) -> list[str]:
    wrong = [*differences_from_torch(whole.runtime_metadata, theirs.runtime_metadata)]
    wrong += differences_from_torch(whole.aot_config, theirs.sanitized_aot_config)
    if theirs.maybe_subclass_meta is not None:
        wrong += differences_from_torch(whole.maybe_subclass_meta, theirs.maybe_subclass_meta)
    wrappers = [wrapper.type.rpartition(".")[2] for wrapper in whole.dispatch_wrappers]  # type: ignore[union-attr]
    if wrappers != [type(wrapper).__name__ for wrapper in theirs.dispatch_wrappers]:
        wrong.append(f"wrappers {wrappers}")
    if [*(whole.indices_of_inps_to_detach or ())] != theirs.indices_of_inps_to_detach:
        wrong.append(f"to detach {whole.indices_of_inps_to_detach}")
    if whole.num_fw_outs_saved_for_bw != theirs.num_fw_outs_saved_for_bw:
        wrong.append(f"saved for backward {whole.num_fw_outs_saved_for_bw}")
    if (whole.backward is None) != (theirs.compiled_bw is None):
        wrong.append("backward")
    return wrong + sorted(whole.extra)
