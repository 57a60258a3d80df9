"""Compute the key of a graph, or the reasons why it has none.

A lookup of torch begins here: ``autograd_cache_key`` checks a graph, collects its inputs and
digests them. Inductor does the same with each FX graph. We replace checks and digest with those of
:mod:`s3cache.graph`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from s3cache.errors import ConfigError
from s3cache.graph import (
    BypassReason,
    Key,
    bypass_reasons,
    context_hashes,
    described_passes,
    extra_cacheable_functions,
    forget_kernels,
    fx_bypass_reasons,
    is_custom_function,
    key_of,
    record_kernel,
    take_baseline,
    unpicklable_options,
)
from s3cache.hooks._state import CacheCall, CompileState, FxKeying, Patches, around
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.importing import when_imported

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import KeyPickler

# A key is needed from the lookup that misses to the save. For a backward that is compiled late,
# many other graphs may come between.
_MAX_KEYS = 1024
# Details of components take more memory, and entries do not need them.
_MAX_WITH_DETAILS = 64


class Registry:
    """Registered functions of the user: their output depends only on inputs and version."""

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}

    def add(self, function: Function[object], version: str) -> None:
        """Register ``function``; a new ``version`` makes old entries miss."""
        name = internals.name_of(function)
        if not name or "<" in name:
            raise ConfigError(
                f"function {function!r}",
                "has no name that other processes can import",
                "define it at the top level of a module",
            )
        if not version:
            raise ConfigError(f"function {name}", "has no version", "give one, e.g. version='1'")
        self._versions[name] = version

    def version_of(self, function: object) -> str | None:
        """Return the registered version, or None. An operator includes its overloads."""
        if not self._versions:
            return None
        version = self._versions.get(internals.name_of(function))
        packet = getattr(function, "overloadpacket", None)
        if version is None and packet is not None:
            return self._versions.get(internals.name_of(packet))
        return version

    @contextlib.contextmanager
    def accepted(self, more: Mapping[str, str]) -> Iterator[None]:
        """Make torch's own check accept them, and ``more``, while the block runs."""
        if not self._versions and not more:
            yield
            return
        inductor = internals.inductor_config.get()
        known = {**self._versions, **more, **inductor.unsafe_marked_cacheable_functions}
        with inductor.patch(unsafe_marked_cacheable_functions=known):
            yield


class KeyHook:
    """Computes keys, or the reasons why a graph has none; remembers keys until the save."""

    def __init__(self, registry: Registry, calls: CompileState) -> None:
        self._registry = registry
        self.version_of = registry.version_of
        self._calls = calls
        self._keys: dict[str, Key] = {}  # the latest last
        self._directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    def is_shared(self, key: str | None) -> bool:
        """Return whether entries under ``key`` are shared.

        They are not if torch or another library made the key up, nor inside ``fresh_cache()``,
        which requests a new compile. We detect it by Triton's directory inside Inductor's: a
        program that only moves its cache rarely does that.
        """
        if key not in self._keys:
            return False
        directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        if directory is None or directory == self._directory:
            return True
        return os.environ.get("TRITON_CACHE_DIR") != os.path.join(directory, "triton")

    def know(self, key: str) -> None:
        """Share entries under ``key``, which another process computed."""
        self._keys.setdefault(key, Key({}))

    def described_passes(self) -> contextlib.AbstractContextManager[None]:
        """Let torch call the users' passes for a description while the block runs."""
        traced = isinstance(self._calls.current, FxKeying)
        return described_passes(self.version_of, traced=traced)

    def known(self, key: str) -> Key:
        """Return the components of a key, as far as they are remembered."""
        return self._keys.get(key, Key({}))

    @around(internals.autograd_cache_key)
    def _autograd_cache_key(
        self,
        original: Function[tuple[str, list[str]]],
        mod: Module,
        inputs: Sequence[object],
        *args: object,
        **kwargs: object,
    ) -> tuple[str, list[str]]:
        """Record the key in the current call, or the reasons why the graph has none.

        Without a key of ours, torch computes its own, as it would without s3cache: the graph then
        stays in torch's caches.
        """
        ask = partial(original, mod, inputs, *args, **kwargs)
        with self._calls.entered(self._calls.current or CacheCall()) as call:
            call.inputs, call.alone = inputs, False
            try:
                with (
                    self.described_passes(),
                    internals.skip_backend_init(),
                    internals.without_made_up_keys(),
                ):
                    key, lines = ask()
                call.key, call.reasons = key, ()
                return key, lines
            except Exception as exc:  # noqa: BLE001 - torch may cache it nevertheless
                call.key, call.reasons = None, call.reasons or _reasons_for(exc)
                call.record_error(exc)
            call.alone = True
            key, lines = ask()
            call.torch_key = key
            return key, lines

    @property
    def _is_alone(self) -> bool:
        return self._calls.current is not None and self._calls.current.alone

    @around(internals.check_cacheable)
    def _check_cacheable(self, original: Callable[[GraphModule], None], gm: GraphModule) -> None:
        if self._is_alone:
            original(gm)
            return
        call = self._calls.current
        inputs = () if call is None else call.inputs
        if reasons := bypass_reasons(gm, inputs, self.version_of):
            self._refuse(reasons)
        # torch refuses graphs with a first call on fake tensors; our entries support them.
        with (
            self._registry.accepted(extra_cacheable_functions(gm)),
            internals.hide_fake_first_call(),
            internals.hide_freezing(),
        ):
            original(gm)

    @around(internals.operator_cacheable)
    def _operator_cacheable(self, original: Callable[[object], bool], operator: object) -> bool:
        # Our keys cover a custom autograd function completely. torch has an option to accept them,
        # but it would be in the key of every graph.
        return (is_custom_function(operator) and not self._is_alone) or original(operator)

    @around(internals.init_backends)
    def _init_backends(self, original: Function[None]) -> None:
        if not internals.skips_backend_init():
            original()

    @around(internals.context_hashes)
    def _context_hashes(self, original: Function[list[object]], gm: GraphModule) -> list[object]:
        return original(gm) if self._is_alone else context_hashes(gm, self.version_of)

    @around(internals.get_hash)
    def _get_hash(self, original: Function[str], pickler: KeyPickler, value: object) -> str:
        if self._is_alone or not isinstance(value, internals.key_details.get()):
            return original(pickler, value)
        compilers = self._calls.user_compilers
        key = key_of(value, pickler, self.version_of, compilers=compilers)
        if not isinstance(key, Key):
            self._refuse(key)
        self._remember((internals.AUTOGRAD_PREFIX.find() or "a") + key.digest, key)
        return key.digest

    @around(internals.fx_check_cacheable)
    def _fx_check_cacheable(
        self, original: Function[None], gm: GraphModule, *args: object, **kwargs: object
    ) -> None:
        """Record in the current call why a graph has no key; torch may still compute its own."""
        call = self._calls.current
        if not isinstance(call, FxKeying):
            original(gm, *args, **kwargs)
            return
        original(gm, *internals.without_carried(args), **kwargs)
        try:
            call.reasons = tuple(fx_bypass_reasons(gm, self.version_of))
        except Exception as exc:  # noqa: BLE001 - torch's own key is as good as ever
            call.reasons = (BypassReason("error", repr(exc)),)
            call.record_error(exc)

    @around(internals.fx_key())
    def _fx_get_key(self, original: Function[str], pickler: KeyPickler, value: object) -> str:
        call = self._calls.current
        details = internals.fx_key_details.get()
        if type(value) is not details or not isinstance(call, FxKeying) or call.reasons:
            return original(pickler, value)
        try:
            key = key_of(value, pickler, self.version_of, traced=True)
        except Exception as exc:  # noqa: BLE001 - torch's own key is as good as ever
            key = [BypassReason("error", repr(exc))]
            call.record_error(exc)
        if not isinstance(key, Key):
            call.reasons = tuple(key)
            return original(pickler, value)
        name = internals.FX_PREFIX + key.digest
        self._remember(name, key)
        return name if internals.fx_get_key.expected else key.digest

    def debug_lines(
        self, original: Function[list[str]], pickler: KeyPickler, value: object
    ) -> list[str]:
        """Make torch log the components of our keys (*hash details*)."""
        call = self._calls.current
        key = None if call is None else self._keys.get(call.key or "")
        # The details of a whole graph have a subclass.
        if key is None or not isinstance(value, internals.fx_key_details.get()):
            return original(pickler, value)
        components = key.components.items()
        return [f"[{each.digest}] {name}: {each.value}" for name, each in components]

    def _refuse(self, reasons: Sequence[BypassReason]) -> NoReturn:
        if self._calls.current is not None:
            self._calls.current.reasons = tuple(reasons)
        raise internals.bypass_error.get()("; ".join(map(str, reasons)))

    def _remember(self, name: str, key: Key) -> None:
        if self._calls.current is not None:
            self._calls.current.key = name
        self._keys.pop(name, None)
        self._keys[name] = key
        names = [*self._keys]
        if len(names) > _MAX_WITH_DETAILS:
            old = names[-1 - _MAX_WITH_DETAILS]
            self._keys[old] = self._keys[old].without_parts()
        if len(names) > _MAX_KEYS:
            del self._keys[names[0]]


def _reasons_for(error: Exception) -> tuple[BypassReason, ...]:
    """Return why torch does not cache a graph; code ``error`` if it failed."""
    if options := tuple(unpicklable_options()):
        return options
    if isinstance(error, internals.bypass_error.get()):
        return (BypassReason("torch", str(error)),)
    return (BypassReason("error", repr(error)),)


# -- kernels of torch's dispatcher, which cannot tell later which kernels were replaced


def watch_registrations(failed: Callable[[Exception], None]) -> Callable[[], None]:
    """Record registered kernels, and torch's own state, from the end of ``import torch`` or now.

    ``failed`` is called with the error if this is not possible: then keys cannot be trusted.
    Returns a function that restores torch and forgets the records.
    """
    patches = Patches()
    early = internals.TORCH not in sys.modules

    def begin() -> None:
        try:
            patches.callback(take_baseline(early=early))
            if internals.is_supported():
                patches.wrap(internals.register_kernel, _register_kernel)
        except Exception as exc:  # noqa: BLE001 - the program that imports torch goes on
            failed(exc)

    patches.callback(forget_kernels)
    patches.callback(when_imported(internals.TORCH, begin))
    return patches.close


def _register_kernel(original: Function[object], *args: object, **kwargs: object) -> object:
    result = original(*args, **kwargs)
    record_kernel(*internals.registered_kernel(*args, **kwargs))
    return result
