"""Put pages of the documentation into the wheel, for ``s3cache explain CODE`` to show.

The pages are in git only once, in ``docs/``. An editable install reads them there
(``s3cache/util/text.py``), so that it shows their current text.
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
        """Include the pages in the wheel, unless it is editable."""
        if version == "editable":
            return
        for name in self.config["pages"]:
            build_data["force_include"][str(ROOT / "docs" / name)] = f"{PLACE}/{name}"
