"""Fingerprints of tensors, by which ranks compare their weights."""

from __future__ import annotations

import pytest
import torch

from notebook_launcher.training.fingerprints import fingerprint, fingerprint_nested, is_comparable, sketch


def test_fingerprint_depends_on_every_bit_and_on_the_order() -> None:
    tensors = [
        torch.rand(5),
        torch.rand(70, 70),
        torch.rand(3).bfloat16(),
        torch.rand(4, dtype=torch.cfloat),
        torch.tensor([True]),
    ]
    original = fingerprint(tensors)
    assert fingerprint(tensor.clone() for tensor in tensors) == original
    assert fingerprint([tensors[1].T.contiguous().T]) == fingerprint([tensors[1]])
    assert fingerprint([tensors[1][:, 1:]]) == fingerprint([tensors[1][:, 1:].clone()])
    assert fingerprint(tensors[::-1]) != original
    for at, tensor in enumerate(tensors):
        changed = [tensor.clone() for tensor in tensors]
        changed[at].view(-1)[-1] = 1 - tensor.view(-1)[-1] if tensor.dtype != torch.bool else False
        assert fingerprint(changed) != original


def test_sketch_estimates_how_far_apart_two_tensors_are() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 10, 1000):
        one, change = (torch.rand(size, generator=generator) - 0.5 for _ in range(2))
        distance = sketch(one).distance(sketch(one + 0.01 * change))
        assert distance == pytest.approx(float(0.01 * change.norm() / one.norm()), rel=0.9)
    broken = torch.full((2,), float("nan"))
    assert sketch(broken).distance(sketch(broken)) == 0.0
    assert sketch(broken).distance(sketch(torch.ones(2))) == float("inf")


def test_only_plain_tensors_are_compared() -> None:
    class Marked(torch.Tensor):
        pass

    kept = [torch.ones(1), torch.nn.Parameter(torch.ones(1))]
    assert all(map(is_comparable, kept))
    left_out = [1.0, torch.ones(1).to_sparse(), torch.ones(1, device="meta"), torch.ones(1).as_subclass(Marked)]
    assert not any(map(is_comparable, left_out))
    assert fingerprint_nested(({"x": kept[:1]}, [kept[1]])) == fingerprint(kept)
    assert fingerprint_nested(("text", {"x": 1})) is None
