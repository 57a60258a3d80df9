"""What g++ made once is used for the same input only (``tests/support/compiled.py``)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import compiled

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++"
)
SOURCE = 'extern "C" double kernel(double x) { return x * x + 1; }\n'


class Compiler:
    """The script before a compiler that writes down its calls, with a store of its own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.calls, self.number = root, root / "calls", 0
        paths = os.environ["PATH"].split(os.pathsep)
        path = os.pathsep.join(each for each in paths if "/build/compiled/" not in each)
        spy = root / "bin" / "g++"
        spy.parent.mkdir()
        real = shutil.which("g++", path=path)
        spy.write_text(f'#!/bin/sh\necho "$*" >>"{self.calls}"\nexec {real} "$@"\n')
        spy.chmod(0o755)
        monkeypatch.delenv("S3CACHE_TEST_COMPILED", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", f"{spy.parent}:{path}")
        compiled.put_first(root / "compiled")
        self.calls.write_text("")

    def run(self, source: str, *options: str, **environment: str) -> tuple[bytes, bool]:
        """Return what it makes of ``source`` on another machine, and whether a compiler ran."""
        self.number += 1
        machine = self.root / f"machine-{self.number}"
        work = machine / "k_CxxBuild"
        work.mkdir(parents=True)
        (machine / "k.cpp").write_text(source)
        before = self.calls.read_text()
        command = ["g++", f"{machine}/k.cpp", "-g1", "-O1", "-shared", "-fPIC", *options]
        command += ["-o", str(machine / "k.so")]
        environment = {**os.environ, **environment}
        subprocess.run(command, cwd=work, env=environment, check=True, capture_output=True)
        return (machine / "k.so").read_bytes(), self.calls.read_text() != before


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


def test_only_equal_input_starts_no_compiler(compiler: Compiler, tmp_path: Path) -> None:
    first, ran = compiler.run(SOURCE)
    assert ran
    assert compiler.run(SOURCE) == (first, False)
    assert compiler.run(SOURCE, S3CACHE_TEST_COMPILED="off")[1]
    assert compiler.run(SOURCE.replace("+ 1", "+ 2"))[1]
    for option in ("-O2", "-DX=1", "-DX=2", "-std=c++20", "-march=native", "-lm"):
        assert compiler.run(SOURCE, option)[1]
    header = tmp_path / "prefix.h"
    for content in ("", "#define kernel other\n"):
        header.write_text(content)
        assert compiler.run(SOURCE, "-include", str(header))[1]
        assert not compiler.run(SOURCE, "-include", str(header))[1]
