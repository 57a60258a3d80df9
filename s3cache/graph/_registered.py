"""Which Python functions were registered with torch's dispatcher, as far as we were there.

The dispatcher keeps them where nobody can read them; it only tells the file of the ``Library``, and
which keys an operator has kernels for.
"""

from __future__ import annotations

import functools
import os

import _s3cache_autoload
from s3cache.torch_api import internals

__all__ = ["forget_kernels", "is_native", "kernel_of", "record_kernel", "replaced_kernels"]

_kernels: dict[str, object] = {}
_NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".mm")


def record_kernel(where: str, function: object) -> None:
    """``function`` is registered from now on; ``where`` is operator and key, as torch has them."""
    _kernels[where] = function


def forget_kernels() -> None:
    """Nobody records any more what is registered: what is known may be replaced unseen."""
    _kernels.clear()


def kernel_of(operator: str, key: str) -> object | None:
    """What was registered for an operator's qualified name and a dispatch key, if we saw it."""
    return _kernels.get(f"{operator.replace('::', '/')}/{key.partition('[')[0]}")


def is_native(path: str) -> bool:
    """Whether what is registered from ``path`` was compiled: Python comes from any other name."""
    return path.endswith(_NATIVE)


def replaced_kernels() -> dict[str, object]:
    """Kernels in Python that torch's own operators have now and did not have by themselves.

    By operator and key, as torch has them; ``None`` stands for one that nobody saw. Some of those
    that were seen may be torch's.
    """
    present = internals.python_kernels()
    found: dict[str, object] = {
        where: function
        for where, function in _kernels.items()
        if internals.is_of_aten(where) and where in present
    }
    for where in present - _s3cache_autoload.kernels - _kernels.keys():
        if internals.is_of_aten(where):  # others are defined with their kernels, when first needed
            name, _, key = where.rpartition("/")
            if not _is_torchs(name.replace("/", "::", 1), key):
                found[where] = None
    return found


@functools.cache
def _is_torchs(name: str, key: str) -> bool:
    """Whether a file of torch's registers it that does so for nobody else."""
    home = internals.torch_directory()
    paths = [
        path
        for each, path in internals.REGISTERED_AT.findall(internals.dispatch_dump.get()(name))
        if each.partition("[")[0] == key and not is_native(path)
    ]
    for_others = (os.path.join(home, "library.py"), os.path.join(home, "_library") + os.sep)
    return all(path.startswith(home) and not path.startswith(for_others) for path in paths)
