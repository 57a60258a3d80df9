"""Programs that compile late, and entries that fail at their first call."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.utils import counters

import s3cache
from s3cache import frame
from tests.hooks.graphs import remote_of
from tests.hooks.jobs import account, log_records, machine_here
from tests.support.forging import encoded


def _gradient(x: Any) -> Any:
    (gradient,) = torch.autograd.grad((x.sin() * 2).sum(), x)
    return gradient * 2


@torch._inductor.config.patch(fallback_by_default=True)  # so that no C++ is compiled
def count_frames(url: str) -> dict[str, int]:
    """Return how many frames Dynamo converts for a graph with a backward that is lowered late."""
    counts = {}
    for name in ("warm", "alone", "miss", "hit"):
        with machine_here(url, name) as cache:
            if name in ("warm", "alone"):
                s3cache.disable()
            torch.compile(_gradient)(torch.ones(4, requires_grad=True))
            counts[name] = counters["frames"]["total"]
            cache.flush()
            assert sum(cache.stats().hits.values()) == (2 if name == "hit" else 0)
    return counts


def _powers(x: Any) -> Any:
    return (x.sin() ** 3 + x.cos() ** 2).exp()


def fork_a_pool(url: str) -> dict[str, Any]:
    """Compile, then let two children compile; return their exit codes, and how long they took."""
    with machine_here(url, "pool"):
        torch.compile(_gradient)(torch.ones(4, requires_grad=True))
        began, children = time.monotonic(), []
        for _ in range(2):
            child = os.fork()
            if not child:
                signal.alarm(120)
                result = torch.compile(_powers)(torch.ones(8))
                os._exit(0 if torch.allclose(result, _powers(torch.ones(8))) else 1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return {"codes": codes, "seconds": time.monotonic() - began}


# -- entries that raise at their first call

RAISE = "raise RuntimeError('this code is broken')"


def plain(x: Any) -> Any:
    return (x.sin() * 2).exp()


def random(x: Any) -> Any:
    return torch.nn.functional.dropout(x.sin(), 0.5) + torch.rand_like(x)


def adding(x: Any) -> Any:
    """A graph that writes to its input."""
    x.add_(1)
    return x.sin() * 2


def looking_up(x: Any) -> Any:
    """A graph that fails for some inputs."""
    table = torch.arange(16.0)
    return table[(x * 8).long()] * 2


@torch._dynamo.allow_in_graph
def _opaque(x: Any) -> Any:
    return x.cos() * 3


def unknown(x: Any) -> Any:
    """A graph that is only cached at the second level."""
    return _opaque(x.sin()) * 2


def known(x: Any) -> Any:
    """A graph that is cached as a whole, and has the same FX graph."""
    return (x.sin().cos() * 3) * 2


def _call(function: Any, *, grad: bool, value: float = 1.0) -> list[Any]:
    """Return outputs, gradient, input and the state of random numbers after a call."""
    torch.manual_seed(0)
    x = torch.linspace(0, value, 8, requires_grad=grad)
    result = function(x)
    if grad:
        result.sum().backward()
    return [result.detach(), x.grad, x.detach(), torch.random.get_rng_state()]


def _is_same(one: list[Any], other: list[Any]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.allclose(a, b))
        for a, b in zip(one, other, strict=True)
    )


@torch._inductor.config.patch(fallback_by_default=True)  # so that no C++ is compiled
def _calls(
    url: str,
    at: str,
    program: str,
    *,
    reader: str = "",
    grad: bool = False,
    backward: bool = False,
    line: str = RAISE,
    last: bool = False,
    kinds: Sequence[str] = ("aot", "fx"),
    value: float = 1.0,
    machines: Sequence[str] = ("first", "second"),
    **options: Any,
) -> dict[str, Any]:
    """Break the entries of a program, and call it on two other machines; return the outcomes.

    With ``reader``, they call this program.
    """
    function = globals()[program]
    calm = _call(torch.compile(function, backend="aot_eager"), grad=grad)
    with machine_here(url, f"{at}/writer", **options | {"mode": "read-write"}) as cache:
        expected = _call(torch.compile(function), grad=grad)
        cache.flush()
    found: dict[str, Any] = {"right": _is_same(calm, expected) or program == "random"}
    assert _break(url, kinds=kinds, backward=backward, line=line, last=last)
    before = {path: path.read_bytes() for path in remote_of(url).rglob("*.*")}
    warnings = log_records()
    for name in machines:
        warnings.clear()
        with machine_here(url, f"{at}/{name}", **options) as cache:
            compiled, outcomes = torch.compile(globals()[reader or program]), list[Any]()
            for _ in range(3):
                torch.manual_seed(0)
                try:
                    outcomes.append(_is_same(_call(compiled, grad=grad, value=value), expected))
                except Exception as exc:
                    notes = getattr(exc, "__notes__", [])
                    outcomes.append([type(exc).__name__, str(exc), *notes])
            cache.flush()
            said = [record.getMessage() for record in warnings]
            found[name] = {
                "outcomes": outcomes,
                "warnings": [each for each in said if "first call" in each],
                **account(cache),
            }
    stays = [path for path, data in before.items() if path.exists() and path.read_bytes() == data]
    found["stays"] = [path.name[0] for path in stays]
    return found


def calls_of(url: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        name: _calls(f"{url}/{number}?create=1", str(number), **options)
        for number, (name, options) in enumerate(cases.items())
    }


def _break(url: str, *, kinds: Sequence[str], backward: bool, line: str, last: bool) -> int:
    """Add a line to the code of entries, in one direction; return the number of these entries."""
    count = 0
    for path in remote_of(url).rglob("*.*"):
        found = frame.decode(path.read_bytes())
        if found.header.kind not in kinds:
            continue
        sections = {each: bytes(found.section(each)) for each in found.names}
        entry = pickle.loads(sections["entry"])
        graphs = [entry]
        if found.header.kind == "aot":
            graphs = [entry.compiled_bw if backward else entry.compiled_fw]
            graphs = [each.result for each in graphs if each is not None]
        elif _is_backward(entry) != backward:
            graphs = []
        for graph in graphs:
            head, call, body = graph.source_code.partition("def call(self, args):\n")
            lines = body.split("\n")
            at = next(i for i, each in enumerate(lines) if last * "return (" in each)
            lines.insert(at, " " * 8 + line)
            assert call
            graph.source_code = head + call + "\n".join(lines)
            graph.cache_key = "c" + f"{hash(graph.source_code) % 10**9:051d}"
            count += 1
        sections["entry"] = pickle.dumps(entry)
        path.write_bytes(encoded(found, sections))
    return count


def _is_backward(graph: Any) -> bool:
    return bool(graph.fx_kwargs.get("is_backward"))
