"""Programs that must have the same keys in every process and on every machine."""

from __future__ import annotations

import functools
import os
import socket
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import s3cache
from s3cache.torch_api import installed_release
from tests.graph.checking import Wrapped

OFFSETS = {"one": 1.0, "two": 2.0}


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


@torch.library.custom_op("s3cache_programs::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, grad: grad * OFFSETS["two"])
s3cache.register_cacheable(torch.ops.s3cache_programs.twice, version="1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.mm.default


def policies() -> dict[str, Any]:
    """Return policies that select the saved operators: a list, and a function."""
    if installed_release() < (2, 13):  # it pickles the function in spite of a cache_hash
        return {"decided": policy}
    return {"listed": [torch.ops.aten.mm.default, torch.ops.aten.sin.default], "decided": policy}


def saved(which: str) -> Callable[[Tensor, Tensor], Tensor]:
    contexts = functools.partial(create_selective_checkpoint_contexts, policies()[which])
    if which == "decided":
        contexts.cache_hash = "mm"  # type: ignore[attr-defined]

    def program(x: Tensor, weight: Tensor) -> Tensor:
        def body(a: Tensor) -> Tensor:
            return torch.sin(a @ weight) @ weight

        return checkpoint(body, x, use_reentrant=False, context_fn=contexts)

    return program


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    return x.sin() + 1


def offset(x: Tensor) -> Tensor:
    return sum((x + value for value in OFFSETS.values()), x).view(-1)[:2]


WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")


class Described(Wrapped):
    """A tensor with sets of words, whose order depends on the hash seed."""

    def __tensor_flatten__(self) -> Any:
        words = Words(WORDS)
        words.more = {*WORDS}
        return ["inner"], ({*WORDS}, {"by": [frozenset(WORDS)]}, CLASSES, words, Holder(*WORDS))


class Words(set[str]):
    """A set with an attribute."""

    more: Any = None


class Marked(CustomGraphPass):
    """A pass with sets in its ``uuid()``."""

    def __call__(self, graph: torch.fx.Graph) -> None: ...

    def uuid(self) -> Any:
        return "marked", frozenset(WORDS), {"of": {*WORDS}}


class Holder:
    def __init__(self, *items: object) -> None:
        self.items = {*items, frozenset(items)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder)

    def __hash__(self) -> int:
        return 1


s3cache.register_cacheable(Words, version="1")
s3cache.register_cacheable(Holder, version="1")
WORD_SET = frozenset(WORDS)
CLASSES = weakref.WeakSet([Holder, Words, Marked])
s3cache.register_cacheable(Described, version="1")


def annotated(x: Tensor) -> Tensor:
    with torch.fx.traceback.annotate({"words": WORD_SET}):
        return x.sin()


def programs() -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Return makers of programs: the function, its inputs, and options of ``torch.compile``."""

    def leaf(*shape: int) -> Tensor:
        return torch.ones(*shape, requires_grad=True)

    passes = ("post_grad_custom_post_pass", "joint_custom_pre_pass")
    options = {"options": {name: Marked() for name in passes}}
    normed = nn.utils.parametrizations.weight_norm
    made: dict[str, Callable[[], tuple[Any, ...]]] = {
        "block": lambda: (Block(), (torch.ones(2, 4, 8),)),
        "function and operator": lambda: (lambda x: Squared.apply(twice(x)).sum(), (leaf(3),)),
        "sets in a subclass": lambda: (torch.sin, (Described(torch.ones(3)),)),
        "sets in passes and an annotation": lambda: (annotated, (torch.ones(3),), options),
        "regions": lambda: (lambda x: region(region(x)), (torch.ones(3),)),
        "dynamic": lambda: (offset, (leaf(5, 2),), {"dynamic": True}),
        "parametrized": lambda: (normed(nn.Linear(4, 4)), (torch.ones(2, 4),)),
    }
    for each in policies():
        made[each] = lambda each=each: (saved(each), (leaf(4, 4), leaf(4, 4)))  # type: ignore[misc]
    return made


def components() -> dict[str, dict[str, list[str]]]:
    """Return the digest and value of each component of each program's key."""
    found = {}
    for name, make in programs().items():
        torch.manual_seed(0)
        function, args, *options = make()
        compiled = torch.compile(function, **(options[0] if options else {}))
        report = s3cache.check(compiled, *args)
        (graph,) = report.graphs
        assert graph.cacheable, f"{name}: {report}"
        found[name] = {part: [one.digest, one.value] for part, one in graph.components.items()}
    return found


def report() -> dict[str, Any]:
    """Return the components of the keys, and facts about this process and machine."""
    return {
        "components": components(),
        "torch": torch.__file__,
        "here": __file__,
        "seed": os.environ.get("PYTHONHASHSEED"),
        "user": os.environ.get("USER"),
        "home": os.path.expanduser("~"),
        "host": socket.gethostname(),
        "argv": sys.argv[0],
        "hash": hash("s3cache"),
    }
