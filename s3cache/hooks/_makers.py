"""What an entry tells people: who made it, and what its key is made of."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping

from s3cache.graph import Component
from s3cache.torch_api import internals

__all__ = ["maker", "told"]


def told(components: Mapping[str, Component]) -> dict[str, list[str]]:
    """The components of a key as plain data: name to digest and value."""
    return {name: [component.digest, component.value] for name, component in components.items()}


def maker(*, compiled: bool) -> dict[str, str]:
    """Who makes an entry; the C++ compiler too, if it has ``compiled``."""
    import torch

    made_by = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
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
