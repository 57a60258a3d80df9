"""Measure the peak memory of a process that moves far more data than its queue may hold.

Run as a program, it is the fresh process of one direction.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tempfile
from typing import Any

from _harness import Bar, Gateway, Result, in_fresh_process, incompressible_entry, key_of

from s3cache import Cache, frame
from s3cache.settings import Settings

ENTRY = 16 << 20


def measure(gateway: Gateway, count: int = (2 << 30) // ENTRY) -> Result:
    result = Result(
        f"Peak memory while {count * ENTRY >> 20:,} MiB pass, in entries of {ENTRY >> 20} MiB",
        ["direction", "upload_queue_max_bytes", "peak above start", "of the limit"],
        notes=["VmHWM of a fresh process, above its VmRSS when its client was connected."],
    )
    for limit in (Settings.upload_queue_max_bytes, Settings.upload_queue_max_bytes // 4):
        for direction in ("upload", "prefetch"):
            with tempfile.TemporaryDirectory() as root:
                request = {
                    "direction": direction,
                    "url": gateway.url("memory"),
                    "options": {
                        **gateway.options(),
                        "local_dir": root,
                        "upload_queue_max_bytes": limit,
                        "prefetch_max_bytes": limit,
                    },
                    "count": count,
                }
                peak = in_fresh_process(__file__, request)["peak"]
            _add_rows(result, direction, limit, peak)
        gateway.empty()
    return result


def _add_rows(result: Result, direction: str, limit: int, peak: int) -> None:
    result.rows.append(
        [direction, f"{limit >> 20} MiB", f"{peak / 2**20:.0f} MiB", f"{peak / limit:.2f} ×"]
    )
    result.samples[f"{direction} with {limit} bytes, peak, bytes"] = [peak]
    if limit == Settings.upload_queue_max_bytes:
        what = f"peak memory of {direction}, × the queue limit"
        result.bars.append(Bar(what, peak / limit, "at most", 1.0))


def _upload(cache: Cache, count: int) -> None:
    for key in map(key_of, range(count)):
        saved = cache.save(key, incompressible_entry(key, ENTRY))
        assert saved.durable, saved
    report = cache.flush()
    assert report.complete, report


def _prefetch(cache: Cache, count: int) -> None:
    report = cache.prefetch(map(key_of, range(count))).wait()
    assert report.found == count, report


def _direction(direction: str, url: str, options: dict[str, Any], count: int) -> dict[str, int]:
    cache = Cache.open(url, strict=True, **options)
    cache.save("warm", frame.encode(kind="bench", key="warm", sections={}))
    assert cache.flush().complete
    cache.prefetch(["warm", "absent"]).wait()
    gc.collect()
    _reset_peak()
    before = _status("VmRSS")
    {"upload": _upload, "prefetch": _prefetch}[direction](cache, count)
    peak = _status("VmHWM") - before
    cache.close()
    return {"peak": peak}


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # https://docs.kernel.org/filesystems/proc.html


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        found = re.search(rf"^{name}:\s+(\d+) kB$", file.read(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(_direction(**json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
