"""Stable bytes of the values in torch's details, from torch's own pickler for keys.

That pickler asks a Python function about each object in a value. Most are of three kinds, of which
a training step has hundreds: inputs, sources of inputs, and graphs. Those are put into words here
without asking again for each of their parts; the words hold all that torch's own reduction does.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from s3cache.graph._autograd import autograd_words, without_aot_names

__all__ = ["Pickled"]

_REMEMBERED_TEXTS = 4096


class Pickled:
    """Bytes that depend on what a value is, and not on which of its parts are one object.

    torch's pickler writes a shared object once for each time it is met (``fast``). Some values
    switch that off; here it holds for each value anew.
    """

    def __init__(self, pickler: Any) -> None:
        self._pickler = pickler
        inherited = getattr(pickler, "reducer_override", _nothing)  # none before torch 2.12
        self._words = _Words(inherited)
        pickler.reducer_override = self._words.reduce

    def __call__(self, value: Any) -> bytes:
        """Raises what torch's pickler raises for a value that has none."""
        self._pickler.clear_memo()
        self._pickler.fast = True
        data: bytes = self._pickler.dumps(value)
        return data


def _nothing(value: Any) -> Any:
    """A ``reducer_override`` that overrides nothing, and refuses what later torches refuse."""
    import torch

    if isinstance(value, torch.Tensor) and value.is_nested:
        raise TypeError("a nested tensor has sizes that are numbered as they come")
    return NotImplemented


class _Words:
    """Reducers for what there is most of; everything else is torch's to reduce."""

    def __init__(self, inherited: Callable[[Any], Any]) -> None:
        from torch._guards import Source
        from torch._inductor.codecache import _ident, extract_tensor_metadata_for_cache_key
        from torch._subclasses import FakeTensor
        from torch.fx import GraphModule

        self._inherited = inherited
        self._same = _ident
        self._metadata_of = extract_tensor_metadata_for_cache_key
        self._source, self._fake, self._graph = Source, FakeTensor, GraphModule
        self._sources: dict[int, tuple[Any, str | None]] = {}

    def reduce(self, value: Any) -> Any:
        """What ``reducer_override`` of a pickler returns."""
        words: Any = None
        if type(value) is self._fake:
            words = _metadata_text(self._metadata_of(value))
        elif isinstance(value, self._source):
            words = self._source_text(value)
        elif isinstance(value, self._graph):
            words = self._graph_parts(value)
        return self._inherited(value) if words is None else (self._same, (words,))

    def _source_text(self, source: Any) -> str | None:
        """The source as an expression, or ``None`` if it holds what has none.

        Sources of the parameters of one module share the sources they begin with.
        """
        known = self._sources.get(id(source))
        if known is None:
            kind = type(source)
            words = [self._word(getattr(source, name)) for name in _init_fields(kind)]
            text = None
            if None not in words:
                text = f"{kind.__module__}.{kind.__qualname__}({','.join(map(str, words))})"
            known = source, text  # an id is only good while its object lives
            self._sources[id(source)] = known
        return known[1]

    def _word(self, value: Any) -> str | None:
        if type(value) in (str, int, bool, type(None)):
            return repr(value)
        if isinstance(value, self._source):
            return self._source_text(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        return None

    def _graph_parts(self, gm: Any) -> Any:
        """As torch's reducer, but the generated code is not compiled to be read."""
        from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler
        from torch.fx.experimental import _config

        line_of = getattr(AOTAutogradCachePickler, "_format_global_for_cache_key", None)
        if line_of is None or getattr(_config, "enrich_profiler_metadata", False):
            return None
        code = gm._graph.python_code(root_module="self")
        parts = {name: value for name, value in vars(gm).items() if name not in _GENERATED}
        described = {name: autograd_words(value) for name, value in code.globals.items()}
        imports = sorted(
            described[name] or line_of(name, value) for name, value in code.globals.items()
        )
        source = code.src if not any(described.values()) else without_aot_names(gm, code.src)
        return parts, source, imports


# Attributes of a graph module that are made from its graph.
_GENERATED = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start"})

_fields_of: dict[type, tuple[str, ...]] = {}


def _init_fields(kind: type) -> tuple[str, ...]:
    names = _fields_of.get(kind)
    if names is None:
        names = tuple(each.name for each in dataclasses.fields(kind) if each.init)
        _fields_of[kind] = names
    return names


# Layers have the same parameters over and over.
_texts: dict[Any, str] = {}
_getters: dict[type, Callable[[Any], Any]] = {}


def _metadata_text(metadata: Any) -> str:
    kind = type(metadata)
    getter = _getters.get(kind)
    if getter is None:
        getter = attrgetter(*(each.name for each in dataclasses.fields(kind)))
        _getters[kind] = getter
    values = getter(metadata)
    try:
        text = _texts.get(values)
    except TypeError:  # symbolic sizes have no hash; in words they are the names of symbols
        return repr(metadata)
    if text is None:
        if len(_texts) >= _REMEMBERED_TEXTS:
            _texts.clear()
        text = _texts[values] = repr(metadata)
    return text
