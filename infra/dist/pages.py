"""Put pages of the documentation into the wheel, for ``s3cache explain CODE`` to show.

They are written in ``docs/`` and are in git once. What is installed from a checkout reads them
there (``s3cache/util/text.py``), so that what is edited is what is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[2]
PLACE = "s3cache/_docs"


class Pages(BuildHookInterface):
    """Adds the pages that ``pyproject.toml`` names; hatchling calls it for each wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write them into what is included, unless what is built leads to the checkout."""
        if version == "editable":
            return
        for name in self.config["pages"]:
            build_data["force_include"][str(ROOT / "docs" / name)] = f"{PLACE}/{name}"
