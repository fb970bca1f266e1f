"""A worker's shared memory as one server sees it."""

from __future__ import annotations

from torch import Tensor

from paceline.tensors.assignment import Ranges
from paceline.tensors.optimizers import SliceOptimizer


class Segment:
    """The part of a worker's segment that belongs to this shard, whole and in the optimizer's pieces.

    Gradients come in the same memory, or in `staging` if the worker has a segment for them.
    """

    def __init__(self, whole: Tensor, staging: Tensor | None, part: Ranges, optimizer: SliceOptimizer) -> None:
        self.ranges = [whole[start:stop] for start, stop in part]
        self.pieces = optimizer.cut_from(whole)
        self.gradient = self.pieces if staging is None else optimizer.cut_from(staging)
        self.absent: frozenset[int] = frozenset()
        """Tensors that have no gradient in the last push."""
        self.holds = -1
        """The version of the parameters that it holds; -1 while it holds a gradient."""

    def fill(self, values: Tensor) -> None:
        """Write the parameters there."""
        for mine, theirs in zip(self.ranges, values.split([len(each) for each in self.ranges]), strict=True):
            mine.copy_(theirs)
