"""The public interface of s3cache: a change must be intended, and be in the changelog."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import s3cache
from tests.support.scripts import modules_after, python

ROOT = Path(s3cache.__file__).resolve().parent
LAZY_PACKAGES = ("s3cache", "s3cache.manage", "s3cache.testing")

FUNCTIONS = {
    "active": "() -> Cache | None",
    "check": "(function: Callable[_P, object], /, *args: _P.args, **kwargs: _P.kwargs) -> Report",
    "disable": "() -> None",
    "explain": "(what: str = , *, url: str | None = None, remote: bool = True, "
    "**options: Unpack[Options]) -> Explained",
    "enable": "(url: str | None = None, **options: Unpack[Options]) -> Cache",
    "enabled": "(url: str | None = None, **options: Unpack[Options]) -> Iterator[Cache]",
    "register_cacheable": "(function: _F, *, version: str) -> _F",
}

CACHE = {
    "clear": "(self) -> int",
    "close": "(self, timeout_s: float | None = None) -> FlushReport",
    "flush": "(self, timeout_s: float | None = None) -> FlushReport",
    "lookup": "(self, key: str, accept: Callable[[Frame], bool] | None = None) -> Hit | Miss",
    "open": "(url: str | None = None, **options: Unpack[Options]) -> Self",
    "prefetch": "(self, keys: Iterable[str]) -> Prefetch",
    "remove": "(self, key: str) -> int",
    "save": "(self, key: str, entry: Frame | Buffer) -> Saved | NotSaved",
    "settings": "property",
    "start": "(self) -> None",
    "stats": "(self) -> CacheStats",
    "subscribe": "(self, listener: Listener) -> Callable[[], None]",
}

OTHERS = {
    *("Cache", "ConfigError", "MissError", "S3CacheError", "S3Options", "Settings", "__version__")
}
# All other names are in their modules.
ELSEWHERE = {
    "cache": "Hit Miss NotSaved Saved",
    "errors": "Reason StoreError",
    "frame": "Frame decode encode",
    "graph": "Graph GraphBreak Report",
    "insight": "Difference Explained Explanation",
    "integrations": "flush_at_checkpoint",
    "options": "Options",
    "settings": "Mode",
    "stats": "CacheStats Listener TransferEvent",
    "store": "FileLocation MemoryLocation StoreOptions open_store",
    "tier": "FlushReport Prefetch PrefetchReport",
}


def signature(function: object) -> str:
    """Return the signature as in the source, where annotations are not evaluated."""
    assert callable(function)
    return str(inspect.signature(function)).replace("'", "")


def test_the_public_names_are_exactly_these() -> None:
    assert set(vars(s3cache)["__all__"]) == {*FUNCTIONS, *OTHERS}


def test_other_names_are_in_their_modules() -> None:
    for module, names in ELSEWHERE.items():
        there = import_module(f"s3cache.{module}")
        assert [name for name in names.split() if not hasattr(there, name)] == []


def test_functions_and_methods_of_a_cache_are_exactly_these() -> None:
    assert {name: signature(getattr(s3cache, name)) for name in FUNCTIONS} == FUNCTIONS
    public = {name: member for name, member in vars(s3cache.Cache).items() if name[0] != "_"}
    for name, member in public.items():
        is_property = isinstance(member, property)
        public[name] = "property" if is_property else signature(getattr(s3cache.Cache, name))
    assert public == CACHE


def test_dir_shows_each_name_before_and_after_its_use() -> None:
    code = f"""
from importlib import import_module
for package in map(import_module, {LAZY_PACKAGES}):
    assert set(package.__all__) <= set(dir(package)), package
    for name in package.__all__:
        assert getattr(package, name) is getattr(package, name)
    assert set(package.__all__) <= set(dir(package)), package
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_type_checkers_see_the_same_exports_as_programs(package: str) -> None:
    """Exports at run time equal the imports below ``TYPE_CHECKING``."""
    module = import_module(package)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    shown = {
        name: f"{node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("s3cache")
        for alias in node.names
        for name in [alias.name]
    }
    assert set(module.__all__) <= {*shown}
    for name in module.__all__:
        home = import_module(shown[name])
        assert getattr(module, name) is getattr(home, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 's3cache' has no attribute 'nonsense'"):
        _ = s3cache.nonsense  # type: ignore[attr-defined]


INERT = """
import logging, sys
logging.basicConfig(format="%(message)s")
import s3cache
from s3cache.cache import Miss, NotSaved
from s3cache.errors import Reason
from s3cache import frame

cache = s3cache.enable("s3://bucket/prefix", region="eu-west-1", strict=True)
assert s3cache.active() is None
assert cache.settings.mode == "off"
miss = cache.lookup("abc")
assert isinstance(miss, Miss) and miss.reason == Reason.DISABLED
entry = frame.encode(kind="test", key="abc", sections={})
assert isinstance(cache.save("abc", entry), NotSaved)
assert cache.prefetch(["abc"]).wait().failed == 0
assert cache.flush(timeout_s=1).complete
with s3cache.enabled("memory://example") as second:
    assert second.stats().saved == 0
try:
    s3cache.enable("s3://bucket", strikt=True)
except s3cache.ConfigError as error:
    print(error.fix)
cache.close()
loaded = {"torch", "botocore", "aioboto3"} & set(sys.modules)
assert not loaded, loaded
"""


def test_the_cache_is_inert_if_torch_is_not_supported(tmp_path: Path) -> None:
    """It has all methods but creates no directory and no client; mistakes still raise errors."""
    metadata = tmp_path / "site" / "torch-1.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.9.0\n")
    home = tmp_path / "home"
    home.mkdir()
    done = python(
        "-c", INERT, env={"HOME": str(home), "PYTHONPATH": f"{metadata.parents[1]}:{ROOT.parent}"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "did you mean 'strict'?\n"
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("torch 1.9.0 is not supported")
    assert list(home.iterdir()) == []


HEAVY = ("torch", "boto3", "botocore", "aioboto3", "aiobotocore", "aiohttp", "typer", "numpy")


def test_import_s3cache_imports_no_other_modules() -> None:
    ours = modules_after("import s3cache") - modules_after("import importlib, typing")
    assert ours - {"__future__"} == {"s3cache"}


def test_opening_a_cache_imports_no_heavy_packages() -> None:
    """A cache with an S3 store imports botocore when it connects, in the background."""
    code = "from s3cache import Cache, Settings; Cache(Settings(local=False))"
    more = "from s3cache.store import open_store; open_store('s3://bucket/p')"
    assert modules_after(f"{code}; {more}").isdisjoint(HEAVY)
