"""``s3cache check``: what of a program can be cached, and why the rest cannot."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from s3cache._pages import footer
from s3cache._words import counted
from s3cache.cli._choosing import Steps, duration_s
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output
from s3cache.errors import ConfigError

if TYPE_CHECKING:
    from s3cache.checking import Checked, CheckedGraph

__all__ = ["check"]

# ruff: noqa: UP045 - see _choosing.py

_ENDS = {
    "itself": "the program ended by itself",
    "steps": "the program was ended: its optimizers have stepped (--steps)",
    "graphs": "the program was ended: so many graphs were compiled (--graphs)",
    "quiet": "the program was ended: it compiled nothing more (--quiet 0 lets it run)",
    "timeout": "the program was ended: its time was over (--timeout)",
    "interrupted": "the program was ended: interrupted",
}
_KEY_DIGITS = 12


@grouped(out=Output)
def check(
    out: Output,
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM [ARGUMENT]...", help="What python runs too, and arguments for it."
        ),
    ],
    module: Annotated[bool, typer.Option("-m", help="A module, not a script.")] = False,
    command: Annotated[bool, typer.Option("-c", help="Code, not a script.")] = False,
    quiet: Annotated[
        str,
        typer.Option(metavar="TIME", help="End it when it compiled nothing for so long; 0: never."),
    ] = "30s",
    steps: Steps = None,
    graphs: Annotated[
        Optional[int],
        typer.Option(metavar="N", help="End it when so many graphs were looked at.", min=1),
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="End it after that time in any case; 0: never.")
    ] = "2h",
) -> int:
    """Run a program, and say of each graph that it compiles whether it can be cached.

    It compiles as ever, in a process of its own; no bucket is needed, none is asked, and nothing is
    left in one, unless the program itself turns s3cache on. Of a graph that cannot be cached all
    reasons are said, with the line in the program and what to do about it. A program is ended
    (SIGTERM, as by a scheduler) once it has compiled something and then nothing for --quiet: that
    is after the first steps of training that takes days, which then saves nothing. Exits with 1 if
    a graph cannot be cached as a whole, or nothing was compiled.
    """
    from s3cache.checking import Limits, check_program

    if module and command:
        raise ConfigError("option -c", "is given beside -m", "leave one of them out")
    kind = ["-m"] if module else ["-c"] if command else []
    if not kind and program[0] != "-" and not os.path.exists(program[0]):
        raise ConfigError(f"script {program[0]}", "is not there", "name another, or give -m or -c")
    found = check_program(
        [*kind, *program],
        Limits(
            quiet_s=duration_s("--quiet", quiet) or None,
            steps=steps,
            graphs=graphs,
            timeout_s=duration_s("--timeout", timeout) or None,
        ),
        to_stderr=out.json,
    )
    if out.json:
        out.record(found.as_dict())
    else:
        _show(out, found)
    if found.end == "interrupted":
        return 130
    return 0 if found.cacheable else 1


def _show(out: Output, found: Checked) -> None:
    code = f" with {found.exit_code}" if found.exit_code else ""
    out.note(f"{_ENDS[found.end]}{code}")
    if not found.graphs:
        out.line("no graph: the program called nothing that torch.compile compiles by Inductor")
        return
    good = sum(graph.cacheable for graph in found.graphs)
    out.line(f"{good} of {counted(len(found.graphs), 'graph')} can be cached")
    for index, graph in enumerate(found.graphs):
        out.line(f"graph {index}: {_verdict(graph)}")
        for reason in graph.reasons:
            where = reason.get("line") or reason.get("node") or ""
            text = f"{reason.get('message', '')} [{reason.get('code', '')}]"
            out.line(f"  {where}: {text}" if where else f"  {text}")
            if reason.get("fix"):
                out.line(f"    fix: {reason['fix']}")
    for place in found.breaks:
        out.line(f"graph break at {place['where']}: {place['reason']}")
    if not found.complete:
        out.line("and more: so many lookups are not recorded")
    if more := footer(each.get("code", "") for graph in found.graphs for each in graph.reasons):
        out.line(more)


def _verdict(graph: CheckedGraph) -> str:
    parts = [graph.nodes] if graph.nodes else []
    if graph.where is not None:
        file, line, function = graph.where
        parts.append(f"{file}:{line} in {function}")
    if graph.times > 1:
        parts.append(f"{graph.times} times")
    if graph.cacheable:
        parts.append(f"key {graph.key[:_KEY_DIGITS]}")
    elif graph.in_halves:
        parts.append("cannot be cached as a whole, its halves can")
    else:
        parts.append("cannot be cached")
    return ", ".join(parts)
