"""The model and data of the ranks: a small transformer on sequences of a random language."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

VOCABULARY = 256
WIDTH, HEADS, LAYERS = 256, 4, 4
LENGTH = 64
"""Tokens of a sequence that are predicted."""
BATCH_SIZE = 4
"""Sequences in a rank's micro-batch."""
SUCCESSORS = 4
"""Number of tokens that may follow a token; the loss of a perfect model is its logarithm."""


class Transformer(nn.Module):
    """Predicts the next token: 3.3 million parameters, 13 MB of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token at each position, (batch, length, vocabulary)."""
        hidden = self.tokens(tokens) + self.positions
        scores: torch.Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return scores


def make_model() -> Transformer:
    """Return the model, the same at each call."""
    torch.manual_seed(0)
    return Transformer()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_data(num_batches: int, num_ranks: int, *, seed: int = 1) -> TensorDataset:
    """Return `num_batches` batches for each rank, of a language in which few tokens may follow a token."""
    source = torch.Generator().manual_seed(0)
    follows = torch.stack([torch.randperm(VOCABULARY, generator=source)[:SUCCESSORS] for _ in range(VOCABULARY)])
    source.manual_seed(seed)
    count = num_batches * num_ranks * BATCH_SIZE
    steps = [torch.randint(VOCABULARY, (count,), generator=source)]
    for _ in range(LENGTH):
        steps.append(follows[steps[-1], torch.randint(SUCCESSORS, (count,), generator=source)])
    return TensorDataset(torch.stack(steps, dim=1))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each next token of `tokens`, (batch, length + 1)."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
