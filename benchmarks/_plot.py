"""A bar chart as SVG, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from html import escape

__all__ = ["horizontal_bars"]

_WIDTH, _LABELS, _NUMBERS = 760, 290, 60  # pixels
_ROW, _BAR, _TOP = 30, 18, 44


def horizontal_bars(
    title: str, values: Mapping[str, float], *, emphasised: Collection[str] = ()
) -> str:
    """One bar for each value from zero, in their order, with its name and number."""
    scale = (_WIDTH - _LABELS - _NUMBERS) / max(values.values())
    parts = [f'<text x="8" y="24" class="title">{escape(title)}</text>']
    for number, (name, value) in enumerate(values.items()):
        top = _TOP + number * _ROW
        kind = "ours" if name in emphasised else "other"
        length = value * scale
        size = f'width="{length:.1f}" height="{_BAR}"'
        parts += [
            f'<text x="{_LABELS - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LABELS}" y="{top}" {size} class="{kind}"/>',
            f'<text x="{_LABELS + length + 6:.1f}" y="{top + 14}">{value:.3g}</text>',
        ]
    height = _TOP + len(values) * _ROW + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">\n'
        "<style>text{font:13px sans-serif;fill:#444}.title{font-weight:bold}"
        ".ours{fill:#2a7fd4}.other{fill:#9aa4ae}"
        "@media(prefers-color-scheme:dark){text{fill:#ccc}}</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )
