"""Draw docs/images/report.png again: ``python -m infra.docs.picture``, with Chromium on the path.

A machine runs the evaluation of a job, and another one the whole job. Then the first machine runs
the whole job, as two ranks and with two edits. Its report has hits from the bucket, misses with the
differences from its earlier evaluation, and a bypass.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from s3cache.testing import Machine

__all__ = ["CHROMIUM", "shoot"]

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "report.png"
_PROGRAM = Path(__file__).with_name("_pictured.py")
_WIDTH, _MARGIN = 1100, 24
_NAMES = ("chromium", "chromium-browser", "google-chrome")

CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), "")


def shoot(page: Path, target: Path, width: int, *options: str) -> Image.Image:
    """Return an image of the whole page in a window of that width, without any network."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(  # noqa: S603 - a browser
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",  # it refuses to run as root otherwise; the page is ours
                "--disable-gpu",
                "--disable-quic",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--screenshot={target}",
                f"--window-size={width},1600",
                *options,
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=600,
        )
    return Image.open(target).convert("RGB")


def _run_job(root: Path, machine: str, job: str, ranks: int = 1) -> dict[str, str]:
    """Run all ranks of a job on a machine; return its environment."""
    variables = {"S3CACHE_JOB": job, "S3CACHE_JOB_PROFILES": "1", "JOB": job}
    variables["S3CACHE_URL"] = f"file://{root / 'bucket'}?create=1"
    home = root / machine
    environment = Machine(home, **variables).environment
    shutil.copy(_PROGRAM, home / "train.py")
    command = [sys.executable, "-W", "ignore", "train.py"]
    running = [
        subprocess.Popen(command, cwd=home, env={**environment, "RANK": str(rank)})  # noqa: S603
        for rank in range(ranks)
    ]
    for process in running:
        if process.wait():
            raise SystemExit(f"the job on {machine} ended with {process.returncode}")
    return environment


def _trimmed(image: Image.Image) -> Image.Image:
    """Return the image without the empty space at the bottom."""
    ground = Image.new("RGB", image.size, image.getpixel((1, 1)))
    box = ImageChops.difference(image, ground).getbbox()
    assert box is not None, "the page is empty"
    return image.crop((0, 0, image.width, min(box[3] + _MARGIN, image.height)))


def main() -> None:
    """Run the job, and draw its report."""
    if not CHROMIUM:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        _run_job(root, "here", "evaluation")
        _run_job(root, "another", "all")
        environment = _run_job(root, "here", "edited", ranks=2)
        page = root / "report.html"
        subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, "-m", "s3cache", "report", "--html", str(page)],
            check=True,
            env=environment,
        )
        text = page.read_text(encoding="utf-8").replace(str(root / "here"), "/job")
        page.write_text(text, encoding="utf-8")
        image = _trimmed(shoot(page, root / "report.png", _WIDTH))
        image.quantize(64).save(PICTURE, optimize=True)
    sys.stdout.write(f"written to {PICTURE}\n")


if __name__ == "__main__":
    main()
