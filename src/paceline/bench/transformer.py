"""The model of `paceline bench gpu`: a causal transformer of torch's own layers, which predicts tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Shape(NamedTuple):
    """How large the model and its batches are."""

    layers: int = 12
    width: int = 768
    vocabulary: int = 50257
    context: int = 512
    batch: int = 8


class Transformer(nn.Module):
    """Returns the loss of a batch of tokens. With the default shape there are 124 million parameters, as in GPT-2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.token, self.place = nn.Embedding(shape.vocabulary, width), nn.Embedding(shape.context, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, shape.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("future", nn.Transformer.generate_square_subsequent_mask(shape.context), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        read, next_one = tokens[:, :-1], tokens[:, 1:]
        hidden = self.encoder(self.token(read) + self.place.weight, mask=self.future, is_causal=True)
        scores = hidden @ self.token.weight.t()
        return nn.functional.cross_entropy(scores.flatten(0, 1), next_one.flatten())


def batch_of(shape: Shape, device: torch.device) -> Tensor:
    return torch.randint(0, shape.vocabulary, (shape.batch, shape.context + 1), device=device)


def compute(model: Transformer, tokens: Tensor) -> None:
    """Runs forward in bfloat16 and backward."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss = model(tokens)
    loss.backward()
