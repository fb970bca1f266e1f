"""A worker's shared memory as one server sees it."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from paceline.runtime.live.server.durable import raw
from paceline.tensors.assignment import Ranges
from paceline.tensors.slices import SliceOptimizer


class Segment:
    """The part of a worker's segment that belongs to this shard, whole and in the optimizer's pieces.

    Gradients come in the same memory, or in `staging` if the worker has a segment for them.
    """

    def __init__(self, whole: Tensor, staging: Tensor | None, part: Ranges, optimizer: SliceOptimizer) -> None:
        self.ranges = [whole[start:stop] for start, stop in part]
        self.pieces = optimizer.cut_from(whole)
        self.gradient: list[Tensor] = self.pieces if staging is None else optimizer.cut_from(staging)
        self.arriving = [(whole if staging is None else staging)[start:stop] for start, stop in part]
        self.absent: frozenset[int] = frozenset()
        """Tensors that have no gradient in the last push."""
        self.holds = -1
        """The version of the parameters that it holds; -1 while it holds a gradient."""
        self.shows_servers = False
        """The worker gets the parameters from the server's own memory: they need not be written here."""

    @cached_property
    def arrived(self) -> list[memoryview]:
        """The bytes of the gradient, in the order of the slice."""
        return [raw(each) for each in self.arriving]

    def fill(self, values: Tensor) -> None:
        """Write the parameters there."""
        for mine, theirs in zip(self.ranges, values.split([len(each) for each in self.ranges]), strict=True):
            mine.copy_(theirs)

    def keep(self) -> list[Tensor]:
        """The gradient, for later: its worker goes on, and the memory is the worker's again."""
        return [piece.clone() for piece in self.gradient]
