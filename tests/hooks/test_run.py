"""Programs that do not import s3cache: ``python -m s3cache run``, and ``backend="s3cache"``."""

from __future__ import annotations

import json
import textwrap
import zipfile
from pathlib import Path

import pytest

from tests.support.marks import slow
from tests.support.sites import Machine, Site

pytestmark = pytest.mark.timeout(900)

_SEEN = """\
import json, os, sys
print(json.dumps([
    sys.argv[1:], sys.path[0], __name__, globals().get("__file__"), getattr(__spec__, "name", None),
    sys.flags.isolated, sys.modules["__main__"].__dict__ is globals(),
]))
print(os.environ.get("S3CACHE_AUTOLOAD", "off"), file=sys.stderr)
"""


@pytest.fixture
def machine(site: Site) -> Machine:
    return site.machine("one", S3CACHE_URL=site.url)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        ("script", []),
        ("-m", []),
        pytest.param("-c", [], marks=slow),
        pytest.param("archive", [], marks=slow),
        pytest.param("script", ["-I"], marks=slow),
    ],
)
def test_a_program_runs_as_if_python_had_started_it(
    machine: Machine, tmp_path: Path, how: str, flags: list[str]
) -> None:
    """Arguments, paths and names are the same for each kind of program; only s3cache is on."""
    _write(tmp_path / "programs" / "train.py", _SEEN)
    _write(machine.root / "train_here.py", _SEEN)
    with zipfile.ZipFile(tmp_path / "programs" / "app", "w") as archive:
        archive.writestr("__main__.py", _SEEN)
    program: list[str] = {
        "script": ["../programs/train.py"],
        "archive": [str(tmp_path / "programs" / "app")],
        "-c": ["-c", _SEEN],
        "-m": ["-m", "train_here"],
    }[how]

    def run(*command: str) -> tuple[int, str, str]:
        done = machine.start(*flags, *command, "--lr", "1", "-m", "--", "-h")
        return done.returncode, done.stdout, done.stderr

    expected, found = run(*program), run("-m", "s3cache", "run", *program)
    assert (expected[0], expected[2]) == (0, "off\n")
    assert found == (0, expected[1], "1\n")


def test_nothing_is_imported_from_the_working_directory(machine: Machine, tmp_path: Path) -> None:
    """As with ``python train.py``: files there may have any name."""
    script = _write(
        tmp_path / "programs" / "train.py",
        """
        import importlib.util, os, subprocess, sys

        assert os.getcwd() not in sys.path and "" not in sys.path
        assert importlib.util.find_spec("s3cache_local") is None
        child = [sys.executable, __file__, "child"]  # has the cache too, and imports nothing here
        if len(sys.argv) == 1:
            subprocess.run(child, check=True)
        import torch  # loads entry points at the end of its import
        print("ran")
        """,
    )
    names = "json typing argparse logging msgpack tenacity torch botocore sitecustomize"
    for name in [*names.split(), "usercustomize", "_s3cache_autoload", "s3cache_local"]:
        text = f"print('{name} of the working directory')\nraise SystemExit(7)"
        _write(machine.root / f"{name}.py", text)
    for name in ("asyncio", "concurrent", "aioboto3", "s3cache"):
        (machine.root / name).mkdir(parents=True)
        if name != "s3cache":  # with an __init__.py, `python -m s3cache` would run it
            _write(machine.root / name / "__init__.py", "raise SystemExit(8)")
    done = machine.start("-m", "s3cache", "run", str(script))
    assert (done.returncode, done.stdout) == (0, "ran\n" * 2), done.stderr


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("raise SystemExit('that is why')", 1),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, marks=slow),
    ],
)
def test_a_program_ends_as_if_python_had_started_it(
    machine: Machine, tmp_path: Path, text: str, status: int
) -> None:
    script = _write(tmp_path / "ends.py", text)
    plain, ours = machine.start(str(script)), machine.start("-m", "s3cache", "run", str(script))
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.returncode == status


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["run"], {}, "Missing argument 'PROGRAM"),
        (["run", "--url", "ftp://x", "{script}"], {}, "ftp"),
        (
            ["run", "{script}"],
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "TORCH_DEVICE_BACKEND_AUTOLOAD",
        ),
    ],
)
def test_bad_usage_gives_one_clear_error(
    machine: Machine, tmp_path: Path, arguments: list[str], settings: dict[str, str], message: str
) -> None:
    """There is no traceback, and the program does not run."""
    script = _write(tmp_path / "script.py", "print('it ran')")
    done = machine.start(
        "-m", "s3cache", *(each.format(script=script) for each in arguments), **settings
    )
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "it ran" not in done.stdout


