"""Compiles on a stand-in for a GPU (``s3cache warm --target``): save no wrong values.

Kernels do nothing on the stand-in. So values that torch computes on the device during a compile are
wrong, and measurements are meaningless. Constants are computed on the processor instead, by
operators with equal results on every device. If anything else was launched while a graph was
compiled, the graph is not saved.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from s3cache.errors import UnsupportedTorchError
from s3cache.features.target import FEATURE, TARGET, names
from s3cache.graph import BypassReason
from s3cache.hooks import Patches, around
from s3cache.torch_api import internals, require
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from s3cache.hooks import Bypasses, Session
    from s3cache.torch_api.protocols import TracingContext

# Operators that round exactly: processors and GPUs agree to the last bit.
_EXACT = frozenset(
    """full scalar_tensor add sub rsub mul div neg abs sign eq ne lt le gt ge where minimum maximum
    clamp clamp_min clamp_max logical_and logical_or logical_not logical_xor bitwise_and bitwise_or
    bitwise_not bitwise_xor ceil floor trunc convert_element_type""".split()  # noqa: SIM905
)
# Operators that call cuDNN, which needs a real driver.
_OF_CUDNN = (
    "convolution convolution_backward _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_cudnn_attention_backward _cudnn_rnn _cudnn_rnn_backward "
    "cudnn_batch_norm cudnn_batch_norm_backward"
)
_NOT_THERE = BypassReason(
    "target",
    "torch computed or measured something on the stand-in for a GPU",
    "compile it on a machine that has the GPU",
)


def install(session: Session) -> None:
    """Install hooks with those that the cache requires."""
    session.required.append(lambda patches: StandIn(session.bypasses).install(patches))


class _OfThread(threading.local):
    at: int | None = None  # launches at the start of the current compile; None outside of one


class StandIn:
    """Keeps values and measurements of a stand-in out of entries. Any thread may compile."""

    def __init__(self, bypasses: Bypasses) -> None:
        import torch

        said = json.loads(os.environ[TARGET])
        here = {"torch": str(torch.__version__), "Python": str(sys.implementation.cache_tag)}
        for name, version in here.items():
            if said.get(name) != version:
                raise UnsupportedTorchError(
                    f"the job runs {name} {version}, but s3cache warm runs {said.get(name)}: the "
                    "target never looks up these keys"
                )
        library = ctypes.CDLL(None)
        self._launches: Callable[[], int] = library.s3cache_launches
        self._count_launch: Callable[[], int] = library.s3cache_launch
        self._began = _OfThread()
        self._bypasses = bypasses
        self._computed: weakref.WeakSet[TracingContext] = weakref.WeakSet()

    def install(self, patches: Patches) -> None:
        """Install all hooks; if one cannot be installed, nothing may be saved."""
        import torch

        require(FEATURE.does)
        patches.install(self)
        if names.first_launch.find() is not None:
            patches.wrap(names.first_launch, self._first_launch)
        library = names.dispatch_library.get()("IMPL", "aten", "CUDA", "")
        patches.callback(library.reset)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of replaced functions
            for name in _OF_CUDNN.split():
                operator = getattr(torch.ops.aten, name).default
                library.impl(name, "CUDA", functools.partial(self._return_empty, operator), False)

    @around(internals.while_compiling)
    @contextlib.contextmanager
    def _while_compiling(
        self, original: Function[AbstractContextManager[None]], *args: object, **kwargs: object
    ) -> Iterator[None]:
        outer = self._began.at
        at = self._launches() if outer is None else outer
        with self._compiling(at), original(*args, **kwargs):
            yield

    @contextlib.contextmanager
    def _compiling(self, at: int) -> Iterator[None]:
        outer, self._began.at = self._began.at, at
        try:
            yield
        finally:
            self._began.at = outer

    @around(internals.compile_fx_inner)
    def _compile_graph(self, original: Function[object], *args: object, **kwargs: object) -> object:
        try:
            return original(*args, **kwargs)
        finally:
            self._has_computed()  # a backward may be lowered much later

    def _has_computed(self) -> bool:
        """Return whether anything was launched since the current graph began to compile."""
        context = internals.current_tracing_context.get()()
        if context is None:
            return True
        if self._launches() != self._began.at:
            self._computed.add(context)
        return context in self._computed

    @around(names.launch_kernel)
    def _launch(self, original: Function[object], *args: object, **kwargs: object) -> object:
        # Kernels that are never launched are never measured; entries list them as unmeasured.
        return None if self._began.at is None else original(*args, **kwargs)

    def _first_launch(self, original: Function[object], *args: object, **kwargs: object) -> object:
        """Launch a kernel for C++, which needs the kernel's file from that (``cpp_wrapper``)."""
        with self._compiling(self._launches()):
            return original(*args, **kwargs)

    @around(names.save_winner)
    def _save_winner(self, original: Function[object], *args: object, **kwargs: object) -> None:
        pass  # a stand-in measures nothing that is worth remembering

    def _return_empty(self, operator: Function[object], *args: object, **kwargs: object) -> object:
        """Return tensors with the layout of an operator's results, without values."""
        import torch

        self._count_launch()
        tree_map, mode = names.tree_map.get(), internals.fake_mode.get()()

        def fake(value: object) -> object:
            is_tensor = isinstance(value, torch.Tensor)
            return mode.from_tensor(value, static_shapes=True) if is_tensor else value

        def empty(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            size, stride, device = value.size(), value.stride(), value.device
            return torch.empty_strided(size, stride, dtype=value.dtype, device=device)

        inputs, named = tree_map(fake, (args, {**kwargs}))
        with mode:
            results = operator(*inputs, **named)
        return tree_map(empty, results)

    @around(internals.save)
    def _save(self, original: Function[None], key: str, *args: object, **kwargs: object) -> None:
        if not self._has_computed():
            original(key, *args, **kwargs)
            return
        self._bypasses.warn([_NOT_THERE], what="a compiled graph is not shared")
        self._bypasses.record("aot", [_NOT_THERE], key=key)

    @around(internals.fx_save)
    def _save_graph(self, original: Function[None], *args: object, **kwargs: object) -> None:
        if not self._has_computed():
            original(*args, **kwargs)
            return
        self._bypasses.note("a compiled graph is not shared", [_NOT_THERE])

    @around(*names.constant_folders)
    def _fold(self, original: Function[object], *args: object, **kwargs: object) -> object:
        with _on_processor()():
            return original(*args, **kwargs)


@functools.cache
def _on_processor() -> type[AbstractContextManager[object]]:
    """Return a mode in which exact operators on the device are computed on the processor."""
    import torch

    class OnProcessor(names.dispatch_mode.get()):  # type: ignore[misc]
        def __torch_dispatch__(
            self,
            operator: Function[object],
            types: object,
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            kwargs, devices = kwargs or {}, list[torch.device]()
            if getattr(operator, "_opname", "") not in _EXACT or "alpha" in kwargs:
                return operator(*args, **kwargs)

            def moved(value: object) -> object:
                if isinstance(value, torch.device) and value.type == "cuda":
                    devices.append(value)
                    return torch.device("cpu")
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    devices.append(value.device)
                    return value.cpu()
                return value

            here, named = names.tree_map.get()(moved, (args, {**kwargs}))
            result = operator(*here, **named)
            if not devices or not isinstance(result, torch.Tensor):
                return result
            return result.to(devices[0])

    return OnProcessor
