"""Whole jobs of torch: ranks train with DDP, and one of them has a mishap.

``python -m tests.fleet.training`` launches jobs as torchrun does: when a rank dies, it ends the
others and starts all ranks again. It reads a job from each line of input, and prints a line for
each. It forks ranks from a process that has imported torch, because the import takes longer than
the training.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fleet.jobs import DEEDS, PLACES, Control, Mishaps, Outcome, Plan, Process
from tests.fleet.steps import STEPS, Steps

_ENDS_WITHIN_S = 900.0
_ATTEMPTS = 3


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
        self._launcher: subprocess.Popen[str] | None = None

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, plan: Plan) -> Outcome:
        """Carry out a plan, and return its outcome."""
        root, outcome = self._root / f"job-{plan.number}", Outcome(plan.kind, plan.number)
        nodes = plan.node_of_each
        expected = self._alone(len(nodes))
        node_dirs = [root / f"n{number}" for number in range(len(plan.nodes))]
        for node_dir in node_dirs:
            node_dir.mkdir(parents=True)
        url = f"file://{root / 'bucket'}?create=1"
        leases = "on" if plan.where == "nodes" else "off"
        config = {"url": url, "wait_s": plan.wait_s, "leases": leases}
        with ExitStack() as stack:
            mishaps = Mishaps(plan, node_dirs)
            stack.callback(mishaps.end)
            control = stack.enter_context(Control(root / "control", plan, mishaps))
            answer = self._launch(root, {**config, "nodes": nodes, "control": control.path})
            mishaps.end()
            if answer is None:
                outcome.hangs.append(f"the job runs after {_ENDS_WITHIN_S:.0f} s")
                return outcome
            outcome.failed += answer["failed"]
            if answer["losses"] != expected:
                outcome.wrong.append(f"{answer['losses']} and not {expected}")
            outcome.judge_waits(control, plan.wait_s)
            keys = {each["key"] for each in control.of("saved") if each["level"] == "aot"}
            settled = {"url": url, "disks": [str(node_dir / "tier") for node_dir in node_dirs]}
            settle = {**settled, "keys": sorted(keys), "control": control.path}
            assert Process("settle", settle).wait(120) == 0
            outcome.lost += keys - {each["key"] for each in control.of("stored")}
        return outcome

    def _alone(self, ranks: int) -> list[Any]:
        """Return the losses of each rank without s3cache."""
        if ranks not in self._expected:
            answer = self._launch(self._root / f"alone-{ranks}", {"nodes": [0] * ranks, "url": ""})
            assert answer is not None
            assert not answer["failed"], answer
            self._expected[ranks] = answer["losses"]
        return self._expected[ranks]

    def _launch(self, root: Path, config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the launcher's answer for a job; None if the job does not end."""
        root.mkdir(parents=True, exist_ok=True)
        launcher = self._launcher = self._launcher or self._start()
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        launcher.stdin.write(json.dumps({"root": str(root), **config}) + "\n")
        launcher.stdin.flush()
        if not select.select([launcher.stdout], [], [], _ENDS_WITHIN_S)[0]:
            self._end()
            return None
        answer: dict[str, Any] = json.loads(launcher.stdout.readline())
        return answer

    def _start(self) -> subprocess.Popen[str]:
        kept = ("PATH", "LD_LIBRARY_PATH", "LANG", "CC", "CXX")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"HOME": str(self._root), "TMPDIR": str(self._root), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.fleet.training"],
            env=environment,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its ranks end with it
        )

    def _end(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.communicate()


# -- the launcher


def launch(config: dict[str, Any]) -> dict[str, Any]:
    """Run the ranks of a job; start all of them again if one is killed."""
    root, count = Path(config["root"]), len(config["nodes"])
    failed: list[str] = []
    for _ in range(_ATTEMPTS):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        ranks = {_forked(config, rank, port): rank for rank in range(count)}
        statuses: dict[int, int] = {}
        ends_at = float("inf")  # other ranks notice a death, and fail, within this time
        while len(statuses) < count:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in ranks:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid]:
                    ends_at = min(ends_at, time.monotonic() + 1)
            elif time.monotonic() > ends_at:
                was_killed = -signal.SIGKILL in statuses.values()
                for each in ranks.keys() - statuses.keys():
                    os.kill(each, signal.SIGKILL)
                    os.waitpid(each, 0)
                    statuses[each] = 0
                if not was_killed:
                    break
            else:
                time.sleep(0.02)
        if not any(statuses.values()):
            losses = [json.loads((root / f"{rank}.json").read_text()) for rank in range(count)]
            return {"losses": losses, "failed": failed}
        if -signal.SIGKILL not in statuses.values():
            logs = [(root / f"{rank}.log").read_text(errors="replace") for rank in range(count)]
            failed += [log[-3000:] for log in logs if "Traceback" in log] or [str(statuses)]
            break
    return {"losses": [], "failed": failed or [f"killed in each of {_ATTEMPTS} attempts"]}


def _forked(config: dict[str, Any], number: int, port: int) -> int:
    if child := os.fork():
        return child
    status = 1
    try:
        root, count = Path(config["root"]), str(len(config["nodes"]))
        log = os.open(root / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for fd in (1, 2):
            os.dup2(log, fd)
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=count)
        os.environ.update(LOCAL_WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        rank(config, number)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def rank(config: dict[str, Any], number: int) -> None:
    """Train for three steps, and write the losses to a file."""
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
    import torch._inductor.compile_fx  # noqa: F401 - for the ranks

    for _line in sys.stdin:
        print(json.dumps(launch(json.loads(_line))), flush=True)
