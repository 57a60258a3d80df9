"""One lookup, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["MAX_LINE_BYTES", "Record", "texts_of"]

#: A line of a file of records is no longer; what is longer is left out.
MAX_LINE_BYTES = 512 << 10


@dataclass(frozen=True)
class Record:
    """What became of one lookup.

    Attributes:
        level: ``aot`` for a whole graph, ``fx`` for a half of one.
        outcome: ``hit``, ``miss`` or ``bypass``.
        key: what was looked up; ``""`` where there is none.
        reason: why it missed; of a hit, the tier that had it.
        time: Unix time of the end.
        elapsed_s: how long it took.
        saved_s: of a hit, what making it took where it was made.
        where: file, line and function that called what was compiled, outside of torch.
        of_whole: whether it is a half of a graph whose whole was looked up before.
        components: what the key is made of, by name: the digest and a readable value.
        parts: of a miss, what components consist of whose value does not say it, by name.
        rejected: of a miss, what kept entries under the key from being used, each in a line.
        reasons: why it was bypassed: code, message, fix, and the line in the user's program.
    """

    level: str
    outcome: str
    key: str = ""
    reason: str = ""
    time: float = 0.0
    elapsed_s: float = 0.0
    saved_s: float = 0.0
    where: tuple[str, int, str] | None = None
    of_whole: bool = False
    components: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rejected: tuple[str, ...] = ()
    reasons: tuple[Mapping[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All that is not empty, as JSON can hold it."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """What :meth:`as_dict` gave; names that a later release has added are left out.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it is something else.
        """
        known = {each.name for each in fields(cls)}
        given = {name: value for name, value in data.items() if name in known}
        if where := given.get("where"):
            file, line, function = where
            given["where"] = (str(file), int(line), str(function))
        given["components"] = {
            str(name): (str(digest), str(value))
            for name, (digest, value) in given.get("components", {}).items()
        }
        given["parts"] = texts_of(given.get("parts", {}))
        given["rejected"] = tuple(str(text) for text in given.get("rejected", ()))
        given["reasons"] = tuple(
            {str(name): str(text) for name, text in reason.items()}
            for reason in given.get("reasons", ())
        )
        for name in ("level", "outcome", "key", "reason"):
            given[name] = str(given.get(name, ""))
        for name in ("time", "elapsed_s", "saved_s"):
            given[name] = float(given.get(name, 0.0))
        return cls(**given)


def texts_of(value: Any) -> dict[str, dict[str, str]]:
    """``value``, if it is a mapping of mappings of texts.

    Raises:
        TypeError, AttributeError: it is something else.
    """
    found: dict[str, dict[str, str]] = {}
    for name, parts in value.items():
        found[str(name)] = {str(part): str(text) for part, text in parts.items()}
    return found
