"""Who made an entry: recorded with it for people, and never part of a key."""

from __future__ import annotations

import functools
import platform
import re

__all__ = ["maker"]


def maker(*, compiled: bool) -> dict[str, str]:
    """Versions and platform of this process, and of the C++ compiler if it has ``compiled``."""
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
    """The compiler's name and version, without its path; ``""`` if it does not say."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    try:
        # torch makes one line of what ``g++ -v`` prints, and has asked already.
        said = get_compiler_version_info(get_cpp_compiler())
    except Exception:  # noqa: BLE001 - it has been used, and is gone
        return ""
    found = re.search(r"(?:\w+ )?(gcc|clang|icpx?) version [\w.+~-]+(?: \([^()/_]*\))?", said)
    return found[0].strip("_") if found else ""
