"""Hooks at torch's keys: what may be cached, and a key of named components.

torch comes by here first in a lookup: ``autograd_cache_key`` checks a graph, collects what it
depends on and digests that; Inductor does the same with each FX graph. Checks and digest are those
of :mod:`s3cache.graph`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

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
from s3cache.hooks._state import CacheCall, CompileState, Patches, around
from s3cache.torch_api import internals
from s3cache.util.importing import when_imported

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import Function, KeyPickler, OperatorLibrary

# A key is needed from the lookup that misses until the save, which for a backward graph that is
# compiled late may be many graphs later.
_MAX_KEYS = 1024
# Details of components take more memory, and an entry does without them.
_MAX_WITH_DETAILS = 64


class FxKeying(CacheCall):
    """One call of Inductor for the key of an FX graph."""


class Registry:
    """Functions that the user has registered: their output depends on inputs and version alone."""

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}

    def add(self, function: Function[object], version: str) -> None:
        """Register ``function``; a new ``version`` makes old entries miss."""
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
        """Return the version that the user gave, if any. An operator stands for its overloads."""
        if not self._versions:
            return None
        version = self._versions.get(internals.name_of(function))
        packet = internals.packet_of(function)
        if version is None and packet is not None:
            return self._versions.get(internals.name_of(packet))
        return version

    @contextlib.contextmanager
    def accepted(self, more: Mapping[str, str]) -> Iterator[None]:
        """Have torch's own check accept them, and ``more``, while the block runs."""
        if not self._versions and not more:
            yield
            return
        inductor = internals.inductor_config.get()
        known = {**self._versions, **more, **inductor.unsafe_marked_cacheable_functions}
        with inductor.patch(unsafe_marked_cacheable_functions=known):
            yield


class KeyHook:
    """Makes keys, or says why a graph has none; remembers keys until they are saved."""

    def __init__(self, registry: Registry, calls: CompileState) -> None:
        self._registry = registry
        self.version_of = registry.version_of
        self._calls = calls
        self._keys: dict[str, Key] = {}  # the latest last
        self._directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    def install_fx(self, patches: Patches) -> None:
        """Replace what makes keys of FX graphs."""
        patches.wrap(internals.fx_check_cacheable, self._fx_check_cacheable)
        patches.wrap(internals.fx_key(), self._fx_get_key)

    def is_shared(self, key: str | None) -> bool:
        """Return whether entries under ``key`` are shared.

        They are not if it is torch's stand-in or another library's, nor inside ``fresh_cache()``,
        which asks for a new compile. All of its callers put Triton's directory into Inductor's,
        which a program that merely moves its cache seldom does.
        """
        if key not in self._keys:
            return False
        directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        if directory is None or directory == self._directory:
            return True
        return os.environ.get("TRITON_CACHE_DIR") != os.path.join(directory, "triton")

    def described_passes(self) -> contextlib.AbstractContextManager[None]:
        """Let torch ask users' passes for a description while the block runs."""
        traced = isinstance(self._calls.current, FxKeying)
        return described_passes(self.version_of, traced=traced)

    def known(self, key: str) -> Key:
        """Return what a key is made of, as far as that is remembered."""
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
        """Record the key in the current call, or why the graph has none."""
        with self._calls.entered(self._calls.current or CacheCall()) as call:
            call.inputs = inputs
            try:
                with self.described_passes(), internals.backends_unasked():
                    made = original(mod, inputs, *args, **kwargs)
            except Exception as exc:
                call.key, call.reasons = None, call.reasons or _reasons_for(exc)
                call.record_error(exc)
                raise
            # An option has torch make up a key for a graph that has none.
            call.key, call.reasons = made[0], ()
            return made

    @around(internals.check_cacheable)
    def _check_cacheable(self, original: Callable[[GraphModule], None], gm: GraphModule) -> None:
        call = self._calls.current
        inputs = () if call is None else call.inputs
        self._refuse(bypass_reasons(gm, inputs, self.version_of))
        # torch refuses first calls on fake tensors; an entry here has room for those.
        with (
            self._registry.accepted(extra_cacheable_functions(gm)),
            internals.first_calls_unasked(),
            internals.freezing_unasked(),
        ):
            original(gm)

    @around(internals.operator_cacheable)
    def _operator_cacheable(self, original: Callable[[object], bool], operator: object) -> bool:
        # Keys here hold all of a custom autograd function. torch has an option to accept them,
        # which would be in the key of every graph.
        return is_custom_function(operator) or original(operator)

    @around(internals.init_backends)
    def _init_backends(self, original: Function[None]) -> None:
        if not internals.are_backends_unasked():
            original()

    @around(internals.context_hashes)
    def _context_hashes(self, _: object, gm: GraphModule) -> list[object]:
        return context_hashes(gm, self.version_of)

    @around(internals.get_hash)
    def _get_hash(self, original: Function[str], pickler: KeyPickler, value: object) -> str:
        if not isinstance(value, internals.key_details.get()):
            return original(pickler, value)
        compilers = self._calls.user_compilers
        key = key_of(value, pickler, self.version_of, compilers=compilers)
        if not isinstance(key, Key):
            self._refuse(key)
            raise AssertionError("no key, and no reason")
        name = internals.key_prefix() + key.digest
        self._remember(name, key)
        if self._calls.current is not None:
            self._calls.current.key = name
        return key.digest

    def _fx_check_cacheable(
        self, original: Function[None], gm: GraphModule, *args: object, **kwargs: object
    ) -> None:
        """Record in the current call why a graph has no key here; torch may have one of its own."""
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
            # Without our reducer, torch's own key is made as it would be without us.
            vars(pickler).pop("reducer_override", None)
            pickler.fast = False
            pickler.clear_memo()
            return original(pickler, value)
        call.key = internals.FX_PREFIX + key.digest
        self._remember(call.key, key)
        return internals.fx_prefix() + key.digest

    def debug_lines(
        self, original: Function[list[str]], pickler: KeyPickler, value: object
    ) -> list[str]:
        """Have torch log the components of a key that was made here."""
        call = self._calls.current
        key = None if call is None else self._keys.get(call.key or "")
        # Those of whole graphs are of a subclass.
        if key is None or not isinstance(value, internals.fx_key_details.get()):
            return original(pickler, value)
        components = key.components.items()
        return [f"[{each.digest}] {name}: {each.value}" for name, each in components]

    def _refuse(self, reasons: Sequence[BypassReason]) -> None:
        if reasons:
            if self._calls.current is not None:
                self._calls.current.reasons = tuple(reasons)
            raise internals.bypass_error.get()("; ".join(map(str, reasons)))

    def _remember(self, name: str, key: Key) -> None:
        self._keys.pop(name, None)
        self._keys[name] = key
        names = [*self._keys]
        if len(names) > _MAX_WITH_DETAILS:
            old = names[-1 - _MAX_WITH_DETAILS]
            self._keys[old] = self._keys[old].without_parts()
        if len(names) > _MAX_KEYS:
            del self._keys[names[0]]


