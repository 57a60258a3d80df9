"""Has torch's ``autograd_cache`` judge and digest graphs as :mod:`s3cache.graph` does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from s3cache.graph._compose import key_of
from s3cache.graph._details import unpicklable_configs
from s3cache.graph._key import Key
from s3cache.graph._safety import Unsafe, also_safe, unsafe_parts
from s3cache.hooks._patching import Patches
from s3cache.hooks._registry import Registry
from s3cache.hooks._versions import key_prefix

__all__ = ["Keying", "reasons_of"]


class Keying:
    """Every reason why a graph has no key, or a key of named components.

    Args:
        made: told each key that is made, under the name that torch knows it by.
    """

    def __init__(self, registry: Registry, made: Callable[[str, Key], None]) -> None:
        self._registry = registry
        self._made = made
        self._now = threading.local()

    def install(self, patches: Patches, module: Any) -> None:
        """Replace the check and the digest."""
        self._install_inputs(patches, module)
        self._install_check(patches, module)
        self._install_digest(patches, module)

    def _install_inputs(self, patches: Patches, module: Any) -> None:
        """Keep a graph's inputs for the check, which torch does not give them."""
        original = module.autograd_cache_key

        def autograd_cache_key(mod: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._now.inputs = example_inputs
            try:
                return original(mod, example_inputs, *args, **kwargs)
            finally:
                self._now.inputs = ()

        patches.set(module, "autograd_cache_key", autograd_cache_key)

    def _install_check(self, patches: Patches, module: Any) -> None:
        check = module.check_cacheable

        def check_cacheable(gm: Any) -> None:
            inputs = getattr(self._now, "inputs", ())
            _bypass(module, unsafe_parts(gm, self._registry.holds, inputs))
            with self._registry.vouched(also_safe(gm)):
                check(gm)

        patches.set(module, "check_cacheable", check_cacheable)

    def _install_digest(self, patches: Patches, module: Any) -> None:
        details_type = module.AOTAutogradCacheDetails
        pickler_type = module.AOTAutogradCachePickler
        inherited = pickler_type.get_hash

        def get_hash(pickler: Any, value: Any) -> str:
            if not isinstance(value, details_type):
                return str(inherited(pickler, value))
            key = key_of(value, pickler, vouched=self._registry.version_of)
            if not isinstance(key, Key):
                _bypass(module, key)
                raise AssertionError("no key, and no reason")
            digest = key.digest
            self._made(key_prefix(module) + digest, key)
            return digest

        patches.set(pickler_type, "get_hash", get_hash)


def _bypass(module: Any, reasons: Sequence[Unsafe]) -> None:
    if reasons:
        error = module.BypassAOTAutogradCache("; ".join(map(str, reasons)))
        error.reasons = list(reasons)
        raise error


def reasons_of(error: Exception) -> list[Unsafe]:
    """Why torch, or we, gave a graph up; empty if it was not on purpose."""
    reasons: list[Unsafe] | None = getattr(error, "reasons", None)
    if reasons is not None:
        return reasons
    if found := list(unpicklable_configs()):
        return found
    return [Unsafe("torch", str(error))] if type(error).__name__.startswith("Bypass") else []
