"""An entry works on a machine that has only its kind in common with the writer's machine."""

from __future__ import annotations

import pickle
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from s3cache import frame
from s3cache.hooks._rebuild import Kernels
from s3cache.hooks._state import CompileState
from tests.support.marks import nightly, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def other_prefix(tmp_path: Path) -> str:
    """Return a Python with another prefix; it has the same torch under another path."""
    root = tmp_path / "elsewhere" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        (packages / entry.name).symlink_to(entry)
    return str(root / "bin" / "python")


@pytest.fixture
def noexec(tmp_path: Path) -> Iterator[Path | None]:
    """A directory from which no file can be executed or mapped; ``None`` if mounting fails."""
    place = tmp_path / "noexec"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "noexec,size=64m", "tmpfs", str(place)]
    try:
        mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    except FileNotFoundError:
        mounted = False
    yield place if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


@slow
def test_a_hit_starts_no_process_and_needs_no_compiler(
    written: Callable[..., tuple[Site, Any]], other_prefix: str, noexec: Path | None, tmp_path: Path
) -> None:
    """Other prefix, home, user, cache and temporary directory; nothing on ``PATH``.

    Forward and backward of a training step, and a graph of Inductor's C++ wrapper.
    """
    # A hit must not probe the instruction set, so the probe is not turned off here.
    site, first = written("train", TORCHINDUCTOR_VEC_ISA_OK="")
    assert first["misses"] == {"absent": 2}
    assert first["saved"] == 2
    assert first["started"]  # the compiler, so the watch sees processes

    reader = site.machine("reader", PATH="", TORCHINDUCTOR_VEC_ISA_OK="")
    if noexec is not None:
        reader.environment["TMPDIR"] = str(noexec)
    found = reader.run("jobs:train", site.url, python=other_prefix)
    assert found["torch_at"] != first["torch_at"]
    assert found["hits"] == {"local": 0, "remote": 2}
    assert found["misses"] == {}
    assert found["started"] == []
    assert found["error"] <= max(first["error"], 1e-5)
    assert found["torch"]["autograd_cache_hit"] == 2
    assert found["time_saved_s"] > 0


@slow
@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=nightly)])
def test_machines_with_other_numbers_of_threads_may_share_code(dynamic: bool, site: Site) -> None:
    """They share code for any number of threads, if torch is set to generate such code."""
    found = site.machine("one").run("jobs:reduce", site.url, [2, 5, 1], dynamic)
    assert [each["saved"] for each in found] == ([1, 0, 1] if dynamic else [1, 1, 1])
    assert sum(found[1]["hits"].values()) == int(dynamic)
    assert max(each["error"] for each in found) < 1e-3


# -- entries contain no source lines and no paths of a program, unless a setting allows it


# The paths of the program, and of the Python that runs it.
PATHS = (str(Path(__file__).parent), sys.prefix, sys.base_prefix)


def _shared_content(site: Site) -> bytes:
    content = []
    for path in site.entries():
        entry = frame.decode(path.read_bytes())
        content += [repr(entry.header).encode(), *(bytes(entry.section(n)) for n in entry.names)]
    return b"\n".join(content)


@nightly  # takes minutes, as it may use no earlier compiles
def test_no_source_line_and_no_path_is_shared_by_default(site: Site) -> None:
    # Earlier output of g++ would name directories of its compile, for debuggers.
    first = site.machine("first", S3CACHE_TEST_COMPILED="off")
    first.run("test_portability:share", site.url)
    content = _shared_content(site)
    for word in (WORD, *PATHS, str(site.root)):
        at = content.find(word.encode())
        assert at < 0, (word, content[max(0, at - 300) : at + 100].decode(errors="replace"))
    assert b"addmm" in content or b"mm.default" in content  # the text of graphs is there
    second = site.machine("second").run("test_portability:share", site.url)
    assert second["misses"] == {"absent": 1}  # the graph without a backward; its forward hits
    # That forward, and the graph of an operator with its own fake.
    assert (second["saved"], second["second level"]) == (0, 2)

    telling = Site(site.root / "telling")
    site.machine("third", S3CACHE_SHARE_SOURCES="yes").run("test_portability:share", telling.url)
    content = _shared_content(telling)
    assert WORD.encode() in content
    assert __file__.encode() in content


