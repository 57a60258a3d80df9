"""Measure the cost of torch's own key, and of s3cache's with all components and safety checks.

The graphs are those of one training step of a GPT, with 6 and with 24 layers. Each gets its key as
in ``torch.compile``, and is not compiled. ``first`` is the first key of a process, ``later`` the
median of its later keys. Each run is a separate process; torch's and s3cache's runs take turns.

s3cache keeps torch's hash of its own source on disk, and checks while torch is imported that it is
still valid. That time is part of ``first``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

from _harness import Bar, Result, environment, finish, in_fresh_process
from _start import ROOT

_LAYERS = (6, 24)
_LATER = 15
_BARS = {"first": 0.3, "later": 0.6}


def _keys_ms(layers: int, side: str) -> dict[str, float]:
    """Run in one process; return milliseconds of its first key, and of a later one."""
    installed_s = 0.0
    if side == "s3cache":
        import s3cache
        from s3cache.hooks import _session

        remember = _session.remember_installation

        def timed(*args: Any) -> None:
            nonlocal installed_s
            began = time.perf_counter()
            remember(*args)
            installed_s = time.perf_counter() - began

        _session.remember_installation = timed
        s3cache.enable()
    import torch
    from torch._functorch._aot_autograd import autograd_cache

    from examples._gpt import CONTEXT, GPT

    times: list[float] = []

    def try_load(mod: Any, args: Any, config: Any, *rest: Any, **kwargs: Any) -> Any:
        for _ in range(1 + _LATER):
            began = time.perf_counter()
            autograd_cache.autograd_cache_key(mod, args, config, *rest[:1])
            times.append(time.perf_counter() - began)
        return (lambda inputs: mod(*inputs)), config

    autograd_cache.AOTAutogradCache.try_load = staticmethod(try_load)  # type: ignore[method-assign]
    text = torch.zeros(4, CONTEXT, dtype=torch.int64)
    torch.compile(GPT(96, layers))(text, text).backward()
    first_s, later_s = installed_s + times[0], statistics.median(times[1:])
    return {"first": first_s * 1e3, "later": later_s * 1e3}


def _in_a_process(layers: int, side: str, root: str) -> dict[str, float]:
    places = {"S3CACHE_LOCAL_DIR": f"{root}/local", "TORCHINDUCTOR_CACHE_DIR": f"{root}/inductor"}
    variables = {**os.environ, **places, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    return in_fresh_process(__file__, {"layers": layers, "side": side}, variables)


def measure(rounds: int) -> Result:
    """Compare medians of ``rounds`` processes for each size and each side, run by turns."""
    result = Result(
        "What a key costs, GPT training graphs",
        ["layers, key of a process", "torch", "s3cache", "ratio"],
        notes=["Medians, with safety checks and all components."],
    )
    with tempfile.TemporaryDirectory() as root:
        _in_a_process(1, "s3cache", root)  # stores the hash of torch's source
        for layers in _LAYERS:
            runs = [
                [_in_a_process(layers, side, root) for side in ("torch", "s3cache")]
                for _ in range(rounds)
            ]
            for what, limit in _BARS.items():
                name = f"{layers} layers, {what}"
                torchs, ours = ([run[side][what] for run in runs] for side in (0, 1))
                medians = statistics.median(torchs), statistics.median(ours)
                ratio = round(medians[1] / medians[0], 3)
                result.rows.append([name, *(f"{ms:.1f} ms" for ms in medians), f"{ratio}"])
                result.bars.append(Bar(f"{name}, × torch's", ratio, "at most", limit))
                result.samples |= {f"{name}, torch, ms": torchs, f"{name}, s3cache, ms": ours}
    return result


def main() -> int:
    """Measure, print and write the JSON; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="where to write the result")
    options = parser.parse_args()
    return finish([measure(options.rounds)], options.json, environment("torch"))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        print(json.dumps(_keys_ms(**json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
