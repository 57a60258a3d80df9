"""Shared parts of the benchmarks: results, bars, the gateway, fresh processes."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import render

from s3cache import Cache, frame
from s3cache.errors import TransientError
from s3cache.settings import Settings
from s3cache.store import Store

BUCKET = "bench"
ENTRY_BYTES = 1_500_000  # the usual size of a compiled graph with its kernels
WORDS = (b"load", b"store", b"mul", b"add", b"index", b"buffer", b"vector", b"float", b"loop")


@dataclass(frozen=True)
class Bar:
    """A number and its limit. A bar without a value was not measured."""

    what: str
    value: float | None
    bound: Literal["at least", "at most"]
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.bound == "at least" else self.value <= self.limit


@dataclass
class Result:
    """The result of one part: a table for people, samples for programs, and the bars.

    ``samples`` are in seconds or bytes, as their names say, in the order of measurement.
    ``chart`` is the name of a file, and ``svg`` its content.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    chart: str = ""
    svg: str = ""

    def markdown(self) -> str:
        return render.of_result(self.as_json())

    def as_json(self) -> dict[str, Any]:
        document = asdict(self) | {"bars": [asdict(bar) | {"met": bar.met} for bar in self.bars]}
        del document["svg"]
        return document


def environment(*packages: str) -> dict[str, str | int | None]:
    """Return the machine, its Python, and the versions of packages."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def write_results(path: str, environment: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Write the results as JSON, and their charts beside it.

    Results in the file of other parts stay, if they are from a machine like this one.
    """
    kept: dict[str, Any] = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        if document["environment"] == environment:
            kept = {result["title"]: result for result in document["results"]}
    kept |= {result.title: result.as_json() for result in results}
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    for result in results:
        if result.chart:
            with open(os.path.join(folder, result.chart), "w", encoding="utf-8") as file:
                file.write(result.svg)
    with open(path, "w", encoding="utf-8") as file:
        document = {"environment": environment, "results": [*kept.values()]}
        json.dump(document, file, indent=1, ensure_ascii=False)
        file.write("\n")


def all_met(results: Sequence[Result]) -> bool:
    """Return whether no bar was missed."""
    return all(bar.met is not False for result in results for bar in result.bars)


def finish(results: Sequence[Result], path: str | None, environment: Mapping[str, Any]) -> int:
    """Print the results, write them to ``path`` if there is one, and return the exit status."""
    for result in results:
        print(f"\n{result.markdown()}", flush=True)
    if path:
        write_results(path, environment, results)
    return int(not all_met(results))


def parts_of(text: str, known: Sequence[str]) -> list[str]:
    """Return the names of parts in a value of ``--parts``."""
    parts = text.split(",")
    if unknown := set(parts) - set(known):
        raise argparse.ArgumentTypeError(f"no part is called {', '.join(sorted(unknown))}")
    return parts


@dataclass(frozen=True)
class Gateway:
    """The S3 server to measure on."""

    endpoint_url: str
    access_key: str
    secret_key: str

    @classmethod
    def from_environment(cls) -> Gateway | None:
        prefix = "S3CACHE_TEST_RGW_"
        if prefix + "ENDPOINT" not in os.environ:
            return None
        return cls(
            *(os.environ[prefix + name] for name in ("ENDPOINT", "ACCESS_KEY", "SECRET_KEY"))
        )

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def options(self) -> dict[str, str]:
        """Return the options of :meth:`s3cache.Cache.open` for this server."""
        return {**asdict(self), "region": "us-east-1"}

    def botocore(self) -> dict[str, str]:
        """Return the arguments of clients of boto3 and aioboto3."""
        return {
            "endpoint_url": self.endpoint_url,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "region_name": "us-east-1",
        }

    def create_bucket(self) -> None:
        self._boto3().create_bucket(Bucket=BUCKET)

    def empty(self, prefix: str = "") -> None:
        """Delete all objects with this prefix."""
        client = self._boto3()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        for page in pages:
            found = [{"Key": each["Key"]} for each in page.get("Contents", ())]
            if found:
                client.delete_objects(Bucket=BUCKET, Delete={"Objects": found, "Quiet": True})

    def _boto3(self) -> Any:
        import boto3

        return boto3.client("s3", **self.botocore())


def cache_without_network(root: str, identity: str) -> Cache:
    """Return the cache of a process that never reaches its bucket."""

    def unreachable() -> Store:
        raise TransientError("no network yet")

    logging.getLogger("s3cache").setLevel(logging.ERROR)
    return Cache(Settings(local_dir=root), open_remote=unreachable, identity=identity)


def key_of(number: int) -> str:
    """Return a cache key that looks like a digest."""
    return f"{number:064x}"


def incompressible_entry(key: str, size: int) -> bytes:
    """Return an incompressible frame of exactly ``size`` bytes."""
    content = os.urandom(size - 1024)
    spare = size - len(frame.encode(kind="bench", key=key, sections={"0": content}, codec="none"))
    content += os.urandom(spare)
    return frame.encode(kind="bench", key=key, sections={"0": content}, codec="none")


def compiled_graph(rng: random.Random, size: int, kernels: int = 25) -> dict[str, bytes]:
    """Return sections like those of a graph with its kernels: half text, half random bytes."""
    each = size // kernels // 2
    words = (size // kernels) // 8
    return {
        f"kernel{number}": rng.randbytes(each) + b" ".join(rng.choices(WORDS, k=words))[:each]
        for number in range(kernels)
    }


def shuffled_rounds(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yield ``names`` in another order each round, so that drift and order affect all alike."""
    rng = random.Random(0)
    for _ in range(rounds):
        yield rng.sample(list(names), len(names))


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in all rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for names in shuffled_rounds([*calls], rounds):
        for name in names:
            started = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - started)
    return times


def percentile(samples: Sequence[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of all rounds: a slow round slows both its numbers."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def in_fresh_process(
    module: str, request: dict[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run ``module`` as a program with ``request`` as JSON; return the JSON of its last line."""
    command = [sys.executable, module, json.dumps(request)]
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer
