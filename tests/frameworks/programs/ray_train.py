"""Ray Train: two workers with DDP, each a process that Ray starts."""

import os
import tempfile

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

# Ray removes the environment of its workers' parent from none of them, but names no directories.
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"


def train(config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    model = torch.compile(ray.train.torch.prepare_model(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in torch.randn(3, 8, 16):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    ray.train.report({"losses": losses})
    # A result without a checkpoint has no metrics.
    if ray.train.get_context().get_world_rank() == 0:
        with open(config["losses"], "w", encoding="utf-8") as file:
            file.writelines(f"loss {loss}\n" for loss in losses)


ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
with tempfile.TemporaryDirectory() as storage:
    found = os.path.join(storage, "losses")
    trainer = TorchTrainer(
        train,
        train_loop_config={"losses": found},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=storage),
    )
    trainer.fit()
    with open(found, encoding="utf-8") as file:
        print(file.read(), end="")
ray.shutdown()
