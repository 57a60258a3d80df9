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


class Compiler:
    """The script before a compiler that writes down its calls, with a store of its own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.calls = root, root / "calls"
        spy = root / "bin" / "g++"
        spy.parent.mkdir()
        real = shutil.which("g++", path=_path_without_the_script())
        spy.write_text(f'#!/bin/sh\necho "$*" >>"{self.calls}"\nexec {real} "$@"\n')
        spy.chmod(0o755)
        monkeypatch.delenv("S3CACHE_TEST_COMPILED", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", f"{spy.parent}:{_path_without_the_script()}")
        compiled.put_first(root / "compiled")
        self.calls.unlink()
        self._number = 0

    def run(self, source: str, *options: str, **environment: str) -> tuple[bytes, bool]:
        """What it makes of ``source`` on another machine, and whether a compiler ran."""
        self._number += 1
        machine = self.root / f"machine-{self._number}"
        work = machine / "k_CxxBuild"
        work.mkdir(parents=True)
        (machine / "k.cpp").write_text(source)
        out = machine / "k.so"
        before = self._called()
        command = ["g++", f"{machine}/k.cpp", "-g1", "-O1", "-shared", "-fPIC", *options]
        subprocess.run(
            [*command, "-o", str(out)],
            cwd=work,
            env={**os.environ, **environment},
            check=True,
            capture_output=True,
        )
        assert [path.name for path in machine.iterdir() if path.name.startswith("k.so")] == ["k.so"]
        return out.read_bytes(), self._called() > before

    def _called(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


def _path_without_the_script() -> str:
    paths = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(path for path in paths if "/build/compiled/" not in path)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


SOURCE = 'extern "C" double kernel(double x) { return x * x + 1; }\n'


def test_equal_input_on_another_machine_starts_no_compiler(compiler: Compiler) -> None:
    first, ran = compiler.run(SOURCE)
    assert ran
    assert compiler.run(SOURCE) == (first, False)
    assert compiler.run(SOURCE, S3CACHE_TEST_COMPILED="off")[1]


def test_whatever_differs_is_compiled(compiler: Compiler, tmp_path: Path) -> None:
    first, _ = compiler.run(SOURCE)
    for other in (SOURCE.replace("+ 1", "+ 2"), SOURCE + "\n"):
        assert compiler.run(other)[1]
    for option in ("-O2", "-DX=1", "-DX=2", "-std=c++20", "-march=native", "-lm"):
        assert compiler.run(SOURCE, option)[1]
    header = tmp_path / "prefix.h"
    for content in ("", "#define kernel other\n"):
        header.write_text(content)
        assert compiler.run(SOURCE, "-include", str(header))[1]
        assert not compiler.run(SOURCE, "-include", str(header))[1]
    assert compiler.run(SOURCE) == (first, False)


def test_what_may_depend_on_more_is_compiled_each_time(compiler: Compiler, tmp_path: Path) -> None:
    header = tmp_path / "own.h"
    header.write_text("#define ONE 1\n")
    named = 'extern "C" const char *name() { return __FILE__; }\n'
    for source, *options in (
        (f'#include "{header}"\n',),
        (named,),
        (SOURCE, f"-I{tmp_path}"),
        (SOURCE, f"-L{tmp_path}"),
        (SOURCE, "-Wl,-z,now"),
    ):
        for _ in range(2):
            assert compiler.run(source, *options)[1]


def test_a_compiler_that_fails_is_asked_again(compiler: Compiler) -> None:
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError) as failed:
            compiler.run("error\n")
        assert b"error" in failed.value.stderr
    assert len(compiler.calls.read_text().splitlines()) == 2
