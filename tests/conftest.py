"""Fixtures for every test."""

from __future__ import annotations

import compileall
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from s3cache.store import MemoryStore
from s3cache.util.threads import DeadlineExecutor
from tests.support import compiled, machines
from tests.support.clock import FakeClock

# make test-all asks for --hypothesis-profile=thorough. CI draws the same examples each time, so a
# failure is about the commit. No deadline: a busy machine is no fault of the code.
for _profile, _examples in {"default": 25, "thorough": 100}.items():
    settings.register_profile(
        _profile,
        max_examples=_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,
    )
settings.load_profile("default")

# Without torch, and mypy, there is still the engine to test: make test-pythons.
WITH_TORCH = "artifact examples gpu graph hooks kinds models opinfo perturb torch_api typing"
collect_ignore = [] if find_spec("torch") else WITH_TORCH.split()

pytest.register_assert_rewrite("tests.support.contract")
# Their fixtures are everywhere; a folder may have one of its own by the same name.
pytest_plugins = [
    f"tests.support.{name}" for name in ("scripted", "served", "shelves", "sites", "users")
]
compiled.put_first()

# A shell has what it starts in the background ignore Ctrl-C, and so would the programs of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What the developer's own machine is set up for must not reach a test.
for _name in [*os.environ]:
    if _name.startswith(("AWS_", "S3CACHE_")) and not _name.startswith("S3CACHE_TEST_"):
        del os.environ[_name]
os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE=os.devnull)
os.environ.update(AWS_SHARED_CREDENTIALS_FILE=os.devnull)
# torch starts no compile workers, and does not test the instruction set of the processor.
os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_VEC_ISA_OK="1")


@pytest.fixture(autouse=True)
def loop_blocking() -> Iterator[None]:
    """Fail a test in which s3cache blocks the event loop: a slow disk would stop every transfer.

    Only calls made from s3cache's own files count; tests may touch the disk as they
    like. An S3 client may be made, and its credentials looked for: that happens on
    a loop and a thread of its own. The AWS configuration is a small file.
    """
    with blockbuster_ctx("s3cache") as blockbuster:
        for function in blockbuster.functions.values():
            function.can_block_in("s3cache/store/_s3_client.py", "_run_on_new_loop")
            function.can_block_in("s3cache/store/_url.py", "_endpoint_of_profile")
        yield


@pytest.fixture(autouse=True)
def disk_deadline() -> Iterator[None]:
    """Wait for a slow disk as long as it takes: tests of a disk that hangs set a limit.

    Without ``monkeypatch``, which would then begin before ``loop_blocking`` and end after it.
    """
    usual_s, DeadlineExecutor.limit_s = DeadlineExecutor.limit_s, 3600.0
    yield
    DeadlineExecutor.limit_s = usual_s


@pytest.fixture(autouse=True, scope="module")
def no_cache_yet() -> None:
    """Forget the cache that another file's tests enabled here: a program has its own process.

    Reports and explanations begin with what this process has looked up.
    """
    if (module := sys.modules.get("s3cache.cache")) is not None:
        vars(module)["_current"] = None


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a directory may be made."""
    return tmp_path / "root"


def pytest_configure(config: pytest.Config) -> None:
    """Do once for all workers what each would do otherwise.

    They share the servers that fork machines of tests, which write no bytecode here.
    """
    if hasattr(config, "workerinput"):
        return
    machines.share_forks()
    if not sys.dont_write_bytecode:
        compileall.compile_dir(Path(__file__).parents[1] / "s3cache", quiet=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that may take longest, or else one runs alone at the end."""
    longest: dict[Path, float] = {}
    for item in items:
        timeout = item.get_closest_marker("timeout")
        usual_s = 1000.0 if item.path.parent.name == "gpu" else 0.0  # Triton compiles
        seconds = float(timeout.args[0]) if timeout else usual_s
        longest[item.path] = max(longest.get(item.path, 0.0), seconds)
    items.sort(key=lambda item: longest[item.path], reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file on one worker, as they share costly fixtures.

    Files that use Ceph RGW share its server, which some of them stop. ``--dist loadgroup`` would
    say the same with marks, but xdist 3.8 does not find them with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "rgw" if file.endswith("_rgw.py") else file

    return ByFile(config, log)
