"""Ray Train: two workers with DDP, each a process that Ray starts."""

import os
import tempfile

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"


def train(config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    model = ray.train.torch.prepare_model(torch.compile(model))
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


with tempfile.TemporaryDirectory() as storage, tempfile.TemporaryDirectory(dir="/tmp") as short:
    # A path of a socket has at most 107 bytes, and Ray adds about 70 to this directory.
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=short)
    path = os.path.join(storage, "losses")
    trainer = TorchTrainer(
        train,
        train_loop_config={"losses": path},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=storage),
    )
    trainer.fit()
    with open(path, encoding="utf-8") as file:
        print(file.read(), end="")
    ray.shutdown()
