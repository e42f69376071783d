"""The first cell of a kernel for tests of libraries in ranks: imports, and a model with known gradients."""

from __future__ import annotations

# A model of one weight and one bias whose training by plain SGD is known in closed form: the gradient of
# mean(w * x + b) is (mean(x), 1), whatever the weight.
DEFINITIONS = """
import os, sys, time
import torch, torch.distributed as dist
import lightning_fabric  # Notes that it was imported in an interactive session.

def rows(num):
    return torch.utils.data.TensorDataset(torch.arange(float(num)).view(-1, 1))

def linear():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    return model

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)
"""
