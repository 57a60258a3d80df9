"""With a trusted key, nothing unsigned is unpickled or run, wherever it lies."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import s3cache
from s3cache import frame
from s3cache.testing import ProgramError
from s3cache.torch_api import Internal, internals
from s3cache.trust import generate
from tests.hooks.fx_programs import waved
from tests.hooks.jobs import account
from tests.hooks.lacking import product
from tests.support.forging import encoded, signed_by
from tests.support.marks import nightly, slow
from tests.support.sites import Machine, Site

pytestmark = pytest.mark.timeout(900)

KEY, STRANGER = generate("ci"), generate("ci")
TRUSTING = {"S3CACHE_TRUSTED_KEYS": KEY.public_text()}
# torch keeps profiles of jobs that have a name.
JOB = {"TORCH_COMPILE_JOB_ID": "job"}
REMOTE = {"TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "1"}
SIGNING = {"S3CACHE_SIGNING_KEY": KEY.secret_text()}


def betrayal(path: Path) -> bytes:
    """A pickle that makes a file when it is read.

    By what graphs themselves are made of: their source. Nothing but a signature keeps that out.
    """
    args = pickle.dumps(({"_code": "\n"}, f"open({str(path)!r}, 'w').close()\n"), 2)
    return b"\x80\x02ctorch.fx.graph_module\nreduce_graph_module\n" + args[2:-1] + b"R."


def plain_betrayal(path: Path) -> bytes:
    """One by what no graph needs."""
    return pickle.dumps(Betrayal(path))


class Betrayal:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


# -- ways around


def planted(site: Site, tmp_path: Path, trace: Path) -> Machine:
    """A machine that has compiled before; all that torch has left there makes ``trace``."""
    machine = site.machine("target", S3CACHE_LOCAL="no", **JOB)
    machine.run("test_trusted:waving", site.url)
    library = _betraying_library(tmp_path, trace)
    kinds = set()
    for path in (machine.root / "inductor").rglob("*"):
        if {"aotautograd", "fxgraph", "dynamo"} & set(path.parts) and path.is_file():
            path.write_bytes(plain_betrayal(trace))
            kinds.add("pickle")
        elif path.suffix in (".py", ".so"):
            betray(path, trace, library)
            kinds.add(path.suffix)
    assert kinds == {"pickle", ".py", ".so"}
    return machine


def betray(path: Path, trace: Path, library: bytes) -> None:
    """Put what makes ``trace`` in the place of a source, of a library, or of a pickle."""
    code = f"open({str(trace)!r}, 'w').close()\n".encode()
    evil = {".py": code, ".so": library}
    path.write_bytes(evil.get(path.suffix) or plain_betrayal(trace))


def run_carelessly(machine: Machine, job: str, *arguments: str) -> None:
    """What was planted may well end the program, once it has run."""
    with contextlib.suppress(ProgramError):
        machine.run(job, *arguments)


@nightly
def test_no_kind_of_what_an_earlier_run_has_left_is_run(site: Site, tmp_path: Path) -> None:
    trace = tmp_path / "betrayed"
    machine = planted(site, tmp_path, trace)
    machine.environment.update(TRUSTING)
    found = machine.run("test_trusted:waving", f"file://{tmp_path}/nothing?create=1")
    assert not trace.exists()
    assert found["misses"] == {"absent": 1}
    for variable in TRUSTING:
        del machine.environment[variable]
    run_carelessly(machine, "test_trusted:waving", f"file://{tmp_path}/nothing2?create=1")
    assert trace.exists()  # it would have


@slow
def test_a_signed_hit_runs_its_own_code_whatever_was_planted(site: Site, tmp_path: Path) -> None:
    """Also in the directory that torch then has; nor is what remembers the installation read."""
    writer = site.machine("writer", **SIGNING, **TRUSTING)
    assert writer.run("test_trusted:waving", site.url)["saved"] == 1
    trace = tmp_path / "betrayed"
    evil = _betraying_library(tmp_path, trace)
    target = site.machine("target", **TRUSTING)
    made = [path for path in writer.root.rglob("*") if path.suffix in (".py", ".so")]
    made = [path for path in made if "inductor" in path.parts]
    assert {path.suffix for path in made} == {".py", ".so"}
    (remembered,) = writer.root.rglob("installation")
    for path in (*made, remembered):
        there = target.root / path.relative_to(writer.root)
        there.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        betray(there, trace, evil)
    found = target.run("test_trusted:waving", site.url)
    assert (found["hits"]["remote"], found["misses"]) == (1, {})
    assert not trace.exists()


@slow
def test_torchs_artifacts_of_others_run_nothing(site: Site, tmp_path: Path) -> None:
    """Loading them unpickles graphs that have kernels of Triton, and profiles a little later."""
    artifacts, evil, trace = (str(tmp_path / name) for name in ("artifacts", "evil", "betrayed"))
    betraying = plain_betrayal(Path(trace)).hex()
    exporter = site.machine("exporter", S3CACHE_LOCAL="no", **JOB)
    exporter.run("test_trusted:compiled", site.url, "", artifacts)
    kinds = exporter.run("test_trusted:poisoned", artifacts, evil, betraying)
    assert {"aot_autograd", "pgo"} <= set(kinds)
    nothing = f"file://{tmp_path}/nothing?create=1"
    bundling = {"TORCHINDUCTOR_BUNDLE_TRITON_INTO_FX_GRAPH_CACHE": "1", **JOB}
    target = site.machine("target", **bundling, **TRUSTING)
    assert target.run("test_trusted:loaded", nothing, evil)["loaded"] == {}
    assert target.run("test_trusted:loaded", "", evil, S3CACHE_URL=nothing)["loaded"] == {}
    found = target.run("test_trusted:compiled", nothing, evil)
    assert found["misses"] == {"absent": 1}
    assert not Path(trace).exists()
    run_carelessly(site.machine("careless", **bundling), "test_trusted:compiled", nothing, evil)
    assert Path(trace).exists()  # it would have


@nightly
def test_torchs_remote_caches_run_nothing(site: Site, tmp_path: Path) -> None:
    """Of graphs, and of profiles."""
    trace = tmp_path / "betrayed"
    content = base64.b64encode(plain_betrayal(trace)).decode()
    remote = {**REMOTE, "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO": "1", **JOB}
    found = site.machine("target", **remote, **TRUSTING).run(
        "test_trusted:redis", site.url, content
    )
    assert not trace.exists()
    assert found["misses"] == {"absent": 1}
    machine = site.machine("careless", **remote)
    run_carelessly(machine, "test_trusted:redis", f"file://{tmp_path}/nothing?create=1", content)
    assert trace.exists()  # it would have


@slow
@pytest.mark.parametrize("job", ["lacking", pytest.param("unsupported", marks=nightly)])
def test_planted_files_do_not_run_where_hooks_cannot_be_installed(
    job: str, site: Site, tmp_path: Path
) -> None:
    """Nor where torch is not supported. It has no caches, and what it compiles is right."""
    trace = tmp_path / "betrayed"
    content = base64.b64encode(plain_betrayal(trace)).decode()
    machine = planted(site, tmp_path, trace)
    arguments = (f"file://{tmp_path}/nothing?create=1", content)
    found = machine.run(f"test_trusted:{job}", *arguments, **REMOTE, **TRUSTING)
    assert not trace.exists()
    assert (found["saved"], found["asked"]) == (0, 0)
    assert found["stderr"].count("it compiles without a cache") == 1
    run_carelessly(machine, f"test_trusted:{job}", *arguments)
    assert trace.exists()  # it would have


def test_a_signed_entry_hits_and_a_forged_one_runs_nothing(site: Site, tmp_path: Path) -> None:
    """Unsigned, with the signature of the good one, or signed by a stranger of the same name."""
    trace = tmp_path / "betrayed"
    saved = site.machine("writer", **SIGNING, **TRUSTING).run("test_trusted:compiled", site.url)
    assert saved["saved"] == 1
    good = {path: path.read_bytes() for path in site.entries()}
    sites = [site.copy(tmp_path / forge.__name__) for forge in FORGERIES]
    for forge, forged in zip(FORGERIES, sites, strict=True):
        for path, data in zip(forged.entries(), good.values(), strict=True):
            path.write_bytes(forge(data, betrayal(trace)))
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
def test_without_signatures_an_entry_runs_code_of_graphs_and_no_other(
    site: Site, tmp_path: Path
) -> None:
    """So the forgeries of the tests around are what they are meant to be."""
    trace = tmp_path / "betrayed"
    site.machine("writer").run("test_trusted:compiled", site.url)
    (path,) = site.entries()
    good, read_only = path.read_bytes(), {"S3CACHE_MODE": "read-only"}
    path.write_bytes(_unsigned(good, plain_betrayal(trace)))
    found = site.machine("reader", **read_only).run("test_trusted:compiled", site.url)
    assert (sum(found["hits"].values()), found["misses"]) == (0, {"corrupt": 1})
    assert not trace.exists()
    path.write_bytes(_unsigned(good, betrayal(trace)))
    site.machine("careless", **read_only).run("test_trusted:compiled", site.url)
    assert trace.exists()


def _betraying_library(place: Path, trace: Path) -> bytes:
    """It makes a file when it is loaded."""
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
    """Who uses the same name."""
    return signed_by(_unsigned(data, evil), STRANGER)


def _moved(data: bytes, evil: bytes) -> bytes:
    """With the signature of the good one."""
    signatures = frame.decode(data).signatures
    return frame.signed(_forged(data, evil), lambda _: signatures)


FORGERIES = (_unsigned, _moved, _by_a_stranger)


# -- the job


def waving(url: str) -> dict[str, Any]:
    """What compiling that one comes to."""
    return compiled(url, program=waved)


def lacking(url: str, content: str) -> dict[str, Any]:
    """The same, where this torch lacks a name, and remote caches answer with ``content``."""
    _serve(content)
    vars(internals)["clear_caches"] = Internal("torch._guards:nonsense")
    return {**waving(url), "asked": len(_asked)}


def unsupported(url: str, content: str) -> dict[str, Any]:
    """The same, where this torch is older than any that s3cache knows."""
    _serve(content)
    internals.OLDEST = (99, 0)
    return {**waving(url), "asked": len(_asked)}


def compiled(
    url: str, artifacts: str = "", export: str = "", program: Any = product
) -> dict[str, Any]:
    """What compiling it comes to.

    Args:
        artifacts: of torch's, to load before.
        export: where to put them to afterwards.
    """
    with s3cache.enabled(url) as cache:
        if artifacts:
            with open(artifacts, "rb") as file:
                torch.compiler.load_cache_artifacts(file.read())
        x = torch.arange(9.0).reshape(3, 3)
        assert torch.allclose(torch.compile(program)(x, x), program(x, x))
        assert cache.flush(30).complete
        if export:
            saved = torch.compiler.save_cache_artifacts()
            assert saved is not None
            with open(export, "wb") as file:
                file.write(saved[0])
        return {**account(cache), "refused": dict(cache.stats().refused)}


def from_each(urls: list[str]) -> list[dict[str, Any]]:
    """What compiling it comes to with each of these remotes, nothing else being kept."""
    found = []
    for url in urls:
        torch.compiler.reset()
        found.append(compiled(url))
    return found


def poisoned(artifacts: str, into: str, evil: str) -> list[str]:
    """Put something else into each of torch's artifacts that is a pickle; returns their kinds."""
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


