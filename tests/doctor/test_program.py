"""Each fault of torch and of the compiler is made here, and named with a fix."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from s3cache.doctor import check_compiler, check_torch

if TYPE_CHECKING:
    from pathlib import Path


def says(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"]


@pytest.mark.parametrize(
    ("command", "verdict", "said"),
    [
        (says("torch 2.13.0, supported: 9 names, 0 not as declared"), "ok", "2.13.0"),
        (says("torch 1.13, not supported: 9 names, 3 not as declared", 1), "fault", "not supp"),
        (
            says("MISSING all torch._x:y\ntorch 2.13, supported: 9 names, 1 not as declared", 1),
            "fault",
            "torch._x:y",
        ),
        ([sys.executable, "-c", "import torch_that_is_not_there"], "fault", "No module named"),
        (["/nowhere/python"], "fault", "No such file"),
    ],
)
def test_each_fault_of_torch(command: list[str], verdict: str, said: str) -> None:
    [check] = check_torch(command=command)
    assert check.verdict == verdict
    assert said in check.found
    assert (verdict == "ok") == (check.fix == "")


@pytest.mark.timeout(300)
def test_torch_is_as_declared_also_where_the_environment_turns_the_cache_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As wherever s3cache is used: what it puts in torch's place is no fault of torch's."""
    monkeypatch.setenv("S3CACHE_URL", f"file://{tmp_path}")
    [check] = check_torch()
    assert (check.verdict, check.fix) == ("ok", "")


def test_an_import_that_does_not_end_is_not_waited_for() -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    [check] = check_torch(0.5, hangs)
    assert check.verdict == "fault"
    assert "cannot be imported within 0.5 s" in check.found


def test_each_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compiler(text: str) -> None:
        path = tmp_path / "g++"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    [check] = check_compiler()
    assert check.verdict == "warning"
    assert "hits need none" in check.found
    compiler("echo g++ of tests 1.0")
    [check] = check_compiler()
    assert (check.verdict, check.found) == ("ok", "g++ of tests 1.0")
    compiler("exit 3")
    [check] = check_compiler()
    assert (check.verdict, "exit code 3" in check.found) == ("fault", True)
    compiler("exec /bin/sleep 600")
    [check] = check_compiler(0.5)
    assert (check.verdict, "no answer within 0.5 s" in check.found) == ("fault", True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    [check] = check_compiler()
    assert "no-such-compiler" in check.found
