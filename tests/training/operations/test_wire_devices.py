"""The devices on which a group takes tensors, which sends and collectives share but for gloo on GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from notebook_launcher.training.operations.checking import collective_device, sending_device


@pytest.mark.parametrize(
    ("group", "device", "sends_from", "reduces_on"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cuda:1", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1", "cuda:1"),
    ],
)
def test_group_sends_and_reduces_where_its_backends_can(monkeypatch, group, device, sends_from, reduces_on):
    monkeypatch.setattr(dist, "get_backend_config", lambda: group)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    given = torch.device(device)
    assert [sending_device(given), collective_device(given)] == [torch.device(sends_from), torch.device(reduces_on)]
