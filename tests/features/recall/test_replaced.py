"""torch's callers reach the functions that recall puts in place of torch's own."""

from __future__ import annotations

import gc
import types

import torch

import s3cache
from s3cache.features.recall import names
from s3cache.graph import ORIGINAL_ATTR
from s3cache.torch_api import Internal, declarations, internals


def _replaced() -> list[tuple[str, object, bool]]:
    """Return the place in torch of each function that recall has replaced, and the original.

    The third is whether a class inherits it; then its base and their decorators may have it.
    """
    needed = [
        each
        for each in declarations
        if isinstance(each, Internal) and each.feature == names.FEATURE and each.expected
    ]
    found = []
    for each in (internals.compile_frame, *needed):
        original = getattr(each.get(), ORIGINAL_ATTR, None)
        owner, _ = each.owner()
        if original is not None:
            bases = owner.__mro__[1:] if isinstance(owner, type) else ()
            is_inherited = any(original in vars(base).values() for base in bases)
            found.append((each.place, original, is_inherited))
    return found


def _asking(x: torch.Tensor) -> torch.Tensor:
    is_known = isinstance(x, list) or issubclass(int, float)
    return x.sin() + is_known


def test_callers_in_torch_reach_each_replacement() -> None:
    """No module, class or method holds an original, however early torch imported it."""
    torch.compile(_asking, backend="eager")(torch.ones(2))  # Dynamo keeps bound methods
    before = _replaced()
    with s3cache.enabled("memory://replaced", recall="on"):
        replaced = _replaced()
        assert len(replaced) >= len(before) + 12
        for place, original, is_inherited in replaced:
            holders = [
                holder
                for holder in gc.get_referrers(original)
                if isinstance(holder, types.MethodType)
                or (
                    isinstance(holder, dict)
                    and holder.get(ORIGINAL_ATTR) is not original
                    and (not is_inherited or "__name__" in holder)  # of a module
                )
            ]
            assert [_said(each) for each in holders] == [], place
    assert _replaced() == before


def _said(holder: object) -> str:
    if isinstance(holder, dict):
        return f"{holder.get('__name__')} {[*holder][:9]}"
    return repr(holder)
