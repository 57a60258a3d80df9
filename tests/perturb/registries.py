"""What programs register with Inductor, by its own functions: patterns, and code for a device.

Each member is made of words of a grammar: where it is registered × how × in place of what.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.compile_fx
from torch import Tensor
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.lowering import lowerings
from torch._inductor.pattern_matcher import (
    Arg,
    CallFunction,
    PatternMatcherPass,
    fwd_only,
    register_graph_pattern,
    register_lowering_pattern,
    register_replacement,
)

__all__ = ["registered"]

_aten = torch.ops.aten
_OPERATORS = ["sin", "cos", "exp", "tanh", "abs", "sigmoid", "erf", "floor"]
_PASSES = {
    "early": joint_graph.early_patterns,
    "joint 0": joint_graph.pass_patterns[0],
    "joint 1": joint_graph.pass_patterns[1],
    "post 0": post_grad.pass_patterns[0],
    "post 1": post_grad.pass_patterns[1],
    "post 2": post_grad.pass_patterns[2],
}


def registered() -> Iterator[tuple[str, Callable[[Tensor], Any], Any]]:
    """Name, program, and what registers something that multiplies by a number."""
    operators = itertools.cycle(_OPERATORS)
    for (where, how), turn in itertools.product(
        itertools.product(_PASSES, ("graph", "lowering", "replacement")), range(3)
    ):
        if how != "lowering" or where.startswith("post"):
            name = next(operators)
            make = functools.partial(_patterned, _PASSES[where], how, name, turn == 2)
            yield f"a {how} pattern of {name} in {where} {turn}", _program(name), make
    for name, how in itertools.product(_OPERATORS[:3], ("method", "constructor")):
        yield f"a wrapper's {how} and {name}", _program(name), functools.partial(_wrapped, how)


def _program(name: str) -> Callable[[Tensor], Any]:
    return functools.partial(_called, name)


def _called(name: str, x: Tensor) -> Any:
    return getattr(torch, name)(x) + 1


def _patterned(
    where: PatternMatcherPass, how: str, name: str, prepend: bool, by: float
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    operator = getattr(_aten, name).default

    def register() -> None:
        pattern = CallFunction(operator, Arg())
        if how == "graph":

            @register_graph_pattern(pattern, pass_dict=where, prepend=prepend)
            def handler(match: Any, x: Any) -> None:
                match.replace_by_example(lambda x: x * by, [x])

        elif how == "lowering":

            @register_lowering_pattern(pattern, pass_dict=where, prepend=prepend)
            def lower(match: Any, x: Any) -> Any:
                return lowerings[_aten.mul.Tensor](x, by)

        else:
            register_replacement(
                lambda x: operator(x), lambda x: x * by, [torch.ones(4, 8)], fwd_only, where
            )

    @contextlib.contextmanager
    def altered() -> Iterator[None]:
        before = {key: [*entries] for key, entries in where.patterns.items()}
        # By which torch refuses a pattern that it has got already.
        seen = {key: [*graphs] for key, graphs in where.seen_patterns.items()}
        register()
        try:
            yield
        finally:
            for table, then in ((where.patterns, before), (where.seen_patterns, seen)):
                table.clear()
                table.update(then)  # type: ignore[arg-type]

    return altered


def _wrapped(how: str, by: float) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    class Wrapper(PythonWrapperCodegen):
        def generate_return(self, output_refs: list[str]) -> None:
            changed = [f"{ref}.mul({by})" if "buf" in ref else ref for ref in output_refs]
            super().generate_return(changed)

    def made(is_subgraph: bool, *args: Any) -> Any:
        return Wrapper.create(is_subgraph, *args)

    wrapper: Any = Wrapper
    if how == "constructor":
        wrapper = type("Other", (PythonWrapperCodegen,), {"create": staticmethod(made)})

    @contextlib.contextmanager
    def altered() -> Iterator[None]:
        common.init_backend_registration()
        before = common.device_codegens["cpu"]
        common.register_backend_for_device("cpu", CppScheduling, wrapper, CppWrapperCpu)
        try:
            yield
        finally:
            common.device_codegens["cpu"] = before

    return altered
