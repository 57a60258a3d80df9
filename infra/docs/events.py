"""Update the tables of events in docs/architecture.md from the code.

.venv/bin/python -m infra.docs.events
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.render import fill

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
#: The classes that have the events, by the name of the object that has one.
CLASSES = {"session": "s3cache/hooks/_state.py", "engine": "s3cache/cache/_results.py"}
_USED = re.compile(r"([\w.]*\b_?events)\.(\w+)\.(subscribe|tell|ask|ask_all|around)\b")


def events(of: str) -> dict[str, tuple[str, str]]:
    """Return the type and the description of each event of a session or an engine."""
    tree = ast.parse((ROOT / CLASSES[of]).read_text(encoding="utf-8"))
    kind = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Events")
    )
    text = (ast.get_docstring(kind) or "").partition("Attributes:\n")[2]
    described = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE)
    words = {name: " ".join(line.split()) for name, line in described}
    types = {
        node.target.attr: ast.unparse(node.annotation)
        for node in ast.walk(kind)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)
    }
    return {name: (shown, words[name].rstrip(".")) for name, shown in types.items()}


def _uses() -> Iterator[tuple[str, str, str, str]]:
    """Yield the object, the event, the verb and the file of each use of an event."""
    for path in sorted((ROOT / "s3cache").rglob("*.py")):
        file = str(path.relative_to(ROOT / "s3cache"))
        for owner, name, verb in _USED.findall(path.read_text(encoding="utf-8")):
            is_of_engine = "engine" in owner or file.startswith("cache/")
            yield "engine" if is_of_engine else "session", name, verb, file


def table(of: str) -> str:
    """Return a row for each event: its type, when it happens, who announces it, who subscribes."""
    rows = ["| event | type | | announced in | subscribers |", "|---|---|---|---|---|"]
    uses = [each[1:] for each in _uses() if each[0] == of]
    for name, (kind, words) in events(of).items():
        tellers = [file for event, verb, file in uses if event == name and verb != "subscribe"]
        listeners = [file for event, verb, file in uses if event == name and verb == "subscribe"]
        rooms = [re.sub(r"^features/(\w+)/.*", r"\1", file) for file in listeners]
        cells = (f"`{of}.{name}`", f"`{kind}`", words, _list(tellers), _list(rooms))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names)) or "none yet"


def updated(page: str) -> str:
    """Return ``page`` with the tables in their blocks."""
    for of in CLASSES:
        page = fill(page, f"events of {of}", table(of))
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
