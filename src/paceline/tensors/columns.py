"""Gradients at equal distances in memory are the columns of a matrix: their sum is a product with a vector of ones.

Adding up N gradients one after another is N - 1 calls for each piece, and as many times through the caches; the product
is one call that reads each gradient once, and plain SGD steps on it without the sum ever being written anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

PRECISE = (torch.float32, torch.float64)
"""What a product adds up no less exactly than additions do."""


class Columns:
    """Remembers the matrices of the gradients it was last asked for: mostly they are where they were before."""

    def __init__(self) -> None:
        self.gradients: tuple[Sequence[Tensor], ...] = ()
        self.matrices: list[Tensor] | None = None
        self.ones = torch.ones(0)

    def of(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
        """A matrix for each piece, with a column for each of the gradients; None if they lie elsewhere."""
        before = self.gradients
        if len(before) != len(gradients) or any(now is not then for now, then in zip(gradients, before, strict=True)):
            self.gradients = tuple(gradients)
            self.matrices = side_by_side(gradients)
            self.ones = torch.ones(len(gradients), dtype=gradients[0][0].dtype) if self.matrices else self.ones
        return self.matrices


def side_by_side(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
    matrices = []
    for pieces in zip(*gradients, strict=True):
        first = pieces[0]
        memory = first.untyped_storage().data_ptr()
        distances = {after.storage_offset() - before.storage_offset() for before, after in pairwise(pieces)}
        if (
            len(distances) != 1
            or min(distances) < len(first)
            or first.dtype not in PRECISE
            or any(piece.untyped_storage().data_ptr() != memory for piece in pieces)
        ):
            return None
        matrices.append(first.as_strided((len(first), len(pieces)), (1, distances.pop())))
    return matrices or None
