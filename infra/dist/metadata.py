"""Make the page of the package index: the README, with links that work there.

The links in a checkout are relative. If ``PROJECT_URL`` is set to the repository's page
(``https://github.com/OWNER/NAME``), they become absolute, at the tag of the version that is built.
Otherwise they stay relative.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(!?\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+\))")


class ProjectMetadata(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``; hatchling calls it for each build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write both into ``metadata``."""
        url = os.environ.get("PROJECT_URL", "").rstrip("/")
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        if url:
            text = absolute_links(text, url, _tag())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = project_urls(url, _tag()) if url else {}


def _tag() -> str:
    source = (ROOT / "s3cache" / "util" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert version is not None
    return f"v{version[1]}"


def absolute_links(text: str, url: str, tag: str) -> str:
    """Return ``text`` with absolute links at ``tag``: to pages, and to raw pictures."""

    def absolute(link: re.Match[str]) -> str:
        way = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}{url}/{way}/{tag}/{link[2]}"

    return _LINK.sub(absolute, text)


def project_urls(url: str, tag: str) -> dict[str, str]:
    """Return the links that the index shows beside the page."""
    return {
        "Source": url,
        "Documentation": f"{url}/tree/{tag}/docs",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
