"""Under gevent, which replaces threads by greenlets, the cache works or reports the reason."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from s3cache.testing import MotoServer
from tests.support.buckets import moto_place
from tests.support.scripts import python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gevent") is None, reason="gevent is not installed"
)

_PROGRAM = """
import os, sys
{first}
from gevent import monkey
monkey.patch_all()
import gevent
from s3cache import Cache, frame

def entry(key):
    return frame.encode(kind="t", key=key, sections={{"a": b"x" * 100}})

turns = 0
def others():
    global turns
    while True:
        turns += 1
        gevent.sleep(0.001)

def work(number):
    for key in (f"{{number}}-{{each}}" for each in range(3)):
        assert not hasattr(cache.lookup(key), "entry")
        assert cache.save(key, entry(key)).durable

def open_cache(name):
    where = os.path.join(sys.argv[1], name)
    return Cache.open(
        sys.argv[2], local_dir=where, endpoint_url=sys.argv[3], region="us-east-1",
        access_key="testing", secret_key="testing", lookup_timeout_s=100,
    )

gevent.spawn(others)
with open_cache("a") as cache:
    gevent.joinall([gevent.spawn(work, number) for number in range(3)], raise_error=True)
    print(cache.flush(100).complete, turns > 10, flush=True)
with open_cache("b") as cache:
    print(type(cache.lookup("1-1")).__name__, cache.prefetch(["0-0", "2-2"]).wait(100).found)
    sys.stdout.flush()  # otherwise the child prints this text again
    child = os.fork()
    if child == 0:
        print(type(cache.lookup("2-1")).__name__, cache.flush(100).complete, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def run(server: MotoServer, root: Path, first: str) -> subprocess.CompletedProcess[str]:
    place = moto_place(server)
    program = [_PROGRAM.format(first=first), str(root), f"s3://{place.bucket}/{root.name}"]
    return python("-W", "ignore", "-c", *program, f"http://127.0.0.1:{server.port}", timeout_s=200)


def test_the_cache_works_if_gevent_patches_before_the_import(
    s3cache_moto_server: MotoServer, tmp_path: Path
) -> None:
    """Saves, uploads, lookups, prefetches and forks work, while other greenlets run."""
    done = run(s3cache_moto_server, tmp_path, "import asyncio, concurrent.futures, selectors")
    assert done.stdout.splitlines() == ["True True", "Hit 2", "Hit True"], done.stderr
    assert done.stderr == ""


def test_the_cache_warns_if_gevent_patches_after_the_import(
    s3cache_moto_server: MotoServer, tmp_path: Path
) -> None:
    """Each cache logs one message, and nothing hangs."""
    done = run(s3cache_moto_server, tmp_path, "import s3cache.cache, s3cache.tier")
    assert done.stdout.splitlines()[0].startswith("False")
    message = "gevent.monkey.patch_all() was called after s3cache was imported: call it first"
    assert done.stderr.count("a lookup failed") == 3  # two caches, and the child's
    assert message in done.stderr
    assert "Traceback" not in done.stderr
