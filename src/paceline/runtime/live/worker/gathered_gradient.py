"""Gradients that leave for other hosts from the tensors where backward has left them, without a copy.

This is chosen if every server is on another host and floats travel as they are. A gradient that does not lie as it is
sent, or is in many small tensors, is copied all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from torch import Tensor

from paceline.runtime.live.worker.data_path import GradientCopies
from paceline.tensors.fused_kernels import is_finite
from paceline.tensors.layout import Layout

WORTH_IT = 1 << 13
"""Elements of a tensor that take as long to copy as it takes to find out where they are."""


class GatheredGradient:
    """Holds the tensors of a gradient until every server has it; links send from there (`GatheredFrames`)."""

    def __init__(self, layout: Layout, copies: GradientCopies) -> None:
        self.layout = layout
        self.copies = copies
        self.tensors: Sequence[Tensor] = ()
        """The gradient; empty while it is in the segment."""

    def begin(self) -> None:
        """Nothing has to be prepared."""

    def write(self, gradients: Sequence[Tensor | None]) -> bool:
        if self.can_gather(gradients):
            self.tensors = gradients
            return all(is_finite(gradient) for gradient in gradients)
        self.tensors = ()
        return self.copies.write(gradients)

    def can_gather(self, gradients: Sequence[Tensor | None]) -> TypeGuard[Sequence[Tensor]]:
        """Whether this gradient can be sent from where it is, and is in so few pieces that this is worth it."""
        if self.layout.numel < WORTH_IT * len(gradients):
            return False
        return all(
            each is not None
            and each.device.type == "cpu"
            and each.dtype == self.layout.torch_dtype
            and each.is_contiguous()
            for each in gradients
        )

    def forget(self) -> None:
        """Nothing is held before the step."""

    def release(self) -> None:
        self.tensors = ()
