"""The page in a real browser: light and dark, on a desk and on a phone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from infra.docs.picture import CHROMIUM, shoot
from s3cache.insight import page
from tests.support.runs import two_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here: apt-get install chromium"),
    pytest.mark.timeout(900),
]

# The colours of the page, as it names them: light, dark.
GROUND = ((255, 255, 255), (0x15, 0x17, 0x18))
KINDS = {
    "local": ((0x1F, 0x8A, 0x70), (0x4C, 0xC3, 0xA0)),
    "remote": ((0x2F, 0x6F, 0xDE), (0x7A, 0xA7, 0xFF)),
    "miss": ((0xC2, 0x57, 0x0C), (0xFF, 0x9A, 0x52)),
    "bypass": ((0x6B, 0x6F, 0x76), (0xA0, 0xA6, 0xAD)),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 500])
def test_all_that_is_drawn_is_seen(tmp_path: Path, scheme: str, width: int) -> None:
    """In its colours, on its ground, and nothing of it runs out of the window."""
    is_dark = scheme == "dark"
    source = tmp_path / "report.html"
    source.write_text(page(two_ranks()), encoding="utf-8")
    colours_wanted = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    shown = shoot(source, tmp_path / "report.png", width, colours_wanted)
    assert shown.getpixel((1, 1)) == GROUND[is_dark]
    colours = colours_of(shown)
    for kind, expected in KINDS.items():
        assert expected[is_dark] in colours, kind
    edge = shown.crop((width - 8, 0, width, shown.height))
    assert colours_of(edge) == {GROUND[is_dark]}


def colours_of(image: Image.Image) -> set[object]:
    return {colour for _, colour in image.getcolors(maxcolors=1 << 24) or []}
