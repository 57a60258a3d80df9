"""The seams at torch's keys: what may be cached, and a key of named components.

torch comes by here first, inside of a lookup: ``autograd_cache_key`` has a graph checked, collects
what it depends on and digests that; Inductor does the same with each half of it. The checks and the
digest are those of :mod:`s3cache.graph`.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from s3cache.errors import ConfigError
from s3cache.graph import (
    BypassReason,
    Component,
    Key,
    bypass_reasons,
    context_hashes,
    described_passes,
    extra_cacheable_functions,
    fx_bypass_reasons,
    is_custom_function,
    key_of,
    unpicklable_options,
)
from s3cache.hooks._patching import Patches
from s3cache.hooks._state import CacheCall, CompileState
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import Function, KeyPickler

__all__ = ["FxKeying", "KeySeam", "Registry", "is_made_for_threads"]

# A key is needed from the lookup that misses until the save, which for a backward graph that is
# compiled late may be many graphs later.
_REMEMBERED_KEYS = 1024
# What their components consist of takes more, and an entry does without it.
_REMEMBERED_PARTS = 64


class FxKeying(CacheCall):
    """One call of Inductor for the key of an FX graph."""


class Registry:
    """Functions that the user vouches for: their output depends on inputs and version alone."""

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}

    def add(self, function: Function[object], version: str) -> None:
        """Vouch for ``function``; a new ``version`` makes old entries miss.

        Raises:
            ConfigError: it has no importable name, or the version is empty.
        """
        name = internals.name_of(function)
        if not name or "<" in name:
            raise ConfigError(
                f"function {function!r}",
                "has no name that other processes share",
                "define it at the top of a module",
            )
        if not version:
            raise ConfigError(f"function {name}", "has no version", "give one, e.g. version='1'")
        self._versions[name] = version

    def version_of(self, function: object) -> str | None:
        """The version that the user gave, if any. An operator stands for its overloads."""
        if not self._versions:
            return None
        version = self._versions.get(internals.name_of(function))
        packet = internals.packet_of(function)
        if version is None and packet is not None:
            return self._versions.get(internals.name_of(packet))
        return version

    @contextlib.contextmanager
    def vouched(self, more: Mapping[str, str]) -> Iterator[None]:
        """Have torch's own check accept them, and ``more``, while the block runs."""
        if not self._versions and not more:
            yield
            return
        inductor = internals.inductor_config.get()
        known = {**self._versions, **more, **inductor.unsafe_marked_cacheable_functions}
        with inductor.patch(unsafe_marked_cacheable_functions=known):
            yield


