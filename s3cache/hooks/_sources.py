"""What torch notes of where a program is written: paths and lines, which entries go without.

torch's entries hold the text of each graph, with the line of the user's program that each node is
from, the stack traces of these lines, and variables of the environment, for logs and for its
profiler. None of it is run. Who may read a bucket need not be one who may read the source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CudagraphInfo, PlaceholderInfo

__all__ = ["installed_in", "without_sources"]

# In the text of a graph: "# File: /home/me/train.py:7 in forward, code: x = secret(x)", where other
# notes of torch's may come first.
_COMMENT = re.compile(r"^[ \t]*# (?:.*[ \t])?File: .*(?:\n|$)", re.MULTILINE)
# As tracebacks have it, with the line below, and the marks below that.
_LINE = r"[ \t]+{}.*(?:\n|$)"
_FRAME = re.compile(
    r'^[ \t]*File ".*", line \d+.*(?:\n|$)'
    rf"""(?:{_LINE.format('(?!File ")')}(?:{_LINE.format("[~^]+")})?)?""",
    re.MULTILINE,
)
# Nothing but stack traces. torch puts one of the last beside its message where a tangent is wrong.
_TRACES = {"cache_linemap", "inductor_provenance_stack_traces_str", "tangent_source_stack_traces"}
# A program that compiles the graph again, for reports to torch, with variables of the environment.
_PROGRAM = "runnable_graph_str"
_RUN = "source_code"
# What its comments name of the machine: in which file a kernel was written out.
_KERNEL_PATH = re.compile(r"(?<=# kernel path: ).*/")


@contextlib.contextmanager
def without_sources(*results: object) -> Iterator[None]:
    """While the block runs, torch's entries and compiled graphs do not say where code is from.

    What is set on them meanwhile stays.
    """
    changed: list[tuple[dict[str, object], str, object, object]] = []
    for result in results:
        fields = vars(result)
        for name, told in [*fields.items()]:
            hidden = _hidden(name, told)
            if hidden is not told:
                fields[name] = hidden
                changed.append((fields, name, told, hidden))
    try:
        yield
    finally:
        for fields, name, told, hidden in changed:
            if fields.get(name) is hidden:
                fields[name] = told


def _hidden(name: str, value: object) -> object:
    if name in _TRACES:
        return None
    if name == _PROGRAM:
        return ""
    if name == "cudagraph_info" and value is not None:
        return _told_nothing(cast("CudagraphInfo", value))
    if not isinstance(value, str):
        return value
    return _KERNEL_PATH.sub("", value) if name == _RUN else _text(value)


def _told_nothing(info: CudagraphInfo) -> CudagraphInfo:
    return dataclasses.replace(
        info,
        placeholders=[_placeholder(each) for each in info.placeholders],
        stack_traces=[None] * len(info.stack_traces),
        cudagraph_fail_reasons=[_text(each) for each in info.cudagraph_fail_reasons],
    )


def _placeholder(info: PlaceholderInfo) -> PlaceholderInfo:
    users = [_placeholder(user) for user in info.users]
    return dataclasses.replace(info, stack_trace=None, mutating_use_stack_trace=None, users=users)


def _text(text: str) -> str:
    return _FRAME.sub("", _COMMENT.sub("", text))


@functools.cache
def installed_in() -> tuple[str, ...]:
    """Directories that compiled code may name: what is below them is torch's and Python's."""
    import torch

    found = {str(Path(torch.__file__).parent.parent), sys.prefix, sys.base_prefix}
    return tuple(sorted(found - {"/", "/usr", "/usr/local"}, key=len, reverse=True))
