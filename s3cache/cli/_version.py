"""``s3cache version``: everything that a bug report needs."""

from __future__ import annotations

import platform
import sys

from s3cache._version import __version__
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output

__all__ = ["show_version", "versions"]

_PACKAGES = (
    "torch",
    "triton",
    "aioboto3",
    "aiobotocore",
    "botocore",
    "aiohttp",
    "msgpack",
    "zstandard",
    "tenacity",
    "pynacl",
    "typer",
    "rich",
)


def versions() -> dict[str, str]:
    """What runs here, by name; nothing of it is imported."""
    from importlib.metadata import PackageNotFoundError, version

    found = {
        "s3cache": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "executable": sys.executable,
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@grouped(out=Output)
def show_version(out: Output) -> None:
    """Print versions of s3cache and of all that it stands on: paste it into a bug report."""
    found = versions()
    if out.json:
        out.record(found)
        return
    width = max(map(len, found))
    for name, text in found.items():
        out.line(f"{name:{width}}  {text}")
