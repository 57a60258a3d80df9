"""torch's callers reach the functions that recall puts in place of torch's own."""

from __future__ import annotations

import gc
import types

import torch

import s3cache
from s3cache.features.recall import names
from s3cache.graph import ORIGINAL_ATTR
from s3cache.torch_api import Internal, declarations, internals


def _replaced() -> list[tuple[str, object]]:
    """Return the place in torch of each function that recall has replaced, and the original."""
    needed = [
        each
        for each in declarations
        if isinstance(each, Internal) and each.feature == names.FEATURE and each.expected
    ]
    values = [(each.place, each.get()) for each in (internals.compile_frame, *needed)]
    return [
        (place, getattr(value, ORIGINAL_ATTR))
        for place, value in values
        if getattr(value, ORIGINAL_ATTR, None) is not None
    ]


def test_callers_in_torch_reach_each_replacement() -> None:
    """No module, class or method holds an original, however early torch imported it."""
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
    before = _replaced()
    with s3cache.enabled("memory://replaced", recall="on"):
        replaced = _replaced()
        assert len(replaced) >= len(before) + 12
        for place, original in replaced:
            holders = [
                holder
                for holder in gc.get_referrers(original)
                if isinstance(holder, types.MethodType)
                or (isinstance(holder, dict) and holder.get(ORIGINAL_ATTR) is not original)
            ]
            assert [_said(each) for each in holders] == [], place
    assert _replaced() == before


def _said(holder: object) -> str:
    if isinstance(holder, dict):
        return f"{holder.get('__name__')} {[*holder][:9]}"
    return repr(holder)
