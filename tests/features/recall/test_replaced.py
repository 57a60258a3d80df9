"""torch's callers reach the functions that recall puts in place of torch's own."""

from __future__ import annotations

import gc
import types

import torch

import s3cache
from s3cache.features.recall import names
from s3cache.graph import ORIGINAL_ATTR
from s3cache.torch_api import Internal, declarations


def _replaced() -> dict[str, object]:
    """Return the original of each replaced function that recall needs, by its place in torch."""
    of_recall = [
        each
        for each in declarations
        if isinstance(each, Internal) and each.feature == names.FEATURE and each.expected
    ]
    found = {each.place: getattr(each.get(), ORIGINAL_ATTR, None) for each in of_recall}
    return {place: original for place, original in found.items() if original is not None}


def test_callers_in_torch_reach_each_replacement() -> None:
    """None holds a function itself, in a module, a class or a method, however early it began."""
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
    before = _replaced()
    with s3cache.enabled("memory://replaced", recall="on"):
        replaced = _replaced()
        assert len(replaced) >= 15
        for place, original in replaced.items():
            assert original is not before.get(place)
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