def test_run_is_refused_if_torch_does_not_find_s3cache(machine: Machine, tmp_path: Path) -> None:
    """A checkout that is only on the path has no entry point, so nothing would be cached."""
    hides_it = tmp_path / "path" / "torch_s3cache-0.dist-info" / "METADATA"
    _write(hides_it, "Metadata-Version: 2.1\nName: torch-s3cache\nVersion: 0\n")
    path = f"{tmp_path / 'path'}:{machine.environment.get('PYTHONPATH', '')}"
    done = machine.start("-m", "s3cache", "run", "-c", "print('it ran')", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not installed" in done.stderr


_TRAINING = """\
import os
import sys
import torch
import torch.distributed as dist

x = torch.arange(9.0).reshape(3, 3)
out = torch.compile(lambda x: x @ x)(x)
assert torch.equal(out, x @ x)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    dist.all_reduce(out)
    assert torch.equal(out, 2 * (x @ x))
    dist.destroy_process_group()
from torch._dynamo.utils import counters
print(sorted(counters["aot_autograd"].items()), sys.argv[1:])
"""


_TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
_TORCHRUN += ["--local-addr=127.0.0.1"]


@pytest.mark.needs("ranks")
@slow
def test_uploads_end_with_the_program_and_torchrun_hits(
    machine: Machine, site: Site, tmp_path: Path
) -> None:
    """A program's entries are in the remote when it ends; two ranks elsewhere hit them."""
    script = _write(tmp_path / "train.py", _TRAINING)
    run = ["-m", "s3cache", "run", str(script), "--epochs", "1"]
    # The summary as JSON, with an option of `run`, not of the program. torchrun sets the number of
    # threads, which is part of every key.
    done = machine.start(*run[:3], "--json", *run[3:], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "('autograd_cache_saved', 1)" in done.stdout
    assert len(site.entries()) == 1
    counts = json.loads(done.stderr.splitlines()[-1])
    assert (counts["rank"], counts["misses"], counts["saved"]) == (None, {"absent": 1}, 1)
    assert counts["uploaded"] == 4  # the graph and its FX graph, the frame and the program

    second = site.machine("two", S3CACHE_URL=site.url)
    done = second.start("-m", *_TORCHRUN, *run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("('autograd_cache_hit', 1)") == 2
    assert done.stdout.count("['--epochs', '1']") == 2
    for rank in (0, 1):
        assert f"s3cache: rank {rank}: 1 hit (1 " in done.stderr
    assert ", ranks 0-1, 2 lookups" in second.start("-m", "s3cache", "report").stdout


_BACKEND = """\
import torch

def function(x):
    return x @ x

x = torch.arange(9.0).reshape(3, 3)
for arguments in ({}, {"mode": "max-autotune-no-cudagraphs"},
                  {"options": {"epilogue_fusion": False}}, {"mode": "default"}):
    torch._dynamo.reset()
    out = torch.compile(function, backend="s3cache", **arguments)(x)
    assert torch.equal(out, x @ x)
try:
    torch._dynamo.reset()
    torch.compile(function, backend="s3cache", options={"no_such_option": 1})(x)
except Exception as exc:
    print("no_such_option" in str(exc))
from torch._dynamo.utils import counters
import s3cache
print(sorted(counters["aot_autograd"].items()), s3cache.active().stats().saved)
"""


@slow
def test_the_environment_configures_the_backend(
    machine: Machine, site: Site, tmp_path: Path
) -> None:
    """``torch.compile`` imports s3cache; ``mode`` and ``options`` apply, and are in the key."""
    script = _write(tmp_path / "train.py", _BACKEND)
    done = machine.start(str(script))
    assert done.returncode == 0, done.stderr
    assert "True" in done.stdout.splitlines()[0]
    # Three different graphs; the default mode hits the first one.
    assert "('autograd_cache_hit', 1), ('autograd_cache_miss', 3)" in done.stdout
    assert done.stdout.rstrip().endswith(" 3")
    assert len(site.entries()) == 3
