"""Cases: small programs that one machine compiles and the next one hits, and their job there."""

from __future__ import annotations

import json
import pickle
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from s3cache import frame
from s3cache.artifact import description, section_of
from tests.equal.observe import differences, observe
from tests.equal.programs import Compile, eagerly
from tests.support.descriptions import differences_from_torch
from tests.support.watch import Watch

Program: TypeAlias = Callable[[Compile], Any]


@dataclass(frozen=True)
class Case:
    """A program, and the expected behaviour of the cache.

    Attributes:
        row: the row of the table "What the cache must hold" in the design.
        name: the unique name.
        program: a function of ``torch.compile`` (in eager mode, of a function that changes
            nothing), which returns all that can be observed: inputs, outputs, gradients, numbers.
        graphs: the number of graphs that are saved, and that hit on the next machine.
        unsaved: the number of graphs that are looked up, but cannot be saved as a whole.
        again: the number of lookups that hit entries that the first machine has just saved.
        halves: the number of halves of bypassed or unsaved graphs that are saved at the second
            level, and that hit on the next machine.
        shared: the number of lookups on the first machine that hit halves of other graphs of the
            case, which it has just saved as a whole.
        lowered: the number of graphs that each machine compiles, because they cannot be cached.
        bypassed: the number of graphs that each process bypasses.
        reasons: the reasons of these bypasses.
        shows: returns whether the description of an entry, as plain data, has the kind of this
            case; one entry of the case must have it.
        native: whether Inductor must generate C++. Otherwise, the code calls each operator in some
            runs, which compiles in a tenth of the time.
        together: the same for all entries of the case; they also have ``key`` and ``guards``.
        differs: observations in which torch.compile differs from eager, also without a cache.
        since: the first torch release that can cache such a graph, if it matters.
        slow: whether only ``make test-all`` runs this case, because another one is similar.
    """

    row: str
    name: str
    program: Program
    graphs: int = 1
    unsaved: int = 0
    again: int = 0
    halves: int = 0
    shared: int = 0
    lowered: int = 0
    bypassed: int = 0
    reasons: tuple[str, ...] = ()
    shows: Callable[[dict[str, Any]], bool] | None = None
    together: Callable[[list[dict[str, Any]]], bool] | None = None
    differs: tuple[str, ...] = ()
    native: bool = False
    since: tuple[int, int] = (0, 0)
    slow: bool = False


CASES: dict[str, Case] = {}


def case(row: str, **expected: Any) -> Callable[[Program], Program]:
    """Register the decorated program under its own name; see :class:`Case`."""

    def register(program: Program) -> Program:
        name = program.__name__
        assert name not in CASES, name
        CASES[name] = Case(row, name, program, **expected)
        return program

    return register


def load_cases() -> dict[str, Case]:
    """Import the cases; return them by name."""
    for module in ("safety", "data", "runtime", "autograd", "ahead"):
        import_module(f"tests.equal.kinds.{module}")
    return CASES


def matrix(requires_grad: bool = False, rows: int = 2) -> Any:
    """Return a matrix of three columns."""
    return torch.arange(3.0 * rows).reshape(rows, 3).requires_grad_(requires_grad)


