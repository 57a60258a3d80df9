"""With a trusted key, nothing unsigned is unpickled or run, wherever it is."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._inductor import remote_cache

import s3cache
from s3cache import frame
from s3cache.testing import ProgramError
from s3cache.torch_api import Internal, internals
from s3cache.trust import generate
from tests.hooks.fx_programs import waved
from tests.hooks.jobs import account
from tests.support.forging import encoded, signed_by
from tests.support.marks import cases, slow
from tests.support.sites import Machine, Site

pytestmark = pytest.mark.timeout(900)

KEY, STRANGER = generate("ci"), generate("ci")
TRUSTING = {"S3CACHE_TRUSTED_KEYS": KEY.public_text()}
TORCHS = ("usual", "lacks a name", "too old")
SIGNING = {"S3CACHE_SIGNING_KEY": KEY.secret_text()}


def evil_pickle(path: Path) -> bytes:
    """Return a pickle that makes a file when it is read.

    It runs source code, as pickles of graphs do. Only a signature can keep that out.
    """
    args = pickle.dumps(({"_code": "\n"}, f"open({str(path)!r}, 'w').close()\n"), 2)
    return b"\x80\x02ctorch.fx.graph_module\nreduce_graph_module\n" + args[2:-1] + b"R."


def plain_evil_pickle(path: Path) -> bytes:
    """Return such a pickle that uses a function that no graph needs."""
    return pickle.dumps(OpensFile(path))


class OpensFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


# -- ways around signatures


def planted(site: Site, tmp_path: Path, trace: Path) -> Machine:
    """Return a machine with files of an earlier compile; each now makes ``trace`` if it is used."""
    machine = site.machine("target", S3CACHE_LOCAL="no")
    machine.run("test_trusted:waving", site.url, True)
    library = _evil_library(tmp_path, trace)
    kinds = set()
    for path in (machine.root / "inductor").rglob("*"):
        if {"aotautograd", "fxgraph", "dynamo"} & set(path.parts) and path.is_file():
            path.write_bytes(plain_evil_pickle(trace))
            kinds.add("pickle")
        elif path.suffix in (".py", ".so"):
            replace_by_evil(path, trace, library)
            kinds.add(path.suffix)
    assert kinds == {"pickle", ".py", ".so"}
    return machine


def replace_by_evil(path: Path, trace: Path, library: bytes) -> None:
    """Replace a source, a library, or a pickle by one that makes ``trace``."""
    code = f"open({str(trace)!r}, 'w').close()\n".encode()
    evil = {".py": code, ".so": library}
    path.write_bytes(evil.get(path.suffix) or plain_evil_pickle(trace))


def run_planted(machine: Machine, job: str, *arguments: object) -> None:
    """Run a job; planted code may end its program."""
    with contextlib.suppress(ProgramError):
        machine.run(job, *arguments)


@slow
def test_a_signed_hit_runs_its_own_code_and_no_planted_code(site: Site, tmp_path: Path) -> None:
    """Files are also planted in torch's own directory, and as a remembered installation."""
    writer = site.machine("writer", **SIGNING, **TRUSTING)
    assert writer.run("test_trusted:waving", site.url)["saved"] == 1
    trace = tmp_path / "betrayed"
    evil = _evil_library(tmp_path, trace)
    target = site.machine("target", **TRUSTING)
    made = [path for path in writer.root.rglob("*") if path.suffix in (".py", ".so")]
    made = [path for path in made if "inductor" in path.parts]
    assert {path.suffix for path in made} == {".py", ".so"}
    (remembered,) = writer.root.rglob("installation")
    for path in (*made, remembered):
        there = target.root / path.relative_to(writer.root)
        there.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_by_evil(there, trace, evil)
    found = target.run("test_trusted:waving", site.url)
    assert (found["hits"]["remote"], found["misses"]) == (1, {})
    assert not trace.exists()


@slow
def test_planted_artifacts_of_torch_run_nothing(site: Site, tmp_path: Path) -> None:
    """Loading them unpickles graphs with Triton kernels, and profiles a little later."""
    artifacts, evil, trace = (str(tmp_path / name) for name in ("artifacts", "evil", "betrayed"))
    betraying = plain_evil_pickle(Path(trace)).hex()
    exporter = site.machine("exporter", S3CACHE_LOCAL="no")
    kinds = exporter.run("test_trusted:poisoned", site.url, artifacts, evil, betraying)
    assert {"aot_autograd", "pgo"} <= set(kinds)
    nothing = f"file://{tmp_path}/nothing?create=1"
    target = site.machine("target", **TRUSTING)
    found = target.run("test_trusted:compiled", nothing, evil)
    assert (found["loaded"], found["misses"]) == ({}, {"absent": 1})
    careless = site.machine("careless")
    assert target.run("test_trusted:loaded", evil, S3CACHE_URL=nothing)["loaded"] == {}
    assert not Path(trace).exists()
    run_planted(careless, "test_trusted:compiled", nothing, evil)
    assert Path(trace).exists()  # without a trusted key, it runs


