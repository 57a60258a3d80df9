"""torch: gradients of each sample (`vmap` of `grad`), and an ensemble of stacked models."""

import copy

import torch
from torch.func import functional_call, grad, stack_module_state, vmap

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
parameters = {name: value.detach() for name, value in model.named_parameters()}


def loss_of(values, x, y):
    return (functional_call(model, values, (x.unsqueeze(0),)).squeeze() - y).square()


@torch.compile
def sample_gradients(values, xs, ys):
    return vmap(grad(loss_of), in_dims=(None, 0, 0))(values, xs, ys)


xs, ys = torch.randn(6, 8), torch.randn(6)
for value in sample_gradients(parameters, xs, ys).values():
    print("loss", value.square().sum().item().hex())

members = [copy.deepcopy(model) for _ in range(3)]
for member in members:
    torch.nn.init.normal_(member[0].weight)
base = copy.deepcopy(members[0]).to("meta")
stacked, buffers = stack_module_state(members)


@torch.compile
def ensemble(values, others, x):
    return vmap(lambda v, o: functional_call(base, (v, o), (x,)))(values, others)


predictions = ensemble(stacked, buffers, xs)
predictions.square().mean().backward()
print("loss", predictions.sum().item().hex())
print("loss", stacked["0.weight"].grad.square().sum().item().hex())
