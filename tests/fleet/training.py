"""Whole jobs of torch: ranks train with DDP, and one of them has a mishap.

torchrun launches the ranks: when one of them dies, it ends the others and starts all again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from s3cache.testing import Machine
from tests.fleet.jobs import DEEDS, PLACES, Control, Mishaps, Outcome, Plan, Process
from tests.fleet.worker import STEPS, Steps

_ENDS_WITHIN_S = 900.0


def draw(number: int, seed: int) -> Plan:
    """Take steps, places and deeds in turn: kill, stop for a while, stop and then kill."""
    random_ = random.Random(f"training {seed}-{number}")
    turn, place = divmod(number, len(PLACES))
    round_, step = divmod(turn, len(STEPS))
    deed = (round_ + step) % 3
    where = PLACES[place]
    ranks = random_.choice([2, 2, 3])
    return replace(
        Plan.draw(number, seed),
        where=where,
        step=STEPS[step],
        deed=DEEDS[min(deed, 1)],
        ends=deed == 2,
        nodes=(ranks,) if where == "node" else (1,) * ranks,
        victims=1,
        wait_s=random_.choice([3.0, 30.0]),
        lasts_s=random_.uniform(0.5, 8.0),
    )


class Training:
    """Runs jobs, and compares their losses with those of jobs without s3cache."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._expected: dict[int, list[Any]] = {}

    def run(self, plan: Plan) -> Outcome:
        """Carry out a plan, and return its outcome."""
        root, outcome = self._root / f"job-{plan.number}", Outcome(plan.kind, plan.number)
        nodes = plan.node_of_each
        if len(nodes) not in self._expected:
            alone = self._root / f"alone-{len(nodes)}"
            self._expected[len(nodes)] = _launch(alone, {"nodes": [0] * len(nodes), "url": ""})
        node_dirs = [root / f"n{number}" for number in range(len(plan.nodes))]
        for node_dir in node_dirs:
            node_dir.mkdir(parents=True)
        url = f"file://{root / 'bucket'}?create=1"
        leases = "on" if plan.where == "nodes" else "off"
        config = {"url": url, "wait_s": plan.wait_s, "leases": leases, "nodes": nodes}
        with ExitStack() as stack:
            mishaps = Mishaps(plan, node_dirs)
            stack.callback(mishaps.end)
            control = stack.enter_context(Control(root / "control", plan, mishaps))
            try:
                restarts = int(plan.deed == "kill" or plan.ends)  # of one rank, once
                losses = _launch(root, {**config, "control": control.path}, restarts)
            except subprocess.TimeoutExpired as exc:
                outcome.hangs.append(str(exc))
                return outcome
            except RuntimeError as exc:
                outcome.failed.append(str(exc))
                losses = []
            mishaps.end()
            if losses != self._expected[len(nodes)]:
                outcome.wrong.append(f"{losses} and not {self._expected[len(nodes)]}")
            outcome.judge_waits(control, plan.wait_s)
            keys = {each["key"] for each in control.of("saved") if each["kind"] == "aot"}
            settled = {"url": url, "disks": [str(node_dir / "tier") for node_dir in node_dirs]}
            settle = {**settled, "keys": sorted(keys), "control": control.path}
            assert Process("settle", settle).wait(120) == 0
            outcome.lost += keys - {each["key"] for each in control.of("stored")}
        return outcome


def _launch(root: Path, config: dict[str, Any], restarts: int = 0) -> list[Any]:
    """Run the ranks of a job with torchrun; return the losses of each.

    Raises:
        RuntimeError: a rank failed, other than by being killed or as the victim of one.
        subprocess.TimeoutExpired: the job does not end.
    """
    count = len(config["nodes"])
    environment = Machine(root, OMP_NUM_THREADS="1").environment
    launcher = ["torch.distributed.run", "--standalone", "--max-restarts", str(restarts)]
    job = ["-m", "tests.fleet.training", json.dumps({"root": str(root), **config})]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *launcher, "--nproc-per-node", str(count), *job],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its ranks end with it
    ) as process:
        try:
            printed, _ = process.communicate(timeout=_ENDS_WITHIN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(printed[-3000:])
    return [json.loads((root / f"{number}.json").read_text()) for number in range(count)]


# -- a rank


def rank(config: dict[str, Any]) -> None:
    """Train for three steps, and write the losses to a file."""
    number = int(os.environ["RANK"])
    root, node = Path(config["root"]), config["nodes"][number]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / f"n{node}" / "inductor")
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import s3cache

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

        def forward(self, x: Any) -> Any:
            return x + self.outer(torch.nn.functional.gelu(self.inner(x)))

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = Block()
    enabled: Any = nullcontext()
    if config["url"]:
        where = {"local_dir": str(root / f"n{node}" / "tier"), "wait_s": config["wait_s"]}
        enabled = s3cache.enabled(config["url"], leases=config["leases"], **where)
    with enabled as cache:
        if cache is not None:
            Steps(cache.engine, config["control"], rank=number, node=node)
        model = torch.compile(DistributedDataParallel(network))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            x = torch.linspace(-1, step + number + 1, 64).reshape(4, 16)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    (root / f"{number}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(json.loads(sys.argv[1]))