@slow
@pytest.mark.parametrize("torchs", cases(TORCHS, nightly_ones={"too old", "usual"}))
def test_no_file_of_an_earlier_run_and_no_remote_cache_of_torch_is_used(
    torchs: str, site: Site, tmp_path: Path
) -> None:
    """If hooks cannot be installed, torch has no caches, and compiles correctly."""
    trace = tmp_path / "betrayed"
    content = base64.b64encode(plain_evil_pickle(trace)).decode()
    machine = planted(site, tmp_path, trace)
    nothing = f"file://{tmp_path}/nothing?create=1"
    found = machine.run("test_trusted:served", nothing, content, torchs, True, **TRUSTING)
    assert not trace.exists()
    if torchs == "usual":
        assert found["misses"] == {"absent": 1}
    else:
        assert (found["saved"], found["asked"]) == (0, 0)
        assert found["stderr"].count("it compiles without a cache") == 1
    # Without a trusted key, it runs: from the remote cache, or from files if that is off.
    run_planted(machine, "test_trusted:served", nothing, content, torchs, torchs == "usual")
    assert trace.exists()


def test_a_signed_entry_hits_and_a_forged_one_runs_nothing(site: Site, tmp_path: Path) -> None:
    """Unsigned, with the good entry's signature, or signed by a stranger of the same name."""
    trace = tmp_path / "betrayed"
    saved = site.machine("writer", **SIGNING, **TRUSTING).run("test_trusted:compiled", site.url)
    assert saved["saved"] == 1
    good = {path: path.read_bytes() for path in site.entries()}
    sites = [site.copy(tmp_path / forge.__name__) for forge in FORGERIES]
    for forge, forged in zip(FORGERIES, sites, strict=True):
        for path, data in zip(forged.entries(), good.values(), strict=True):
            path.write_bytes(forge(data, evil_pickle(trace)))
    urls = [site.url, *(forged.url for forged in sites)]
    reader = site.machine("reader", S3CACHE_MODE="read-only", S3CACHE_LOCAL="no", **TRUSTING)
    hit, *refused = reader.run("test_trusted:from_each", urls)
    assert (hit["hits"]["remote"], hit["refused"]) == (1, {})
    for found in refused:
        assert sum(found["hits"].values()) == 0
        assert found["misses"] == {"untrusted": 1}
        assert sum(found["refused"].values()) >= 1
    assert not trace.exists()


@slow
def test_without_signatures_an_entry_runs_only_code_of_graphs(site: Site, tmp_path: Path) -> None:
    """So the forgeries of the other tests would run without signatures."""
    trace = tmp_path / "betrayed"
    site.machine("writer").run("test_trusted:compiled", site.url)
    (path,) = site.entries()
    good, read_only = path.read_bytes(), {"S3CACHE_MODE": "read-only"}
    path.write_bytes(_unsigned(good, plain_evil_pickle(trace)))
    found = site.machine("reader", **read_only).run("test_trusted:compiled", site.url)
    assert (sum(found["hits"].values()), found["misses"]) == (0, {"corrupt": 1})
    assert not trace.exists()
    path.write_bytes(_unsigned(good, evil_pickle(trace)))
    site.machine("careless", **read_only).run("test_trusted:compiled", site.url)
    assert trace.exists()


