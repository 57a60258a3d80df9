"""Nodes in C++ under compiled autograd: a bypass as a whole, hits at the second level."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils import cpp_extension

from tests.hooks.captured import NODE
from tests.support.marks import nightly

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def extension(tmp_path: Path) -> Path:
    """The node, compiled."""
    source, library = tmp_path / "node.cpp", tmp_path / "node.so"
    source.write_text(NODE)
    command = [os.environ.get("CXX", "g++"), "-O0", "-std=c++20", "-fPIC", "-shared"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [str(source), "-o", str(library)]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    subprocess.run([*command, "-ltorch_cpu", "-ltorch", "-lc10"], check=True)
    return library


@nightly
def test_a_node_in_cpp_is_bypassed_as_a_whole_and_hits_at_the_second_level(
    site: Site, extension: Path
) -> None:
    """Another formula of the node's has other keys and gradients."""
    first, second, other = (
        site.machine(name, BY=by).run("captured:through_a_node", site.url, str(extension))
        for name, by in (("first", "3"), ("second", "3"), ("other", "5"))
    )
    for found in (first, second, other):
        assert found["right"]
        assert found["bypass_reasons"] == {"function": 1}
        assert "outside of compiled autograd" in found["stderr"]
    assert (first["lowered"], first["fx"]) == (1, {"hits": 0, "saved": 1})
    assert (second["lowered"], second["fx"]) == (0, {"hits": 1, "saved": 0})
    assert (other["lowered"], other["fx"]) == (1, {"hits": 0, "saved": 1})
