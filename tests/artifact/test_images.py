"""Shared libraries lose what says where they were made, and nothing that is run."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from s3cache.artifact import check_image, without_places
from s3cache.errors import CorruptError

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
    pytest.mark.skipif(sys.platform != "linux", reason="no ELF here"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("somebody's own") / "kernel.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module", params=["-g", "-g0", "-gz"])
def image(source: Path, request: pytest.FixtureRequest) -> bytes:
    library = source.with_suffix(".so")
    subprocess.run(
        ["g++", request.param, "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    return library.read_bytes()


def test_a_library_does_the_same_without_the_places(
    image: bytes, source: Path, tmp_path: Path
) -> None:
    place = str(source.parent)
    assert place.encode() in image
    mended = bytes(without_places(image, place))
    assert place.encode() not in mended
    assert len(mended) == len(image)
    check_image(mended)
    with pytest.raises(CorruptError, match="truncated"):
        check_image(mended[: len(mended) // 4])
    path = tmp_path / "mended.so"
    path.write_bytes(mended)
    library = ctypes.CDLL(str(path))
    library.file.restype = ctypes.c_char_p
    assert library.file() == b"/".ljust(len(place), b".") + b"/kernel.cpp"
    assert library.thrown(1) == len(str(source))  # exceptions find their handlers


def test_what_is_not_understood_stays_as_it_is(image: bytes) -> None:
    for cut in (5, 40, 64, len(image) // 2, len(image) - 64):
        assert without_places(image[:cut]) == image[:cut]
    for other in (b"", b"MZ\x90", b"\x7fELF\x01" + bytes(100)):
        assert without_places(other, "/home/me") == other
