"""What graphs of compiled autograd call, in words.

Compiled autograd traces a whole backward pass. It puts functions into the graph that it makes as it
goes: one for each kind of node of torch's autograd, and one for each compiled graph whose backward
pass is part of this one. No import finds them, and torch's key refuses them.
"""

from __future__ import annotations

import hashlib
import re
from types import CodeType, FunctionType
from typing import Any

__all__ = ["autograd_words", "without_aot_names"]

# Nodes that compiled autograd copies from the backward pass of the first, second … compiled graph.
_COPIED = re.compile(r"\baot\d+_\w+")

_PROLOGUE = "AutogradCompilerInstance.proxy_call_aot_backward.<locals>.call_aot_bwd_prologue"
# Globals of a generated prologue: what is described below, and what its error messages say.
_DESCRIBED = frozenset({"torch", "_process_tangent_", "_tangent_metas_"})
_FOR_MESSAGES = frozenset({"_tangent_descs_", "_compile_id_", "_stack_traces_"})


def autograd_words(target: Any) -> str | None:
    """Which function ``target`` is, if it is one of them and all that it does can be told."""
    from torch._dynamo.compiled_autograd import Op

    if isinstance(target, Op):
        # All that a node of torch's own has saved is in its arguments. C++ of others may do more.
        return None if target.is_custom_function else f"autograd node {target.__name__}"
    if isinstance(target, FunctionType) and target.__qualname__ == _PROLOGUE:
        return _prologue_words(target)
    return None


def without_aot_names(gm: Any, source: str) -> str:
    """``source``, generated from ``gm``, with numbers for the names of nodes copied into it.

    The backward pass of a hit was written out and read again, which gives its nodes other names.
    """
    names = (node.name for node in gm.graph.nodes if _COPIED.fullmatch(node.name))
    numbers = {name: f"aot#{number}" for number, name in enumerate(names)}
    return _COPIED.sub(lambda found: numbers.get(found[0], found[0]), source)


def _prologue_words(target: FunctionType) -> str | None:
    """Code that AOTAutograd generates to check, and lay out, what a backward pass is given."""
    from torch._functorch._aot_autograd.schemas import PlainTensorMeta

    cells = dict(zip(target.__code__.co_freevars, target.__closure__ or (), strict=True))
    cell = cells.get("bw_prologue_fn")
    prologue: Any = None if cell is None else cell.cell_contents
    if not isinstance(prologue, FunctionType) or prologue.__closure__:
        return None
    used = {name for name in _names(prologue.__code__) if name in prologue.__globals__}
    tangents = prologue.__globals__.get("_tangent_metas_", ())
    if used - _DESCRIBED - _FOR_MESSAGES or any(type(t) is not PlainTensorMeta for t in tangents):
        return None  # of a tensor subclass, or of a torch that we have not seen
    return f"backward prologue {_digest(prologue.__code__)} of {list(tangents)!r}"


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _digest(code: CodeType) -> str:
    constants = [
        _digest(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts
    ]
    text = repr((code.co_code, code.co_names, code.co_varnames, constants))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
