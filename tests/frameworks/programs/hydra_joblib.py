"""Hydra: a sweep over two configurations, run side by side by joblib's processes."""

import sys

import hydra
import torch
from hydra.core.config_store import ConfigStore

ConfigStore.instance().store(name="config", node={"width": 16})


@hydra.main(version_base=None, config_name="config")
def main(config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, config.width), torch.nn.GELU())
    loss = torch.compile(model)(torch.ones(4, 8)).square().mean()
    loss.backward()
    sys.stdout.write(f"loss {config.width} {loss.item().hex()}\n")


if __name__ == "__main__":
    sys.argv += ["--multirun", "width=16,24", "hydra/launcher=joblib"]
    main()