def train(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call it, run backward from its differentiable outputs; return inputs, outputs, gradients."""
    outputs = function(*inputs)
    flat = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    total: Any = 0
    for index, each in enumerate(flat):
        if isinstance(each, Tensor) and each.grad_fn is not None:
            total = total + (each * (index + 1.5)).sum()
    total.backward()
    leaves = [each for each in inputs if isinstance(each, Tensor) and each.is_leaf]
    return inputs, flat, [each.grad for each in leaves]


def graph(row: str, *makes: Callable[[], Any], **expected: Any) -> Callable[[Any], Any]:
    """Register the decorated function as a case: it is compiled, and called with new inputs.

    If an input requires a gradient, a backward follows.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def program(compile_it: Compile) -> Any:
            inputs = [make() for make in makes]
            if any(each.requires_grad for each in inputs):
                return train(compile_it(function), *inputs)
            return (*inputs, compile_it(function)(*inputs))

        program.__name__ = function.__name__
        case(row, **expected)(program)
        return function

    return register


# -- the job of a machine


def run(names: list[str], remote: str | None, native: bool = True) -> dict[str, dict[str, Any]]:
    """Run cases one after the other, each as if it were alone in the process.

    Args:
        native: whether Inductor generates C++ for all cases.

    Returns:
        For each case the counts of :class:`Watch`, ``error`` (eager or compiled), ``differs`` (from
        eager) and ``hits`` (as torch counts them); with s3cache also ``shown`` (whether a saved
        entry has the case's kind) and ``entries`` (descriptions of saved entries).
    """
    cases, watch = load_cases(), Watch()
    seen: set[Path] = set()
    found = {}
    for name in names:
        found[name] = watch.around(partial(_compared, cases[name], native))
        if remote is not None:
            new = [path for path in _files(remote) if path not in seen]
            seen.update(new)
            saved = (frame.decode(path.read_bytes()) for path in new)
            entries = [_description(each) for each in saved if each.header.kind == "aot"]
            found[name].update(shown=_shown(cases[name], entries), entries=entries)
    return found


def _shown(case: Case, entries: list[dict[str, Any]]) -> bool:
    some = case.shows is None or any(map(case.shows, entries))
    return some and (case.together is None or case.together(entries))


def _compared(case: Case, native: bool) -> dict[str, Any]:
    """Run the case eagerly and compiled, as if it were alone."""
    torch.compiler.reset()
    counters.clear()
    compiler: Any = torch.compiler.config
    try:
        torch.manual_seed(0)
        expected = observe(case.program(eagerly))
        torch.manual_seed(0)
        with (
            compiler.patch(cache_key_tag=case.name),  # hits no entries of other cases
            torch._inductor.config.patch(fallback_by_default=not (native or case.native)),
        ):
            got = observe(case.program(torch.compile))
    except Exception:
        return {"error": traceback.format_exc()}
    differs = differences(got, expected, close=1e-5)
    return {
        "error": "",
        "differs": [each for each in differs if not each.startswith(case.differs)],
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
    }


def _files(remote: str) -> list[Path]:
    root = Path(remote.removeprefix("file://").partition("?")[0])
    return [path for path in root.rglob("*") if path.is_file() and "/v1" in str(path)]


def _description(entry: frame.Frame) -> dict[str, Any]:
    """Return an entry's description of its graph, by torch's names, and errors in it."""
    whole: Any = description(entry.header)
    plain = json.loads(json.dumps(whole["runtime_metadata"], default=repr))
    described: dict[str, Any] = defaultdict(lambda: None, plain)
    described.update(
        inputs=[defaultdict(lambda: None, each) for each in described["input_info"]],
        outputs=[defaultdict(lambda: None, each) for each in described["output_info"]],
        subclasses={
            "inputs": described["subclass_inp_meta"],
            "outputs": described["subclass_fw_graph_out_meta"],
            "tangents": described["subclass_tangent_meta"],
        },
        wrappers=[each["class"].rpartition(".")[2] for each in whole["dispatch_wrappers"]],
        has_backward_module=whole["has_backward_module"],
        key=entry.header.key,
        guards=entry.header.meta["guards"],
    )
    compiled = pickle.loads(bytes(section_of(entry, "aot", "entry")))
    described["wrong"] = [*_wrong(whole, described["wrappers"], compiled, entry.header.meta)]
    return described


def _wrong(whole: dict[str, Any], wrappers: list[str], compiled: Any, meta: Any) -> Iterator[str]:
    """Yield what differs from torch's object, or is wrong about the process that made it."""
    for name in ("runtime_metadata", "sanitized_aot_config", "maybe_subclass_meta"):
        if (value := getattr(compiled, name)) is not None:
            yield from differences_from_torch(whole.get(name), value, name)
    for name in ("indices_of_inps_to_detach", "num_fw_outs_saved_for_bw"):
        if whole.get(name) != getattr(compiled, name):
            yield f"{name}: {whole.get(name)}"
    if wrappers != [type(wrapper).__name__ for wrapper in compiled.dispatch_wrappers]:
        yield f"wrappers: {wrappers}"
    if whole["has_backward"] != (compiled.compiled_bw is not None):
        yield "backward"
    made_by, components = meta["made_by"], meta["components"]
    is_right = made_by["torch"] == components["torch.version"][1] and made_by["platform"]
    if not (is_right and "device" in made_by and all(time >= 0 for time in meta["times_ns"])):
        yield f"made by {made_by} in {meta['times_ns']}"
    if not all(len(digest) == 32 for digest, _ in components.values()):
        yield "digests"
