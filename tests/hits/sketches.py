"""Random programs, and the same with one thing about them different.

A sketch is plain data. Its ``source`` is a module, with a function to compile; its ``calls`` say
what that is called with, one call after the other: with inputs that overlap or lie elsewhere, of
other sizes, with other settings when the backward comes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, fields, replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["Call", "Sketch", "pairs"]

COLUMNS = 4
INPUTS = ("a", "b", "c")

# -- where a value lives that user code reads, and how it reads it

PLACES = {
    "global": ("VALUE = {}", "VALUE"),
    "list": ("VALUES = [0.0, {}]", "VALUES[1]"),
    "dict": ("VALUES = {{'deep': {{'er': {}}}}}", "VALUES['deep']['er']"),
    "array": ("import numpy\nVALUES = numpy.array([0.0, {}])", "float(VALUES[1])"),
    "decimal": ("import decimal\nVALUE = decimal.Decimal('{}')", "float(VALUE)"),
    "deque": ("import collections\nVALUES = collections.deque([{}])", "VALUES[0]"),
    "class": ("class Holder:\n    value = {}", "Holder.value"),
    "base class": (
        "class Base:\n    def read(self):\n        return {}\nclass Holder(Base):\n    pass",
        "Holder().read()",
    ),
    "property": (
        "class Holder:\n    @property\n    def value(self):\n        return {}\nHOLDER = Holder()",
        "HOLDER.value",
    ),
    "slots": (
        "class Holder:\n    __slots__ = ('value',)\nHOLDER = Holder()\nHOLDER.value = {}",
        "HOLDER.value",
    ),
    "attribute": ("def holder():\n    pass\nholder.value = {}", "holder.value"),
    "default": ("def read(value={}):\n    return value", "read()"),
    "closure": ("def make(value):\n    return lambda: value\nread = make({})", "read()"),
    "partial": ("import functools\nread = functools.partial(float, {})", "read()"),
    "module": (
        (
            "import sys, types\nvalues = types.ModuleType('values_of_it')\nvalues.value = {}\n"
            "sys.modules['values_of_it'] = values"
        ),
        "values.value",
    ),
    "local import": (
        (
            "import sys, types\nvalues = types.ModuleType('values_of_it')\nvalues.value = {}\n"
            "sys.modules['values_of_it'] = values\ndef read():\n    import values_of_it\n"
            "    return values_of_it.value"
        ),
        "read()",
    ),
    "tensor": ("HELD = torch.tensor([{}])", "HELD.item()"),
    "chain": (
        "def read0():\n    return {}\n"
        + "\n".join(f"def read{n}():\n    return read{n - 1}()" for n in range(1, 16)),
        "read15()",
    ),
    "environment": ("import os\nos.environ['FUZZED'] = '{}'", "float(os.environ['FUZZED'])"),
    "context": (
        "import contextvars\nVALUE = contextvars.ContextVar('VALUE')\nVALUE.set({})",
        "VALUE.get()",
    ),
}

# -- which code reads it, while a graph is traced

HOOKS = {
    "traced": "def helper(x):\n    return x * ({0})",
    "formula": """
        @torch.library.custom_op("fuzzed::op", mutates_args=())
        def helper(x: torch.Tensor) -> torch.Tensor:
            return x.sin()
        @helper.register_fake
        def fake(x):
            return torch.empty_like(x)
        def backward(ctx, grad):
            return grad * ({0})
        helper.register_autograd(backward)
        """,
    "fake": """
        @torch.library.custom_op("fuzzed::op", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1)[:2].clone()
        @op.register_fake
        def fake(x):
            return x.new_empty(2) if ({0}) < 1e6 else x.new_empty(1)
        def helper(x):
            return op(x.detach()).sum() + x
        """,
    "decomposed": """
        library = torch.library.Library("fuzzed", "DEF")
        library.define("op(Tensor x) -> Tensor")
        def decomposed(x):
            return x * ({0})
        library.impl("op", decomposed, "CompositeImplicitAutograd")
        def helper(x):
            return torch.ops.fuzzed.op(x)
        """,
    "function": """
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.cos()
            @staticmethod
            def backward(ctx, grad):
                return grad * ({0})
        def helper(x):
            return Function.apply(x)
        """,
}

# The same as a formula, but its user vouches for it, and then changes it: a wrong hit.
BLIND = "vouched"
_blind = """
    import s3cache
    s3cache.register_cacheable(torch.ops.fuzzed.op, version='1')
    """

# -- what a program does

UNARY = (
    "{x}.sin()",
    "{x}.exp()",
    "torch.nn.functional.gelu({x})",
    "{x}.softmax(-1)",
    "{x}.cumsum(0)",
    "{x}.flip(0)",
    "{x}.clamp(-0.5)",
    "{x}.detach()",
    "torch.nn.functional.layer_norm({x}, ({x}.shape[-1],))",
    "helper({x})",
)
BINARY = ("{x} + {y}", "{x} * {y}", "torch.maximum({x}, {y})", "torch.where({x} > 0, {x}, {y})")
IN_PLACE = ("{x}.mul_(2.0)", "{x}.add_({y}.detach())", "{x}[:, 1:3].mul_(3.0)", "{x}.t().neg_()")
VIEWS = (
    "torch.as_strided({x}, (2, 3), (3, 1), 1).sum()",
    "torch.as_strided({x}, (2, 2), (2, 1)).sum()",
    "torch.as_strided({x}[1:], (3,), (1,), 1).sum()",
    "torch.as_strided_scatter({x}, {x}.reshape(-1)[:3] * 2, (3,), (1,), 2).sum()",
    "{x}[1:].sum()",
    "{x}.t()[2].sum()",
    "{x}.reshape(-1)[::2].sum()",
)
MODES = ("no_grad()", "enable_grad()", "autocast('cpu')")
SETTINGS = (
    "torch.use_deterministic_algorithms(True)",
    "torch.set_float32_matmul_precision('medium')",
    "torch._inductor.config.cpp.enable_unsafe_math_opt_flag = True",
    "torch._inductor.config.emulate_precision_casts = True",
    "torch.set_num_threads(2)",
    "torch.backends.mkldnn.enabled = False",
)
LAYOUTS = ("plain", "offset", "transposed", "strided")
RELATIONS = ("apart", "same", "value", "overlap", "neighbour", "interleaved")


@dataclass(frozen=True)
class Call:
    """One call of the compiled function.

    Attributes:
        rows: of each input.
        layouts: how each input lies in its storage.
        relation: of the second input to the first.
        setting: what is set between the forward and the backward; empty for nothing.
    """

    rows: int = 3
    layouts: tuple[str, ...] = ("plain",) * len(INPUTS)
    relation: str = "apart"
    setting: str = ""


@dataclass(frozen=True)
class Sketch:
    """A program: what it does, what its user code reads, how it is called."""

    steps: tuple[str, ...]
    outputs: tuple[int, ...]
    hook: str
    place: str
    value: float
    mode: str
    setting: str
    dynamic: bool | None
    calls: tuple[Call, ...]

    @property
    def source(self) -> str:
        """A module with ``program``, a function of three tensors; ``setting`` is set already."""
        where, how = PLACES[self.place]
        steps = "\n".join(f"    {step}" for step in self.steps)
        hook = (HOOKS["formula"], _blind) if self.hook == BLIND else (HOOKS[self.hook],)
        names = sorted({f"r{number % len(self.steps)}" for number in self.outputs})
        return "\n".join(
            (
                "import torch",
                self.setting,
                where.format(self.value),
                "\n".join(map(textwrap.dedent, hook)).format(how),
                f"def program({', '.join(INPUTS)}):",
                f"    with torch.{self.mode}:",
                textwrap.indent(steps, "    "),
                f"    return {', '.join(names)},",
                "",
            )
        )


def _steps(draw: DrawFn) -> tuple[str, ...]:
    steps: list[str] = []
    registers = list(INPUTS)
    for number in range(draw(st.integers(1, 5))):
        form = draw(st.sampled_from(UNARY + BINARY + IN_PLACE + VIEWS))
        x, y = (draw(st.sampled_from(registers)) for _ in range(2))
        steps.append(f"r{number} = {form.format(x=x, y=y)}")
        if form not in VIEWS:
            registers.append(f"r{number}")
    if not any("helper" in step for step in steps):
        steps.append(f"r{len(steps)} = helper({draw(st.sampled_from(registers))})")
    return tuple(steps)


_calls = st.builds(
    Call,
    rows=st.sampled_from((3, 3, 3, 5, 8)),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * len(INPUTS)),
    relation=st.sampled_from(RELATIONS),
    setting=st.sampled_from(("", "", *SETTINGS)),
)
_parts: dict[str, SearchStrategy[object]] = {
    "steps": st.composite(_steps)(),
    "outputs": st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    "hook": st.sampled_from(sorted(HOOKS)),
    "place": st.sampled_from(sorted(PLACES)),
    "value": st.sampled_from((2.0, 3.0, 0.5)),
    "mode": st.sampled_from(MODES),
    "setting": st.sampled_from(("", "", *SETTINGS)),
    "dynamic": st.sampled_from((None, True, False)),
    "calls": st.lists(_calls, min_size=1, max_size=3).map(tuple),
}
# What is changed most often: that which graphs do not show.
_CHANGED = (*_parts, "value", "value", "calls", "calls", "calls", "one call", "one call")


@st.composite
def pairs(draw: DrawFn) -> tuple[Sketch, Sketch]:
    """A program, and one that differs from it in one part."""
    program = Sketch(**{name: draw(part) for name, part in _parts.items()})  # type: ignore[arg-type]
    assert {field.name for field in fields(Sketch)} == {*_parts}
    changed = draw(st.sampled_from(_CHANGED))
    if changed == "one call":
        # What comes first is hit; what comes later has to be compiled, if other code is needed.
        new = (*program.calls, draw(_calls))
        return program, replace(program, calls=new)
    return program, replace(program, **{changed: draw(_parts[changed])})  # type: ignore[arg-type]
