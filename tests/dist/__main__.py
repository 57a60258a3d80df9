"""Check that the packages in a directory are complete and the wheel works alone; make test-dist.

    python -m tests.dist dist

Installs the wheel into an empty environment, outside of the checkout. Runs there the README's first
program, the backend that torch finds by its entry point, a program that torch enables s3cache for,
``python -m s3cache run``, and, with the extra ``cli``, ``s3cache explain``, which prints text of the
documentation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

from tests.support.pages import ROOT, printed, programs

NAME, PACKAGE = "torch-s3cache", "torch_s3cache"
BESIDE = {"_s3cache_autoload.py", "_s3cache_process.py"}
# Pages of the documentation, by their name in the wheel.
PAGES = {
    f"s3cache/_docs/{name}": ROOT / "docs" / name
    for name in ("bypasses.md", "doctor.md", "errors.md", "reasons.md", "recall.md")
}

BACKEND = """
import torch

with torch.no_grad():
    torch.compile(torch.nn.Linear(4, 4), backend="s3cache")(torch.ones(4, 4))
import s3cache

print(s3cache.active().stats().saved)  # -> 1
"""

SILENT = BACKEND.replace(', backend="s3cache"', "")


def check_wheel(wheel: Path) -> None:
    """Check that the wheel has exactly the package, the file that torch calls and some pages."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata_ = message_from_string(archive.read(metadata).decode())
        for name, page in PAGES.items():
            assert archive.read(name) == page.read_bytes(), name
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "s3cache").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in names if ".dist-info/" not in name}
    expected = {*package, *PAGES, *BESIDE}
    assert held == expected, held ^ expected
    assert "s3cache/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names), "the licence is missing"
    assert metadata_["Name"] == NAME
    assert f"-{metadata_['Version']}-" in wheel.name
    # The package s3cache on the index belongs to another project.
    required = [
        text for text in metadata_.get_all("Requires-Dist") or [] if re.match(r"s3cache\b", text)
    ]
    assert not required, required
    assert metadata_["Description-Content-Type"].startswith("text/markdown")
    print(f"{wheel.name}: {len(package)} files, as in the checkout")


def check_page() -> None:
    """Check that the README has no broken link if it is built with the project's URL."""
    url = "https://example.com/owner/name"
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata"],
        cwd=ROOT,
        env={**os.environ, "PROJECT_URL": url},
        stdout=subprocess.PIPE,
        check=True,
    )
    metadata_ = json.loads(done.stdout)
    links = re.findall(r"\]\(([^)\s]+)\)", metadata_["readme"]["text"])
    tag = f"v{metadata_['version']}"
    assert f"{url}/raw/{tag}/docs/benchmarks/start_up.svg" in links
    assert f"{url}/blob/{tag}/docs/threat-model.md" in links
    relative = [link for link in links if not link.startswith(("https://", "#"))]
    assert not relative, relative
    assert metadata_["urls"]["Source"] == url
    print(f"README: {len(links)} links, none of them is relative")


def check_sdist(sdist: Path) -> None:
    """Check that the sdist has the files to build, test and read, and no built files."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        *("LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml", *BESIDE),
        *("docs/threat-model.md", "docs/reasons.md", "s3cache/py.typed", "tests/conftest.py"),
        *("infra/dist/metadata.py", "infra/dist/pages.py"),
    }
    assert needed <= names, needed - names
    built = {name for name in names if re.search(r"(^|/)(\.venv|build|dist|__pycache__)/", name)}
    built -= {name for name in built if name.startswith(("infra/dist/", "tests/dist/"))}
    assert not built, built
    print(f"{sdist.name}: {len(names)} files")


def check_installed(wheel: Path, place: Path) -> None:
    """Check that the wheel works as the README says in a new environment."""
    venv.create(place / "venv", with_pip=True)
    python = str(place / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    constraints = str(ROOT / "constraints.txt")
    install = [*pip, "install", "--quiet", "-c", constraints]
    subprocess.run([*install, str(wheel)], check=True)
    subprocess.run([*pip, "check"], check=True)

    program = programs(ROOT / "README.md")[0]
    url = "memory://example"
    found = run(python, "-c", "import s3cache; print(s3cache.__file__)", place=place)
    assert found[0].startswith(str(place / "venv")), found
    check_output("the README's first program", run(python, "-c", program, place=place), program)

    backend = place / "backend.py"
    backend.write_text(BACKEND)
    script = place / "script.py"
    script.write_text(program.replace(f'enable("{url}")', "active()"))
    silent = place / "silent.py"
    silent.write_text(SILENT)
    for what, arguments, source in (
        ("the backend", [str(backend)], backend),
        ("torch by itself", [str(silent)], silent),
        ("python -m s3cache run", ["-m", "s3cache", "run", str(script)], script),
    ):
        lines = run(python, *arguments, place=place, S3CACHE_URL=url)
        check_output(what, lines, source.read_text())

    command = str(place / "venv" / "bin" / "s3cache")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "pip install 'torch-s3cache[cli]'" in done.stderr, done
    subprocess.run([*install, f"{wheel}[cli]"], check=True)
    check_explained(command, place)


def check_explained(command: str, place: Path) -> None:
    """Check that ``s3cache explain`` finds the documentation outside of the checkout."""
    shown = run(command, "explain", "untrusted", "kernel", "clock", place=place)
    assert any(line.startswith("| `unsigned` |") for line in shown), shown
    assert {line.partition(":")[0] for line in shown} >= {"untrusted", "kernel", "clock"}, shown
    print(f"s3cache explain: printed {len(shown)} lines, as it should")


def run(python: str, *arguments: str, place: Path, **variables: str) -> list[str]:
    """Run Python with a new home and cache; return the lines that it prints."""
    home = tempfile.mkdtemp(dir=place)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "CXX") if name in os.environ}
    done = subprocess.run(
        [python, *arguments],
        cwd=home,
        env={**kept, "HOME": home, "TMPDIR": home, "PYTHONWARNINGS": "ignore", **variables},
        stdout=subprocess.PIPE,
        text=True,
        timeout=800,
        check=True,
    )
    return done.stdout.splitlines()


def check_output(what: str, lines: list[str], program: str) -> None:
    """Check that ``lines`` are those in the comments of the program."""
    assert lines == printed(program) != [], f"{what} printed {lines}, not {printed(program)}"
    print(f"{what}: printed {lines}, as it should")


def main() -> None:
    dist = Path(sys.argv[1]).resolve()
    (wheel,) = dist.glob(f"{PACKAGE}-*.whl")
    (sdist,) = dist.glob(f"{PACKAGE}-*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    check_page()
    with tempfile.TemporaryDirectory(prefix="s3cache-dist-") as place:
        check_installed(wheel, Path(place).resolve())


if __name__ == "__main__":
    main()
