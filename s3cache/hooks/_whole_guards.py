"""The seam at guards on sizes: a hit is guarded by what the compile was, and by nothing more.

torch writes a guard such as ``Max(8, s0) <= s1`` as ``max(8, s0) <= s1`` and has Python evaluate it
for the sizes of a hit. Python's own ``max`` takes a branch: what is guarded is ``s0 > 8`` too, and
calls that the compiled code is right for are compiled anew, as they are after hits of torch's own.
torch has functions of both that take none.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.hooks._patching import Patches
    from s3cache.torch_api.protocols import Function

__all__ = ["WholeGuards", "unbranched"]

_BRANCHES = re.compile(r"\b(min|max)\(")


class WholeGuards:
    """Has the guards of an entry, of a graph or of a half, evaluated one by one and in no parts."""

    def install(self, patches: Patches) -> None:
        """Replace how torch evaluates them."""
        patches.replace(internals.evaluate_guards_expression, self._unbranching)

    def _unbranching(self, original: Function[bool]) -> Function[bool]:
        def evaluate_guards_expression(shapes: object, code: str, args: Sequence[object]) -> bool:
            return original(shapes, unbranched(code), args)

        return evaluate_guards_expression


def unbranched(expression: str) -> str:
    """The same condition on sizes, evaluated as one where Python would take a branch.

    What cannot be read is returned as it is: whoever evaluates it says so.
    """
    if _BRANCHES.search(expression) is None:
        return expression
    try:
        return ast.unparse(_Unbranching().visit(ast.parse(expression.strip(), mode="eval")))
    except SyntaxError:
        return expression


class _Unbranching(ast.NodeTransformer):
    """``max(a, b, c)`` becomes ``torch.sym_max(torch.sym_max(a, b), c)``."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in ("min", "max") or node.keywords or len(node.args) < 2:
            return node
        function = ast.parse(f"torch.sym_{name}", mode="eval").body
        return functools.reduce(lambda one, other: ast.Call(function, [one, other], []), node.args)
