"""Shared libraries lose the paths of their build directory, and still work."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from s3cache.artifact import check_image, without_places
from s3cache.errors import CorruptError
from tests.support.marks import slow

SOURCE = """
#include <stdexcept>
#include <cstring>
extern "C" const char *file() { return __FILE__; }
extern "C" int thrown(int n) {
    try { if (n) throw std::runtime_error(__FILE__); } catch (const std::exception &e) {
        return (int)std::strlen(e.what());
    }
    return 0;
}
"""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs ELF libraries"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("somebody's own") / "kernel.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture(
    scope="module", params=["-g", *(pytest.param(each, marks=slow) for each in ("-g0", "-gz"))]
)
def image(source: Path, request: pytest.FixtureRequest) -> bytes:
    library = source.with_suffix(".so")
    subprocess.run(
        ["g++", request.param, "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    return library.read_bytes()


def test_a_library_works_the_same_without_its_build_paths(
    image: bytes, source: Path, tmp_path: Path
) -> None:
    directory = str(source.parent)
    assert directory.encode() in image
    cleaned = bytes(without_places(image, directory))
    assert directory.encode() not in cleaned
    assert len(cleaned) == len(image)
    check_image(cleaned)
    with pytest.raises(CorruptError, match="truncated"):
        check_image(cleaned[: len(cleaned) // 4])
    path = tmp_path / "cleaned.so"
    path.write_bytes(cleaned)
    library = ctypes.CDLL(str(path))
    library.file.restype = ctypes.c_char_p
    assert library.file() == b"/".ljust(len(directory), b".") + b"/kernel.cpp"
    assert library.thrown(1) == len(str(source))  # exceptions find their handlers


def test_a_file_that_cannot_be_parsed_stays_unchanged(image: bytes) -> None:
    for cut in (5, 40, 64, len(image) // 2, len(image) - 64):
        assert without_places(image[:cut]) == image[:cut]
    for other in (b"", b"MZ\x90", b"\x7fELF\x01" + bytes(100)):
        assert without_places(other, "/home/me") == other
