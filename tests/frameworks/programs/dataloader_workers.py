"""torch: workers of data loaders: forked after a compile, spawned, and persistent over epochs."""

import torch
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(12, 16))
    for options in (
        {"num_workers": 0},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
    ):
        loader = DataLoader(data, batch_size=4, **options)
        for _ in range(2):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = compiled(x).square().mean()
                loss.backward()
                optimizer.step()
                print("loss", loss.item().hex())


if __name__ == "__main__":
    main()