class KeySeam:
    """Every reason why a graph has no key, or a key; remembered until it is saved with an entry."""

    def __init__(self, registry: Registry, calls: CompileState) -> None:
        self._registry = registry
        self._calls = calls
        self._keys: OrderedDict[str, Key] = OrderedDict()
        self._with_parts: OrderedDict[str, None] = OrderedDict()
        self._directory = _cache_directory()

    def install(self, patches: Patches) -> None:
        """Replace what makes keys."""
        patches.replace(internals.autograd_cache_key, self._key_maker)
        patches.replace(internals.check_cacheable, self._checker)
        patches.replace(internals.get_hash, self._digester)
        patches.replace(internals.operator_cacheable, _function_accepter)
        patches.replace(internals.context_hashes, self._context_hasher)
        patches.replace(internals.init_backends, _only_if_asked)

    def install_fx(self, patches: Patches) -> None:
        """Replace what makes keys of FX graphs."""
        patches.replace(internals.fx_check_cacheable, self._fx_checker)
        patches.replace(internals.fx_key(), self._fx_digester)

    def install_logs(self, patches: Patches) -> None:
        """Replace what torch logs of keys."""
        patches.replace(internals.fx_debug_lines, self._describer)

    def is_shared(self, key: str | None) -> bool:
        """Whether entries under ``key`` are to be shared.

        Not if it is torch's stand-in or somebody else's, nor inside of ``fresh_cache()``, which
        asks for compiling anew. That leaves no trace that all of its callers share, but it puts
        Triton's directory into Inductor's; a program that merely moves its cache seldom does that.
        """
        if key not in self._keys:
            return False
        directory = _cache_directory()
        if directory is None or directory == self._directory:
            return True
        return os.environ.get("TRITON_CACHE_DIR") != os.path.join(directory, "triton")

    def described_passes(self) -> contextlib.AbstractContextManager[None]:
        """While it is entered, torch can ask users' passes what they are."""
        traced = isinstance(self._calls.current, FxKeying)
        return described_passes(self._registry.version_of, traced=traced)

    def components(self, key: str) -> Mapping[str, Component]:
        """What a key that is shared is made of."""
        return self._keys[key].components

    def known(self, key: str) -> Key:
        """What a key is made of, as far as that is remembered."""
        return self._keys.get(key, Key({}))

    def _key_maker(
        self, original: Function[tuple[str, list[str]]]
    ) -> Function[tuple[str, list[str]]]:
        """Tell the current call the key, or why the graph has none."""

        def autograd_cache_key(
            mod: Module, inputs: Sequence[object], *args: object, **kwargs: object
        ) -> tuple[str, list[str]]:
            with self._calls.entered(self._calls.current or CacheCall()) as call:
                call.inputs = inputs
                try:
                    with self.described_passes(), internals.backends_unasked():
                        made = original(mod, inputs, *args, **kwargs)
                except Exception as exc:
                    call.key, call.reasons = None, call.reasons or _reasons_for(exc)
                    call.met(exc)
                    raise
                # Told to, torch makes up a key for a graph that has none.
                call.key, call.reasons = made[0], ()
                return made

        return autograd_cache_key

    def _checker(self, original: Callable[[GraphModule], None]) -> Callable[[GraphModule], None]:
        def check_cacheable(gm: GraphModule) -> None:
            call = self._calls.current
            inputs = () if call is None else call.inputs
            self._refuse(bypass_reasons(gm, inputs, self._registry.version_of))
            # The one thing that torch refuses and an entry here has room for: hooks/_first_calls.
            with (
                self._registry.vouched(extra_cacheable_functions(gm)),
                internals.first_calls_unasked(),
                internals.freezing_unasked(),
            ):
                original(gm)

        return check_cacheable

    def _context_hasher(
        self, _: Callable[[GraphModule], list[object]]
    ) -> Callable[[GraphModule], list[object]]:
        # A function, as what it replaces, and nothing that is called like one.
        def collect_context_fn_hashes(gm: GraphModule) -> list[object]:
            return context_hashes(gm, self._registry.version_of)

        return collect_context_fn_hashes

    def _digester(
        self, original: Callable[[KeyPickler, object], str]
    ) -> Callable[[KeyPickler, object], str]:
        details = internals.key_details.get()

        def get_hash(pickler: KeyPickler, value: object) -> str:
            if not isinstance(value, details):
                return original(pickler, value)
            key = key_of(
                value,
                pickler,
                self._registry.version_of,
                compilers=self._calls.user_compilers,
            )
            if not isinstance(key, Key):
                self._refuse(key)
                raise AssertionError("no key, and no reason")
            name = internals.key_prefix() + key.digest
            self._remember(name, key)
            if self._calls.current is not None:
                self._calls.current.key = name
            return key.digest

        return get_hash

    def _fx_checker(self, original: Function[None]) -> Function[None]:
        """Tell the current call why a graph has no key here; torch may have one of its own."""

        def check_can_cache(gm: GraphModule, *args: object, **kwargs: object) -> None:
            call = self._calls.current
            if not isinstance(call, FxKeying):
                original(gm, *args, **kwargs)
                return
            original(gm, *internals.without_carried(args), **kwargs)
            try:
                call.reasons = tuple(fx_bypass_reasons(gm, self._registry.version_of))
            except Exception as exc:  # noqa: BLE001 - torch's own key is as good as ever
                call.reasons = (BypassReason("error", repr(exc)),)
                call.met(exc)

        return check_can_cache

    def _fx_digester(
        self, original: Callable[[KeyPickler, object], str]
    ) -> Callable[[KeyPickler, object], str]:
        details = internals.fx_key_details.get()

        def get_key(pickler: KeyPickler, value: object) -> str:
            call = self._calls.current
            if not (type(value) is details and isinstance(call, FxKeying) and not call.reasons):
                return original(pickler, value)
            try:
                key = key_of(value, pickler, self._registry.version_of, traced=True)
            except Exception as exc:  # noqa: BLE001 - torch's own key is as good as ever
                key = [BypassReason("error", repr(exc))]
                call.met(exc)
            if not isinstance(key, Key):
                call.reasons = tuple(key)
                return original(pickler, value)
            call.key = internals.FX_PREFIX + key.digest
            self._remember(call.key, key)
            return internals.fx_prefix() + key.digest

        return get_key

    def _describer(
        self, original: Callable[[KeyPickler, object], list[str]]
    ) -> Callable[[KeyPickler, object], list[str]]:
        """Have torch log, of a key that was made here, the components that are in it."""
        details = internals.fx_key_details.get()  # those of whole graphs are of a subclass

        def debug_lines(pickler: KeyPickler, value: object) -> list[str]:
            call = self._calls.current
            if (
                call is None
                or not call.key
                or call.key not in self._keys
                or not isinstance(value, details)
            ):
                return original(pickler, value)
            return [
                f"[{component.digest}] {name}: {component.value}"
                for name, component in self.components(call.key).items()
            ]

        return debug_lines

    def _refuse(self, reasons: Sequence[BypassReason]) -> None:
        if reasons:
            if self._calls.current is not None:
                self._calls.current.reasons = tuple(reasons)
            raise internals.bypass_error.get()("; ".join(map(str, reasons)))

    def _remember(self, name: str, key: Key) -> None:
        self._keys[name] = key
        self._with_parts[name] = None
        while len(self._with_parts) > _REMEMBERED_PARTS:
            old, _ = self._with_parts.popitem(last=False)
            if old in self._keys:
                self._keys[old] = self._keys[old].without_parts()
        while len(self._keys) > _REMEMBERED_KEYS:
            self._keys.popitem(last=False)


def _only_if_asked(original: Function[None]) -> Function[None]:
    def init_backend_registration() -> None:
        if not internals.are_backends_unasked():
            original()

    return init_backend_registration


def _function_accepter(original: Callable[[object], bool]) -> Callable[[object], bool]:
    """Have all of torch's checks accept custom autograd functions: keys here hold all of them.

    torch has an option for it, which would be in the key of every graph.
    """

    def cacheable(operator: object) -> bool:
        return is_custom_function(operator) or original(operator)

    return cacheable


def _reasons_for(error: Exception) -> tuple[BypassReason, ...]:
    """Why torch gave a graph up; code ``error`` if it was not on purpose."""
    if options := tuple(unpicklable_options()):
        return options
    if isinstance(error, internals.bypass_error.get()):
        return (BypassReason("torch", str(error)),)
    return (BypassReason("error", repr(error)),)


def is_made_for_threads(components: Mapping[str, Component]) -> bool:
    """Whether a key says that code under it is made for the number of threads."""
    return bool({"cpp_runtime_thread_count", "torch.num_threads"} & set(components))


def _cache_directory() -> str | None:
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR")
