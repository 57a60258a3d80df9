"""The seam at AOTAutograd's saves: an entry, its kernels and its description become a frame."""

from __future__ import annotations

import logging
from typing import Any

from s3cache.artifact import Artifact
from s3cache.artifact._describe import describe
from s3cache.cache import Cache, Saved
from s3cache.hooks._compiling import Compiling
from s3cache.hooks._fresh import FreshCache
from s3cache.hooks._kernels import Kernels, UnsharableKernelError
from s3cache.hooks._keys import KeySeam
from s3cache.hooks._maker import maker
from s3cache.hooks._patching import Patches

__all__ = ["SaveSeam"]

logger = logging.getLogger("s3cache")


class SaveSeam:
    """Shares what torch has compiled; what cannot be shared goes to torch's own directory."""

    def __init__(
        self,
        cache: Cache,
        kernels: Kernels,
        keys: KeySeam,
        fresh: FreshCache,
        compiling: Compiling,
    ) -> None:
        self._cache = cache
        self._kernels = kernels
        self._keys = keys
        self._fresh = fresh
        self._compiling = compiling
        self._warned = False

    def install(self, patches: Patches, module: Any) -> None:
        """Replace where ``AOTAutogradCache.save`` writes to."""
        cache_type = module.AOTAutogradCache
        save, write = cache_type.save, cache_type._write_to_local_cache

        def saving(key: str, entry: Any, *args: Any, **kwargs: Any) -> None:
            compiling = self._compiling
            compiling.begin()
            compiling.entry = entry
            try:
                save(key, entry, *args, **kwargs)
                if compiling.error is not None and self._cache.settings.strict:
                    raise compiling.error
            finally:
                compiling.begin()

        def write_to_local_cache(key: str, content: bytes) -> None:
            entry = self._compiling.entry
            # Without an entry this is torch.compiler.load_cache_artifacts.
            ours = entry is not None and self._keys.made(key) and not self._fresh.inside()
            if not (ours and self._saved(key, entry, content)):
                write(key, content)

        patches.set(cache_type, "save", staticmethod(saving))
        patches.set(cache_type, "_write_to_local_cache", staticmethod(write_to_local_cache))

    def _saved(self, key: str, entry: Any, content: bytes) -> bool:
        try:
            frame = self._artifact(key, entry, content).encode(key)
            return isinstance(self._cache.save(key, frame), Saved)
        except UnsharableKernelError as exc:
            self._cache.count_bypass(["kernel"])
            logger.info("s3cache: a compiled graph is not shared: %s", exc)
            self._compiling.met(exc)
        except Exception as exc:
            self._compiling.met(exc)
            if not self._warned and not self._cache.settings.strict:
                self._warned = True
                logger.warning("s3cache: a compiled graph is not shared", exc_info=True)
        return False

    def _artifact(self, key: str, entry: Any, content: bytes) -> Artifact:
        parts = [part.result for part in (entry.compiled_fw, entry.compiled_bw) if part is not None]
        kernels = self._kernels.needed_by(_modules(parts))
        return Artifact(
            entry=content,
            kernels=kernels,
            guards=entry.guards_expr,
            forward_ns=int(entry.forward_time_taken_ns),
            backward_ns=int(entry.backward_time_taken_ns),
            runtime=describe(entry),
            components={
                name: [each.digest, each.value] for name, each in self._keys.components(key).items()
            },
            made_by=maker(compiled=bool(kernels)),
        )


def _modules(parts: list[Any]) -> list[tuple[str, str]]:
    """Name and source of the Python module that Inductor generated for each part."""
    from torch._inductor.output_code import CompiledFxGraph

    for part in parts:
        if not isinstance(part, CompiledFxGraph):
            raise UnsharableKernelError(f"it is a {type(part).__name__}, not one compiled graph")
    return [(part.cache_key, part.source_code) for part in parts]
