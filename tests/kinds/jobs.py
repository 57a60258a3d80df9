"""What a machine does with the cases: run each eagerly and compiled, and say how they compare."""

from __future__ import annotations

import json
import pickle
import traceback
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from s3cache import frame
from s3cache.artifact import Artifact, GraphDescription, description, to_plain
from tests.kinds.case import CASES, Case
from tests.support import watch
from tests.support.descriptions import differences_from_torch

__all__ = ["ROWS", "load_cases", "run", "run_alone"]

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


def run(names: list[str], remote: str) -> dict[str, dict[str, Any]]:
    """Run cases one after the other, each as if it were alone in the process.

    Returns:
        For each case ``differs`` (from eager), ``counts`` and ``torch`` (what the cache and torch
        counted), ``lowered`` and ``started`` (graphs compiled and processes started), ``shown``
        (an entry was saved that has the case's kind), ``entries`` (descriptions of what was
        saved) and ``error``.
    """
    load_cases()
    lowered, started = watch.lowerings(), watch.processes()
    seen = set(_files(remote))
    found = {}
    for name in names:
        lowered.clear()
        started.clear()
        found[name] = _one(CASES[name])
        found[name].update(lowered=len(lowered), started=list(started))
        new = [path for path in _files(remote) if path not in seen]
        seen.update(new)
        entries = [_description(each) for each in map(_entry, new) if each.header.kind == "aot"]
        found[name].update(shown=_shown(CASES[name], entries), entries=entries)
    return found


def run_alone(names: list[str]) -> dict[str, dict[str, Any]]:
    """The same without s3cache: for each case ``lowered``, ``started`` and ``error``."""
    load_cases()
    lowered, started = watch.lowerings(), watch.processes()
    found = {}
    for name in names:
        lowered.clear()
        started.clear()
        _, error = _compared(CASES[name])
        found[name] = {"error": error, "lowered": len(lowered), "started": list(started)}
    return found


def _shown(case: Case, entries: list[dict[str, Any]]) -> bool:
    some = case.shows is None or any(map(case.shows, entries))
    return some and (case.together is None or case.together(entries))


def _one(case: Case) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    import s3cache

    cache = s3cache.active()
    assert cache is not None
    counters.clear()
    before = cache.stats()
    differs, error = _compared(case)
    cache.flush(60)
    after = cache.stats()
    counts = {
        "hits": sum(after.hits.values()) - sum(before.hits.values()),
        "misses": sum(after.misses.values()) - sum(before.misses.values()),
        "reasons_of_misses": {
            str(reason): count - before.misses.get(reason, 0)
            for reason, count in after.misses.items()
            if count != before.misses.get(reason, 0)
        },
        "saved": after.saved - before.saved,
        "half_hits": sum(after.fx.hits.values()) - sum(before.fx.hits.values()),
        "halves": _kept(after.fx) - _kept(before.fx),
        "bypassed": after.bypassed - before.bypassed,
        "reasons": sorted(
            reason
            for reason, count in after.bypass_reasons.items()
            if count > before.bypass_reasons.get(reason, 0)
        ),
    }
    aot = {key: n for key, n in counters["aot_autograd"].items() if key.startswith("autograd_ca")}
    return {"differs": differs, "counts": counts, "torch": aot, "error": error}


def _kept(level: Any) -> int:
    """Entries saved at a level that no other has superseded."""
    return int(level.saved - level.superseded)


def _compared(case: Case) -> tuple[list[str], str]:
    """What differs from eager, as if the case were alone in the process; or how it failed."""
    import torch

    torch.compiler.reset()
    compiler: Any = torch.compiler.config
    try:
        with compiler.patch(cache_key_tag=case.name):  # no other case's entries
            return _compare(case), ""
    except Exception:
        return [], traceback.format_exc()


def _compare(case: Case) -> list[str]:
    from tests.support.observe import differences, observe

    results = []
    for compile_it in (_eagerly, _compiled):
        results.append(observe(_seeded(case, compile_it)))
    return [
        each
        for each in differences(*results)
        if not any(each.startswith(known) for known in case.differs)
    ]


def _seeded(case: Case, compile_it: Any) -> Any:
    import torch

    torch.manual_seed(0)
    return case.program(compile_it)


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


def _entry(path: Path) -> frame.Frame:
    return frame.decode(path.read_bytes())


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
        "subclasses": {place: list(map(_plain, metas)) for place, metas in subclasses.items()},
        "wrappers": [wrapper.type.rpartition(".")[2] for wrapper in whole.dispatch_wrappers],
        "has_backward": whole.backward is not None,
        "has_backward_module": whole.has_backward_module,
        "key": entry.header.key,
        "guards": entry.header.meta["guards"],
        "wrong": _wrong(whole, pickle.loads(bytes(Artifact.entry_of(entry, "aot")))),
    }


def _plain(meta: Any) -> Any:
    return json.loads(json.dumps(to_plain(meta), default=repr))


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
