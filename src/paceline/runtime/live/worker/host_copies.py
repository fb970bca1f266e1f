"""Copies of the gradients of a model on the CPU, made by the thread that calls.

It looks for NaN and Inf meanwhile (`tensors/fused_kernels.py`). A large gradient is copied around the caches: a copy
through them reads what it is about to overwrite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from paceline.tensors import fused_kernels
from paceline.tensors.layout import Layout, Part

AROUND = 1 << 21
"""Parameters of a model whose gradients go around the caches: nothing of them would be there when the server reads."""


class HostCopies:
    """Copies gradients to `gradient`, views of a segment."""

    def __init__(self, gradient: Sequence[Tensor]) -> None:
        self.gradient = gradient
        self.around = sum(view.numel() for view in gradient) >= AROUND
        self.finite: dict[int, bool] = {}
        """Whether each gradient that was put is finite."""

    def write(self, gradients: Sequence[Tensor | None]) -> bool:
        """Copies a whole gradient; whether it is finite."""
        self.finite.clear()
        finite = True
        for gradient, view in zip(gradients, self.gradient, strict=True):
            if gradient is None:
                view.zero_()
            else:
                finite &= fused_kernels.copy_and_check_finite(gradient, view, self.around)
        return finite

    def put(self, gradients: Mapping[int, Tensor]) -> None:
        """Begins to copy the gradients of these tensors."""
        for index, gradient in gradients.items():
            view = self.gradient[index]
            self.finite[index] = fused_kernels.copy_and_check_finite(gradient, view, self.around)

    def clear(self, absent: Iterable[int]) -> None:
        """Writes zeros for tensors without a gradient: a shard that needs one for a mean reads them."""
        for index in absent:
            self.gradient[index].zero_()
            self.finite.pop(index, None)

    def finish(self) -> bool:
        """Returns when all that was put is there; whether it is finite."""
        finite = all(self.finite.values())
        self.finite.clear()
        return finite

    def settle(self) -> None:
        """Returns when nothing is being copied: each copy is made at once."""


def write_slice(gradients: Sequence[Tensor | None], segment: Tensor, layout: Layout, part: Part) -> None:
    """Writes one shard's slice of a gradient once more."""
    flat = [None if gradient is None else gradient.reshape(-1) for gradient in gradients]
    starts = list(accumulate((entry.numel for entry in layout.entries), initial=0))
    for piece in layout.pieces(part, layout.numel):
        there, gradient = segment[piece.start : piece.start + piece.length], flat[piece.entry]
        if gradient is None:
            there.zero_()
        else:
            first = piece.start - starts[piece.entry]
            there.copy_(gradient[first : first + piece.length])
