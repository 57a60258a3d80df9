"""Triton kernels in torch: the state of a loaded kernel, its files, and its remembered winner."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from s3cache.features.device import names
from s3cache.features.device.names import SEARCHED
from s3cache.hooks import COMPILES_LATER
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CachingAutotuner


# Set on a configuration that was searched for. torch does not pickle them.
_SEARCHED = _COMBINED, _DESCENDED = "found_by_combo_autotune", "found_by_coordesc"


def kernels_in(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the kernels of Triton that a module of generated code has loaded, with their names."""
    for name, value in vars(module).items():
        if isinstance(value, names.autotuner.get()):
            yield kernel_name(value), value
        elif type(value).__name__.endswith("MultiKernelCall"):
            yield name, value


def kernel_name(tuner: CachingAutotuner) -> str:
    """Return the name of a kernel in generated code."""
    return str(tuner.inductor_meta.get("kernel_name") or tuner.fn.__name__)


def left_to_measure(kernel: Any) -> str:
    """Return why the next launch of a loaded kernel measures; "" if it does not."""
    if not isinstance(kernel, names.autotuner.get()):
        return "a choice between kernels" if kernel.picked_kernel is None else ""
    results = kernel.launchers or kernel.compile_results or kernel.configs
    if len(results) > 1:
        return f"{len(results)} configurations"
    meta, config = kernel.inductor_meta, getattr(results[0], "config", results[0])
    if is_combined(kernel) and not getattr(config, _COMBINED, False):
        return "sizes of blocks of a combo kernel"
    if (
        meta.get("coordinate_descent_tuning")
        and not getattr(config, _DESCENDED, False)
        and getattr(kernel, "_should_coordesc_tune", True)
    ):
        return "neighbours of a configuration (coordinate_descent_tuning)"
    return ""


def compiled_later(source: str) -> dict[str, str]:
    """Return the kernels that generated C++ compiles at their first launch (``cpp_wrapper``).

    The result has the name of each kernel by the digest of its source.
    """
    begin, end = map(re.escape, COMPILES_LATER)
    calls = re.findall(rf"{begin}(.*?){end}", source, re.DOTALL)
    return {
        kernel_digest(text): name for each in calls for name, text in kernel_sources(each.strip())
    }


def remembered_winner(tuner: CachingAutotuner) -> dict[str, Any] | None:
    """Return the fastest configuration of a kernel that torch remembers on this machine, if any."""
    cache = getattr(tuner.save_cache_hook, "__self__", None)
    if not isinstance(cache, internals.autotune_cache.get()) or cache.local_cache is None:
        return None
    store, path = cache.local_cache
    found = store.get(path)
    return found if isinstance(found, dict) else None


def remember_winner(kernel: str, best: Mapping[str, Any]) -> None:
    """Make torch remember the fastest configuration of a kernel, by the digest of its source.

    A configuration that this machine already remembers stays.
    """
    if "configs_hash" not in best:  # there was no choice, or it is not known
        return
    path = internals.path_of_module.get()(kernel, "py")[2]
    cache = internals.autotune_cache.get().create({}, path, best["configs_hash"])
    if cache is not None and cache.local_cache is not None:
        store, where = cache.local_cache
        if not os.path.exists(where):
            store.put(where, dict(best))


def kernel_sources(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and source of each kernel of Triton in generated Python code, in order."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "triton"
            and len(node.args) > 1
            and isinstance(name := node.args[0], ast.Constant)
            and isinstance(text := node.args[1], ast.Constant)
        ):
            yield str(name.value), str(text.value)


def kernel_digest(source: str) -> str:
    """Return the digest of a kernel's source, which is the name of its file."""
    return str(names.code_hash.get()(source.strip()))


def ready_to_launch(pending: dict[str, Any], name: str) -> CachingAutotuner:
    """Wait for a kernel that C++ is about to launch for the first time, and return it."""
    if not isinstance(pending[name], names.autotuner.get()):
        pending[name] = pending[name].result()  # not twice: each call loads its configurations
    return pending[name]


def files_of(tuner: CachingAutotuner) -> set[str]:
    """Return the names of the directories with the files of a kernel, one per configuration."""
    file_name = internals.triton_file_name.get()
    return {file_name(each.kernel.hash) for each in tuner.compile_results}


def triton_files(name: str, device: int) -> object:
    """Return a kernel's files as torch bundles them."""
    directory = os.path.join(internals.triton_directory.get()(device), name)
    make, files = names.triton_file_class.get(), []
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        with open(entry, "rb") as file:
            content = file.read()
        if entry.name.endswith(".json"):
            content = content.replace(directory.encode(), b"[REPLACE]")  # as torch does
        files.append(make(entry.name, content))
    return names.triton_files_class.get()(name, device, files)


def sealed_kernel(kernel: CachingAutotuner, tuner: CachingAutotuner) -> CachingAutotuner:
    """Return a kernel of a bundle with only the winner that ``tuner``, its loaded form, found."""
    (launcher,) = tuner.launchers
    file_name = internals.triton_file_name.get()
    results = [
        result
        for result in kernel.compile_results
        if file_name(result.kernel.hash) == launcher.cache_hash
    ]
    if not results:  # a search has found it: its files are there
        with tuner.lock:
            results = [tuner._precompile_config(launcher.config)]
        if type(results[0]) is not type(kernel.compile_results[0]):
            raise TypeError(f"torch launches {kernel_name(tuner)} in another way now")
        results[0].kernel.cubin_raw = None  # torch leaves it out, too
    sealed = object.__new__(type(kernel))
    vars(sealed).update(vars(kernel), compile_results=results)
    # One that was compiled here would be measured against smaller blocks.
    sealed.inductor_meta = {**kernel.inductor_meta, "dynamic_scale_rblock": False}
    vars(sealed).pop("_could_rblock_scale", None)
    setattr(sealed, SEARCHED, [each for each in _SEARCHED if getattr(launcher.config, each, False)])
    return sealed


def is_combined(tuner: CachingAutotuner) -> bool:
    """Return whether a kernel combines several, and torch searches for the blocks of each."""
    return bool(tuner.inductor_meta.get("combo_tuning_groups"))