def _evil_library(place: Path, trace: Path) -> bytes:
    """Return a library that makes ``trace`` when it is loaded."""
    source, library = place / "evil.c", place / "evil.so"
    source.write_text(
        "#include <stdio.h>\n"
        f'__attribute__((constructor)) void f(void) {{ fclose(fopen("{trace}", "w")); }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library.read_bytes()


def _forged(data: bytes, evil: bytes) -> frame.Frame:
    there = frame.decode(data)
    return frame.decode(encoded(there, dict.fromkeys(there.names, evil)))


def _unsigned(data: bytes, evil: bytes) -> bytes:
    return bytes(_forged(data, evil).data)


def _by_a_stranger(data: bytes, evil: bytes) -> bytes:
    """Sign with a stranger's key of the same name."""
    return signed_by(_unsigned(data, evil), STRANGER)


def _moved(data: bytes, evil: bytes) -> bytes:
    """Attach the signature of the good entry."""
    signatures = frame.decode(data).signatures
    return frame.signed(_forged(data, evil), lambda _: signatures)


FORGERIES = (_unsigned, _moved, _by_a_stranger)


# -- the job


def product(x: Any, y: Any) -> Any:
    """A graph that Inductor compiles without a C++ compiler."""
    return (x @ y).t()


def waving(url: str, named: bool = False) -> dict[str, Any]:
    """Compile ``waved``, in a job with a name if ``named``; return the counts."""
    if named:
        _name_job()
    return compiled(url, program=waved)


def _name_job() -> None:
    torch.compiler.config.job_id = "job"  # torch keeps profiles of jobs that have a name


def served(url: str, content: str, torchs: str, remote: bool) -> dict[str, Any]:
    """Compile with this torch; its remote caches, if they are on, answer with ``content``."""
    _serve(content)
    if remote:
        torch._inductor.config.fx_graph_remote_cache = True
        torch._functorch.config.enable_remote_autograd_cache = True
        torch._dynamo.config.automatic_dynamic_remote_pgo = True
    if torchs == "lacks a name":
        vars(internals)["clear_caches"] = Internal("torch._guards:nonsense")
    elif torchs == "too old":
        internals.OLDEST = (99, 0)
    return {**waving(url, True), "asked": len(_asked)}


def compiled(
    url: str, artifacts: str = "", export: str = "", program: Any = product
) -> dict[str, Any]:
    """Compile ``program``; return the counts.

    Args:
        artifacts: A file with torch's artifacts to load before.
        export: A file for torch's artifacts afterwards.
    """
    if artifacts or export:
        _name_job()
    with s3cache.enabled(url) as cache:
        seen = loaded(artifacts) if artifacts else {}
        x = torch.arange(9.0).reshape(3, 3)
        assert torch.allclose(torch.compile(program)(x, x), program(x, x))
        assert cache.flush(30).complete
        if export:
            saved = torch.compiler.save_cache_artifacts()
            assert saved is not None
            with open(export, "wb") as file:
                file.write(saved[0])
        return {**account(cache), "refused": dict(cache.stats().refused), **seen}


def from_each(urls: list[str]) -> list[dict[str, Any]]:
    """Compile with each of these remotes, from scratch; return the counts."""
    found = []
    for url in urls:
        torch.compiler.reset()
        found.append(compiled(url))
    return found


def poisoned(url: str, artifacts: str, into: str, evil: str) -> list[str]:
    """Put ``evil`` into each of torch's artifacts that is a pickle; return their kinds."""
    compiled(url, export=artifacts)
    from torch.compiler._cache import CacheArtifactManager, _serialize_single_cache
    from torch.utils._appending_byte_serializer import AppendingByteSerializer

    with open(artifacts, "rb") as file:
        found = CacheArtifactManager.deserialize(file.read())
    assert found is not None
    serializer = AppendingByteSerializer(serialize_fn=_serialize_single_cache)
    for kind, each_of in found.items():
        for each in each_of:
            if kind != "autotune":
                object.__setattr__(each, "content", bytes.fromhex(evil))
        serializer.append((kind, each_of))
    with open(into, "wb") as file:
        file.write(serializer.to_bytes())
    return sorted(found)


def loaded(artifacts: str) -> dict[str, Any]:
    """Load artifacts before any compile; return their names."""
    with open(artifacts, "rb") as file:
        info = torch.compiler.load_cache_artifacts(file.read())
    return {"loaded": dict(info.artifacts) if info else None}


_asked: list[str] = []


def _serve(content: str) -> None:
    """Install a Redis client that needs no server, and answers with ``content``."""

    class Redis:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def get(self, key: str) -> bytes:
            _asked.append(key)
            return json.dumps({"data": content, "time_taken_ms": 1}).encode()

        def set(self, key: str, value: bytes) -> None:
            pass

    module, exceptions = ModuleType("redis"), ModuleType("redis.exceptions")
    vars(exceptions)["ConnectionError"] = ConnectionError
    vars(module).update(Redis=Redis, ConnectionError=ConnectionError, exceptions=exceptions)
    vars(remote_cache)["redis"] = module
