"""Write ``s3cache/options.py``, the types of all settings, from their declarations.

    .venv/bin/python -m infra.docs.options

Settings are declared once, in ``s3cache/settings.py`` and by each feature.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from s3cache.settings import Settings

FILE = Path(__file__).resolve().parents[2] / "s3cache" / "options.py"
_HEAD = '''"""The types of all settings, as arguments; ``make docs-settings`` writes this file."""

from __future__ import annotations

import os
from typing import Literal

from s3cache.store import StoreOptions
from s3cache.trust import Signer


class Options(StoreOptions, total=False):
    """The arguments of :meth:`s3cache.Cache.open` besides the URL; see :class:`Settings`.

    ``None`` means not given.
    """

'''


def generated() -> str:
    """Return the text of the file."""
    hints = get_type_hints(Settings)
    lines = [
        f"    {it.name}: {' | '.join(_accepted(hints[it.name], it.metadata['kind']))} | None\n"
        for it in fields(Settings)
        if it.name != "url"
    ]
    return _HEAD + "".join(lines)


def _accepted(hint: Any, kind: Any) -> list[str]:
    """Return the types of values that code may give for a setting of this type."""
    if get_origin(hint) is Literal:
        return [f"Literal[{', '.join(map(json.dumps, get_args(hint)))}]"]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    names = [of.__name__ for of in kinds if of is not type(None)]
    if "str" not in names:
        names.append("str")
    if kind.is_path:
        names.insert(names.index("str") + 1, "os.PathLike[str]")
    return names


if __name__ == "__main__":
    FILE.write_text(generated(), encoding="utf-8")
