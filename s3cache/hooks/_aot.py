"""The seam at AOTAutograd's cache: keys, lookups and saves of whole graphs.

torch's own ``try_load`` and ``save`` run as they are, with their counters, trace artifacts and
time-out extensions. What is replaced: how the key is digested (named components), where candidates
come from, and where an entry is written to.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from s3cache.artifact import Artifact
from s3cache.artifact._describe import describe
from s3cache.cache import Cache, Hit
from s3cache.errors import S3CacheError
from s3cache.frame import Frame
from s3cache.graph._key import Component, Key, components_of
from s3cache.graph._machine import machine_components
from s3cache.graph._safety import Unsafe, unsafe_parts
from s3cache.hooks._kernels import Kernels, MissingKernelError
from s3cache.hooks._patching import Patches
from s3cache.hooks._registry import Registry

__all__ = ["AotSeam"]

logger = logging.getLogger("s3cache")

_REMEMBERED_KEYS = 256


class AotSeam:
    """Puts a cache behind ``AOTAutogradCache``."""

    def __init__(self, cache: Cache, kernels: Kernels, registry: Registry) -> None:
        self._cache = cache
        self._kernels = kernels
        self._registry = registry
        self._home = _inductor_home()
        self._saving = threading.local()
        self._keys: OrderedDict[str, Key] = OrderedDict()

    def install(self, patches: Patches) -> None:
        """Replace what has to be replaced in torch."""
        import torch._functorch.config as functorch
        from torch._functorch._aot_autograd import autograd_cache

        patches.configure(functorch, "bundled_autograd_cache", True)
        self._install_key(patches, autograd_cache)
        self._install_lookup(patches, autograd_cache)
        self._install_save(patches, autograd_cache)

    # -- the key

    def _install_key(self, patches: Patches, module: Any) -> None:
        check = module.check_cacheable
        details_type = module.AOTAutogradCacheDetails
        pickler_type = module.AOTAutogradCachePickler

        def check_cacheable(gm: Any) -> None:
            reasons = unsafe_parts(gm, self._registry.holds)
            if reasons:
                raise module.BypassAOTAutogradCache(_explain(reasons))
            with self._registry.vouched():
                check(gm)

        inherited = pickler_type.get_hash

        def get_hash(pickler: Any, value: Any) -> str:
            if not isinstance(value, details_type):
                return str(inherited(pickler, value))
            key = Key(
                {
                    **components_of(value, pickler.dumps),
                    **machine_components(),
                    "s3cache.functions": Component.of_text(self._registry.versions()),
                }
            )
            digest = key.digest
            self._keys[module.AOTAUTOGRAD_CACHE_PREFIX + digest] = key
            while len(self._keys) > _REMEMBERED_KEYS:
                self._keys.popitem(last=False)
            return digest

        patches.set(module, "check_cacheable", check_cacheable)
        patches.set(pickler_type, "get_hash", get_hash)

    # -- looking up

    def _install_lookup(self, patches: Patches, module: Any) -> None:
        cache_type = module.AOTAutogradCache
        original = cache_type.iterate_over_candidates

        def iterate_over_candidates(cls: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            if not self._elsewhere():
                for hit in self._cache.candidates(_key_of(args, kwargs)):
                    candidate = self._candidate(hit, module)
                    if candidate is not None:
                        yield candidate
            yield from original(*args, **kwargs)

        patches.set(cache_type, "iterate_over_candidates", classmethod(iterate_over_candidates))

    def _candidate(self, hit: Hit, module: Any) -> tuple[Any, bytes, bool] | None:
        try:
            content = bytes(Artifact.entry_of(hit.entry))
            entry = pickle.loads(content)  # noqa: S301 - verified; see docs/threat-model.md
            kernels = Artifact.kernels_of(hit.entry)
        except Exception as exc:  # noqa: BLE001 - whatever unpickling meets is a bad entry
            self._reject(hit.entry, exc)
            return None
        self._guard_rebuilding(entry, hit.entry, kernels, module)
        return entry, content, hit.tier == "local"

    def _guard_rebuilding(
        self, entry: Any, frame: Frame, kernels: dict[str, Any], module: Any
    ) -> None:
        """Make a failure to rebuild the callable a miss: torch compiles, and saves that."""
        rebuild = entry.wrap_post_compile

        def wrap_post_compile(*args: Any, **kwargs: Any) -> Any:
            self._kernels.offer(kernels)
            try:
                return rebuild(*args, **kwargs)
            except Exception as exc:
                self._reject(frame, exc)
                raise module.FXGraphCacheMiss(f"s3cache: {exc}") from exc
            finally:
                self._kernels.withdraw(kernels)

        entry.wrap_post_compile = wrap_post_compile

    def _reject(self, frame: Frame, error: Exception) -> None:
        self._cache.reject(frame, error)

    # -- saving

    def _install_save(self, patches: Patches, module: Any) -> None:
        cache_type = module.AOTAutogradCache
        save, write = cache_type.save, cache_type._write_to_local_cache

        def saving(key: str, entry: Any, *args: Any, **kwargs: Any) -> None:
            self._saving.entry = entry
            try:
                save(key, entry, *args, **kwargs)
            finally:
                self._saving.entry = None

        def write_to_local_cache(key: str, content: bytes) -> None:
            entry = getattr(self._saving, "entry", None)
            if entry is None or self._elsewhere():
                write(key, content)  # torch.compiler.load_cache_artifacts, fresh_cache()
            else:
                self._save(key, entry, content)

        patches.set(cache_type, "save", staticmethod(saving))
        patches.set(cache_type, "_write_to_local_cache", staticmethod(write_to_local_cache))

    def _save(self, key: str, entry: Any, content: bytes) -> None:
        try:
            artifact = self._artifact(key, entry, content)
            self._cache.save(key, artifact.encode(key))
        except (S3CacheError, MissingKernelError, OSError) as exc:
            if self._cache.settings.strict:
                raise
            logger.warning("s3cache: a compiled graph is not shared: %s", exc)

    def _artifact(self, key: str, entry: Any, content: bytes) -> Artifact:
        compiled = [
            part.result for part in (entry.compiled_fw, entry.compiled_bw) if part is not None
        ]
        sources = [graph.source_code for graph in compiled if getattr(graph, "source_code", "")]
        known = self._keys.get(key)
        components = known.components if known is not None else {}
        return Artifact(
            entry=content,
            kernels=self._kernels.needed_by(sources),
            guards=entry.guards_expr,
            forward_ns=int(entry.forward_time_taken_ns),
            backward_ns=int(entry.backward_time_taken_ns),
            runtime=describe(entry.runtime_metadata),
            components={name: [each.digest, each.value] for name, each in components.items()},
            made_by=_maker(),
        )

    def _elsewhere(self) -> bool:
        """Whether the program is inside ``fresh_cache()``, which asks for compiling anew."""
        return _inductor_home() != self._home


def _key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return str(kwargs["key"] if "key" in kwargs else args[-1])


def _explain(reasons: list[Unsafe]) -> str:
    return "; ".join(map(str, reasons))


def _inductor_home() -> str | None:
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR")


def _maker() -> dict[str, str]:
    import torch

    return {"torch": str(torch.__version__)}