TRACE = """  File "/home/me/train.py", line 7, in forward
    x = secret(x)  # confidential
        ^^^^^^^^^
"""


def test_stack_traces_of_cuda_graphs_are_not_shared() -> None:
    """Without an accelerator, torch notes no such traces."""
    from torch._inductor.cudagraph_utils import CudagraphCachedInfo, PlaceholderInfo

    user = PlaceholderInfo("mul", TRACE, [], TRACE)
    reason = f"skipping cudagraphs due to mutated inputs. Found from : \n {TRACE}and so on"
    known: dict[str, Any] = {
        "placeholders": [PlaceholderInfo("x", TRACE, [user], None)],
        "stack_traces": [TRACE, None],
        "cudagraph_fail_reasons": [reason],
    }
    graph = SimpleNamespace(
        source_code="# File: what is run stays as it is",
        cudagraph_info=CudagraphCachedInfo(
            **{field.name: frozenset() for field in fields(CudagraphCachedInfo)} | known
        ),
        disabled_cudagraphs_reason=reason,
        cache_linemap=[(3, TRACE)],
    )
    before = pickle.dumps(vars(graph))
    with Kernels(CompileState()).hidden(graph):
        graph.guards_expr = "s0 > 2"  # as torch does while it saves a graph
        shared = pickle.dumps(vars(graph))
        assert b"confidential" not in shared
        assert b"/home/me" not in shared
        assert graph.source_code == "# File: what is run stays as it is"
        assert graph.cudagraph_info.stack_traces == [None, None]
        (placeholder,) = graph.cudagraph_info.placeholders
        assert [placeholder.name, placeholder.users[0].name] == ["x", "mul"]
        assert graph.disabled_cudagraphs_reason.endswith("Found from : \nand so on")
    assert vars(graph).pop("guards_expr") == "s0 > 2"
    assert pickle.dumps(vars(graph)) == before


# -- programs with a word at the end of their lines; a test searches the entries for it


WORD = "confidential"


def share(url: str) -> dict[str, Any]:
    """Compile graphs; return the counts."""
    from torch.utils.checkpoint import checkpoint

    import s3cache
    from tests.hooks.jobs import account

    @torch.library.custom_op("telling::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2  # confidential

    @halved.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)  # confidential

    def trained(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.layer_norm(x, (8,))  # confidential
        return (y.relu() @ y.t()).sum()  # confidential

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(trained, x.sin(), use_reentrant=False)  # confidential

    def called(x: torch.Tensor) -> torch.Tensor:
        return halved(x.cos()) * 3  # confidential

    def chosen(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # confidential

    def mutated(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2  # confidential

    x = torch.linspace(-1, 1, 32).view(4, 8)
    with s3cache.enabled(url, local=False) as cache:
        torch.compile(trained)(x.clone().requires_grad_()).backward()
        torch.compile(recomputed)(x.clone().requires_grad_()).backward()
        torch.compile(trained, dynamic=True)(x.clone().requires_grad_()).backward()
        compiled = torch.compile(mutated)
        for size in (4, 3):  # another process need not see the first size
            compiled(x[:size].clone())
        for function in (called, chosen, mutated):
            torch.compile(function)(x.clone())
        # The backward never runs: the forward is shared alone.
        torch.compile(lambda x: x.exp().sum())(x.clone().requires_grad_())  # confidential
        assert not cache.flush(60).remaining
        return {**account(cache), "second level": sum(cache.stats().fx.hits.values())}
