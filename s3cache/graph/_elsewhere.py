"""What programs keep elsewhere of the classes that code comes by, so that no walk would meet it.

They tell torch how their containers are taken apart, Python which classes count as which others,
and torch what is to be called around every module.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import cast

from s3cache.graph._homes import home_of
from s3cache.torch_api import internals

__all__ = ["answer_of", "counts_as", "hooks_around", "operators_in", "registered_for"]

# What code asks torch of the process that is in no key, where the answer can be a part of it.
_ANSWERS = frozenset(["get_num_interop_threads", "get_num_threads", "is_initialized"])


def answer_of(function: object) -> object:
    """What a function of torch's that asks the process would answer now; ``None`` if it does not.

    Args:
        function: one of torch's, which takes no arguments.
    """
    name = str(getattr(function, "__name__", ""))
    return cast("Callable[[], object]", function)() if name in _ANSWERS else None


def registered_for(kind: type) -> Iterator[tuple[str, list[object]]]:
    """What a class was registered with, in words, and the functions and classes that say so."""
    home = home_of(kind)
    node = internals.pytree_nodes.get().get(kind)
    if node is not None and not home.is_named:
        yield "pytree", [node.flatten_fn, node.unflatten_fn]
    if isinstance(kind, abc.ABCMeta) and not home.is_named and (found := _registered(kind)):
        found.sort(key=lambda each: (each.__module__, each.__qualname__))
        yield "counts as it", [*found]


def counts_as(kind: type, abstract: type) -> bool:
    """Whether ``kind``, or a class that it is derived from, was registered with an abstract one."""
    return isinstance(abstract, abc.ABCMeta) and not set(kind.__mro__).isdisjoint(
        _registered(abstract)
    )


def _registered(kind: abc.ABCMeta) -> list[type]:
    dump: Callable[[type], tuple[set[Callable[[], type | None]], object]]
    dump = abc._get_dump  # type: ignore[attr-defined]
    return [each for weak in dump(kind)[0] if (each := weak()) is not None]


def hooks_around(kind: type) -> list[object]:
    """What is called around every module, if ``kind`` is a class of those."""
    import torch

    if not issubclass(kind, torch.nn.Module):
        return []
    tables = [table for each in internals.GLOBAL_HOOKS if (table := each.get())]
    return [list(table.values()) for table in tables]


def operators_in(module: ModuleType) -> Callable[[str], object] | None:
    """What finds an operator in ``module``, or the way to some; ``None`` if it has none.

    ``torch.ops.mine`` by itself stands for all operators in it: code may take one of them later.
    """
    import torch

    if module is torch:
        return lambda name: torch.ops if name == "ops" else None
    if module is torch.ops:
        return lambda name: vars(module).get(name)
    if not internals.is_namespace(module):
        return None
    # Those of torch's are told otherwise: by what is in the dispatcher for them.
    is_torchs = module.__name__.rpartition(".")[2] in ("aten", "prims", "prim", "higher_order")
    return None if is_torchs else lambda name: getattr(module, name, None)