def is_made_for_threads(key: Key) -> bool:
    """Return whether code under this key is made for the number of threads."""
    return bool({"cpp_runtime_thread_count", "torch.num_threads"} & set(key.components))


def _reasons_for(error: Exception) -> tuple[BypassReason, ...]:
    """Return why torch gave a graph up; code ``error`` if it was not on purpose."""
    if options := tuple(unpicklable_options()):
        return options
    if isinstance(error, internals.bypass_error.get()):
        return (BypassReason("torch", str(error)),)
    return (BypassReason("error", repr(error)),)


# -- kernels of torch's dispatcher, which does not say later what replaced one of torch's


def watch_registrations(failed: Callable[[Exception], None]) -> Callable[[], None]:
    """Record kernels, and note what torch has by itself, from the end of ``import torch`` or now.

    ``failed`` is called with what keeps it from that: keys cannot be trusted then. Returns a
    function that puts torch back as it was, and forgets them.
    """
    patches = Patches()
    early = internals.TORCH not in sys.modules

    def begin() -> None:
        try:
            patches.at_undo(take_baseline(early=early))
            if internals.is_supported():
                patches.replace(internals.register_kernel, _recorder)
        except Exception as exc:  # noqa: BLE001 - the program that imports torch goes on
            failed(exc)

    withdraw = when_imported(internals.TORCH, begin)

    def stop() -> None:
        withdraw()
        patches.undo()
        forget_kernels()

    return stop


def _recorder(original: Function[object]) -> Function[object]:
    def impl(
        library: OperatorLibrary, name: object, function: object, *args: str, **kwargs: str
    ) -> object:
        result = original(library, name, function, *args, **kwargs)
        record_kernel(*internals.registered_kernel(library, name, function, *args, **kwargs))
        return result

    return impl