def loaded(url: str, artifacts: str) -> dict[str, Any]:
    """What comes of loading those before anything is compiled; ``url`` is "" for no cache."""
    with s3cache.enabled(url) if url else contextlib.nullcontext():
        with open(artifacts, "rb") as file:
            data = file.read()
        try:
            info = torch.compiler.load_cache_artifacts(data)
        except Exception as exc:
            return {"failed": str(exc)}
        assert info is not None
        return {"loaded": dict(info.artifacts)}


def redis(url: str, content: str) -> dict[str, Any]:
    """What compiling it comes to where torch's remote caches answer everything with ``content``."""
    _serve(content)
    return {**compiled(url), "asked": len(_asked)}


_asked: list[str] = []


def _serve(content: str) -> None:
    """A Redis without a server."""

    class Redis:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def get(self, key: str) -> bytes:
            _asked.append(key)
            return json.dumps({"data": content, "time_taken_ms": 1}).encode()

        def set(self, key: str, value: bytes) -> None:
            pass

    module = ModuleType("redis")
    errors = {"ConnectionError": ConnectionError, "exceptions": ModuleType("redis.exceptions")}
    vars(module).update(Redis=Redis, **errors)
    vars(errors["exceptions"]).update(ConnectionError=ConnectionError)
    sys.modules["redis"] = module
