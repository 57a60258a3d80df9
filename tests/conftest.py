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
from tests.support import compiled, machines, trees
from tests.support.clock import FakeClock

# make test-all uses --hypothesis-profile=thorough. CI draws the same examples each time, so that
# only a commit can cause a failure. No deadline: a busy machine is not a fault of the code.
for _profile, _examples in {"default": 25, "thorough": 100}.items():
    settings.register_profile(
        _profile,
        max_examples=_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,
    )
settings.load_profile("default")

# Without torch and mypy, only tests of the engine run: python -m tests.pythons.
WITH_TORCH = "artifact equal examples gpu graph hooks torch_api typing"
collect_ignore = [] if find_spec("torch") else WITH_TORCH.split()

pytest.register_assert_rewrite("tests.support.contract")
# All tests can use the fixtures of these modules. A folder may override a fixture by its name.
pytest_plugins = [
    f"tests.support.{name}"
    for name in ("scripted", "served", "shelves", "sites", "stopped", "users")
]
compiled.put_first()

# A program that a shell starts in the background ignores Ctrl-C, and so do its child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Settings of the developer's machine must not reach a test.
for _name in [*os.environ]:
    if _name.startswith(("AWS_", "S3CACHE_")) and not _name.startswith("S3CACHE_TEST_"):
        del os.environ[_name]
os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE=os.devnull)
os.environ.update(AWS_SHARED_CREDENTIALS_FILE=os.devnull)
os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "100"  # so that few objects have several pages
# torch starts no compile workers, and does not test the instruction set of the processor.
os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_VEC_ISA_OK="1")


@pytest.fixture(autouse=True, scope="module")
def loop_blocking() -> Iterator[None]:
    """Fail a test if s3cache blocks the event loop: a slow disk would stop all transfers.

    Only calls from s3cache's own files count; tests may use the disk freely. s3cache may create
    an S3 client and look for credentials, because it does so on a separate loop and thread. It
    may read the AWS configuration, which is a small file.
    """
    with blockbuster_ctx("s3cache") as blockbuster:
        for function in blockbuster.functions.values():
            function.can_block_in("s3cache/store/_s3_client.py", "run_on_new_loop")
            function.can_block_in("s3cache/store/_options.py", "_endpoint_of_profile")
            function.can_block_in("s3cache/store/_options.py", "_check")
        yield


@pytest.fixture(autouse=True)
def disk_deadline() -> Iterator[None]:
    """Wait for a slow disk without a limit: tests of a disk that hangs set one."""
    usual_s, DeadlineExecutor.limit_s = DeadlineExecutor.limit_s, 3600.0
    yield
    DeadlineExecutor.limit_s = usual_s


@pytest.fixture(autouse=True, scope="module")
def no_cache_yet() -> None:
    """Forget the cache that the tests of another file enabled in this process.

    Reports and explanations begin with the lookups of this process.
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
    """Return the path of a directory that does not exist yet."""
    return tmp_path / "root"


def pytest_configure(config: pytest.Config) -> None:
    """Do this work once instead of in each worker.

    Workers share the servers that fork test machines. These machines write no bytecode here.
    """
    if hasattr(config, "workerinput"):
        return
    machines.share_forks()
    if not sys.dont_write_bytecode:
        compileall.compile_dir(Path(__file__).parents[1] / "s3cache", quiet=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, so that none of them runs alone at the end.

    Skip tests that need a feature which is missing, see ``tests/support/trees.py``.
    """
    lacking = {*filter(None, os.environ.get(trees.VARIABLE, "").split(","))}
    for item in items if lacking else ():
        for mark in item.iter_markers("needs"):
            if not mark.args or lacking.intersection(mark.args):
                item.add_marker(pytest.mark.skip("needs a feature that is missing"))
    longest: dict[Path, float] = {}
    for item in items:
        timeout = item.get_closest_marker("timeout")
        compiles = item.path.parent.name in ("device", "gpu", "target")  # with Triton
        usual_s = 1000.0 if compiles else 0.0
        seconds = float(timeout.args[0]) if timeout else usual_s
        longest[item.path] = max(longest.get(item.path, 0.0), seconds)
    items.sort(key=lambda item: longest[item.path], reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file on one worker, as they share costly fixtures.

    All files that use Ceph RGW run on one worker, because some of them stop its server.
    ``--dist loadgroup`` does the same with marks, but xdist 3.8 does not find them with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "rgw" if file.endswith("_rgw.py") else file

    return ByFile(config, log)
