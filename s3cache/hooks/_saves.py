"""The seam at AOTAutograd's saves: an entry, its kernels and its description become a frame.

torch's own ``save`` runs as it is: it pickles the entry, records it for ``save_cache_artifacts``,
and writes it to its directory. That write comes here; what cannot be shared goes to the directory.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from s3cache._logs import logger_of
from s3cache._pages import pointer
from s3cache._problems import code_of
from s3cache.artifact import (
    Artifact,
    UnreadableError,
    check_readable,
    describe,
    packed,
    variant_of,
)
from s3cache.cache import Engine, Saved
from s3cache.graph import FIRST_CALL, Code, Component, Unsafe
from s3cache.hooks._bundling import Bundling
from s3cache.hooks._bypasses import Bypasses
from s3cache.hooks._conditions import UnrecordedError, described, note_conditions
from s3cache.hooks._first_calls import UndescribedError
from s3cache.hooks._kernels import Kernels, UnsharableKernelError
from s3cache.hooks._keys import CacheCall, CacheCalls, KeySeam
from s3cache.hooks._patching import Patches
from s3cache.hooks._records import Recording
from s3cache.hooks._sources import without_sources
from s3cache.hooks._triton import portable
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import AOTResult, Function

__all__ = ["SaveSeam", "maker", "told"]

logger = logger_of("saves")


class Save(CacheCall):
    """One call of ``save``, with what is to be saved.

    Attributes:
        is_shared: whether it is ours; what torch keeps to itself stays as torch made it.
        relies_on: see :class:`Artifact`.
    """

    def __init__(self, entry: AOTResult, *, is_shared: bool) -> None:
        super().__init__()
        self.entry = entry
        self.is_shared = is_shared
        self.relies_on: str | None = None


class SaveSeam:
    """Shares what torch has compiled, and counts what cannot be, with the reason."""

    def __init__(
        self,
        engine: Engine,
        calls: CacheCalls,
        keys: KeySeam,
        kernels: Kernels,
        bundling: Bundling,
        bypasses: Bypasses,
        recording: Recording,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._keys = keys
        self._kernels = kernels
        self._bundling = bundling
        self._bypasses = bypasses
        self._recording = recording
        self._warned = False

    def install(self, patches: Patches) -> None:
        """Replace where ``AOTAutogradCache.save`` writes to, and see what it cannot pickle."""
        patches.replace(internals.save, self._saver)
        patches.replace(internals.pickle_entry, self._pickler)
        patches.replace(internals.write_to_local_cache, self._writer)

    def _saver(self, original: Function[None]) -> Function[None]:
        def save(key: str, entry: AOTResult, *args: object, **kwargs: object) -> None:
            is_shared = self._keys.is_shared(key)
            with self._calls.entered(Save(entry, is_shared=is_shared)) as saving:
                saving.key = key
                if self._has_noted(key, entry, saving):
                    original(key, entry, *args, **kwargs)
                if saving.error is not None and self._engine.settings.strict:
                    raise saving.error

        return save

    def _has_noted(self, key: str, entry: AOTResult, saving: Save) -> bool:
        """Put into ``entry`` what its code relies on, without which nobody may use it."""
        if not saving.is_shared:
            return True
        try:
            noted = note_conditions(entry, self._bundling.compile_of(key))
        except UnrecordedError as exc:
            self._refused("unrecorded", exc)
            return False
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._failed(saving, exc)
            return False
        saving.relies_on = described(noted)
        return True

    def _pickler(self, original: Function[bytes | None]) -> Function[bytes | None]:
        def pickle_entry(entry: AOTResult, *args: object, **kwargs: object) -> bytes | None:
            saving = self._calls.current
            if not (isinstance(saving, Save) and saving.is_shared):
                return original(entry, *args, **kwargs)
            shares = self._engine.settings.share_sources
            with contextlib.ExitStack() as stack:
                try:
                    if graphs := internals.with_triton_kernels(_graphs(entry)):
                        stack.enter_context(portable(graphs, share_sources=shares))
                    stack.enter_context(self._told_of(entry))
                except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
                    self._failed(saving, exc)
                    return None
                content = original(entry, *args, **kwargs)
            if content is None:  # torch has logged what it met
                field = internals.find_unpicklable_field.get()(entry) or "as a whole"
                message = f"what it was compiled to cannot be pickled ({field})"
                self._refused("entry", internals.bypass_error.get()(message))
            return content

        return pickle_entry

    def _told_of(self, entry: AOTResult) -> contextlib.AbstractContextManager[None]:
        if self._engine.settings.share_sources:
            return contextlib.nullcontext()
        return without_sources(entry, entry.runtime_metadata, *_graphs(entry))

    def _writer(self, original: Callable[[str, bytes], None]) -> Callable[[str, bytes], None]:
        def write_to_local_cache(key: str, content: bytes) -> None:
            saving = self._calls.current
            # Not in a save, this is torch.compiler.load_cache_artifacts.
            if not (
                isinstance(saving, Save) and saving.is_shared and self._share(key, saving, content)
            ):
                original(key, content)

        return write_to_local_cache

    def _share(self, key: str, saving: Save, content: bytes) -> bool:
        try:
            check_readable(content)
            with self._recording.events.shown("s3cache.save") as event:
                frame = self._artifact(key, saving, content).encode(key)
                is_remote = internals.tiers_asked("aot").remote
                saved = self._engine.save(key, frame, remote=is_remote)
                event.update(key=key, level="aot", bytes=len(frame), saved=isinstance(saved, Saved))
            if isinstance(saved, Saved):
                logger.debug("saved %s (%d bytes)", key, len(frame))
                entry = saving.entry
                compile_ns = entry.forward_time_taken_ns + entry.backward_time_taken_ns
                self._recording.saved(key, len(frame), saved.elapsed_s, compile_ns / 1e9)
                if is_remote or not internals.tiers_asked("fx").remote:
                    self._supersede(saving.entry)
            return isinstance(saved, Saved)
        except UnreadableError as exc:
            self._refused("entry", exc)
        except UnsharableKernelError as exc:
            self._refused("kernel", exc)
        except UndescribedError as exc:
            self._refused("fakify-first-call", exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._failed(saving, exc)
        return False

    def _failed(self, saving: Save, error: Exception) -> None:
        saving.met(error)
        if not self._warned and not self._engine.settings.strict:
            self._warned = True
            where = pointer(code_of(error))
            logger.warning("a compiled graph is not shared %s", where, exc_info=error)

    def _refused(self, code: Code, error: Exception) -> None:
        reasons = [Unsafe(code, str(error))]
        self._bypasses.met(reasons, what="a compiled graph is not shared")
        current = self._calls.current
        if current is not None:
            self._recording.bypassed("aot", reasons, None, key=current.key or "")
            current.met(error)

    def _supersede(self, entry: AOTResult) -> None:
        """Its halves need not be shared by themselves any more."""
        for half in (entry.compiled_fw, entry.compiled_bw):
            graph = None if half is None else half.result
            if isinstance(graph, internals.compiled_graph.get()) and graph._fx_graph_cache_key:
                self._engine.supersede(graph._fx_graph_cache_key, variant_of(graph.guards_expr))

    def _artifact(self, key: str, saving: Save, content: bytes) -> Artifact:
        entry = saving.entry
        graphs = _graphs(entry)
        kernels = self._kernels.images_of(graphs)
        components = self._keys.components(key)
        first_call = self._bundling.outputs(key)
        if FIRST_CALL in components and first_call is None:
            raise UndescribedError("torch has not said what its first call returns")
        with self._told_of(entry):
            runtime = packed(describe(entry))
        return Artifact(
            kind="aot",
            entry=content,
            kernels=kernels,
            guards=entry.guards_expr,
            relies_on=saving.relies_on,
            forward_ns=int(entry.forward_time_taken_ns),
            backward_ns=int(entry.backward_time_taken_ns),
            runtime=runtime,
            components=told(components),
            parts=self._keys.known(key).parts,
            made_by=maker(graphs, compiled=bool(kernels)),
            first_call=first_call,
        )


def _graphs(entry: AOTResult) -> list[object]:
    """What its forward, and its backward if it has one, were compiled to."""
    halves = (entry.compiled_fw, entry.compiled_bw)
    return [half.result for half in halves if half is not None]


# -- what an entry tells people


def told(components: Mapping[str, Component]) -> dict[str, list[str]]:
    """The components of a key as plain data: name to digest and value."""
    return {name: [component.digest, component.value] for name, component in components.items()}


def maker(graphs: Iterable[object], *, compiled: bool) -> dict[str, str]:
    """Who makes an entry, and for which devices; the C++ compiler too, if it has ``compiled``."""
    import torch

    made_by = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "device": " ".join(
            sorted({each for graph in graphs for each in getattr(graph, "device_types", ())})
        ),
    }
    return {**made_by, "compiler": _compiler()} if compiled else made_by


@functools.cache
def _compiler() -> str:
    """The C++ compiler's name and version, without its path; ``""`` if it does not say."""
    try:
        # torch makes one line of what ``g++ -v`` prints, and has asked already.
        said = internals.compiler_version.get()(internals.cpp_compiler.get()())
    except Exception:  # noqa: BLE001 - it has been used, and is gone
        return ""
    known = re.search(r"(?:\w+ )?(gcc|clang|icpx?) version [\w.+~-]+(?: \([^()/_]*\))?", said)
    return known[0].strip("_") if known else ""
