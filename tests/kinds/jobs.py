"""Run each case on a machine, eagerly and compiled, and compare the results."""

from __future__ import annotations

import json
import pickle
import traceback
from collections import defaultdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from s3cache import frame
from s3cache.artifact import description, section_of
from tests.kinds.case import CASES, Case
from tests.support.descriptions import differences_from_torch
from tests.support.watch import Watch

ROWS = (
    "safety",
    "outputs",
    "inputs",
    "tensors",
    "runtime",
    "paths",
    "compiled_autograd",
    "compiled_backward",
    "models",
)


def load_cases() -> dict[str, Case]:
    """Import all cases; return them by name."""
    for row in ROWS:
        import_module(f"tests.kinds.{row}")
    return CASES


def run(names: list[str], remote: str | None) -> dict[str, dict[str, Any]]:
    """Run cases one after the other, each as if it were alone in the process.

    Returns:
        For each case the counts of :class:`Watch`, ``error``, ``differs`` (from eager) and ``hits``
        (as torch counts them); with s3cache also ``shown`` (whether a saved entry has the case's
        kind) and ``entries`` (descriptions of saved entries).
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
    """Run the case as if it were alone; return its differences from eager, and its error."""
    import torch
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiler: Any = torch.compiler.config
    try:
        with compiler.patch(cache_key_tag=case.name):  # hits no entries of other cases
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


def _compiled(function: Any, **options: Any) -> Any:
    import torch

    return torch.compile(function, **options)


def _files(remote: str) -> list[Path]:
    root = Path(remote.removeprefix("file://").partition("?")[0])
    return [path for path in root.rglob("*") if path.is_file() and "/v1" in str(path)]


def _description(entry: frame.Frame) -> dict[str, Any]:
    """Return an entry's description of its graph, by torch's names, and errors in it."""
    whole: Any = description(entry.header)
    metadata = whole["runtime_metadata"]
    described: dict[str, Any] = defaultdict(
        lambda: None, json.loads(json.dumps(metadata, default=repr))
    )
    described.update(
        inputs=[defaultdict(lambda: None, each) for each in described["input_info"]],
        outputs=[defaultdict(lambda: None, each) for each in described["output_info"]],
        subclasses={
            "inputs": described["subclass_inp_meta"],
            "outputs": described["subclass_fw_graph_out_meta"],
            "tangents": described["subclass_tangent_meta"],
        },
        wrappers=[_class(wrapper) for wrapper in whole["dispatch_wrappers"]],
        has_backward=whole["has_backward"],
        has_backward_module=whole["has_backward_module"],
        key=entry.header.key,
        guards=entry.header.meta["guards"],
        wrong=[
            *_wrong(whole, pickle.loads(bytes(section_of(entry, "aot", "entry")))),
            *_wrongly_made(entry.header.meta),
        ],
    )
    return described


def _wrongly_made(meta: Any) -> list[str]:
    """Return the names of wrong metadata about the process that made the entry."""
    made_by, components = meta["made_by"], meta["components"]
    torch = components["torch.version"][1]
    right = {
        "times": all(time >= 0 for time in meta["times_ns"]),
        "made by": made_by["torch"] == torch and made_by["platform"] and "device" in made_by,
        "digests": all(len(digest) == 32 for digest, _ in components.values()),
    }
    return [what for what, is_right in right.items() if not is_right]


def _wrong(whole: dict[str, Any], compiled: Any) -> list[str]:
    wrong: list[str] = []
    for name in ("runtime_metadata", "sanitized_aot_config", "maybe_subclass_meta"):
        if (value := getattr(compiled, name)) is not None:
            wrong += differences_from_torch(whole.get(name), value, name)
    wrappers = [_class(wrapper) for wrapper in whole["dispatch_wrappers"]]
    if wrappers != [type(wrapper).__name__ for wrapper in compiled.dispatch_wrappers]:
        wrong.append(f"wrappers {wrappers}")
    if whole.get("indices_of_inps_to_detach") != compiled.indices_of_inps_to_detach:
        wrong.append(f"to detach {whole.get('indices_of_inps_to_detach')}")
    if whole.get("num_fw_outs_saved_for_bw") != compiled.num_fw_outs_saved_for_bw:
        wrong.append(f"saved for backward {whole.get('num_fw_outs_saved_for_bw')}")
    if whole["has_backward"] != (compiled.compiled_bw is not None):
        wrong.append("backward")
    return wrong


def _class(wrapper: dict[str, Any]) -> str:
    return str(wrapper["class"]).rpartition(".")[2]
