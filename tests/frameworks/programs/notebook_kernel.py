"""Jupyter: cells of a notebook compile a model; its kernel is restarted, and they run again."""

from jupyter_client.manager import KernelManager

CELLS = (
    "import torch",
    "torch.manual_seed(0)\nmodel = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())",
    "compiled = torch.compile(model)",
    "loss = compiled(torch.ones(4, 8)).square().mean(); loss.backward()",
    "print('loss', loss.item().hex())",
    "print('loss', model[0].weight.grad.sum().item().hex())",
)


def show(message):
    if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
        print(message["content"]["text"], end="", flush=True)
    assert message["msg_type"] != "error", message["content"]["traceback"]


manager = KernelManager()
manager.start_kernel()
for start in range(2):
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    for cell in CELLS:
        client.execute_interactive(cell, output_hook=show, timeout=300)
    client.stop_channels()
    if start == 0:
        manager.restart_kernel()
manager.shutdown_kernel()
