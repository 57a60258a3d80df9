"""Save kernels of Triton without files, directories and bound methods of this machine.

The machine that reads an entry adds its own.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from s3cache.artifact import hidden_places
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CachingAutotuner, TritonBundle, TritonFile

# Triton's intermediate code. It contains names of source files, and no process needs it
# (TRITON_STORE_BINARY_ONLY).
_STAGES = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn")
_GROUP = "__grp__"  # prefix of the file that lists the others
#: On a kernel in an entry: the digest of its configurations, under which torch remembers the best.
_CONFIGS = "s3cache_configs"


def portable(
    bundle: TritonBundle,
    copies: Mapping[CachingAutotuner, CachingAutotuner],
    places: Collection[str],
) -> TritonBundle:
    """Return a bundle that any machine can use, without the names of ``places``.

    ``copies`` are unloaded copies of kernels that torch has loaded since.
    """
    autotuners = [
        dataclasses.replace(static, kernel=_without_process(kernel))
        for static in bundle.static_autotuners
        if not internals.is_loaded(kernel := copies.get(static.kernel, static.kernel))
    ]
    kernels = []
    for kernel in bundle.kernel_artifacts:
        files = [file for file in kernel.artifacts if not file.filename.endswith(_STAGES)]
        names = {file.filename for file in files}
        kept = [
            dataclasses.replace(file, payload=hidden_places(_payload(file, names), *places))
            for file in files
        ]
        kernels.append(dataclasses.replace(kernel, artifacts=kept))
    return dataclasses.replace(bundle, kernel_artifacts=kernels, static_autotuners=autotuners)


def unloaded(kernel: CachingAutotuner) -> CachingAutotuner:
    """Return a copy that does not change when torch loads ``kernel``."""
    bare = _without_process(kernel)
    bare.compile_results = [*map(copy.copy, kernel.compile_results)]
    for result in bare.compile_results:
        result.kernel = copy.copy(result.kernel)
    return bare


def _payload(file: TritonFile, names: set[str]) -> bytes:
    if not file.filename.startswith(_GROUP):
        return bytes(file.payload)
    # A newer Triton ignores a group if one of its files is missing.
    group = json.loads(file.payload)
    paths = group["child_paths"].items()
    group["child_paths"] = {name: path for name, path in paths if name in names}
    return json.dumps(group).encode()


def _without_process(kernel: CachingAutotuner) -> CachingAutotuner:
    """Return a copy without the state of this process; torch refuses to pickle a loaded kernel."""
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


def restore_kernel(kernel: CachingAutotuner) -> None:
    """Add the state of this process to a kernel, as if it had been compiled here."""
    if kernel.filename is not None or not kernel.kernel_hash:
        return  # torch has added it
    kernel.filename = internals.path_of_module.get()(kernel.kernel_hash, "py")[2]
    vars(kernel.fn)[internals.BINDERS] = defaultdict(kernel.fn.create_binder)
    if internals.FILE in vars(kernel.fn):
        vars(kernel.fn)[internals.FILE] = kernel.filename
    configs = kernel.__dict__.pop(_CONFIGS, None)
    if configs is not None:
        cache = internals.autotune_cache.get().create(
            kernel.inductor_meta, kernel.filename, configs
        )
        kernel.save_cache_hook = cache and cache.save
