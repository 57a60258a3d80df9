"""The seams at AOTAutograd's cache, put together."""

from __future__ import annotations

from s3cache.cache import Cache
from s3cache.hooks._bundles import Bundles
from s3cache.hooks._compiling import Compiling
from s3cache.hooks._fresh import FreshCache
from s3cache.hooks._kernels import Kernels
from s3cache.hooks._keys import KeySeam
from s3cache.hooks._lookups import LookupSeam
from s3cache.hooks._patching import Patches
from s3cache.hooks._registry import Registry
from s3cache.hooks._results import ResultSeam
from s3cache.hooks._saves import SaveSeam

__all__ = ["install_aot"]


def install_aot(patches: Patches, cache: Cache, kernels: Kernels, registry: Registry) -> None:
    """Put ``cache`` behind torch's ``AOTAutogradCache``."""
    from torch._functorch._aot_autograd import autograd_cache

    compiling, fresh, bundles = Compiling(), FreshCache(), Bundles()
    keys = KeySeam(cache, registry, compiling)
    lookups = LookupSeam(cache, kernels, keys, bundles, fresh, compiling)
    saves = SaveSeam(cache, kernels, keys, fresh, compiling)
    results = ResultSeam(cache, compiling)
    for seam in (keys, lookups, saves, results, bundles):
        seam.install(patches, autograd_cache)
