"""The page in a real browser: light and dark, on a desk and on a phone."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from s3cache.report import page
from tests.support.runs import two_ranks

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), "")

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
Shoot = Callable[..., Image.Image]


@pytest.fixture
def shoot(tmp_path: Path) -> Shoot:
    """What a window of a width shows of the page."""

    def shoot(width: int, *options: str) -> Image.Image:
        source, target = tmp_path / "report.html", tmp_path / "report.png"
        source.write_text(page(two_ranks()), encoding="utf-8")
        window = f"--window-size={width},1600"
        subprocess.run(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",  # it refuses to be root's otherwise; the page is ours
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--screenshot={target}",
                window,
                *options,
                source.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=600,
        )
        return Image.open(target).convert("RGB")

    return shoot


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 500])
def test_all_that_is_drawn_is_seen(shoot: Shoot, scheme: str, width: int) -> None:
    """In its colours, on its ground, and nothing of it runs out of the window."""
    is_dark = scheme == "dark"
    shown = shoot(width, f"--blink-settings=preferredColorScheme={0 if is_dark else 1}")
    assert shown.getpixel((1, 1)) == GROUND[is_dark]
    colours = colours_of(shown)
    for kind, expected in KINDS.items():
        assert expected[is_dark] in colours, kind
    edge = shown.crop((width - 8, 0, width, shown.height))
    assert colours_of(edge) == {GROUND[is_dark]}


def colours_of(image: Image.Image) -> set[object]:
    return {colour for _, colour in image.getcolors(maxcolors=1 << 24) or []}
