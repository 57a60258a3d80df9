"""The seam at AOTAutograd's lookups: entries come from the cache, and bad ones are set aside.

torch's own ``try_load`` runs as it is, with its counters, trace artifacts and time-out extensions.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator
from typing import Any

from s3cache.artifact import Artifact
from s3cache.cache import Cache, Hit
from s3cache.errors import CorruptError
from s3cache.hooks._bundles import Bundles
from s3cache.hooks._compiling import Compiling
from s3cache.hooks._fresh import FreshCache
from s3cache.hooks._kernels import Kernels
from s3cache.hooks._keys import KeySeam
from s3cache.hooks._patching import Patches

__all__ = ["LookupSeam"]

logger = logging.getLogger("s3cache")


class LookupSeam:
    """Puts a cache before torch's own directory of entries."""

    def __init__(
        self,
        cache: Cache,
        kernels: Kernels,
        keys: KeySeam,
        bundles: Bundles,
        fresh: FreshCache,
        compiling: Compiling,
    ) -> None:
        self._cache = cache
        self._kernels = kernels
        self._keys = keys
        self._bundles = bundles
        self._fresh = fresh
        self._compiling = compiling

    def install(self, patches: Patches, module: Any) -> None:
        """Replace what looks an entry up, judges it and makes a callable of it."""
        cache_type, entry_type = module.AOTAutogradCache, module.GenericAOTAutogradResult
        patches.set(cache_type, "try_load", self._loader(cache_type))
        patches.set(cache_type, "iterate_over_candidates", self._candidates(cache_type, entry_type))
        patches.set(cache_type, "evaluate_guards", self._judge(cache_type))
        patches.set(entry_type, "wrap_post_compile", self._rebuilder(entry_type, module))

    def _loader(self, cache_type: Any) -> Any:
        original = cache_type.try_load

        def try_load(*args: Any, **kwargs: Any) -> Any:
            compiling = self._compiling
            compiling.begin()
            try:
                result = original(*args, **kwargs)
                if compiling.error is not None and self._cache.settings.strict:
                    raise compiling.error
                function = result[0] if isinstance(result, tuple) else result
                if function is None and self._ours(compiling.key):
                    self._bundles.begin()
                return result
            finally:
                compiling.begin()

        return staticmethod(try_load)

    def _ours(self, key: str | None) -> bool:
        return key is not None and self._keys.made(key) and not self._fresh.inside()

    # -- candidates

    def _candidates(self, cache_type: Any, entry_type: type) -> Any:
        inherited = cache_type.iterate_over_candidates.__func__

        def iterate_over_candidates(cls: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            if self._ours(self._compiling.key) and _local(args, kwargs):
                yield from self._entries(str(self._compiling.key), entry_type)
            self._compiling.candidate = None
            yield from inherited(cls, *args, **kwargs)

        return classmethod(iterate_over_candidates)

    def _entries(self, key: str, entry_type: type) -> Iterator[tuple[Any, bytes, bool]]:
        try:
            for hit in self._cache.candidates(key):
                try:
                    content = bytes(Artifact.entry_of(hit.entry))
                    entry = pickle.loads(content)  # noqa: S301 - verified; see docs/threat-model.md
                    if not isinstance(entry, entry_type):
                        raise CorruptError("entry", f"holds a {type(entry).__name__}")
                except Exception as exc:  # noqa: BLE001 - whatever unpickling meets
                    self._compiling.met(exc)
                    self._cache.reject(hit.entry, exc)
                    continue
                self._compiling.candidate = entry, hit
                yield entry, content, hit.tier == "local"
        except Exception as exc:
            self._compiling.met(exc)
            if not self._cache.settings.strict:
                logger.warning("s3cache: a lookup failed, which is a miss", exc_info=True)

    def _judge(self, cache_type: Any) -> Any:
        original = cache_type.evaluate_guards

        def evaluate_guards(*args: Any, **kwargs: Any) -> bool:
            try:
                return bool(original(*args, **kwargs))
            except Exception as exc:
                if self._compiling.candidate is None:
                    raise
                _, hit = self._compiling.candidate
                self._compiling.met(exc)
                self._cache.reject(hit.entry, exc)
                return False

        return staticmethod(evaluate_guards)

    # -- the callable

    def _rebuilder(self, entry_type: Any, module: Any) -> Any:
        original = entry_type.wrap_post_compile

        def wrap_post_compile(entry: Any, *args: Any, **kwargs: Any) -> Any:
            candidate = self._compiling.candidate
            if candidate is None or candidate[0] is not entry:
                return original(entry, *args, **kwargs)
            hit = candidate[1]
            try:
                with _undone_if_it_fails(), self._kernels.only(Artifact.kernels_of(hit.entry)):
                    function = original(entry, *args, **kwargs)
            except Exception as exc:
                self._compiling.met(exc)
                self._cache.take_back(hit, exc)
                # A miss to torch: it compiles, and what it saves replaces the entry.
                raise module.FXGraphCacheMiss(f"s3cache: {exc}") from exc
            self._used(entry, hit)
            return function

        return wrap_post_compile

    def _used(self, entry: Any, hit: Hit) -> None:
        saved_s = (entry.forward_time_taken_ns + entry.backward_time_taken_ns) / 1e9
        self._cache.count_time_saved(saved_s)
        logger.info(
            "s3cache: hit %s (%s), %.1f s of compiling saved",
            self._compiling.key,
            hit.tier,
            saved_s,
        )


def _local(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch asks for its local cache at all: ``enable_autograd_cache``."""
    return bool(kwargs["local"] if "local" in kwargs else args[0])


@contextlib.contextmanager
def _undone_if_it_fails() -> Iterator[None]:
    """Take back what a half rebuilt callable has told the rest of the compile."""
    import torch

    context = torch._guards.TracingContext.try_get()
    strides = None if context is None else context.output_strides
    before = None if strides is None else list(strides)
    try:
        yield
    except Exception:
        if strides is not None and before is not None:
            strides[:] = before
        raise
