"""The seam at Triton's kernels: what an entry holds of them, and the directory to which they go.

An entry holds what is run, and nothing of the machine that compiled it: no file, no directory, no
bound method. What a kernel needs of those is made on the machine that reads it (:func:`portable`).

torch writes the kernels of an entry to files, unless there are some under their names already, and
loads those by name, at once or when they are first run. So nobody else may be able to write there,
or to have written: what is loaded are then the bytes that were verified, or what this user's torch
has compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from s3cache.artifact import hidden_places
from s3cache.errors import ConfigError
from s3cache.hooks._patching import Patches
from s3cache.hooks._sources import installed_in
from s3cache.store import Directory, check_way, is_writable_by_others, make_parents
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import (
        CachingAutotuner,
        TritonBundle,
        TritonFile,
        TritonKernel,
    )

__all__ = ["TritonSeam", "check_triton_directory", "portable"]

Emit: TypeAlias = Function[object]


class TritonSeam:
    """Looks at where kernels go before they go there.

    Args:
        is_rebuilding: whether this thread makes an entry of s3cache's into a callable.
    """

    def __init__(self, is_rebuilding: Callable[[], bool]) -> None:
        self._is_rebuilding = is_rebuilding

    def install(self, patches: Patches) -> None:
        patches.replace(internals.emit_triton_bundle, self._emitter)
        patches.replace(internals.collect_triton_bundle, _collector)

    def _emitter(self, original: Emit) -> Emit:
        def read_and_emit(bundle: TritonBundle, *args: object, **kwargs: object) -> object:
            if self._is_rebuilding():
                for kernel in bundle.kernel_artifacts:
                    base = internals.triton_directory.get()(kernel.device)
                    check_triton_directory(base, kernel.kernel_hash)
            for static in bundle.static_autotuners:
                _settle(static.kernel)
            return original(bundle, *args, **kwargs)

        return read_and_emit


# -- what an entry holds


def _collector(original: Function[object]) -> Function[object]:
    def collect(bundler: object, *args: object, **kwargs: object) -> object:
        internals.keep_launched_kernels(bundler)
        return original(bundler, *args, **kwargs)

    return collect


# What Triton compiles a kernel through, before it is what the device runs. It can do without
# (TRITON_STORE_BINARY_ONLY); each names the files that the kernel is from.
_STAGES = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn")
_GROUP = "__grp__"  # begins the name of the file that lists the others
#: Of a kernel in an entry: under which digest its fastest configuration is remembered.
_CONFIGS = "s3cache_configs"


@contextlib.contextmanager
def portable(graphs: Iterable[object], *, share_sources: bool) -> Iterator[None]:
    """While the block runs, Triton kernels of compiled graphs hold what any machine can use.

    torch alone can use them as well, but does not remember the fastest configuration then.

    Args:
        share_sources: whether messages of a kernel may name the file that it is from.
    """
    places = () if share_sources else (*installed_in(), internals.cache_dir.get()())
    changed = []
    try:
        for graph in graphs:
            fields = vars(graph)
            bundle: TritonBundle | None = fields.get(internals.TRITON_BUNDLE)
            if bundle:
                changed.append((fields, bundle))
                fields[internals.TRITON_BUNDLE] = dataclasses.replace(
                    bundle,
                    kernel_artifacts=[_binary(each, places) for each in bundle.kernel_artifacts],
                    static_autotuners=[
                        dataclasses.replace(each, kernel=_unsettled(each.kernel))
                        for each in bundle.static_autotuners
                    ],
                )
        yield
    finally:
        for fields, bundle in changed:
            fields[internals.TRITON_BUNDLE] = bundle


def _binary(kernel: TritonKernel, places: Sequence[str]) -> TritonKernel:
    files = [each for each in kernel.artifacts if not each.filename.endswith(_STAGES)]
    names = {each.filename for each in files}
    return dataclasses.replace(
        kernel,
        artifacts=[
            dataclasses.replace(each, payload=hidden_places(_payload(each, names), *places))
            for each in files
        ],
    )


def _payload(file: TritonFile, names: set[str]) -> bytes:
    if not file.filename.startswith(_GROUP):
        return file.payload
    group = json.loads(file.payload)  # a newer Triton takes it for none if a file is not there
    group["child_paths"] = {
        name: path for name, path in group["child_paths"].items() if name in names
    }
    return json.dumps(group).encode()


def _unsettled(kernel: CachingAutotuner) -> CachingAutotuner:
    """A copy without what is of this process; its own reduction refuses one that was loaded."""
    bare, function = object.__new__(type(kernel)), object.__new__(type(kernel.fn))
    vars(function).update(vars(kernel.fn))
    vars(function)[internals.BINDERS] = None
    if internals.FILE in vars(function):
        vars(function)[internals.FILE] = ""
    vars(bare).update(vars(kernel), fn=function, filename=None, save_cache_hook=None)
    vars(bare).update({internals.LAUNCHERS: [], internals.RELOAD: None})
    cache = getattr(kernel.save_cache_hook, "__self__", None)
    if isinstance(cache, internals.autotune_cache.get()):
        vars(bare)[_CONFIGS] = cache.configs_hash
    return bare


def _settle(kernel: CachingAutotuner) -> None:
    """Give a kernel what is of this process, as if it had been compiled here."""
    if kernel.filename is not None or not kernel.kernel_hash:
        return  # torch has made it
    kernel.filename = internals.path_of_module.get()(kernel.kernel_hash, "py")[2]
    vars(kernel.fn)[internals.BINDERS] = defaultdict(kernel.fn.create_binder)
    if internals.FILE in vars(kernel.fn):
        vars(kernel.fn)[internals.FILE] = kernel.filename
    configs = vars(kernel).pop(_CONFIGS, None)
    if configs is not None:
        cache = internals.autotune_cache.get().create(
            kernel.inductor_meta, kernel.filename, configs
        )
        kernel.save_cache_hook = cache and cache.save


# -- where they go


def check_triton_directory(base: str, kernel: str) -> None:
    """Make ``base`` for this user alone, unless it is there; look at what there is of a kernel.

    Raises:
        PermissionError: others may write in it, or what is there is not this user's alone. That
            says nothing of the entry.
    """
    try:
        make_parents(os.path.abspath(base))
        check_way(base)  # before it is opened: from then on the name leads there
        directory = Directory.at(base, make=True)
        # Where nobody else gets in, it does not matter what the umask left open within.
        is_private = not os.fstat(directory.fd).st_mode & 0o077
        with contextlib.suppress(FileNotFoundError):  # there is nothing for it yet
            _check_files(directory, kernel, is_private=is_private)
    except ConfigError as exc:
        raise PermissionError(
            errno.EACCES, f"kernels of Triton are not loaded from where others may write: {exc}"
        ) from exc


def _check_files(base: Directory, kernel: str, *, is_private: bool) -> None:
    place = f"{base.path}/{kernel}"
    status = os.stat(kernel, dir_fd=base.fd, follow_symlinks=False)
    _check_ours(status, stat.S_ISDIR, is_private, place)
    fd = os.open(kernel, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=base.fd)
    try:
        for name in os.listdir(fd):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            _check_ours(status, stat.S_ISREG, is_private, f"{place}/{name}")
    finally:
        os.close(fd)


def _check_ours(
    status: os.stat_result, is_kind: Callable[[int], bool], is_private: bool, place: str
) -> None:
    is_ours = is_kind(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or (not is_private and is_writable_by_others(status)):
        raise ConfigError(
            place,
            "is not this user's alone",
            "remove it, or give TRITON_CACHE_DIR another directory",
        )
