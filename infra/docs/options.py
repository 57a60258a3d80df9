"""Write ``s3cache/options.py``, the types of all settings, from their declarations.

    .venv/bin/python -m infra.docs.options [--check]

Settings are declared once, in ``s3cache/settings.py`` and by each feature. With ``--check`` nothing
is written, and the status is 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
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
    declared = [(each.name, each.metadata["kind"]) for each in fields(Settings)]
    lines = [
        f"    {name}: {' | '.join(_accepted(hints[name], kind))} | None\n"
        for name, kind in declared
        if name != "url"
    ]
    return _HEAD + "".join(lines)


def _accepted(hint: Any, kind: Any) -> list[str]:
    """Return the types of values that code may give for a setting of this type."""
    if get_origin(hint) is Literal:
        return [f"Literal[{', '.join(map(json.dumps, get_args(hint)))}]"]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    names = [each.__name__ for each in kinds if each is not type(None)]
    if "str" not in names:
        names.append("str")
    if kind.is_path:
        names.insert(names.index("str") + 1, "os.PathLike[str]")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = generated()
    if parser.parse_args().check:
        return int(FILE.read_text(encoding="utf-8") != text)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
